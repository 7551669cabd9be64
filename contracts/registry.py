"""Records that people manage: tenants, API keys and models, in KV buckets that every service watches.

Used by the command line and by the admin API, so that both say the same. Secrets of keys are shown once, when made;
what is stored is their HMAC under the pepper. Every function raises HeadraceError with what to change.
"""

import secrets
import unicodedata
from collections.abc import Callable
from typing import Any, TypeVar

import msgspec

from contracts import ids, subjects, topology
from contracts.bus import Bus, WrongSequence
from contracts.clock import now_ms
from contracts.errors import HeadraceError
from contracts.keys import Peppers
from contracts.messages.admission import DEADLINE_MS_MAX
from contracts.messages.base import Codec
from contracts.messages.records import KeyRecord, Manifest, PoolLimits, TenantLimits, TenantRecord

R = TypeVar("R", TenantRecord, Manifest)

_TENANT = Codec[TenantRecord](TenantRecord)
_KEY = Codec[KeyRecord](KeyRecord)
_MANIFEST = Codec[Manifest](Manifest)

CHANGES_TRIED_MAX = 8
"""Tries of a change that others overtake; each one reads the record again."""


WEIGHT_MAX = 1e6
"""Weights from one over it to itself: beyond, the sums of a fair queue lose what is small or overflow."""
OVERBOOKING_MAX = 100.0
COUNT_MAX = 2**53 - 1
"""Of what is counted: larger whole numbers are not exact as floats, nor in JavaScript."""


class NewKey(msgspec.Struct, frozen=True, kw_only=True):
    """A key as its owner sees it, this once."""

    id: str
    key: str


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


async def create_tenant(bus: Bus, record: TenantRecord) -> TenantRecord:
    """A new tenant; an existing one with the same settings is returned as it is, another one refused."""
    record = msgspec.structs.replace(check_tenant(record), created_at_ms=now_ms())
    try:
        await bus.kv.create(topology.TENANTS, subjects.encode(record.name), _TENANT.encode(record))
    except WrongSequence as error:
        present = await tenant(bus, record.name)
        if present is None or msgspec.structs.replace(present, created_at_ms=record.created_at_ms) != record:
            raise HeadraceError("conflict", f"tenant {record.name} exists with other settings") from error
        return present
    return record


async def tenant(bus: Bus, name: str) -> TenantRecord | None:
    """The tenant's record; None when there is none."""
    entry = await bus.kv.get(topology.TENANTS, subjects.encode(check_name("tenant name", name)))
    return _TENANT.decode(entry.value) if entry is not None else None


async def tenants(bus: Bus) -> list[TenantRecord]:
    """By name."""
    records = [_TENANT.decode(entry.value) for entry in (await bus.kv.all(topology.TENANTS)).values()]
    return sorted(records, key=lambda record: record.name)


async def change_tenant(bus: Bus, name: str, change: Callable[[TenantRecord], TenantRecord]) -> TenantRecord:
    """Apply ``change`` to the tenant as it is; seen by every service within a second."""
    missing = f"there is no tenant {name} (make it with: headrace tenant create)"
    return await _change(bus, topology.TENANTS, name, _TENANT, lambda record: check_tenant(change(record)), missing)


def with_limits(
    record: TenantRecord, limits: dict[str, int | None], *, model: str | None = None, **fields: Any
) -> TenantRecord:
    """``record`` with some fields changed, and some limits: of one model, or of all that have none of their own."""
    if limits and model is not None:
        own = msgspec.structs.replace(record.model_limits.get(model, record.limits), **limits)
        fields["model_limits"] = {**record.model_limits, model: own}
    elif limits:
        fields["limits"] = msgspec.structs.replace(record.limits, **limits)
    return msgspec.structs.replace(record, **fields)


