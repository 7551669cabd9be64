"""Who a process is on the bus, and whom it trusts: files, which are read again for each connection.

So a credential is replaced by replacing its file: ``nats_client`` notices, and connects anew with what the files hold.
Seeds stand in no setting and no address; nothing of a file's content is ever logged.
"""

import base64
import os
import ssl
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import msgspec

from contracts.bus.types import BusError

SEED_BYTES_MAX = 1024
"""A seed has 58 characters."""


class Signed(NamedTuple):
    """Answer to the server's challenge."""

    public_key: str
    signature: str


class Credentials(msgspec.Struct, frozen=True, kw_only=True):
    """Paths; empty for what is not used. Without a seed the server is asked nothing, and must not ask."""

    seed_file: str = ""
    """NKey seed of the user, whose name is the file's: ``gateway-0.seed``."""
    ca_file: str = ""
    """Certificates (PEM) that the server's must come from; with it a connection without TLS is refused."""
    cert_file: str = ""
    """Own certificate (PEM), for servers that ask for one, and its key."""
    key_file: str = ""

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> "Credentials":
        """As services read them: HEADRACE_NATS_SEED_FILE, and so on."""
        return cls(**{field: environment.get(f"HEADRACE_NATS_{field.upper()}", "") for field in cls.__struct_fields__})

    @property
    def user(self) -> str:
        """Name of the user; empty without a seed."""
        return Path(self.seed_file).name.removesuffix(".seed") if self.seed_file else ""

    def check(self) -> None:
        """Raises BusError that says what to change when these cannot work."""
        if bool(self.cert_file) != bool(self.key_file):
            raise BusError(
                "a client certificate needs both its file and its key's (HEADRACE_NATS_CERT_FILE, _KEY_FILE)"
            )
        if self.cert_file and not self.ca_file:
            raise BusError("a client certificate is of no use without HEADRACE_NATS_CA_FILE")
        if self.seed_file:
            self.sign(b"")
        self.tls()

    def sign(self, challenge: bytes) -> Signed:
        """Raises BusError when there is no seed in the file."""
        import nkeys  # only here: a server without users needs none

        try:
            with open(self.seed_file, "rb") as file:
                seed = bytearray(file.read(SEED_BYTES_MAX).strip())
        except OSError as error:
            raise BusError(f"the seed cannot be read: {self.seed_file}: {error.strerror}") from error
        if not seed:
            raise BusError(f"the seed is empty: {self.seed_file}; make it anew with: headrace nats-config")
        try:
            pair = nkeys.from_seed(seed)
            return Signed(pair.public_key.decode(), base64.b64encode(pair.sign(challenge)).decode())
        except Exception:  # The library's own, or one of base64 or of the curve; its text may hold the seed.
            raise BusError(f"there is no NKey seed in {self.seed_file}; make it with: headrace nats-config") from None

    def tls(self) -> ssl.SSLContext | None:
        """For one connection; None without TLS. Raises BusError when a file is none of a certificate or its key."""
        if not self.ca_file:
            return None
        try:
            context = ssl.create_default_context(ssl.Purpose.SERVER_AUTH, cafile=self.ca_file)
            context.minimum_version = ssl.TLSVersion.TLSv1_3
            if self.cert_file:
                context.load_cert_chain(self.cert_file, self.key_file)
        except (OSError, ssl.SSLError) as error:
            reason = error.strerror or str(error)
            raise BusError(f"the certificates of the bus cannot be used ({', '.join(self.files)}): {reason}") from error
        return context

    @property
    def files(self) -> list[str]:
        """Those that are used."""
        return [path for path in msgspec.structs.astuple(self) if path]

    def stamp(self) -> tuple[tuple[int, int, int], ...]:
        """Differs when a file was replaced or written; what is away for a moment counts as nothing."""
        return tuple(file_stamp(path) for path in self.files)


def file_stamp(path: str) -> tuple[int, int, int]:
    """Differs when the file was replaced or written; zeros while it is away."""
    try:
        status = os.stat(path)
    except OSError:
        return (0, 0, 0)
    return (status.st_ino, status.st_mtime_ns, status.st_size)


ANONYMOUS = Credentials()
"""For a server that has no users."""
