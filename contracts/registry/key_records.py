"""Records of API keys, each at its id and the hash of its secret."""

import contextlib
import re
import secrets
from collections.abc import Callable

import msgspec

from contracts import instants, topology
from contracts.bus import Bus, KvEntry, WrongSequence
from contracts.clock import now_ms
from contracts.errors import HeadraceError
from contracts.keys import Peppers, problem_of
from contracts.messages.base import Codec, fields_of
from contracts.messages.records import KeyRecord, KeyUse
from contracts.registry.base import CHANGES_TRIED_MAX, Changed, at_home, encoded, readable

_KEY = Codec[KeyRecord](KeyRecord)
_USE = Codec[KeyUse](KeyUse)
_KEY_ID = re.compile(r"[A-Za-z0-9_-]{1,64}\Z")


class ShownKey(KeyRecord, frozen=True, kw_only=True):
    """A key as operators see it."""

    last_used_at_ms: int = 0
    """To the minute; 0: not yet."""


def read_key(entry: KvEntry) -> KeyRecord:
    """The key of an entry, likewise."""
    record = _KEY.decode(entry.value)
    return at_home(record, f"{record.id}.{record.hash}", entry)


def check_key(record: KeyRecord) -> KeyRecord:
    """``record`` when every value makes sense."""
    if problem := problem_of(record.scopes, record.addresses, record.note):
        field, reason = problem
        raise HeadraceError("invalid_request", reason, param=field)
    return record


def check_expiry(at_ms: int) -> None:
    """Raises HeadraceError when a key could not be used any more, or no calendar could show until when."""
    if at_ms < 0 or 0 < at_ms <= now_ms():
        raise HeadraceError("invalid_request", "expires_at_ms has passed", param="expires_at_ms")
    if at_ms > instants.LAST_MS:
        reason = f"expires_at_ms is after the year {instants.YEAR_MAX}: 0 is never"
        raise HeadraceError("invalid_request", reason, param="expires_at_ms")


async def keep_key(bus: Bus, peppers: Peppers, secret: str, record: KeyRecord) -> Changed[KeyRecord]:
    """The record of ``secret``, made from this one unless there is one, be it revoked or not. Its id is given here."""
    if present := await keys_of_secret(bus, peppers, secret.encode()):
        return Changed(present[0], present[0])
    place = peppers.hashes(secret.encode())[0]
    identifier = f"key_{secrets.token_hex(8)}"
    made = msgspec.structs.replace(record, id=identifier, hash=place, pepper=peppers.name(), created_at_ms=now_ms())
    await bus.kv.create(topology.KEYS, f"{identifier}.{place}", encoded(_KEY, made))
    return Changed(None, made)


async def keys_of_secret(bus: Bus, peppers: Peppers, secret: bytes) -> list[KeyRecord]:
    """The records of a secret: one, two while it moves to a new pepper, none when nobody knows it."""
    found = [await bus.kv.all(topology.KEYS, f"*.{place}") for place in peppers.hashes(secret)]
    return [record for entries in found for record in readable(read_key, entries)]


async def keys(bus: Bus) -> list[ShownKey]:
    """Oldest first."""
    records = {record.id: record for record in readable(read_key, await bus.kv.all(topology.KEYS))}
    uses = {key: _USE.decode(entry.value).used_at_ms for key, entry in (await bus.kv.all(topology.USES)).items()}
    shown = [ShownKey(**fields_of(KeyRecord, each), last_used_at_ms=uses.get(each.id, 0)) for each in records.values()]
    return sorted(shown, key=lambda record: (record.created_at_ms, record.id))


async def key(bus: Bus, identifier: str) -> KeyRecord:
    """The key with this id."""
    for record in readable(read_key, await _places(bus, identifier)):
        return record
    raise HeadraceError("not_found", f"there is no key with the id {identifier}")


async def change_key(bus: Bus, identifier: str, change: Callable[[KeyRecord], KeyRecord]) -> Changed[KeyRecord]:
    """Apply ``change`` to the key with this id; again until it holds, for a key may be on its way to a new pepper."""
    before = await key(bus, identifier)
    for _ in range(CHANGES_TRIED_MAX):
        entries = await _places(bus, identifier)
        records = {f"{record.id}.{record.hash}": record for record in readable(read_key, entries)}
        wanted = {place: check_key(change(record)) for place, record in records.items()}
        if wanted == records:
            return Changed(before, change(before))
        for place, record in wanted.items():
            if record != records[place]:
                with contextlib.suppress(WrongSequence):  # then the next look finds it
                    await bus.kv.update(topology.KEYS, place, encoded(_KEY, record), revision=entries[place].revision)
    raise HeadraceError("conflict", f"{identifier} is being changed by others; try again")


async def move_key(bus: Bus, peppers: Peppers, secret: bytes) -> None:
    """Move a secret's key from the previous pepper to the current one; nothing when it is there."""
    current, *previous = peppers.hashes(secret)
    found = [await bus.kv.all(topology.KEYS, f"*.{place}") for place in previous]
    for old in [entry for entries in found for entry in entries.values() if readable(read_key, {entry.key: entry})]:
        record = msgspec.structs.replace(read_key(old), hash=current, pepper=peppers.name())
        place, moved = f"{record.id}.{current}", 0
        with contextlib.suppress(WrongSequence):  # somebody else moves it
            moved = await bus.kv.create(topology.KEYS, place, encoded(_KEY, record))
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
