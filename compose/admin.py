"""Records that people manage (tenants, keys, models, in KV buckets), and questions about usage and queues.

Secrets of keys are shown once, when made; what is stored is their HMAC under the pepper.
"""

import calendar
import datetime
import hashlib
import hmac
import secrets
import time
import unicodedata
from pathlib import Path

import msgspec

from compose.config import ComposeError, new_key
from contracts import subjects, topology
from contracts.bus import Bus, WrongSequence
from contracts.messages import (
    Codec,
    KeyRecord,
    Manifest,
    QueueAnswer,
    TenantLimits,
    TenantRecord,
    UsageAnswer,
    UsageDimension,
    UsageQuery,
    UsageRow,
)

_TENANT = Codec[TenantRecord](TenantRecord)
_KEY = Codec[KeyRecord](KeyRecord)
_MANIFEST = Codec[Manifest](Manifest)
_USAGE_QUERY = Codec[UsageQuery](UsageQuery)
_USAGE_ANSWER = Codec[UsageAnswer](UsageAnswer)
_QUEUE_ANSWER = Codec[QueueAnswer](QueueAnswer)

USAGE_TIMEOUT_S = 30.0
USAGE_PAGE = 10_000


class NewKey(msgspec.Struct, frozen=True, kw_only=True):
    """A key as its owner sees it, this once."""

    id: str
    key: str


def check_name(kind: str, name: str) -> str:
    """``name`` when it can be kept; raises ComposeError with the reason."""
    try:
        subjects.encode(name)
    except subjects.InvalidName as error:
        raise ComposeError(f"this {kind} cannot be kept: {error}") from error
    for position, character in enumerate(name):
        if unicodedata.category(character) in ("Cc", "Zl", "Zp"):
            raise ComposeError(
                f"this {kind} cannot be kept: it holds the control character U+{ord(character):04X} "
                f"at position {position}"
            )
    return name


# Tenants ---------------------------------------------------------------------------------------------------


async def create_tenant(
    bus: Bus, name: str, limits: TenantLimits, weight: float = 1.0, models: list[str] | None = None
) -> TenantRecord:
    """A new tenant; an existing one with the same settings is returned as it is, another one refused."""
    check_name("tenant name", name)
    for model in models or ():
        check_name("model name", model)
    record = TenantRecord(name=name, limits=limits, weight=weight, models=models, created_at_ms=_now_ms())
    try:
        await bus.kv_create(topology.TENANTS, subjects.encode(name), _TENANT.encode(record))
    except WrongSequence as error:
        present = await tenant(bus, name)
        if present is None or msgspec.structs.replace(present, created_at_ms=record.created_at_ms) != record:
            raise ComposeError(f"tenant {name} exists with other settings") from error
        return present
    return record


async def tenant(bus: Bus, name: str) -> TenantRecord | None:
    entry = await bus.kv_get(topology.TENANTS, subjects.encode(name))
    return _TENANT.decode(entry.value) if entry is not None else None


async def tenants(bus: Bus) -> list[TenantRecord]:
    """By name."""
    records = [_TENANT.decode(entry.value) for entry in (await bus.kv_all(topology.TENANTS)).values()]
    return sorted(records, key=lambda record: record.name)


# Keys ------------------------------------------------------------------------------------------------------


def read_pepper(path: Path | None) -> bytes:
    """The pepper's bytes, as gateways read them; raises ComposeError."""
    if path is None:
        raise ComposeError("the key pepper is not known: set HEADRACE_PEPPER_FILE to the gateways' file")
    try:
        pepper = path.read_bytes().strip()
    except OSError as error:
        raise ComposeError(f"the key pepper cannot be read: {path}: {error.strerror}") from error
    if not pepper:
        raise ComposeError(f"the key pepper is empty: {path}")
    return pepper


def key_hash(pepper: bytes, secret: str) -> str:
    """Key of the KEYS bucket for a secret: hex HMAC-SHA256 under the pepper."""
    return hmac.new(pepper, secret.encode(), hashlib.sha256).hexdigest()


