"""One ledger process: opens ClickHouse, then ingests events, answers queries and keeps prices, budgets and sums.

Which events become rows and how they get there is ingest.py's; each other duty has a module of its own.
"""

import asyncio
from collections.abc import Sequence
from urllib.parse import urlsplit

import structlog

from contracts import subjects
from contracts.bus import Bus, BusError
from contracts.messages.deliveries import Delivery
from ledger import retention
from ledger.availability import Availability
from ledger.budgets import Budgets
from ledger.config import LedgerConfig
from ledger.core.rows import Row
from ledger.deliveries import DeliveryIngest
from ledger.ingest import DURABLE, Ingest
from ledger.invoices import Invoices
from ledger.metering import Metering
from ledger.prices import Prices
from ledger.query_api import QueryApi
from ledger.rollouts import Rollouts
from ledger.rollups import Rollups
from ledger.sql_endpoint.http import SqlEndpoint
from ledger.sql_endpoint.session import Sessions
from ledger.store import Away, BadValues, Owned, Store
from ledger.tracing import Tracing

log = structlog.get_logger(__name__)

QUEUE = "ledger"
STANDBY_S = 1.0
"""How often a standby tries to own the directory of chDB."""
PURGE_S = 60.0
QUERIES_MAX = 64
ANSWER_MARGIN_BYTES = 64 << 10
"""What of a message of the bus is left to its head."""


class Ledger:
    """The service. ``run`` returns after ``stop``."""

    def __init__(self, config: LedgerConfig, bus: Bus) -> None:
        self._config = config
        self._bus = bus
        self._store = Store(config.clickhouse_url, config.clickhouse_database, replicated=config.clickhouse_replicated)
        self._stopping = asyncio.Event()
        self._clickhouse = Availability(self._stopping)
        self._state = "starting"

    def not_ready(self) -> str:
        """Why the service does not do its work now; empty when it does."""
        return self._clickhouse.problem or self._state

    def stop(self) -> None:
        """End ``run`` once the batch in hand is done."""
        self._state = "stopping"
        self._stopping.set()

    async def run(self) -> None:
        """Serve until ``stop``; raises what broke."""
        sql = None
        try:
            if await self._open():
                sql = await self._open_sql_endpoint()
                await self._work()
        finally:
            if sql is not None:
                await asyncio.to_thread(sql.close)
            await self._store.close()

    async def _open(self) -> bool:
        """Try until ClickHouse is there and ours; False when the service stops first."""
        standby = False
        while not self._stopping.is_set():
            try:
                await self._store.open()
            except Owned as error:
                if not standby:
                    log.info("ledger_standby", reason=str(error))
                standby, self._state = True, f"standby: {error}"
                await self._clickhouse.pause(STANDBY_S)
            except (Away, BadValues) as error:
                await self._clickhouse.failed("open", error)
            else:
                self._clickhouse.succeeded()
                log.info("ledger_open", database=self._config.clickhouse_database)
                return True
        return False

    async def _open_sql_endpoint(self) -> SqlEndpoint | None:
        """The SQL endpoint, if one is configured; raises OSError when its address cannot be had."""
        config = self._config
        if not config.sql_listen:
            return None
        directory = urlsplit(config.clickhouse_url).path
        sessions = Sessions(directory, config.clickhouse_database, config.sql_user, config.sql_password)
        endpoint = SqlEndpoint(sessions, config.sql_listen)
        await asyncio.to_thread(endpoint.start)
        log.info("sql_endpoint_open", listen=endpoint.address)
        return endpoint

    async def _work(self) -> None:
        """Every duty at once, until ``stop``."""
        budgets = Budgets(self._bus, self._store, DURABLE)
        rollups = Rollups(self._store)
        prices = Prices(self._bus, self._store)
        await prices.start()
        query_api = QueryApi(
            self._store,
            prices,
            Invoices(self._bus),
            self._bus.session.max_payload - ANSWER_MARGIN_BYTES,
            Rollouts(self._bus),
        )
        queries = await self._bus.subscribe(
            subjects.USAGE_QUERIES, query_api.answer, queue=QUEUE, concurrent=True, limit=QUERIES_MAX
        )
        tracing, metering = self._tracing(), self._metering()
        collected = [each for each in (tracing, metering) if each is not None]

        def inserted(rows: Sequence[Row]) -> None:
            newest: dict[str, int] = {}
            for row in rows:
                newest[row.tenant] = max(newest.get(row.tenant, 0), row.stream_seq)
            budgets.touched(newest)
            rollups.touched()
            for each in collected:
                each.attempts(rows)

        def told(deliveries: Sequence[Delivery]) -> None:
            for each in collected:
                each.deliveries(deliveries)

        ingest = Ingest(self._bus, self._store, self._config, self._clickhouse, self._stopping, inserted)
        delivered = DeliveryIngest(self._store, told)
        deliveries = await self._bus.subscribe(subjects.DELIVERIES, delivered.take, queue=QUEUE)
        await ingest.start()
        if not self._stopping.is_set():
            self._state = ""
        try:
            async with asyncio.TaskGroup() as group:
                duties = [budgets.run(), rollups.run(), prices.run(), delivered.run(), self._purge()]
                duties += [tracing.run()] if tracing is not None else []
                loops = [group.create_task(duty) for duty in duties]
                await self._stopping.wait()
                for loop in loops:
                    loop.cancel()
        finally:
            await ingest.close()
            await queries.close()
            await deliveries.close()
            await prices.close()
            if metering is not None:
                await metering.close()

    def _tracing(self) -> Tracing | None:
        config = self._config
        if not config.otlp_endpoint:
            return None
        return Tracing(config.otlp_endpoint, sample=config.trace_sample, slow_s=config.trace_slow_s)

    def _metering(self) -> Metering | None:
        endpoint = self._config.otlp_metrics_endpoint
        return Metering(endpoint, self._bus.user) if endpoint else None

    async def _purge(self) -> None:
        while True:
            await asyncio.sleep(PURGE_S)
            try:
                await retention.purge(self._bus, DURABLE)
            except BusError as error:
                log.warning("attempts_not_purged", error=str(error))
