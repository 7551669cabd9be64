"""Records that people manage: tenants, API keys and models, in KV buckets that every service watches.

How they are checked, read and written. Who may change them, and the trail of it, is contracts.administration's: nobody
else calls what writes here. Every function raises HeadraceError with what to change.
"""

import contextlib
import re
import secrets
import unicodedata
from collections.abc import Callable, Mapping
from typing import Any, Generic, TypeVar

import msgspec
import structlog

from contracts import subjects, topology
from contracts.bus import Bus, KvEntry, WrongSequence
from contracts.clock import now_ms
from contracts.errors import HeadraceError
from contracts.keys import Peppers, problem_of
from contracts.messages.admission import DEADLINE_MS_MAX
from contracts.messages.base import Codec, fields_of
from contracts.messages.records import KeyRecord, KeyUse, Manifest, PoolLimits, TenantLimits, TenantRecord

R = TypeVar("R", bound=msgspec.Struct)

_log = structlog.get_logger()
_TENANT = Codec[TenantRecord](TenantRecord)
_KEY = Codec[KeyRecord](KeyRecord)
_USE = Codec[KeyUse](KeyUse)
_MANIFEST = Codec[Manifest](Manifest)
_KEY_ID = re.compile(r"[A-Za-z0-9_-]{1,64}\Z")

CHANGES_TRIED_MAX = 8
"""Tries of a change that others overtake; each one reads the record again."""


WEIGHT_MAX = 1e6
"""Weights from one over it to itself: beyond, the sums of a fair queue lose what is small or overflow."""
OVERBOOKING_MAX = 100.0
COUNT_MAX = 2**53 - 1
"""Of what is counted: larger whole numbers are not exact as floats, nor in JavaScript."""


class Changed(msgspec.Struct, Generic[R], frozen=True):
    """A record before and after a change; None: there was, or is, none."""

    before: R | None
    after: R | None


class ShownKey(KeyRecord, frozen=True, kw_only=True):
    """A key as operators see it."""

    last_used_at_ms: int = 0
    """To the minute; 0: not yet."""


def read_tenant(entry: KvEntry) -> TenantRecord:
    """The tenant of an entry. Raises MsgspecError for what is none, and for a record from another place.

    A server of JetStream sends answers wherever it is asked to, also to a key of a bucket: who may only read records
    could have one copied. So each says where it belongs.
    """
    record = _TENANT.decode(entry.value)
    return _at_home(record, subjects.encode_or_empty(record.name), entry)


def read_key(entry: KvEntry) -> KeyRecord:
    """The key of an entry, likewise."""
    record = _KEY.decode(entry.value)
    return _at_home(record, f"{record.id}.{record.hash}", entry)


def read_model(entry: KvEntry) -> Manifest:
    """The model of an entry, likewise."""
    manifest = _MANIFEST.decode(entry.value)
    return _at_home(manifest, subjects.encode_or_empty(manifest.name), entry)


def _at_home(record: R, home: str, entry: KvEntry) -> R:
    if home != entry.key:
        raise msgspec.ValidationError(f"a record of {home} lies at {entry.key}")
    return record


def _encoded(codec: Codec[R], record: R) -> bytes:
    """What is written. Raises HeadraceError for what nobody could read: it would be as if absent."""
    data = codec.encode(record)
    try:
        codec.decode(data)
    except msgspec.MsgspecError as error:
        raise HeadraceError("invalid_request", f"this is more than is kept: {error}") from error
    return data


def _all(read: Callable[[KvEntry], R], entries: Mapping[str, KvEntry]) -> list[R]:
    """What can be read of them."""
    found = []
    for entry in entries.values():
        try:
            found.append(read(entry))
        except msgspec.MsgspecError as error:
            _log.error("record_unreadable", key=entry.key[:64], reason=str(error))
    return found