async def create_key(bus: Bus, pepper: bytes, tenant_name: str) -> NewKey:
    """A new key of an existing tenant."""
    check_name("tenant name", tenant_name)
    if await tenant(bus, tenant_name) is None:
        raise ComposeError(f"there is no tenant {tenant_name} (make it with: headrace tenant create)")
    secret = new_key()
    record = await keep_key(bus, pepper, secret, tenant_name)
    return NewKey(id=record.id, key=secret)


async def keep_key(bus: Bus, pepper: bytes, secret: str, tenant_name: str, *, admin: bool = False) -> KeyRecord:
    """The record of ``secret``, made unless there is one, be it revoked or not."""
    name = key_hash(pepper, secret)
    identifier = f"key_{secrets.token_hex(8)}"
    record = KeyRecord(id=identifier, tenant=tenant_name, admin=admin, created_at_ms=_now_ms())
    try:
        await bus.kv_create(topology.KEYS, name, _KEY.encode(record))
    except WrongSequence:
        entry = await bus.kv_get(topology.KEYS, name)
        if entry is None:
            raise
        return _KEY.decode(entry.value)
    return record


async def keys(bus: Bus) -> list[KeyRecord]:
    """Oldest first."""
    records = [_KEY.decode(entry.value) for entry in (await bus.kv_all(topology.KEYS)).values()]
    return sorted(records, key=lambda record: (record.created_at_ms, record.id))


async def revoke_key(bus: Bus, identifier: str) -> KeyRecord:
    """Revoke the key with this id; one that is revoked stays as it is."""
    for entry in (await bus.kv_all(topology.KEYS)).values():
        record = _KEY.decode(entry.value)
        if record.id != identifier:
            continue
        if record.revoked_at_ms:
            return record
        revoked = msgspec.structs.replace(record, revoked_at_ms=_now_ms())
        await bus.kv_put(topology.KEYS, entry.key, _KEY.encode(revoked))
        return revoked
    raise ComposeError(f"there is no key with the id {identifier}")


# Models ----------------------------------------------------------------------------------------------------


async def put_manifest(bus: Bus, manifest: Manifest) -> None:
    await bus.kv_put(topology.MODELS, subjects.encode(manifest.name), _MANIFEST.encode(manifest))


async def keep_only(bus: Bus, names: set[str]) -> None:
    """Remove the manifests of all other models."""
    for manifest in await models(bus):
        if manifest.name not in names:
            await bus.kv_delete(topology.MODELS, subjects.encode(manifest.name))


async def models(bus: Bus) -> list[Manifest]:
    """By name."""
    manifests = [_MANIFEST.decode(entry.value) for entry in (await bus.kv_all(topology.MODELS)).values()]
    return sorted(manifests, key=lambda manifest: manifest.name)


# Usage and queues ------------------------------------------------------------------------------------------


def month_of(at_ms: int) -> tuple[int, int]:
    """The UTC month around an instant as a half-open range in Unix ms."""
    day = datetime.datetime.fromtimestamp(at_ms / 1000, datetime.UTC)
    first = day.replace(day=1, hour=0, minute=0, second=0, microsecond=0)
    after = first + datetime.timedelta(days=calendar.monthrange(first.year, first.month)[1])
    return int(first.timestamp()) * 1000, int(after.timestamp()) * 1000


async def usage(bus: Bus, by: list[UsageDimension], from_at_ms: int, to_at_ms: int) -> list[UsageRow]:
    """All rows of the range, of every tenant; raises ComposeError when the ledger refuses."""
    rows: list[UsageRow] = []
    while True:
        query = UsageQuery(from_at_ms=from_at_ms, to_at_ms=to_at_ms, by=by, limit=USAGE_PAGE, offset=len(rows))
        data = await bus.request(subjects.USAGE, _USAGE_QUERY.encode(query), timeout_s=USAGE_TIMEOUT_S)
        answer = _USAGE_ANSWER.decode(data)
        if answer.error:
            raise ComposeError(f"the ledger refused: {answer.error}")
        rows += answer.rows
        if not answer.has_more or not answer.rows:
            return rows


async def queue(bus: Bus, model: str) -> QueueAnswer:
    """Live queues of one model, from its scheduler."""
    return _QUEUE_ANSWER.decode(await bus.request(subjects.queues(model), b"{}"))


def _now_ms() -> int:
    return time.time_ns() // 1_000_000
