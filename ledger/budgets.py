"""Month-to-date totals of each tenant in the BUDGETS bucket, for admission to read.

Totals are read from ClickHouse, never added up here: duplicates and several ledgers cannot falsify them. A
write names the revision known before the total was read, so an older total cannot overwrite a newer one.
"""

import asyncio
import time
from collections.abc import Iterable

import structlog

from contracts import clock, instants, subjects
from contracts.bus import Bus, BusError, WrongSequence
from contracts.messages.base import Codec
from contracts.messages.records import Budget
from contracts.topology import BUDGETS
from ledger import rollups
from ledger.core import queries
from ledger.store import Store, StoreError

log = structlog.get_logger(__name__)

PAUSE_S = 1.0
"""Least time between two rounds; a round may also take at most a fifth of the time."""
SWEEP_S = 60.0
"""All tenants are compared so often: another ledger may have died between its insert and its write."""

_budgets: Codec[Budget] = Codec(Budget)


class Budgets:
    """Call ``touched`` after an insert; ``run`` does the rest."""

    def __init__(self, bus: Bus, store: Store) -> None:
        self._bus = bus
        self._store = store
        self._due: set[str] = set()
        self._wake = asyncio.Event()
        self._known: dict[str, tuple[int, bytes]] = {}
        """Key -> revision and value, as last seen."""

    def touched(self, tenants: Iterable[str]) -> None:
        """Rows of these tenants were inserted."""
        self._due.update(tenants)
        self._wake.set()

    async def run(self) -> None:
        """For ever; what fails is tried again in the next round."""
        swept_at = -SWEEP_S
        while True:
            sweep = time.monotonic() - swept_at >= SWEEP_S
            due, self._due = self._due, set()
            self._wake.clear()
            started = time.monotonic()
            try:
                if sweep:
                    entries = await self._bus.kv.all(BUDGETS)
                    self._known = {key: (entry.revision, entry.value) for key, entry in entries.items()}
                if sweep or due:
                    await self._publish(None if sweep else due)
                swept_at = started if sweep else swept_at
            except (StoreError, BusError) as error:
                self.touched(due)
                log.warning("budgets_not_published", error=str(error))
            await asyncio.sleep(max(PAUSE_S, 4 * (time.monotonic() - started)))
            try:
                async with asyncio.timeout(max(0.0, swept_at + SWEEP_S - time.monotonic())):
                    await self._wake.wait()
            except TimeoutError:
                pass

    async def _publish(self, tenants: set[str] | None) -> None:
        now_ms = clock.now_ms()
        month = instants.month_of(now_ms)
        plan = await rollups.plan(self._store, *instants.month_around(now_ms))
        for tenant, tokens in await self._store.select(queries.month_tokens(plan, tenants)):
            key = subjects.encode(tenant)
            value = _budgets.encode(Budget(month=month, tokens=tokens))
            revision, known = self._known.get(key, (0, b""))
            if value == known:
                continue
            try:
                if revision:
                    revision = await self._bus.kv.update(BUDGETS, key, value, revision=revision)
                else:
                    revision = await self._bus.kv.create(BUDGETS, key, value)
                self._known[key] = (revision, value)
            except WrongSequence:  # another ledger was faster: read what it wrote, then the total again
                entry = await self._bus.kv.get(BUDGETS, key)
                self._known[key] = (entry.revision, entry.value) if entry else (0, b"")
                self.touched([tenant])
