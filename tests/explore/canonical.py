"""One form for equal states: instants become distances from now, and what only reports or counts is left out.

Left out: histories and metrics; the throughput estimate and fairness counters (one tenant without limits: they decide
nothing); times that are only written into terminal events (by one, that of admission, a new owner replays token
buckets: worlds that differ in it alone are taken as one). Plain dicts and sets are taken as unordered.
"""

import enum
import re
from collections import OrderedDict, deque
from types import FunctionType, MethodType
from typing import Any

import msgspec

from contracts.messages.base import Message
from scheduler.core.quotas import MINUTE_MS, TokenBucket
from tests.explore.records import BASE_MS, LOST_TICKS

FAR_MS = 30_000
"""Instants further ahead than any timer of a history."""
OLD_MS = -6_000
"""Instants longer ago than any timer looks back."""

_LEFT_OUT = frozenset(
    (
        *("history", "_history", "effects", "_effects", "_handlers", "_settings", "settings", "_bounds", "record"),
        *("_life", "_queue", "ledger", "versions", "prefix", "prompts", "index", "found", "cache", "_usable"),
        *("_loads", "_ends", "work_share", "work_tokens"),
        *("outcomes", "refusals", "mended", "lost_workers", "throughput", "retry_reservations"),
        *("counter", "charged", "_order", "_active", "_last_leaver"),
        *("beats", "clocks", "pulled_at_ms", "ended_at_ms", "first_token_at_ms", "error_message", "_now_ms"),
    )
)
_UNORDERED = frozenset(("cancel_waiters", "askers"))
_REPORT = re.compile(rb'"(?:admitted|ended|first_token)_at_ms":\d+,?|"error_message":"[^"]*",?')
_SPANS = re.compile(rb'"admitted_at_ms":(\d+),"publish_within_ms":(\d+),"deadline_ms":(\d+)')
_DISPATCHED = re.compile(rb'"dispatched_at_ms":\d+,?')
_INSTANT = re.compile(rb"\b10000\d{8}\b")


_encode = msgspec.json.Encoder().encode


def _until(found: re.Match[bytes]) -> bytes:
    """Spans from admission as what they mean: when they are over."""
    admitted_at, publish_within, deadline = map(int, found.groups())
    return b'"publish_by_ms":%d,"deadline_at_ms":%d' % (admitted_at + publish_within, admitted_at + deadline)


def _reduced(data: bytes) -> bytes:
    text = _REPORT.sub(b"", _SPANS.sub(_until, data))
    return _DISPATCHED.sub(b"", text) if b'"outcome"' in text else text


def near(instant: int, now: int) -> int:
    """``instant`` as a distance from ``now``, cut off beyond every timer."""
    return max(OLD_MS, min(FAR_MS, instant - now))


def form(state: Any) -> tuple[tuple[Any, ...], tuple[int, ...], tuple[int, ...]]:
    """The state's shape, with instants taken out; the instants; and those at which token buckets are full again."""
    walk = _Walk(state)
    return tuple(walk.shape), tuple(walk.times), tuple(walk.full_at)


class _Walk:
    def __init__(self, state: Any) -> None:
        self.shape: list[Any] = []
        self.times: list[int] = []
        self.full_at: list[int] = []
        self._beats = state.core.pool.beats if hasattr(state, "ledger") else 0
        self._visit(state)

    def _visit(self, value: Any) -> None:
        kind = type(value)
        if kind is int:
            if value >= BASE_MS and value < BASE_MS + 10**8:
                self.shape.append("@")
                self.times.append(value)
            else:
                self.shape.append(value)
        elif kind in (str, bytes, bool, float) or value is None:
            self.shape.append(value)
        elif kind in (list, tuple, deque):
            self.shape.append(len(value))
            for item in value:
                self._visit(item)
        elif isinstance(value, OrderedDict):
            self._pairs(list(value.items()))
        elif isinstance(value, dict):
            self._pairs(sorted(value.items(), key=lambda pair: repr(pair[0])))
        elif isinstance(value, (set, frozenset)):
            self.shape.append(tuple(sorted(map(repr, value))))
        elif isinstance(value, enum.Enum):
            self.shape.append(value.value)
        elif isinstance(value, msgspec.Raw):
            self.shape.append(bytes(value))
        elif isinstance(value, Message):
            self._message(value)
        elif isinstance(value, TokenBucket):
            self.shape.append(value.size)
            if value.size:
                missing = value.size - value.level(value._at_ms)
                self.full_at.append(value._at_ms + round(missing * MINUTE_MS / value.size))
        elif isinstance(value, (FunctionType, MethodType)):
            pass
        else:
            self._attributes(value)

    def _message(self, value: Message) -> None:
        text = _reduced(_encode(value))
        self.times += map(int, _INSTANT.findall(text))
        self.shape.append(_INSTANT.sub(b"@", text))

    def _pairs(self, pairs: list[tuple[Any, Any]]) -> None:
        self.shape.append(len(pairs))
        for key, value in pairs:
            self._visit(key)
            self._visit(value)

    def _attributes(self, value: Any) -> None:
        self.shape.append(type(value).__name__)
        for name in _names_of(value):
            if name in _LEFT_OUT:
                continue
            inner = getattr(value, name)
            if name == "heard_at_beat":
                self.shape.append(min(LOST_TICKS + 1, self._beats - inner))
            elif name == "acknowledged_at_beat":
                self.shape.append(min(2 * LOST_TICKS + 1, self._beats - inner))
            elif name == "given_back":
                self.shape.append(tuple(sorted((k, min(LOST_TICKS + 1, self._beats - t)) for k, t in inner.items())))
            elif name == "evicted":
                self.shape.append(tuple(sorted(inner)))
            elif name == "_heard":
                self.shape.append(tuple(sorted((k, min(LOST_TICKS + 1, self._beats - t)) for k, t in inner.items())))
            elif name in ("deadlines", "_expiries"):
                self._visit(sorted(inner))
            elif name in _UNORDERED:
                self.shape.append(tuple(sorted(set(map(repr, inner)))))
            else:
                self._visit(inner)


_names: dict[type, tuple[str, ...]] = {}


def _names_of(value: Any) -> tuple[str, ...]:
    kind = type(value)
    if kind not in _names:
        if isinstance(value, msgspec.Struct):
            _names[kind] = value.__struct_fields__
        else:
            _names[kind] = tuple(name for each in kind.__mro__ for name in getattr(each, "__slots__", ()))
    return (*_names[kind], *sorted(getattr(value, "__dict__", ())))


_settled: dict[tuple[bytes, int], bytes] = {}


def settled(data: bytes, now: int) -> bytes:
    """Encoded messages with their instants as distances, and without what only reports."""
    known = _settled.get((data, now))
    if known is None:
        known = _INSTANT.sub(lambda found: b"%d" % near(int(found[0]), now), _reduced(data))
        _settled[data, now] = known
    return known


def flat(value: Any, now: int) -> Any:
    """A record or message with all encoded messages inside it settled."""
    if type(value) is bytes:
        return settled(value, now)
    if isinstance(value, tuple):
        return tuple([flat(item, now) for item in value])
    return value
