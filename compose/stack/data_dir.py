"""What ``headrace up`` was asked for, and the data directory: secrets, lock, logs and run.json.

Nothing here starts a process or talks to the bus, so that every command can import it cheaply.
"""

import contextlib
import errno
import fcntl
import json
import os
import secrets
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple

import msgspec

from contracts import ids

if TYPE_CHECKING:
    from contracts.bus.credentials import Credentials
    from contracts.keys import Peppers

Engine = Literal["vllm", "simulated"]
Role = Literal["gateway", "scheduler", "worker", "ledger", "nats"]
ROLES: tuple[Role, ...] = ("gateway", "scheduler", "worker", "ledger", "nats")


class ComposeError(Exception):
    """Why a command cannot do what was asked, in words for the person who typed it."""


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """Options of ``headrace up``; the command line states the defaults."""

    engine: Engine
    models: tuple[str, ...]
    workers: tuple[int, ...]
    """Of each model."""
    autoscale: tuple[int, int] | None
    """Least and most workers of each model; None: as many as were asked for."""
    gateways: int
    schedulers: int
    host: str
    port: int
    """0 takes a free one."""
    admin_port: int
    """On 127.0.0.1; 0 takes a free one."""
    tls_cert: str
    """Files of the certificate and its key; empty: plain HTTP."""
    tls_key: str
    nats_url: str
    """Empty: start a server of our own."""
    clickhouse_url: str
    """Empty: chDB in the data directory."""
    sim_slots: int
    sim_kv_tokens: int
    sim_prefill_tps: float
    sim_itl_ms: float
    sim_context: int


class Secrets(msgspec.Struct, frozen=True, kw_only=True):
    """Made on the first start and kept, so that keys outlive restarts."""

    key: str
    admin_key: str
    sql_password: str = ""
    """Of the ledger's SQL endpoint."""


class Run(msgspec.Struct, frozen=True, kw_only=True):
    """``run.json``: where a running stack is reached. Scripts read it; keep names and meanings."""

    url: str
    admin_url: str
    gateway_urls: list[str]
    metrics_urls: dict[str, list[str]]
    nats_url: str
    nats_seed_file: str
    """The operator's; empty when the bus is not the stack's own."""
    key: str
    admin_key: str
    pids: dict[str, list[int]]