def check_name(kind: str, name: str) -> str:
    """``name`` when it can be kept."""
    try:
        subjects.encode(name)
    except subjects.InvalidName as error:
        raise HeadraceError("invalid_request", f"this {kind} cannot be kept: {error}", param="name") from error
    for position, character in enumerate(name):
        if unicodedata.category(character) in ("Cc", "Zl", "Zp"):
            raise HeadraceError(
                "invalid_request",
                f"this {kind} cannot be kept: it holds the control character U+{ord(character):04X} "
                f"at position {position}",
                param="name",
            )
    return name


def check_tenant(record: TenantRecord) -> TenantRecord:
    """``record`` when every value makes sense."""
    check_name("tenant name", record.name)
    for model in [*(record.models or ()), *record.model_limits]:
        check_name("model name", model)
    if not 1 / WEIGHT_MAX <= record.weight <= WEIGHT_MAX:
        message = f"weight must be a number above 0: from {1 / WEIGHT_MAX:g} to {WEIGHT_MAX:g}"
        raise HeadraceError("invalid_request", message, param="weight")
    if not 1 <= record.deadline_ms <= DEADLINE_MS_MAX:
        raise HeadraceError("invalid_request", f"deadline_ms must be from 1 to {DEADLINE_MS_MAX}", param="deadline_ms")
    if not record.priorities:
        raise HeadraceError("invalid_request", "priorities must name at least one class", param="priorities")
    _check_count("monthly_budget_tokens", record.monthly_budget_tokens)
    for limits in (record.limits, *record.model_limits.values()):
        _check_counts(limits)
    return record


def _check_counts(limits: TenantLimits | PoolLimits) -> None:
    for field, value in msgspec.structs.asdict(limits).items():
        _check_count(field, value)


def _check_count(field: str, value: float | None) -> None:
    if value is not None and value < 0:
        raise HeadraceError("invalid_request", f"{field} must not be negative", param=field)
    if value is not None and value > COUNT_MAX:
        raise HeadraceError("invalid_request", f"{field} must be at most {COUNT_MAX}", param=field)


async def create_tenant(bus: Bus, record: TenantRecord) -> Changed[TenantRecord]:
    """A new tenant; an existing one with the same settings is returned as it is, another one refused."""
    record = msgspec.structs.replace(check_tenant(record), created_at_ms=now_ms())
    try:
        await bus.kv.create(topology.TENANTS, subjects.encode(record.name), _encoded(_TENANT, record))
    except WrongSequence as error:
        present = await tenant(bus, record.name)
        if present is None or msgspec.structs.replace(present, created_at_ms=record.created_at_ms) != record:
            raise HeadraceError("conflict", f"tenant {record.name} exists with other settings") from error
        return Changed(present, present)
    return Changed(None, record)


async def tenant(bus: Bus, name: str) -> TenantRecord | None:
    """The tenant's record; None when there is none."""
    entry = await bus.kv.get(topology.TENANTS, subjects.encode(check_name("tenant name", name)))
    found = _all(read_tenant, {} if entry is None else {name: entry})
    return found[0] if found else None


async def tenants(bus: Bus) -> list[TenantRecord]:
    """By name."""
    return sorted(_all(read_tenant, await bus.kv.all(topology.TENANTS)), key=lambda record: record.name)


async def change_tenant(bus: Bus, name: str, change: Callable[[TenantRecord], TenantRecord]) -> Changed[TenantRecord]:
    """Apply ``change`` to the tenant as it is; seen by every service within a second."""
    missing = f"there is no tenant {name} (make it with: headrace tenant create)"
    return await _change(
        bus, topology.TENANTS, name, read_tenant, _TENANT, lambda record: check_tenant(change(record)), missing
    )


async def require_tenant(bus: Bus, name: str) -> None:
    """Raises HeadraceError (not_found)."""
    if await tenant(bus, name) is None:
        raise HeadraceError(
            "not_found", f"there is no tenant {name} (make it with: headrace tenant create)", param="tenant"
        )


def check_key(record: KeyRecord) -> KeyRecord:
    """``record`` when every value makes sense."""
    if problem := problem_of(record.scopes, record.addresses, record.note):
        field, reason = problem
        raise HeadraceError("invalid_request", reason, param=field)
    return record


