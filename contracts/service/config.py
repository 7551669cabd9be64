"""Configuration of every service: one frozen struct, read once from ``HEADRACE_*`` variables in ``__main__``."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal, TypeVar

import msgspec

C = TypeVar("C", bound="ServiceConfig")
Positive = Annotated[float, msgspec.Meta(gt=0)]
Count = Annotated[int, msgspec.Meta(ge=1)]


class ConfigError(Exception):
    """Every bad value at once, a line each."""


class ServiceConfig(msgspec.Struct, frozen=True, kw_only=True):
    """What all services share. Field ``nats_url`` is read from ``HEADRACE_NATS_URL``, and so on."""

    nats_url: str = "nats://127.0.0.1:4222"
    """May carry user and password; never logged."""
    log_format: Literal["json", "pretty"] = "json"
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    metrics_host: str = "127.0.0.1"
    metrics_port: int = 0
    """Port of /metrics, /health/live and /health/ready; 0 serves none."""

    def problems(self) -> list[str]:
        """Relations between values that do not hold; empty when all is well."""
        return []


def load(kind: type[C], environment: Mapping[str, str]) -> C:
    """``kind`` from the environment; raises ConfigError that names every bad variable.

    A value is parsed as the field's type: numbers, booleans (true/false), lists and structs as JSON, text as is.
    A field that ends in ``_file`` must name a file that exists.
    """
    values: dict[str, object] = {}
    wrong: list[str] = []
    for field in msgspec.structs.fields(kind):
        variable = f"HEADRACE_{field.name.upper()}"
        text = environment.get(variable)
        if text is None:
            if field.required:
                wrong.append(f"{variable} is not set")
            continue
        try:
            values[field.name] = _parse(text, field.type)
        except msgspec.MsgspecError as error:
            wrong.append(f"{variable}: {error}")
            continue
        if field.name.endswith("_file") and text and not Path(text).is_file():
            wrong.append(f"{variable}: there is no file {text}")
    if wrong:
        raise ConfigError("\n".join(wrong))
    config = msgspec.convert(values, kind)
    if wrong := config.problems():
        raise ConfigError("\n".join(wrong))
    return config


def _parse(text: str, kind: object) -> object:
    try:
        return msgspec.convert(text, kind, strict=False)
    except msgspec.ValidationError:
        return msgspec.json.decode(text.encode(), type=kind, strict=False)
