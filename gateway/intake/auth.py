"""Who calls: API keys and tenants, kept in memory by watching their buckets.

A revocation or a disabled tenant holds as soon as the watch delivers it (milliseconds); nothing is cached beyond
the watched state, so a new key works as soon, too. While the bus is away the last known state stays, and no
request can be admitted anyway.
"""

from collections.abc import Iterable
from typing import Generic, TypeVar

import msgspec
import structlog

from contracts import subjects, topology
from contracts.bus import Bus, KvEntry, Watch
from contracts.errors import HeadraceError
from contracts.keys import Peppers
from contracts.messages.base import Codec
from contracts.messages.records import KeyRecord, TenantRecord

_log = structlog.get_logger()

R = TypeVar("R", KeyRecord, TenantRecord)

SECRET_BYTES_MAX = 512
"""Longer credentials are not looked at; ours have 46 bytes."""


class Identity(msgspec.Struct, frozen=True):
    """Whom a request is charged to."""

    tenant: TenantRecord
    key_id: str
    admin: bool = False


class _Records(Generic[R]):
    """The records of one bucket by their keys."""

    def __init__(self, kind: type[R]) -> None:
        self._codec: Codec[R] = Codec(kind)
        self.known: dict[str, R] = {}

    def take(self, key: str, entry: KvEntry | None) -> None:
        """A watch's handler. A record that cannot be decoded counts as absent: nobody gets in by it."""
        self.known.pop(key, None)
        if entry is None:
            return
        try:
            self.known[key] = self._codec.decode(entry.value)
        except msgspec.MsgspecError as error:
            _log.error("record_undecodable", key=key[:8], seq=entry.revision, reason=str(error))


class Directory:
    """Keys and tenants as the buckets hold them now."""

    def __init__(self, peppers: Peppers) -> None:
        self.peppers = peppers
        self._keys = _Records(KeyRecord)
        self._tenants = _Records(TenantRecord)
        self._watches: list[Watch] = []

    async def start(self, bus: Bus) -> None:
        """Returns when the present state is known."""
        for bucket, records in ((topology.TENANTS, self._tenants), (topology.KEYS, self._keys)):
            self._watches.append(await bus.kv.watch(bucket, records.take))

    async def close(self) -> None:
        """Stop watching."""
        for watch in self._watches:
            await watch.close()

    def tenant(self, name: str) -> TenantRecord | None:
        """The tenant, unless it does not exist or is disabled."""
        try:
            record = self._tenants.known.get(subjects.encode(name))
        except subjects.InvalidName:
            return None
        return None if record is None or record.disabled else record

    def authenticate(self, headers: Iterable[tuple[bytes, bytes]]) -> Identity:
        """The caller of a request with these raw headers; raises HeadraceError (invalid_api_key).

        The work is the same for every credential, and what is compared is an HMAC that the caller cannot choose.
        """
        secret = _secret(headers)
        found = [record for digest in self.peppers.hashes(secret) if (record := self._keys.known.get(digest))]
        key = found[0] if found else None
        tenant = None if key is None or key.revoked_at_ms else self.tenant(key.tenant)
        if key is None or tenant is None or not secret:
            raise HeadraceError(
                "invalid_api_key",
                "No valid API key was given. Send it as 'Authorization: Bearer hr_...' or 'x-api-key: hr_...'.",
            )
        return Identity(tenant, key.id, key.admin)


def _secret(headers: Iterable[tuple[bytes, bytes]]) -> bytes:
    """The one credential, a bearer's or Anthropic's ``x-api-key``; empty when there is none, or two that differ.

    The same one twice is fine: Anthropic's SDK sends both headers when both of its variables are set. An empty header
    counts as none.
    """
    given = {secret for name, value in headers if (secret := _credential(name, value)) is not None}
    secret = given.pop() if len(given) == 1 else b""
    return secret if len(secret) <= SECRET_BYTES_MAX else b""


def _credential(name: bytes, value: bytes) -> bytes | None:
    """What a header gives as a credential, empty when it is none that is understood; None when it gives nothing."""
    value = value.strip()
    if not value or name not in (b"authorization", b"x-api-key"):
        return None
    if name == b"x-api-key":
        return value
    scheme, _, secret = value.partition(b" ")
    return secret.strip() if scheme.lower() == b"bearer" else b""
