"""Builds the sums of hours and days once they are over, and again when late events mark them.

Nothing waits for it: what is not built is read from ``attempts``. Several ledgers may build the same period; the
greater number counts.
"""

import asyncio
import time
from collections.abc import Sequence

import structlog

from ledger import metrics
from ledger.core import queries, rollup_plan
from ledger.core.rollup_plan import DAY_S, Build, Level, Mark, Plan
from ledger.store import Store, StoreError

log = structlog.get_logger(__name__)

LOOK_S = 5.0
"""How often is looked for what to build."""
LOOK_IDLE_S = 60.0
"""The same while nothing is inserted here and nothing is due: another ledger may have inserted, and died."""
SWEEP_S = 600.0
"""How often rows of earlier builds are removed, and how old those builds are at least: no query takes so long."""


async def state(store: Store, from_ms: int, to_ms: int, *, building: bool = False) -> tuple[list[Mark], list[Build]]:
    """Marks and builds of the days that a range touches; raises Away."""
    marks, builds = [], []
    ask = store.build if building else store.select
    for level, start_s, count, build, first_ms, last_ms in await ask(queries.state(from_ms, to_ms)):
        if level:
            builds.append(Build(level, start_s, build, count))
        else:
            marks.append(Mark(start_s, count, first_ms, last_ms))
    return marks, builds


async def plan(store: Store, from_ms: int, to_ms: int, levels: Sequence[Level] = ("hour", "day")) -> Plan:
    """What to read for a query of [from, to); raises Away."""
    return rollup_plan.plan(from_ms, to_ms, *await state(store, from_ms, to_ms), levels)


class Rollups:
    """``run`` goes on for ever; what fails is tried again."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._seen: dict[Level, dict[int, tuple[int, float]]] = {"hour": {}, "day": {}}
        self._touched = True
        self._idle_until = 0.0
        """Unless something is inserted nothing is due before."""

    def touched(self) -> None:
        """Rows were inserted."""
        self._touched = True

    async def run(self) -> None:
        """Look, build and sweep, for ever."""
        swept_at = time.monotonic()
        while True:
            try:
                await self._look_if_due(time.time())
                if time.monotonic() - swept_at >= SWEEP_S:
                    await self.sweep(time.time_ns() - int(SWEEP_S * 1e9))
                    swept_at = time.monotonic()
            except StoreError as error:
                log.warning("rollups_not_built", error=str(error))
            await asyncio.sleep(LOOK_S)

    async def _look_if_due(self, now_s: float) -> None:
        if not self._touched and now_s < self._idle_until:
            return
        self._touched = False
        try:
            await self.step(now_s)
        except StoreError:
            self._touched = True
            raise
        over_at = [rollup_plan.over_at(level, start_s) for level, seen in self._seen.items() for start_s in seen]
        self._idle_until = min([now_s + LOOK_IDLE_S, *over_at])

    async def step(self, now_s: float) -> None:
        """Build what is due: hours, then the days that have no open hour. Raises StoreError."""
        hours = await self._unbuilt("hour")
        for day_s, starts in _by_day(rollup_plan.due("hour", hours, self._seen["hour"], now_s)):
            await self.build("hour", day_s, starts)
        self._look("hour", hours, now_s)
        open_days = {start_s // DAY_S * DAY_S for start_s in await self._unbuilt("hour")}
        days = await self._unbuilt("day")
        for day_s in rollup_plan.due("day", days, self._seen["day"], now_s):
            if day_s not in open_days:
                await self.build("day", day_s, [day_s])
        self._look("day", days, now_s)

    async def build(self, level: Level, day_s: int, starts: Sequence[int]) -> None:
        """Build these periods of one day from what lies below them."""
        marks, builds = await state(self._store, day_s * 1000, (day_s + DAY_S) * 1000, building=True)
        if level == "hour":
            marks = [mark for mark in marks if mark.start_s in starts]
            watermarks = [(mark.start_s, mark.marks) for mark in marks]
        else:
            watermarks = [(day_s, sum(mark.marks for mark in marks))]
        below: Sequence[Level] = () if level == "hour" else ("hour",)
        found = rollup_plan.plan(day_s * 1000, (day_s + DAY_S) * 1000, marks, builds, below)
        known = max((build.build for build in builds), default=0)
        number = max(time.time_ns(), known + 1)
        for query in queries.build(level, number, day_s, found):
            await self._store.build(query)
        await self._store.build(queries.finish_build(level, number, day_s, watermarks))
        metrics.BUILT.labels(level).inc(len(watermarks))

    async def sweep(self, before: int) -> None:
        """Remove rows of builds that count no more and began before ``before`` (Unix ns)."""
        for level in rollup_plan.LENGTH_S:
            for kind in ("usage", "latency"):
                condition = queries.stale(level, before)
                table = f"{kind}_{level}s"
                [(count,)] = await self._store.build(
                    queries.Query(f"SELECT count() FROM {table} WHERE {condition}", {})  # noqa: S608 (all of it ours)
                )
                if count:
                    await self._store.build(queries.Query(f"ALTER TABLE {table} DELETE WHERE {condition}", {}))

    async def _unbuilt(self, level: Level) -> dict[int, int]:
        return dict(await self._store.build(queries.unbuilt(level)))

    def _look(self, level: Level, unbuilt: dict[int, int], now_s: float) -> None:
        before = self._seen[level]
        self._seen[level] = {start_s: (marks, before.get(start_s, (0, now_s))[1]) for start_s, marks in unbuilt.items()}


def _by_day(hours: Sequence[int]) -> list[tuple[int, list[int]]]:
    days: dict[int, list[int]] = {}
    for start_s in hours:
        days.setdefault(start_s // DAY_S * DAY_S, []).append(start_s)
    return sorted(days.items())