async def create_key(bus: Bus, peppers: Peppers, tenant_name: str, *, admin: bool = False) -> NewKey:
    """A new key of an existing tenant."""
    if await tenant(bus, tenant_name) is None:
        raise HeadraceError(
            "not_found", f"there is no tenant {tenant_name} (make it with: headrace tenant create)", param="tenant"
        )
    secret = ids.api_key()
    record = await keep_key(bus, peppers, secret, tenant_name, admin=admin)
    return NewKey(id=record.id, key=secret)


async def keep_key(bus: Bus, peppers: Peppers, secret: str, tenant_name: str, *, admin: bool = False) -> KeyRecord:
    """The record of ``secret``, made unless there is one, be it revoked or not."""
    name = peppers.hashes(secret.encode())[0]
    identifier = f"key_{secrets.token_hex(8)}"
    record = KeyRecord(id=identifier, tenant=tenant_name, admin=admin, created_at_ms=now_ms())
    try:
        await bus.kv.create(topology.KEYS, name, _KEY.encode(record))
    except WrongSequence:
        entry = await bus.kv.get(topology.KEYS, name)
        if entry is None:
            raise
        return _KEY.decode(entry.value)
    return record


async def keys(bus: Bus) -> list[KeyRecord]:
    """Oldest first."""
    records = [_KEY.decode(entry.value) for entry in (await bus.kv.all(topology.KEYS)).values()]
    return sorted(records, key=lambda record: (record.created_at_ms, record.id))


async def revoke_key(bus: Bus, identifier: str) -> KeyRecord:
    """Revoke the key with this id; one that is revoked stays as it is."""
    for entry in (await bus.kv.all(topology.KEYS)).values():
        record = _KEY.decode(entry.value)
        if record.id != identifier:
            continue
        if record.revoked_at_ms:
            return record
        revoked = msgspec.structs.replace(record, revoked_at_ms=now_ms())
        await bus.kv.put(topology.KEYS, entry.key, _KEY.encode(revoked))
        return revoked
    raise HeadraceError("not_found", f"there is no key with the id {identifier}")


async def put_manifest(bus: Bus, manifest: Manifest) -> None:
    """Enter a model as it was prepared; limits and fallbacks that an operator set for it stay."""
    check_name("model name", manifest.name)
    entry = await bus.kv.get(topology.MODELS, subjects.encode(manifest.name))
    if entry is not None:
        present = _MANIFEST.decode(entry.value)
        manifest = msgspec.structs.replace(manifest, limits=present.limits, fallbacks=present.fallbacks)
    await bus.kv.put(topology.MODELS, subjects.encode(manifest.name), _MANIFEST.encode(manifest))


async def keep_only(bus: Bus, names: set[str]) -> None:
    """Remove the manifests of all other models."""
    for manifest in await models(bus):
        if manifest.name not in names:
            await bus.kv.delete(topology.MODELS, subjects.encode(manifest.name))


async def models(bus: Bus) -> list[Manifest]:
    """By name."""
    manifests = [_MANIFEST.decode(entry.value) for entry in (await bus.kv.all(topology.MODELS)).values()]
    return sorted(manifests, key=lambda manifest: manifest.name)


async def change_model(
    bus: Bus, name: str, *, limits: dict[str, Any] | None = None, fallbacks: list[str] | None = None
) -> Manifest:
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

    return await _change(bus, topology.MODELS, name, _MANIFEST, change, f"there is no model {name}")


async def _change(bus: Bus, bucket: str, name: str, codec: Codec[R], change: Callable[[R], R], missing: str) -> R:
    """Compare-and-set until nobody was in between."""
    key = subjects.encode(check_name("name", name))
    for _ in range(CHANGES_TRIED_MAX):
        entry = await bus.kv.get(bucket, key)
        if entry is None:
            raise HeadraceError("not_found", missing)
        record = change(codec.decode(entry.value))
        try:
            await bus.kv.update(bucket, key, codec.encode(record), revision=entry.revision)
        except WrongSequence:
            continue
        return record
    raise HeadraceError("conflict", f"{name} is being changed by others; try again")
