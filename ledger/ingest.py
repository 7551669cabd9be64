"""Ingest: ATTEMPTS -> ClickHouse, acknowledged after the insert.

Whatever fails is tried again with a growing pause and without acknowledging: events wait in ATTEMPTS. Only an event
that can never be a row leaves by another way, to DEAD_LETTERS.
"""

import asyncio
import time
from collections.abc import Callable, Sequence

import structlog

from contracts import subjects, topology
from contracts.bus import BatchConsumer, Bus, BusError, Incoming
from contracts.messages.attempts import DeadLetter
from contracts.messages.base import Codec
from ledger import metrics
from ledger.availability import Availability
from ledger.config import LedgerConfig
from ledger.core.rows import InvalidEvent, Row, Source, dead_letter, halves, row_of
from ledger.store import Away, BadValues, Store

log = structlog.get_logger(__name__)

DURABLE = "ledger"
ACK_WAIT_S = 5.0
"""How late the events of a killed ledger come again. Those of a live one that waits longer for ClickHouse
come again too, which changes nothing; it asks for none meanwhile."""
EVERY_S = 1.0
"""Between two inserts while there is more and more to insert: each costs the embedded engine some 15 ms of CPU, with
its marks and its part of the merges, however few its rows."""
CLOSE_S = 5.0
"""How long the last batch may take when the service stops; what is not acknowledged then comes again."""

_letters: Codec[DeadLetter] = Codec(DeadLetter)


class _Stopping(Exception):
    """The service stops before ClickHouse came back."""


class Ingest:
    """Takes batches from ``start`` to ``close``. ``inserted`` is called with the rows of each insert."""

    def __init__(
        self,
        bus: Bus,
        store: Store,
        config: LedgerConfig,
        clickhouse: Availability,
        stopping: asyncio.Event,
        inserted: Callable[[Sequence[Row]], None],
    ) -> None:
        self._bus = bus
        self._store = store
        self._clickhouse = clickhouse
        self._stopping = stopping
        self._inserted = inserted
        self._finishing: asyncio.Task[None] | None = None
        self._oldest_ms = 0
        """When the bus had stored the oldest event of the batch that is being inserted; 0: none is."""
        metrics.LAG_SECONDS.set_function(self._lag_s)
        self._attempts = BatchConsumer(
            bus.jetstream,
            topology.ATTEMPTS,
            DURABLE,
            "attempt.v1.>",
            self._take,
            batch=config.ledger_batch_rows,
            max_wait_s=config.ledger_batch_wait_ms / 1000,
            ack_wait_s=ACK_WAIT_S,
            every_s=EVERY_S,
        )

    async def start(self) -> None:
        """Begin to take batches."""
        await self._attempts.start()

    async def close(self) -> None:
        """Take no more; wait CLOSE_S at most for the batch in hand."""
        await self._attempts.close()
        if self._finishing is not None:
            await asyncio.wait([self._finishing], timeout=CLOSE_S)

    def _lag_s(self) -> float:
        oldest_ms = self._oldest_ms
        return max(0.0, time.time() - oldest_ms / 1000) if oldest_ms else 0.0

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
        self._oldest_ms = messages[0].stored_at_ms
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
        self._oldest_ms = 0

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
                await self._clickhouse.failed("insert", error)
                if self._stopping.is_set():
                    raise _Stopping from None
            else:
                self._clickhouse.succeeded()
                metrics.INSERT_SECONDS.observe(time.monotonic() - started)
                metrics.BATCHES.inc()
                metrics.ROWS.inc(len(rows))
                self._inserted(rows)
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
        log.error("event_set_aside", subject=source.subject, stream_seq=source.stream_seq, reason=reason)
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


def _source(message: Incoming) -> Source:
    return Source(message.subject, message.data, message.stream_seq, message.stored_at_ms)
