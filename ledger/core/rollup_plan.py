"""Which rows answer a query: built days, built hours, or the attempts themselves; and what is built next. Pure.

Each hour that holds events has marks, one for each insert that touched it. A build counts while its watermark is the
count of marks; what no build answers, and the parts of hours at a range's ends, is read from ``attempts``.
"""

from collections.abc import Collection, Iterable, Mapping
from itertools import groupby
from typing import Literal, NamedTuple

HOUR_S = 3600
DAY_S = 86_400

Level = Literal["hour", "day"]
LENGTH_S: dict[Level, int] = {"hour": HOUR_S, "day": DAY_S}

SETTLE_S = 30
"""A period is built this long after its end, when most of its events are there: they come when requests end."""
UNSETTLED_S_MAX = 60
"""A period whose marks keep changing is built all the same after so long, as under a long replay."""


class Mark(NamedTuple):
    """An hour that holds events. Its attempts lie between the two times in the key of ``attempts``."""

    start_s: int
    marks: int
    requested_from_ms: int
    requested_to_ms: int


class Build(NamedTuple):
    """Sums of a period, made under a number that is theirs alone; the greatest number counts."""

    level: Level
    start_s: int
    build: int
    watermark: int
    """Count of the period's marks when the build began."""


class Piece(NamedTuple):
    """Part of the range that is read from ``attempts``, and where that lies in its key (both ends included)."""

    from_ms: int
    to_ms: int
    requested_from_ms: int
    requested_to_ms: int


class Plan(NamedTuple):
    """What to read. Days and hours are (start, build)."""

    days: list[tuple[int, int]]
    hours: list[tuple[int, int]]
    raw: list[Piece]


def plan(
    from_ms: int,
    to_ms: int,
    marks: Iterable[Mark],
    builds: Iterable[Build],
    levels: Collection[Level] = ("hour", "day"),
) -> Plan:
    """Each event of [from, to) in exactly one of the parts. ``marks`` must hold whole days."""
    built = {(build.level, build.start_s): build for build in builds if build.level in levels}
    found = Plan([], [], [])

    def covered(level: Level, start_s: int, count: int) -> Build | None:
        whole = from_ms <= start_s * 1000 and (start_s + LENGTH_S[level]) * 1000 <= to_ms
        build = built.get((level, start_s))
        return build if whole and build is not None and build.watermark == count else None

    for day_s, group in groupby(sorted(marks), lambda mark: mark.start_s // DAY_S * DAY_S):
        of_day = list(group)
        if build := covered("day", day_s, sum(mark.marks for mark in of_day)):
            found.days.append((day_s, build.build))
            continue
        for mark in of_day:
            if build := covered("hour", mark.start_s, mark.marks):
                found.hours.append((mark.start_s, build.build))
            else:
                _read_raw(found.raw, mark, from_ms, to_ms)
    return found


def _read_raw(raw: list[Piece], mark: Mark, from_ms: int, to_ms: int) -> None:
    """Add the hour's part of the range; neighbours become one piece."""
    start_ms, end_ms = max(from_ms, mark.start_s * 1000), min(to_ms, (mark.start_s + HOUR_S) * 1000)
    if start_ms >= end_ms:
        return
    piece = Piece(start_ms, end_ms, mark.requested_from_ms, mark.requested_to_ms)
    if raw and raw[-1].to_ms == start_ms:
        last = raw.pop()
        piece = Piece(
            last.from_ms,
            end_ms,
            min(last.requested_from_ms, piece.requested_from_ms),
            max(last.requested_to_ms, piece.requested_to_ms),
        )
    raw.append(piece)


def over_at(level: Level, start_s: int) -> float:
    """When a period may be built at the earliest."""
    return start_s + LENGTH_S[level] + SETTLE_S


def due(level: Level, unbuilt: Mapping[int, int], seen: Mapping[int, tuple[int, float]], now_s: float) -> list[int]:
    """Starts of the periods to build now, in order.

    ``unbuilt``: start -> marks. ``seen``: the same at the last look, each with the time at which it was first seen.
    """
    ready = []
    for start_s, marks in sorted(unbuilt.items()):
        before, since_s = seen.get(start_s, (0, now_s))
        over = now_s >= over_at(level, start_s)
        if over and (marks == before or now_s - since_s >= UNSETTLED_S_MAX):
            ready.append(start_s)
    return ready
