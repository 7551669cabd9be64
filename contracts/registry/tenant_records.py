"""Records of tenants."""

from collections.abc import Callable

import msgspec

from contracts import subjects, topology
from contracts.bus import Bus, KvEntry, WrongSequence
from contracts.clock import now_ms
from contracts.errors import HeadraceError
from contracts.messages.admission import DEADLINE_MS_MAX
from contracts.messages.base import Codec
from contracts.messages.records import TenantRecord
from contracts.messages.rollouts import SHADOW_TENANT
from contracts.registry.base import (
    Changed,
    at_home,
    change_record,
    check_count,
    check_counts,
    check_name,
    encoded,
    readable,
)

_TENANT = Codec[TenantRecord](TenantRecord)

WEIGHT_MAX = 1e6
"""Weights from one over it to itself: beyond, the sums of a fair queue lose what is small or overflow."""


def read_tenant(entry: KvEntry) -> TenantRecord:
    """The tenant of an entry. Raises MsgspecError for what is none, and for a record from another place."""
    record = _TENANT.decode(entry.value)
    return at_home(record, subjects.encode_or_empty(record.name), entry)


def check_tenant(record: TenantRecord) -> TenantRecord:
    """``record`` when every value makes sense."""
    check_name("tenant name", record.name)
    if record.name == SHADOW_TENANT:
        raise HeadraceError("invalid_request", f"{SHADOW_TENANT} is the service's own name", param="name")
    for model in [*(record.models or ()), *record.model_limits]:
        check_name("model name", model)
    if not 1 / WEIGHT_MAX <= record.weight <= WEIGHT_MAX:
        message = f"weight must be a number above 0: from {1 / WEIGHT_MAX:g} to {WEIGHT_MAX:g}"
        raise HeadraceError("invalid_request", message, param="weight")
    if not 1 <= record.deadline_ms <= DEADLINE_MS_MAX:
        raise HeadraceError("invalid_request", f"deadline_ms must be from 1 to {DEADLINE_MS_MAX}", param="deadline_ms")
    if not record.priorities:
        raise HeadraceError("invalid_request", "priorities must name at least one class", param="priorities")
    check_count("monthly_budget_tokens", record.monthly_budget_tokens)
    for limits in (record.limits, *record.model_limits.values()):
        check_counts(limits)
    return record


async def create_tenant(bus: Bus, record: TenantRecord) -> Changed[TenantRecord]:
    """A new tenant; an existing one with the same settings is returned as it is, another one refused."""
    record = msgspec.structs.replace(check_tenant(record), created_at_ms=now_ms())
    try:
        await bus.kv.create(topology.TENANTS, subjects.encode(record.name), encoded(_TENANT, record))
    except WrongSequence as error:
        present = await tenant(bus, record.name)
        if present is None or msgspec.structs.replace(present, created_at_ms=record.created_at_ms) != record:
            raise HeadraceError("conflict", f"tenant {record.name} exists with other settings") from error
        return Changed(present, present)
    return Changed(None, record)


async def tenant(bus: Bus, name: str) -> TenantRecord | None:
    """The tenant's record; None when there is none."""
    entry = await bus.kv.get(topology.TENANTS, subjects.encode(check_name("tenant name", name)))
    found = readable(read_tenant, {} if entry is None else {name: entry})
    return found[0] if found else None


async def tenants(bus: Bus) -> list[TenantRecord]:
    """By name."""
    return sorted(readable(read_tenant, await bus.kv.all(topology.TENANTS)), key=lambda record: record.name)


async def change_tenant(bus: Bus, name: str, change: Callable[[TenantRecord], TenantRecord]) -> Changed[TenantRecord]:
    """Apply ``change`` to the tenant as it is; seen by every service within a second."""
    missing = f"there is no tenant {name} (make it with: headrace tenant create)"
    return await change_record(
        bus, topology.TENANTS, name, read_tenant, _TENANT, lambda record: check_tenant(change(record)), missing
    )


async def require_tenant(bus: Bus, name: str) -> None:
    """Raises HeadraceError (not_found)."""
    if await tenant(bus, name) is None:
        raise HeadraceError(
            "not_found", f"there is no tenant {name} (make it with: headrace tenant create)", param="tenant"
        )
