"""The ledger's service: ATTEMPTS -> ClickHouse, acknowledged after the insert; it starts and stops all the others.

Whatever fails is tried again with a growing pause and without acknowledging: events wait in ATTEMPTS. Only an
event that can never be a row leaves by another way, to DEAD_LETTERS.
"""

import asyncio
import random
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from urllib.parse import urlsplit

import structlog

from contracts import subjects, topology
from contracts.bus import BatchConsumer, Bus, BusError, Incoming
from contracts.messages.attempts import DeadLetter
from contracts.messages.base import Codec
from ledger import metrics, retention
from ledger.budgets import Budgets
from ledger.config import LedgerConfig
from ledger.core.rows import InvalidEvent, Row, Source, dead_letter, halves, row_of
from ledger.prices import Prices
from ledger.query_api import QueryApi
from ledger.rollups import Rollups
from ledger.sql_endpoint.http import SqlEndpoint
from ledger.sql_endpoint.session import Sessions
from ledger.store import Away, BadValues, Owned, Store

log = structlog.get_logger(__name__)

DURABLE = "ledger"
QUEUE = "ledger"
ACK_WAIT_S = 5.0
"""How late the events of a killed ledger come again. Those of a live one that waits longer for ClickHouse
come again too, which changes nothing; it asks for none meanwhile."""
STANDBY_S = 1.0
"""How often a standby tries to own the directory of chDB."""
PURGE_S = 60.0
CLOSE_S = 5.0
"""How long the last batch may take when the service stops; what is not acknowledged then comes again."""
QUERIES_MAX = 64
ANSWER_MARGIN_BYTES = 64 << 10

_letters: Codec[DeadLetter] = Codec(DeadLetter)


class _Stopping(Exception):
    """The service stops before ClickHouse came back."""


