"""Month-to-date totals of each tenant in the BUDGETS bucket, for admission to read.

Totals are read from ClickHouse, never added up here: duplicates and several ledgers cannot falsify them. A
write names the revision known before the total was read, so an older total cannot overwrite a newer one. With each
goes the sequence number up to which ATTEMPTS was acknowledged before it was read: admission adds what came later.
"""

import asyncio
import time
from collections.abc import Mapping

import structlog

from contracts import clock, instants, subjects
from contracts.bus import Bus, BusError, WrongSequence
from contracts.messages.base import Codec
from contracts.messages.records import Budget
from contracts.topology import ATTEMPTS, BUDGETS
from ledger import rollups
from ledger.core import queries
from ledger.store import Store, StoreError

log = structlog.get_logger(__name__)

PAUSE_S = 5.0
"""Least time between two rounds; a round may also take at most a fifth of the time. Admission does not wait for one:
it adds the ends that no total covers."""
SWEEP_S = 60.0
"""All tenants are compared so often: another ledger may have died between its insert and its write."""

_budgets: Codec[Budget] = Codec(Budget)


class Budgets:
    """Call ``touched`` after an insert; ``run`` does the rest."""

    def __init__(self, bus: Bus, store: Store, durable: str) -> None:
        """``durable``: the consumer of ATTEMPTS that all ledgers share."""
        self._bus = bus
        self._store = store
        self._durable = durable
        self._due: dict[str, int] = {}
        """Tenant -> newest sequence number that was inserted for it, until a total is published that covers it."""
        self._wake = asyncio.Event()
        self._known: dict[str, tuple[int, bytes]] = {}
        """Key -> revision and value, as last seen."""

    def touched(self, newest: Mapping[str, int]) -> None:
        """Rows of these tenants were inserted: tenant -> the newest one's sequence number."""
        for tenant, seq in newest.items():
            self._due[tenant] = max(seq, self._due.get(tenant, 0))
        self._wake.set()

    async def run(self) -> None:
        """For ever; what fails is tried again in the next round."""
        swept_at, first = -SWEEP_S, True
        while True:
            sweep = time.monotonic() - swept_at >= SWEEP_S
            due, self._due = self._due, {}
            self._wake.clear()
            started = time.monotonic()
            try:
                if sweep:
                    entries = await self._bus.kv.all(BUDGETS)
                    self._known = {key: (entry.revision, entry.value) for key, entry in entries.items()}
                if sweep or due:
                    await self._publish(due, every=sweep, anew=first)
                swept_at, first = started if sweep else swept_at, False
            except (StoreError, BusError) as error:
                self.touched(due)
                log.warning("budgets_not_published", error=str(error))
            await asyncio.sleep(max(PAUSE_S, 4 * (time.monotonic() - started)))
            try:
                async with asyncio.timeout(max(0.0, swept_at + SWEEP_S - time.monotonic())):
                    await self._wake.wait()
            except TimeoutError:
                pass

    async def _publish(self, due: Mapping[str, int], *, every: bool, anew: bool) -> None:
        """Totals of the tenants that are due, or of all where they differ; ``anew``: of all, for who died before us may
        have published one that was ahead of what it had acknowledged.
        """
        now_ms = clock.now_ms()
        month = instants.month_of(now_ms)
        consumer = await self._bus.jetstream.api(f"CONSUMER.INFO.{ATTEMPTS}.{self._durable}")
        covers_seq = int(consumer["ack_floor"]["stream_seq"])  # Read before the totals, which hold all of it then.
        plan = await rollups.plan(self._store, *instants.month_around(now_ms))
        for tenant, tokens in await self._store.select(queries.month_tokens(plan, None if every else due)):
            known = self._known.get(subjects.encode(tenant))
            before = _budgets.decode(known[1]) if known else Budget(month="", tokens=0)
            if anew or tenant in due or (month, tokens) != (before.month, before.tokens):
                await self._put(tenant, Budget(month=month, tokens=tokens, covers_seq=covers_seq))
        self.touched({tenant: seq for tenant, seq in due.items() if seq > covers_seq})

    async def _put(self, tenant: str, budget: Budget) -> None:
        key, value = subjects.encode(tenant), _budgets.encode(budget)
        revision, known = self._known.get(key, (0, b""))
        if value == known:
            return
        try:
            if revision:
                revision = await self._bus.kv.update(BUDGETS, key, value, revision=revision)
            else:
                revision = await self._bus.kv.create(BUDGETS, key, value)
            self._known[key] = (revision, value)
        except WrongSequence:  # another ledger was faster: read what it wrote, then the total again
            entry = await self._bus.kv.get(BUDGETS, key)
            self._known[key] = (entry.revision, entry.value) if entry else (0, b"")
            self.touched({tenant: 0})