def check_expiry(at_ms: int) -> None:
    """Raises HeadraceError when a key could not be used any more."""
    if at_ms < 0 or 0 < at_ms <= now_ms():
        raise HeadraceError("invalid_request", "expires_at_ms has passed", param="expires_at_ms")


async def keep_key(bus: Bus, peppers: Peppers, secret: str, record: KeyRecord) -> Changed[KeyRecord]:
    """The record of ``secret``, made from this one unless there is one, be it revoked or not. Its id is given here."""
    if present := await keys_of_secret(bus, peppers, secret.encode()):
        return Changed(present[0], present[0])
    place = peppers.hashes(secret.encode())[0]
    identifier = f"key_{secrets.token_hex(8)}"
    made = msgspec.structs.replace(record, id=identifier, hash=place, pepper=peppers.name(), created_at_ms=now_ms())
    await bus.kv.create(topology.KEYS, f"{identifier}.{place}", _encoded(_KEY, made))
    return Changed(None, made)


async def keys_of_secret(bus: Bus, peppers: Peppers, secret: bytes) -> list[KeyRecord]:
    """The records of a secret: one, two while it moves to a new pepper, none when nobody knows it."""
    found = [await bus.kv.all(topology.KEYS, f"*.{place}") for place in peppers.hashes(secret)]
    return [record for entries in found for record in _all(read_key, entries)]


async def keys(bus: Bus) -> list[ShownKey]:
    """Oldest first."""
    records = {record.id: record for record in _all(read_key, await bus.kv.all(topology.KEYS))}
    uses = {key: _USE.decode(entry.value).used_at_ms for key, entry in (await bus.kv.all(topology.USES)).items()}
    shown = [ShownKey(**fields_of(KeyRecord, each), last_used_at_ms=uses.get(each.id, 0)) for each in records.values()]
    return sorted(shown, key=lambda record: (record.created_at_ms, record.id))


async def key(bus: Bus, identifier: str) -> KeyRecord:
    """The key with this id."""
    for record in _all(read_key, await _places(bus, identifier)):
        return record
    raise HeadraceError("not_found", f"there is no key with the id {identifier}")


async def change_key(bus: Bus, identifier: str, change: Callable[[KeyRecord], KeyRecord]) -> Changed[KeyRecord]:
    """Apply ``change`` to the key with this id; again until it holds, for a key may be on its way to a new pepper."""
    before = await key(bus, identifier)
    for _ in range(CHANGES_TRIED_MAX):
        entries = await _places(bus, identifier)
        records = {f"{record.id}.{record.hash}": record for record in _all(read_key, entries)}
        wanted = {place: check_key(change(record)) for place, record in records.items()}
        if wanted == records:
            return Changed(before, change(before))
        for place, record in wanted.items():
            if record != records[place]:
                with contextlib.suppress(WrongSequence):  # then the next look finds it
                    await bus.kv.update(topology.KEYS, place, _encoded(_KEY, record), revision=entries[place].revision)
    raise HeadraceError("conflict", f"{identifier} is being changed by others; try again")


async def move_key(bus: Bus, peppers: Peppers, secret: bytes) -> None:
    """Move a secret's key from the previous pepper to the current one; nothing when it is there."""
    current, *previous = peppers.hashes(secret)
    found = [await bus.kv.all(topology.KEYS, f"*.{place}") for place in previous]
    for old in [entry for entries in found for entry in entries.values() if _all(read_key, {entry.key: entry})]:
        record = msgspec.structs.replace(read_key(old), hash=current, pepper=peppers.name())
        place, moved = f"{record.id}.{current}", 0
        with contextlib.suppress(WrongSequence):  # somebody else moves it
            moved = await bus.kv.create(topology.KEYS, place, _encoded(_KEY, record))
        try:
            await bus.kv.delete(topology.KEYS, old.key, revision=old.revision)
        except WrongSequence:
            # It was changed, perhaps revoked, after it was read: the copy must not outlive that.
            if moved:
                await bus.kv.delete(topology.KEYS, place, revision=moved)