class DataDir:
    """The files of one stack. What holds a secret has mode 0600."""

    def __init__(self, path: Path) -> None:
        self.path = path.expanduser().absolute()
        self.pepper = self.path / "pepper"
        self.logs = self.path / "logs"
        self.nats = self.path / "nats"
        self.seeds = self.nats / "seeds"
        self.ledger = self.path / "ledger"
        self.run = self.path / "run.json"
        self.control = self.path / "control.sock"
        """Where a running stack hears commands (compose.stack.control)."""
        self.sql = self.path / "sql.json"
        self.secret_files = self.path / "secrets"
        """Directory of what the services read, a file a secret."""
        self.first_key = self.path / "key"

    def prepare(self) -> list[str]:
        """Create the directories and the pepper, for this user alone; raises ComposeError when that cannot be done.

        What others could read is closed to them; a line for each says so.
        """
        os.umask(0o077)  # of the children, too: what they write is as private
        try:
            self._refuse_foreign()
            self.path.mkdir(parents=True, exist_ok=True)
            for directory in (self.logs, self.nats, self.ledger):
                directory.mkdir(exist_ok=True)
            if not self.pepper.exists():
                write_private(self.pepper, secrets.token_hex(32).encode())
            return [line for path in self._private() if (line := _close(path))]
        except OSError as error:
            raise ComposeError(f"the data directory {self.path} cannot be used: {error.strerror}") from error

    def _refuse_foreign(self) -> None:
        """Raises ComposeError for a directory of something else, open to others: its mode is not ours to change."""
        if not self.path.is_dir() or not _is_wide(self.path) or self.pepper.exists():
            return
        if any(self.path.iterdir()):
            raise ComposeError(
                f"the data directory {self.path} holds other things and is open to other users; name an empty one, "
                f"or close it: chmod 700 {self.path}"
            )

    def _private(self) -> Iterator[Path]:
        """All that this class keeps, and the logs."""
        yield self.path
        for path in (*self.path.iterdir(), *self.logs.iterdir()):
            if not path.is_symlink():
                yield path

    def lock(self) -> int:
        """Descriptor that holds the directory for this process while it lives; children do not inherit it."""
        descriptor = os.open(self.path / "lock", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(descriptor)
            if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
                raise
            raise ComposeError(
                f"another stack is running in {self.path}; stop it, or name another directory with --data-dir"
            ) from error
        return descriptor

    def secrets(self) -> Secrets:
        """The kept secrets; made when there are none."""
        path = self.path / "secrets.json"
        kept: Secrets | None = None
        if path.exists():
            try:
                kept = msgspec.json.decode(path.read_bytes(), type=Secrets)
            except msgspec.MsgspecError as error:
                raise ComposeError(f"{path} is damaged ({error}); remove it to get new keys") from error
        complete = Secrets(
            key=kept.key if kept else ids.api_key(),
            admin_key=kept.admin_key if kept else ids.api_key(),
            sql_password=(kept.sql_password if kept else "") or secrets.token_urlsafe(24),
        )
        if complete != kept:
            write_private(path, msgspec.json.encode(complete))
        return complete

    def secret_file(self, name: str, text: str) -> str:
        """Path of a file with that secret, for a service's ``HEADRACE_..._FILE``."""
        self.secret_files.mkdir(exist_ok=True)
        path = self.secret_files / name
        write_private(path, text.encode())
        return str(path)

    def read_run(self) -> Run:
        """Raises ComposeError when no stack has been started here, or its file is damaged."""
        try:
            return msgspec.json.decode(self.run.read_bytes(), type=Run)
        except FileNotFoundError as error:
            raise ComposeError(f"no stack is running in {self.path} (start one with: headrace up)") from error
        except (OSError, msgspec.MsgspecError) as error:
            raise ComposeError(f"{self.run} cannot be read: {error}") from error

    def write_run(self, run: Run) -> None:
        write_private(self.run, json.dumps(msgspec.to_builtins(run), indent=2).encode() + b"\n")

    def write_sql(self, url: str, user: str, password: str) -> None:
        """``sql.json``: the read-only SQL endpoint of a running stack."""
        given = {"url": url, "user": user, "password": password}
        write_private(self.sql, json.dumps(given, indent=2).encode() + b"\n")

    def remove_run(self) -> None:
        for path in (self.run, self.sql):
            with contextlib.suppress(FileNotFoundError):
                path.unlink()


def write_private(path: Path, data: bytes) -> None:
    """Replace ``path`` by ``data`` atomically, with mode 0600."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(data)
    temporary.replace(path)


def _is_wide(path: Path) -> bool:
    return stat.S_IMODE(path.stat().st_mode) & 0o077 != 0


def _close(path: Path) -> str:
    """Take the group's and others' rights; a line that says so, empty when there were none."""
    try:
        before = stat.S_IMODE(path.stat().st_mode)
        if not before & 0o077:
            return ""
        path.chmod(before & 0o700)
    except FileNotFoundError:
        return ""  # a stack that runs here writes new files in the place of old ones
    return f"{path} was open to other users (mode {before:04o}); it is closed now"


def default_data_dir(environment: Mapping[str, str]) -> Path:
    return Path(environment.get("HEADRACE_DATA_DIR") or ".headrace")


class Target(NamedTuple):
    """The stack that a command works on. ``pepper`` is None when it is not known here."""

    nats_url: str
    credentials: "Credentials"
    pepper: Path | None


def find_target(data_dir: Path | None, environment: Mapping[str, str]) -> Target:
    """``--data-dir`` first, then HEADRACE_NATS_URL (with its HEADRACE_NATS_*_FILE, and HEADRACE_PEPPER_FILE), then the
    default directory.
    """
    from contracts.bus.credentials import Credentials  # brings in the bus, which takes .1 s

    url = environment.get("HEADRACE_NATS_URL", "")
    if data_dir is None and url:
        pepper = environment.get("HEADRACE_PEPPER_FILE", "")
        return Target(url, Credentials.from_environment(environment), Path(pepper) if pepper else None)
    directory = DataDir(data_dir or default_data_dir(environment))
    run = directory.read_run()
    own = {"HEADRACE_NATS_SEED_FILE": run.nats_seed_file} if run.nats_seed_file else {}
    return Target(run.nats_url, Credentials.from_environment({**environment, **own}), directory.pepper)


def read_peppers(path: Path | None) -> "Peppers":
    """The gateways' key peppers; raises ComposeError."""
    from contracts.keys import Peppers

    if path is None:
        raise ComposeError("the key pepper is not known: set HEADRACE_PEPPER_FILE to the gateways' file")
    try:
        return Peppers.parse(_read_secret(path))
    except ValueError as error:
        raise ComposeError(f"{path}: {error}") from error


def _read_secret(path: Path) -> str:
    from contracts.service.config import ConfigError, read_secret

    try:
        return read_secret(path)
    except ConfigError as error:
        raise ComposeError(str(error)) from error