class Ledger:
    """One ledger process. ``run`` returns after ``stop``."""

    def __init__(self, config: LedgerConfig, bus: Bus) -> None:
        self._config = config
        self._bus = bus
        self._store = Store(config.clickhouse_url, config.clickhouse_database, replicated=config.clickhouse_replicated)
        self._stopping = asyncio.Event()
        self._state = "starting"
        self._failures = 0
        self._finishing: asyncio.Task[None] | None = None
        self._sql: SqlEndpoint | None = None

    def not_ready(self) -> str:
        """Why the service does not do its work now; empty when it does."""
        return self._state

    def stop(self) -> None:
        """End ``run`` once the batch in hand is done."""
        self._state = "stopping"
        self._stopping.set()

    async def run(self) -> None:
        """Serve until ``stop``; raises what broke."""
        try:
            await self._work()
        finally:
            if self._sql is not None:
                await asyncio.to_thread(self._sql.close)
            await self._store.close()

    async def _work(self) -> None:
        if not await self._open():
            return
        self._budgets = Budgets(self._bus, self._store)
        prices = Prices(self._bus, self._store)
        await prices.start()
        query_api = QueryApi(self._store, prices, self._bus.session.max_payload - ANSWER_MARGIN_BYTES)
        queries = await self._bus.subscribe(
            subjects.USAGE_QUERIES, query_api.answer, queue=QUEUE, concurrent=True, limit=QUERIES_MAX
        )
        attempts = BatchConsumer(
            self._bus.jetstream,
            topology.ATTEMPTS,
            DURABLE,
            "attempt.v1.>",
            self._take,
            batch=self._config.ledger_batch_rows,
            max_wait_s=self._config.ledger_batch_wait_ms / 1000,
            ack_wait_s=ACK_WAIT_S,
        )
        await attempts.start()
        self._state = ""
        try:
            async with asyncio.TaskGroup() as group:
                duties = (self._budgets.run(), Rollups(self._store).run(), prices.run(), self._purge())
                loops = [group.create_task(duty) for duty in duties]
                await self._stopping.wait()
                for loop in loops:
                    loop.cancel()
        finally:
            await attempts.close()
            if self._finishing is not None:
                await asyncio.wait([self._finishing], timeout=CLOSE_S)
            await queries.close()
            await prices.close()

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
                await self._pause(STANDBY_S)
            except (Away, BadValues) as error:
                await self._failed("open", error)
            else:
                self._succeeded()
                self._state = "starting"
                log.info("ledger_open", database=self._config.clickhouse_database)
                await self._open_sql_endpoint()
                return True
        return False

    async def _open_sql_endpoint(self) -> None:
        """The SQL endpoint, if one is configured; raises OSError when its address cannot be had."""
        config = self._config
        if config.sql_listen:
            directory = urlsplit(config.clickhouse_url).path
            password = await asyncio.to_thread(Path(config.sql_password_file).read_text, "utf-8")
            sessions = Sessions(directory, config.clickhouse_database, config.sql_user, password.strip())
            self._sql = SqlEndpoint(sessions, config.sql_listen)
            await asyncio.to_thread(self._sql.start)
            log.info("sql_endpoint_open", listen=self._sql.address)

    # Events ------------------------------------------------------------------------------------------------

    async def _take(self, messages: list[Incoming]) -> None:
        """Read one batch while the one before is being inserted; at most one is."""
        rows: list[Row] = []
        rejected: dict[int, str] = {}
        for number, message in enumerate(messages, 1):
            try:
                rows.append(row_of(_source(message)))
            except InvalidEvent as error:
                rejected[message.stream_seq] = str(error)
            if number % 500 == 0:
                await asyncio.sleep(0)  # queries come in between
        previous, self._finishing = self._finishing, None
        if previous is not None:
            await previous
        self._finishing = asyncio.create_task(self._finish(messages, rows, rejected))

    async def _finish(self, messages: Sequence[Incoming], rows: Sequence[Row], rejected: dict[int, str]) -> None:
        """Rows into the table, what can be none into DEAD_LETTERS, then all acknowledged."""
        try:
            for row, reason in await self._write(rows):
                rejected[row.stream_seq] = reason
        except _Stopping:
            return
        done = []
        for message in messages:
            reason = rejected.get(message.stream_seq, "")
            if not reason or await self._set_aside(message, reason):
                done.append(message)
        await self._acknowledge(done)
        metrics.PENDING.set(messages[-1].pending)

    async def _write(self, rows: Sequence[Row]) -> list[tuple[Row, str]]:
        """Insert, trying until it succeeds or the service stops (then raises _Stopping).

        Returns the rows that ClickHouse refuses for what they hold, found by halving, and its reasons.
        """
        if not rows:
            return []
        while True:
            started = time.monotonic()
            try:
                await self._store.insert(rows)
            except BadValues as error:
                if len(rows) == 1:
                    return [(rows[0], f"ClickHouse refuses the row: {error}")]
                first, second = halves(rows)
                return [*await self._write(first), *await self._write(second)]
            except Away as error:
                await self._failed("insert", error)
                if self._stopping.is_set():
                    raise _Stopping from None
            else:
                self._succeeded()
                metrics.INSERT_SECONDS.observe(time.monotonic() - started)
                metrics.BATCHES.inc()
                metrics.ROWS.inc(len(rows))
                metrics.DELAY_SECONDS.set(max(0.0, time.time() - min(row.stored_at for row in rows) / 1000))
                self._budgets.touched({row.tenant for row in rows})
                return []

    async def _set_aside(self, message: Incoming, reason: str) -> bool:
        """Whether the dead letter is stored; if not, the event comes again."""
        source = _source(message)
        letter = _letters.encode(dead_letter(source, reason))
        msg_id = f"{topology.ATTEMPTS}.{source.stream_seq}.{source.stored_at_ms}"
        try:
            await self._bus.jetstream.store(subjects.DEAD_ATTEMPTS, letter, msg_id=msg_id)
        except BusError as error:
            log.warning("dead_letter_not_stored", stream_seq=source.stream_seq, error=str(error))
            return False
        metrics.DEAD_LETTERS.inc()
        log.error("event_refused", subject=source.subject, stream_seq=source.stream_seq, reason=reason)
        return True

    async def _acknowledge(self, messages: Sequence[Incoming]) -> None:
        """All but the last without waiting: an ack that is lost costs a repetition, which changes nothing."""
        if not messages:
            return
        try:
            for message in messages[:-1]:
                await self._bus.publish(message.reply, b"")
        except BusError as error:
            log.warning("events_not_acknowledged", error=str(error))
        await messages[-1].ack()

    async def _purge(self) -> None:
        while True:
            await asyncio.sleep(PURGE_S)
            try:
                await retention.purge(self._bus, DURABLE, time.time())
            except BusError as error:
                log.warning("attempts_not_purged", error=str(error))

    # Failure -----------------------------------------------------------------------------------------------

    async def _failed(self, what: str, error: Exception) -> None:
        """Note that ClickHouse is away, and pause, longer each time."""
        self._failures += 1
        self._state = f"ClickHouse: {error}"
        metrics.FAILURES.inc()
        metrics.CONNECTED.set(0)
        pause = pause_s(self._failures, random.random)
        log.warning("clickhouse_away", during=what, failures=self._failures, pause_s=pause, error=str(error))
        await self._pause(pause)

    def _succeeded(self) -> None:
        if self._failures:
            log.info("clickhouse_back", failures=self._failures)
        self._failures = 0
        self._state = "" if not self._stopping.is_set() else "stopping"
        metrics.CONNECTED.set(1)

    async def _pause(self, seconds: float) -> None:
        """Sleep; shorter when the service stops."""
        try:
            async with asyncio.timeout(seconds):
                await self._stopping.wait()
        except TimeoutError:
            pass


def pause_s(failures: int, jitter: Callable[[], float]) -> float:
    """Pause after so many failures in a row: 0.2 s after one, doubling to 30 s, less up to a quarter.

    ``jitter``: gives a number in [0, 1).
    """
    return min(30.0, 0.2 * 2.0 ** min(failures - 1, 8)) * (1 - jitter() / 4)


def _source(message: Incoming) -> Source:
    return Source(message.subject, message.data, message.stream_seq, message.stored_at_ms)
