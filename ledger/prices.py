"""Keeps the table ``prices`` the same as the bucket PRICES, which is what counts.

A difference is written with an edition above all that the table holds, so any number of ledgers may do it.
"""

import asyncio
from datetime import date

import msgspec
import structlog

from contracts import currency as currencies
from contracts import topology
from contracts.bus import Bus, BusError, KvEntry, Watch
from contracts.messages.base import Codec
from contracts.messages.records import Price
from ledger.core import queries
from ledger.store import Store, StoreError

log = structlog.get_logger(__name__)

SWEEP_S = 60.0
"""How often table and bucket are compared without a change: another ledger may have died in between."""
RETRY_S = 1.0
PRICE_MAX = 10**12
"""A million of the currency's units for a million tokens; more is a slip, and sums must not overflow."""

_prices: Codec[Price] = Codec(Price)

PriceRow = tuple[str, str, str, str, str, int, int, int, int]
"""queries.PRICE_COLUMNS: model, version, tier, first day, currency, and the four prices."""


class Prices:
    """``start`` returns when the table is up to date for the first time; ``run`` keeps it so."""

    def __init__(self, bus: Bus, store: Store) -> None:
        self._bus = bus
        self._store = store
        self._rows: dict[str, PriceRow] = {}
        self._changed = asyncio.Event()
        self._watch: Watch | None = None

    @property
    def currency(self) -> str:
        """Empty while there are no prices."""
        return next((row[4] for row in self._rows.values()), "")

    async def start(self) -> None:
        """Read the bucket and write the table; ClickHouse may be away."""
        self._watch = await self._bus.kv.watch(topology.PRICES, self._take)
        try:
            await self._write()
        except StoreError as error:
            log.warning("prices_not_written", error=str(error))
            self._changed.set()

    async def run(self) -> None:
        """For ever; what fails is tried again."""
        while True:
            try:
                async with asyncio.timeout(SWEEP_S):  # wait_for of 3.11 may swallow a cancel
                    await self._changed.wait()
            except TimeoutError:
                pass
            self._changed.clear()
            try:
                await self._write()
            except (StoreError, BusError) as error:
                log.warning("prices_not_written", error=str(error))
                self._changed.set()
                await asyncio.sleep(RETRY_S)

    async def close(self) -> None:
        """Follow the bucket no longer."""
        if self._watch is not None:
            await self._watch.close()

    def _take(self, key: str, entry: KvEntry | None) -> None:
        self._rows.pop(key, None)
        if entry is not None:
            try:
                self._rows[key] = price_row(_prices.decode(entry.value))
            except (msgspec.MsgspecError, ValueError) as error:
                log.error("price_undecodable", key=key, seq=entry.revision, reason=str(error))
        self._changed.set()

    async def _write(self) -> None:
        """Raises StoreError."""
        present = set(await self._store.select(queries.PRICES))
        wanted = set(self._rows.values())
        gone = {each[:4] for each in present} - {each[:4] for each in wanted}
        if present == wanted:
            return
        [(edition,)] = await self._store.select(queries.PRICES_EDITION)
        changed = [(each, 0) for each in wanted - present] + [(each, 1) for each in present if each[:4] in gone]
        await self._store.insert_prices(
            [
                (model, version, tier, date.fromisoformat(day), *rest, edition + 1, is_gone)
                for (model, version, tier, day, *rest), is_gone in changed
            ]
        )


def price_row(price: Price) -> PriceRow:
    """The price as the table holds it; raises ValueError when it cannot be one."""
    if not "1970-01-01" < date.fromisoformat(price.valid_from).isoformat() < "2149-01-01":
        raise ValueError("the day is out of range")
    figures = (price.input, price.cached_input, price.output, price.reasoning)
    if not all(0 <= figure <= PRICE_MAX for figure in figures):
        raise ValueError("a price is negative or absurd")
    currencies.digits_of(price.currency)
    return (price.model, price.version, price.tier, price.valid_from, price.currency, *figures)