async def keep_use(bus: Bus, identifier: str, at_ms: int) -> None:
    """Note when a key was last used; nothing for what cannot be a key's id."""
    if not _KEY_ID.match(identifier):
        return
    await bus.kv.put(topology.USES, identifier, _USE.encode(KeyUse(used_at_ms=at_ms)))


async def _places(bus: Bus, identifier: str) -> dict[str, KvEntry]:
    if not _KEY_ID.match(identifier):
        return {}
    return await bus.kv.all(topology.KEYS, f"{identifier}.*")


async def put_manifest(bus: Bus, manifest: Manifest) -> Changed[Manifest]:
    """Enter a model as it was prepared; limits and fallbacks that an operator set for it stay."""
    check_name("model name", manifest.name)
    entry = await bus.kv.get(topology.MODELS, subjects.encode(manifest.name))
    present = next(iter(_all(read_model, {} if entry is None else {entry.key: entry})), None)
    if present is not None:
        manifest = msgspec.structs.replace(manifest, limits=present.limits, fallbacks=present.fallbacks)
    await bus.kv.put(topology.MODELS, subjects.encode(manifest.name), _encoded(_MANIFEST, manifest))
    return Changed(present, manifest)


async def remove_model(bus: Bus, name: str) -> None:
    """Remove a model's manifest."""
    await bus.kv.delete(topology.MODELS, subjects.encode(name))


async def models(bus: Bus) -> list[Manifest]:
    """By name."""
    return sorted(_all(read_model, await bus.kv.all(topology.MODELS)), key=lambda manifest: manifest.name)


async def model(bus: Bus, name: str) -> Manifest:
    """The model's manifest."""
    entry = await bus.kv.get(topology.MODELS, subjects.encode(check_name("model name", name)))
    for manifest in _all(read_model, {} if entry is None else {name: entry}):
        return manifest
    raise HeadraceError("not_found", f"there is no model {name}")


async def change_model(
    bus: Bus, name: str, *, limits: dict[str, Any] | None = None, fallbacks: list[str] | None = None
) -> Changed[Manifest]:
    """Change bounds of the model's queue (fields of PoolLimits) or its fallbacks, which must be other models."""
    if fallbacks is not None:
        known = {manifest.name for manifest in await models(bus)}
        for fallback in fallbacks:
            if fallback == name or fallback not in known:
                raise HeadraceError("invalid_request", f"{fallback} is no other model", param="fallbacks")

    def change(manifest: Manifest) -> Manifest:
        changed = msgspec.structs.replace(manifest.limits, **(limits or {}))
        _check_counts(changed)
        if not 0 < changed.kv_overbooking <= OVERBOOKING_MAX:
            message = f"kv_overbooking must be above 0 and at most {OVERBOOKING_MAX:g}"
            raise HeadraceError("invalid_request", message, param="kv_overbooking")
        return msgspec.structs.replace(
            manifest, limits=changed, fallbacks=manifest.fallbacks if fallbacks is None else fallbacks
        )

    return await _change(bus, topology.MODELS, name, read_model, _MANIFEST, change, f"there is no model {name}")


async def _change(
    bus: Bus,
    bucket: str,
    name: str,
    read: Callable[[KvEntry], R],
    codec: Codec[R],
    change: Callable[[R], R],
    missing: str,
) -> Changed[R]:
    """Compare-and-set until nobody was in between."""
    key = subjects.encode(check_name("name", name))
    for _ in range(CHANGES_TRIED_MAX):
        entry = await bus.kv.get(bucket, key)
        found = _all(read, {} if entry is None else {key: entry})
        if entry is None or not found:
            raise HeadraceError("not_found", missing)
        before = found[0]
        record = change(before)
        try:
            await bus.kv.update(bucket, key, _encoded(codec, record), revision=entry.revision)
        except WrongSequence:
            continue
        return Changed(before, record)
    raise HeadraceError("conflict", f"{name} is being changed by others; try again")
