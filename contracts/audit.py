"""The audit trail: who did what, in a stream to which everybody may only append.

An action's entry is stored before anything is done; when it cannot be stored, nothing is done. What came of it is a
second entry with the same id. Should that one not be stored, the action stands, and its first entry says that it may.
"""

import hashlib
import uuid
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import structlog

from contracts import clock, subjects, topology
from contracts.bus import Bus, BusError, Incoming, OrderedConsumer, TooLarge
from contracts.errors import HeadraceError
from contracts.forms import TrailQuery
from contracts.messages.administration import AuditEntry, Result, Via
from contracts.messages.base import Codec
from contracts.registry import Changed

VALUE_BYTES_MAX = 2048
"""Of one field in an entry; a larger one is named by its hash."""

TARGET_CHARS_MAX = 512

_log = structlog.get_logger()
_ENTRY = Codec[AuditEntry](AuditEntry)


class Actor(msgspec.Struct, frozen=True, kw_only=True):
    """Who acts: a key's id, or ``operator``; from which address and by which way."""

    name: str
    address: str
    via: Via
    request_id: str = ""


class Record:
    """What an action says of itself while it runs."""

    def __init__(self) -> None:
        self.target = ""
        self.changed: Changed[Any] = Changed(None, None)


def new_id() -> str:
    """Of an action."""
    return uuid.uuid4().hex


@asynccontextmanager
async def recorded(bus: Bus, actor: Actor, action: str, target: str, asked: Any = None) -> AsyncIterator[Record]:
    """What happens inside is an action of ``actor``. Raises HeadraceError (unavailable) before it when no entry can
    be stored.

    ``asked`` is the form, without secrets.
    """
    intended = AuditEntry(
        id=new_id(),
        at_ms=clock.now_ms(),
        actor=actor.name,
        address=actor.address,
        via=actor.via,
        action=action,
        target=target[:TARGET_CHARS_MAX],
        result="intended",
        asked=_fields(asked),
        request_id=actor.request_id,
    )
    await append(bus, intended)
    record = Record()
    record.target = target
    try:
        yield record
    except HeadraceError as error:
        await _close(bus, intended, record, "refused", error.message)
        raise
    except BaseException as error:
        await _close(bus, intended, record, "failed", type(error).__name__)
        raise
    await _close(bus, intended, record, "done", "")


async def append(bus: Bus, entry: AuditEntry) -> None:
    """Store an entry; raises HeadraceError when it is not certain that it is stored."""
    subject = subjects.audit(entry.action.partition(".")[0])
    try:
        await bus.jetstream.store(subject, _ENTRY.encode(entry), msg_id=uuid.uuid4().hex)
    except TooLarge as error:
        raise HeadraceError("request_too_large", "this is too large for the audit trail") from error
    except BusError as error:
        _log.error("audit_refused", action=entry.action, reason=str(error))
        raise HeadraceError(
            "unavailable", "the audit trail does not take an entry, so nothing was done", retry_after_s=5
        ) from error


async def _close(bus: Bus, intended: AuditEntry, record: Record, result: Result, reason: str) -> None:
    before, after = differences(record.changed)
    entry = msgspec.structs.replace(
        intended,
        at_ms=clock.now_ms(),
        target=record.target[:TARGET_CHARS_MAX],
        result=result,
        reason=reason[:VALUE_BYTES_MAX],
        asked={},
        before=before,
        after=after,
    )
    try:
        await append(bus, entry)
    except HeadraceError:
        pass  # it is logged, and the first entry stands


def differences(changed: Changed[Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The fields that differ, as they were and as they are."""
    before, after = _fields(changed.before), _fields(changed.after)
    differ = [name for name in {**before, **after} if before.get(name) != after.get(name)]
    were = {name: before[name] for name in differ if name in before}
    return were, {name: after[name] for name in differ if name in after}


def _fields(value: Any) -> dict[str, Any]:
    """A struct's fields as JSON values, those with their default left out; large ones by their hash."""
    if value is None:
        return {}
    fields: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(value))
    fields.pop("hash", None)  # of a key's secret: more readers than the bucket of keys has
    for name, field in fields.items():
        data = msgspec.json.encode(field)
        if len(data) > VALUE_BYTES_MAX:
            fields[name] = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    return fields


async def entries(bus: Bus) -> list[AuditEntry]:
    """All that are kept, oldest first."""
    return [entry async for each in bus.jetstream.read(topology.AUDIT, "audit.v1.>") if (entry := _read(each))]


NEWEST_MAX, NEWEST_BYTES_MAX = 200, 512 << 10
"""Of one list: half of what an answer over the bus holds."""
_WINDOWS = (1000, 10_000, 100_000)
"""So many of the newest messages are looked at, then more until there are enough."""


async def newest(bus: Bus, areas: Iterable[str], query: TrailQuery) -> list[AuditEntry]:
    """Entries of these areas, the newest first; ``intended`` ones only where nothing followed."""
    area = query.action.partition(".")[0]
    wanted = [each for each in areas if area in ("", each)]
    limit = min(max(1, query.limit), NEWEST_MAX)
    last = (await bus.jetstream.api(f"STREAM.INFO.{topology.AUDIT}"))["state"]["last_seq"]
    found: list[AuditEntry] = []
    for window in _WINDOWS:
        start = max(1, last - window + 1)
        read = [
            entry
            for each in wanted
            async for message in bus.jetstream.read(topology.AUDIT, subjects.audit(each), start_seq=start)
            if (entry := _read(message)) and _fits(entry, query)
        ]
        found = settled(read)
        if len(found) >= limit or start == 1:
            break
    found.sort(key=lambda entry: entry.at_ms, reverse=True)
    return _within(found[:limit], NEWEST_BYTES_MAX)


def settled(entries: list[AuditEntry]) -> list[AuditEntry]:
    """Without the first entries of actions of which the second is there."""
    ended = {entry.id for entry in entries if entry.result != "intended"}
    return [entry for entry in entries if entry.result != "intended" or entry.id not in ended]


def _fits(entry: AuditEntry, query: TrailQuery) -> bool:
    return (
        query.action in ("", entry.action, entry.action.partition(".")[0])
        and query.actor in ("", entry.actor)
        and query.target in ("", entry.target)
    )


def _within(entries: list[AuditEntry], bytes_max: int) -> list[AuditEntry]:
    """The first of them, as far as they fit."""
    total = 0
    for count, entry in enumerate(entries):
        total += len(_ENTRY.encode(entry))
        if total > bytes_max:
            return entries[:count]
    return entries


async def follow(bus: Bus, tell: Callable[[AuditEntry], None]) -> OrderedConsumer:
    """Tell everything that is kept, then what is to come, until the consumer is closed."""

    def take(message: Incoming) -> None:
        if entry := _read(message):
            tell(entry)

    return await OrderedConsumer(bus.jetstream, topology.AUDIT, "audit.v1.>", take, start_seq=1).start()


def _read(message: Incoming) -> AuditEntry | None:
    """None for what is no entry: services may have the server send its answers here, too (contracts.permissions)."""
    try:
        return _ENTRY.decode(message.data)
    except msgspec.MsgspecError:
        _log.error("audit_unreadable", seq=message.stream_seq)
        return None
