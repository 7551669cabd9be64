"""Records of aliases: names that stand for one of several models. A model's own name is never an alias."""

import msgspec

from contracts import subjects, topology
from contracts.bus import Bus, KvEntry
from contracts.clock import now_ms
from contracts.errors import HeadraceError
from contracts.messages.base import Codec
from contracts.messages.records import Alias
from contracts.registry.base import Changed, at_home, check_name, encoded, readable
from contracts.registry.model_records import find_model, models

_ALIAS = Codec[Alias](Alias)

BUILT_IN = {
    alias.name: alias
    for alias in (
        Alias(name="auto", order="cheapest"),
        Alias(name="best", order="dearest"),
        Alias(name="fast", order="soonest"),
    )
}
"""What these stand for until an operator says otherwise: all models that the caller may use."""


def read_alias(entry: KvEntry) -> Alias:
    """The alias of an entry. Raises MsgspecError for what is none, and for a record from another place."""
    record = _ALIAS.decode(entry.value)
    return at_home(record, subjects.encode_or_empty(record.name), entry)


async def aliases(bus: Bus) -> list[Alias]:
    """By name, those that are built in among them."""
    kept = {alias.name: alias for alias in readable(read_alias, await bus.kv.all(topology.ALIASES))}
    return sorted((BUILT_IN | kept).values(), key=lambda alias: alias.name)


async def put_alias(bus: Bus, alias: Alias) -> Changed[Alias]:
    """Set what an alias stands for, whatever it stood for. Raises HeadraceError (invalid_request, conflict)."""
    check_name("alias", alias.name)
    if "@" in alias.name:
        raise HeadraceError("invalid_request", "an alias has no @", param="name")
    if await find_model(bus, alias.name) is not None:
        raise HeadraceError("conflict", f"{alias.name} is a model: give the alias another name", param="name")
    known = {record.name for record in await models(bus)}
    if unknown := [name for name in alias.models if name not in known]:
        raise HeadraceError("invalid_request", f"there is no model {unknown[0]}", param="models")
    if len(set(alias.models)) < len(alias.models):
        raise HeadraceError("invalid_request", "a model is listed twice", param="models")
    if alias.order == "listed" and not alias.models:
        raise HeadraceError("invalid_request", "list models, or say by what all of them are ordered", param="models")
    before = await _find(bus, alias.name)
    alias = msgspec.structs.replace(alias, created_at_ms=now_ms())
    await bus.kv.put(topology.ALIASES, subjects.encode(alias.name), encoded(_ALIAS, alias))
    return Changed(before, alias)


async def remove_alias(bus: Bus, name: str) -> Changed[Alias]:
    """Forget an alias; one that is built in stands for all models again. Raises HeadraceError (not_found)."""
    before = await _find(bus, name)
    if before is None:
        built_in = "; it is built in, and can be set to something else" if name in BUILT_IN else ""
        raise HeadraceError("not_found", f"there is no alias {name} that was set{built_in}")
    await bus.kv.delete(topology.ALIASES, subjects.encode(name))
    return Changed(before, BUILT_IN.get(name))


async def _find(bus: Bus, name: str) -> Alias | None:
    entry = await bus.kv.get(topology.ALIASES, subjects.encode(check_name("alias", name)))
    found = readable(read_alias, {} if entry is None else {entry.key: entry})
    return found[0] if found else None
