"""What all records share: names, counts, what lies where it belongs, changes by compare-and-set."""

import unicodedata
from collections.abc import Callable, Mapping
from typing import Generic, TypeVar

import msgspec
import structlog

from contracts import subjects
from contracts.bus import Bus, KvEntry, WrongSequence
from contracts.errors import HeadraceError
from contracts.messages.base import Codec
from contracts.messages.records import PoolLimits, TenantLimits

R = TypeVar("R", bound=msgspec.Struct)

_log = structlog.get_logger()

CHANGES_TRIED_MAX = 8
"""Tries of a change that others overtake; each one reads the record again."""
COUNT_MAX = 2**53 - 1
"""Of what is counted: larger whole numbers are not exact as floats, nor in JavaScript."""


class Changed(msgspec.Struct, Generic[R], frozen=True):
    """A record before and after a change; None: there was, or is, none."""

    before: R | None
    after: R | None


def at_home(record: R, home: str, entry: KvEntry) -> R:
    """``record`` when ``home`` is the key that it lies at; raises MsgspecError for one from another place.

    A server of JetStream sends answers wherever it is asked to, also to a key of a bucket: who may only read records
    could have one copied. So each says where it belongs.
    """
    if home != entry.key:
        raise msgspec.ValidationError(f"a record of {home} lies at {entry.key}")
    return record


def encoded(codec: Codec[R], record: R) -> bytes:
    """What is written. Raises HeadraceError for what nobody could read: it would be as if absent."""
    data = codec.encode(record)
    try:
        codec.decode(data)
    except msgspec.MsgspecError as error:
        raise HeadraceError("invalid_request", f"this is more than is kept: {error}") from error
    return data


def readable(read: Callable[[KvEntry], R], entries: Mapping[str, KvEntry]) -> list[R]:
    """What can be read of them."""
    found = []
    for entry in entries.values():
        try:
            found.append(read(entry))
        except msgspec.MsgspecError as error:
            _log.error("record_unreadable", key=entry.key[:64], reason=str(error))
    return found


_JOINERS = "\u200c\u200d"
"""Invisible, and part of how words of some languages and emoji are written."""


def check_name(kind: str, name: str) -> str:
    """``name`` when it can be kept: shown as what it is, alone, and put into an address of the admin API."""
    try:
        subjects.encode(name)
    except subjects.InvalidName as error:
        raise HeadraceError("invalid_request", f"this {kind} cannot be kept: {error}", param="name") from error
    if why := _hidden(name):
        raise HeadraceError("invalid_request", f"this {kind} cannot be kept: {why}", param="name")
    return name


def _hidden(name: str) -> str:
    """Why people or addresses would take it for another one; empty when they do not."""
    if name in (".", ".."):
        return "in an address . and .. are steps between folders"
    if name != name.strip():
        return "it begins or ends with a space"
    if not unicodedata.is_normalized("NFC", name):
        return "it has characters apart from their accents: write it composed (Unicode's NFC)"
    for position, character in enumerate(name):
        category = unicodedata.category(character)
        if category in ("Cc", "Zl", "Zp"):
            return f"it holds the control character U+{ord(character):04X} at position {position}"
        if category == "Cf" and character not in _JOINERS:
            return f"it holds the invisible character U+{ord(character):04X} at position {position}"
    return ""


def check_counts(limits: TenantLimits | PoolLimits) -> None:
    """Every field of them."""
    for field, value in msgspec.structs.asdict(limits).items():
        check_count(field, value)


def check_count(field: str, value: float | None) -> None:
    """Raises HeadraceError for what cannot be one."""
    if value is not None and value < 0:
        raise HeadraceError("invalid_request", f"{field} must not be negative", param=field)
    if value is not None and value > COUNT_MAX:
        raise HeadraceError("invalid_request", f"{field} must be at most {COUNT_MAX}", param=field)


async def change_record(
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
        found = readable(read, {} if entry is None else {key: entry})
        if entry is None or not found:
            raise HeadraceError("not_found", missing)
        before = found[0]
        record = change(before)
        try:
            await bus.kv.update(bucket, key, encoded(codec, record), revision=entry.revision)
        except WrongSequence:
            continue
        return Changed(before, record)
    raise HeadraceError("conflict", f"{name} is being changed by others; try again")
