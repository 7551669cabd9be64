"""Configuration of every service: one frozen struct, read once from ``HEADRACE_*`` variables in ``__main__``."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal, TypeVar
from urllib.parse import urlsplit

import msgspec

from contracts.bus import BusError, Credentials

C = TypeVar("C", bound="ServiceConfig")
Positive = Annotated[float, msgspec.Meta(gt=0)]
Count = Annotated[int, msgspec.Meta(ge=1)]
Secret = Annotated[str, msgspec.Meta(extra={"secret": True})]
"""Text that may stand in a file instead: field ``pepper`` is read from ``HEADRACE_PEPPER``, or from the file that
``HEADRACE_PEPPER_FILE`` names. An environment is seen by all children of a process, by ``docker inspect`` and crash
reports, so that files are what ``headrace up`` and the containers use."""


class ConfigError(Exception):
    """Every bad value at once, a line each."""


class ServiceConfig(msgspec.Struct, frozen=True, kw_only=True):
    """What all services share. Field ``nats_url`` is read from ``HEADRACE_NATS_URL``, and so on."""

    nats_url: str = "nats://127.0.0.1:4222"
    """Servers, separated by commas."""
    nats_seed_file: str = ""
    """NKey seed of this process's user on the bus: ``<user>.seed``. Replaced while running, it is taken at once."""
    nats_ca_file: str = ""
    """Certificates that the bus's must come from; with it there is no connection without TLS."""
    nats_cert_file: str = ""
    """This process's certificate for the bus, and its key."""
    nats_key_file: str = ""
    log_format: Literal["json", "pretty"] = "json"
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    metrics_host: str = "127.0.0.1"
    metrics_port: int = 0
    """Port of /metrics, /health/live and /health/ready; 0 serves none."""

    @property
    def credentials(self) -> Credentials:
        """For the bus."""
        return Credentials(**{field: getattr(self, f"nats_{field}") for field in Credentials.__struct_fields__})

    def problems(self) -> list[str]:
        """Relations between values that do not hold; empty when all is well. Heirs add theirs to these."""
        if "@" in self.nats_url:
            return ["HEADRACE_NATS_URL holds a user: name the file of its seed in HEADRACE_NATS_SEED_FILE instead"]
        try:
            self.credentials.check()
        except BusError as error:
            return [f"HEADRACE_NATS_*_FILE: {error}"]
        return []


def load(kind: type[C], environment: Mapping[str, str]) -> C:
    """``kind`` from the environment; raises ConfigError that names every bad variable.

    A value is parsed as the field's type: numbers, booleans (true/false), lists and structs as JSON, text as is.
    A field that ends in ``_file`` must name a file that exists; a ``Secret`` may stand in a file.
    """
    values: dict[str, object] = {}
    wrong: list[str] = []
    for field in msgspec.structs.fields(kind):
        variable = f"HEADRACE_{field.name.upper()}"
        try:
            text = _text_of(variable, environment, secret=field.type == Secret)
            if text is not None:
                values[field.name] = _parse(text, field.type)
            elif field.required:
                wrong.append(f"{variable} is not set")
        except msgspec.MsgspecError as error:
            wrong.append(f"{variable}: {error}")
            continue
        except ConfigError as error:
            wrong.append(str(error))
            continue
        if field.name.endswith("_file") and text and not Path(text).is_file():
            wrong.append(f"{variable}: there is no file {text}")
    if wrong:
        raise ConfigError("\n".join(wrong))
    config = msgspec.convert(values, kind)
    if wrong := config.problems():
        raise ConfigError("\n".join(wrong))
    return config


def _text_of(variable: str, environment: Mapping[str, str], *, secret: bool) -> str | None:
    """What is given for a field; raises ConfigError."""
    text = environment.get(variable)
    path = environment.get(f"{variable}_FILE") if secret else None
    if path is None:
        return text
    if text is not None:
        raise ConfigError(f"{variable} and {variable}_FILE are both set; one of them says it")
    try:
        return read_secret(Path(path))
    except ConfigError as error:
        raise ConfigError(f"{variable}_FILE: {error}") from error


def read_secret(path: Path) -> str:
    """A secret's text, without white space around it; raises ConfigError, also when there is none."""
    try:
        text = path.read_text("utf-8").strip()
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not text") from error
    if not text:
        raise ConfigError(f"{path} is empty")
    return text


def empty_password(url: str) -> bool:
    """Whether one of the URLs, separated by commas, names a user with an empty password."""
    return any(urlsplit(part.strip()).password == "" for part in url.split(","))


def _parse(text: str, kind: object) -> object:
    try:
        return msgspec.convert(text, kind, strict=False)
    except msgspec.ValidationError:
        return msgspec.json.decode(text.encode(), type=kind, strict=False)
