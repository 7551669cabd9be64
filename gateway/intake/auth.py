"""Who calls, and for what its key is: API keys and tenants, kept in memory by watching their buckets.

A revocation or a disabled tenant holds as soon as the watch delivers it (milliseconds); nothing is cached beyond
the watched state, so a new key works as soon, too. While the bus is away the last known state stays, and no
request can be admitted anyway.
"""

import time
from collections.abc import Callable, Iterable
from typing import Generic, TypeVar

import msgspec
import structlog

from contracts import keys, registry, subjects, topology
from contracts.bus import Bus, KvEntry, Watch
from contracts.clock import now_ms
from contracts.errors import HeadraceError
from contracts.keys import Peppers
from contracts.messages.administration import LoginFailure
from contracts.messages.records import KeyRecord, Scope, TenantRecord
from gateway import metrics
from gateway.intake.activity import Activity, FailedLogins

_log = structlog.get_logger()

R = TypeVar("R", KeyRecord, TenantRecord)

SECRET_BYTES_MAX = 512
"""Longer credentials are not looked at; ours have 46 bytes."""


_CREDENTIALS = frozenset({b"authorization", b"x-api-key"})


class Identity(msgspec.Struct, frozen=True):
    """Whom a request is charged to."""

    tenant: TenantRecord
    key_id: str
    scopes: tuple[Scope, ...] = ("inference", "usage")


class _Records(Generic[R]):
    """The records of one bucket, by the last token of their keys: a tenant's name, the hash of a secret.

    Two keys may share one: a wiped store is filled with a new id for the same secret before the old one is missed.
    """

    def __init__(self, read: Callable[[KvEntry], R]) -> None:
        self._read: Callable[[KvEntry], R] = read
        self._known: dict[str, dict[str, R]] = {}

    def at(self, place: str) -> list[R]:
        """What there is by that token."""
        return list(self._known.get(place, {}).values())

    def take(self, key: str, entry: KvEntry | None) -> None:
        """A watch's handler. What is no record of this place counts as absent: nobody gets in by it."""
        records = self._known.setdefault(place := key.rpartition(".")[2], {})
        records.pop(key, None)
        try:
            if entry is not None:
                records[key] = self._read(entry)
        except msgspec.MsgspecError as error:
            _log.error("record_unreadable", key=key[:24], reason=str(error))
        if not records:
            del self._known[place]


class Directory:
    """Keys and tenants as the buckets hold them now."""

    def __init__(self, peppers: Peppers, activity: Activity) -> None:
        self._peppers = peppers
        self._activity = activity
        self._failures = FailedLogins()
        self._keys = _Records(registry.read_key)
        self._tenants = _Records(registry.read_tenant)
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
            records = self._tenants.at(subjects.encode(name))
        except subjects.InvalidName:
            return None
        return next((record for record in records if not record.disabled), None)

    def authenticate(
        self, headers: Iterable[tuple[bytes, bytes]], address: str, scope: Scope | None = None
    ) -> Identity:
        """The caller of a request with these raw headers from this IP address, whose key is for ``scope``.

        Raises HeadraceError: invalid_api_key, permission_denied, or rate_limit_exceeded instead when too much from this
        address has failed. The work is the same for every credential, and what is compared is an HMAC that the
        caller cannot choose.
        """
        secret = secret_of(headers)
        places = self._peppers.hashes(secret)
        records = [record for place in places for record in self._keys.at(place)]
        tenant = next(iter(self._tenants.at(subjects.encode(records[0].tenant))), None) if records else None
        reason = keys.failure_of(records, tenant, address, now_ms())
        if reason is not None or tenant is None:
            raise self._refusal(secret, address, reason or "unknown", records[0].id if records else "")
        key = records[0]
        if scope is not None and scope not in key.scopes:
            if scope.startswith("admin:"):
                self._activity.failed(address, "scope", key.id)
            raise HeadraceError("permission_denied", f"This API key is not for {scope}.")
        self._activity.used(key.id, now_ms())
        if not self._keys.at(places[0]):
            self._activity.outdated(secret)
        return Identity(tenant, key.id, key.scopes)

    def _refusal(self, secret: bytes, address: str, reason: LoginFailure, key_id: str) -> HeadraceError:
        metrics.FAILED_LOGINS.labels(reason if secret else "missing").inc()
        if secret:
            self._activity.failed(address, reason, key_id)
            if wait_s := self._failures.count(address, time.monotonic()):
                message = "Too many logins from your address have failed. Valid API keys are let in all the same."
                return HeadraceError("rate_limit_exceeded", message, retry_after_s=wait_s)
        if reason == "expired":
            return HeadraceError("invalid_api_key", "This API key has expired.")
        if reason == "address":
            return HeadraceError("permission_denied", "This API key may not be used from your address.")
        return HeadraceError(
            "invalid_api_key",
            "No valid API key was given. Send it as 'Authorization: Bearer hr_...' or 'x-api-key: hr_...'.",
        )


def secret_of(headers: Iterable[tuple[bytes, bytes]]) -> bytes:
    """The one credential, a bearer's or Anthropic's ``x-api-key``; empty when there is none, or two that differ.

    The same one twice is fine: Anthropic's SDK sends both headers when both of its variables are set. An empty header
    counts as none.
    """
    given = {
        secret for name, value in headers if name in _CREDENTIALS and (secret := _credential(name, value)) is not None
    }
    secret = given.pop() if len(given) == 1 else b""
    return secret if len(secret) <= SECRET_BYTES_MAX else b""


def _credential(name: bytes, value: bytes) -> bytes | None:
    """What one of these headers gives, empty when that is no credential that is understood; None for an empty one."""
    value = value.strip()
    if not value:
        return None
    if name == b"x-api-key":
        return value
    scheme, _, secret = value.partition(b" ")
    return secret.strip() if scheme.lower() == b"bearer" else b""
