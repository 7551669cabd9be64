"""One answer on its way to an HTTP caller: what waits to be written, and what must be written though nothing came.

Chunks become server-sent events in the form of the caller's API. Order, repair and ends are the relay's
(contracts.streaming.relay), the status line and the connection gateway.http.inference's.
"""

import asyncio
import secrets
import time
from array import array
from collections.abc import Callable
from typing import Protocol

import msgspec

from contracts.messages.frames import EndData, ErrorData
from contracts.messages.request import RequestEnvelope
from contracts.streaming.pattern import Pattern
from contracts.streaming.relay import Relay
from contracts.streaming.subscriber import RelayedStream
from contracts.workload import scope
from gateway import metrics
from gateway.apis.response_format import one_line
from gateway.apis.table import APIS

KEEP_ALIVE_S = 10.0
"""Pause of a stream after which a comment goes out, so that at least every 15 s there are bytes."""

GAPS_MAX = 256
"""Pauses between chunks of one stream that are kept until they are counted in one go: 1 KB."""

MERGE_LAG_MS = 50
"""Of the event loop. A few steps of an engine: less is made up for in one turn, without a caller's seeing it."""

KEEP_ALIVE = b": keep-alive\n"
"""A comment line and no blank line: some SSE parsers take a block without data for an empty event."""

_MARK = b'"%b"' % secrets.token_hex(16).encode()
"""A text that stands nowhere else."""


class Writer(Protocol):
    """Where the body of an answer goes whose head was sent."""

    on_writable: Callable[[], None]
    """Called when ``write`` may be tried again."""

    def write(self, data: bytes) -> bool:
        """At once; False where the caller must first read, and then nothing is written."""


class Outbox:
    """Has each stream that got something flushed once, when all else of this turn of the event loop has been done.

    So what comes together is written together, and no stream costs a task's turn. ``lag_ms`` tells how late the event
    loop is.
    """

    def __init__(self, lag_ms: Callable[[], int] = lambda: 0) -> None:
        self.merging = False
        """The loop is late: texts of one stream that wait to be written become one event."""
        self._lag_ms = lag_ms
        self._loop: asyncio.AbstractEventLoop | None = None
        self._due: list[GatewayStream] = []

    def add(self, stream: "GatewayStream") -> None:
        """``stream`` has something to write."""
        if not self._due:
            if self._loop is None:
                self._loop = asyncio.get_running_loop()
            self._loop.call_soon(self._flush)
        self._due.append(stream)

    def _flush(self) -> None:
        due, self._due = self._due, []
        self.merging = self._lag_ms() >= MERGE_LAG_MS
        now = time.monotonic()
        for stream in due:
            stream.flush(now)


class GatewayStream(RelayedStream):
    """One task awaits ``ready``, sends the answer's head, says where to write, and awaits ``over``."""

    __slots__ = (
        "_after",
        "_before",
        "_blocked_since",
        "_bytes_max",
        "_event",
        "_extensible",
        "_gaps",
        "_held_until",
        "_last_chunk_at",
        "_last_write_at",
        "_outbox",
        "_pattern",
        "_pending",
        "_pending_bytes",
        "_waiter",
        "_writer",
        "blocked_s",
        "chunks",
        "commit",
        "end",
        "ended_at",
        "error",
        "first_chunk_at",
        "scope",
        "sse",
    )

    def __init__(self, envelope: RequestEnvelope, outbox: Outbox, *, hold_s: float, bytes_max: int) -> None:
        """The status line may wait ``hold_s`` for the first frame; more than ``bytes_max`` unread is too slow."""
        now = time.monotonic()
        super().__init__(
            name=envelope.request_id,
            request_id=envelope.request_id,
            model=envelope.model,
            tenant=envelope.tenant,
            relay=Relay(stream=envelope.stream, now_ms=int(now * 1000)),
        )
        if envelope.idempotency is not None:
            self.idempotency_key = envelope.idempotency.key
        self.sse = envelope.stream
        """Server-sent events; else one JSON answer."""
        self.chunks = 0
        self.end: EndData | None = None
        self.error: ErrorData | None = None
        self.commit = False
        """The status line must not wait any longer for the first frame."""
        self.first_chunk_at = 0.0
        self.blocked_s = 0.0
        """How long writing waited for the caller."""
        self._blocked_since = 0.0
        self._last_write_at = now
        self._held_until = now + hold_s
        self._last_chunk_at = 0.0
        self.ended_at = 0.0
        """When the end or the error came; 0 before."""
        self.scope = scope(envelope, envelope.version)
        """Of its metrics."""
        self._gaps = array("f")
        self._pending: list[bytes] = []
        self._pending_bytes = 0
        self._bytes_max = bytes_max
        self._waiter: asyncio.Future[None] | None = None
        self._outbox = outbox
        self._writer: Writer | None = None
        self._event = APIS[envelope.endpoint].format.event
        self._pattern: Pattern | None = None
        self._before = self._after = b""
        """What is around a text of the pattern."""
        self._extensible: Pattern | None = None
        """Of the last event that is pending, where it is a text's."""

    @property
    def ended(self) -> bool:
        """No more will come; what is pending may still be taken."""
        return self.end is not None or self.error is not None

    async def ready(self) -> None:
        """Returns when there is something to write, the status line is due, or the stream has ended."""
        while not self._pending and not self.commit and not self.ended:
            await self._news()

    async def over(self) -> None:
        """Returns when the stream has ended."""
        while not self.ended:
            await self._news()

    async def _news(self) -> None:
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def write_to(self, writer: Writer) -> None:
        """The answer's head is sent: what there is, or a sign of life, is written now, and what comes as it comes."""
        self._writer = writer
        writer.on_writable = self._go_on
        if not self._pending:
            self._put(KEEP_ALIVE)
        self.flush(time.monotonic())

    def flush(self, now: float) -> None:
        """Write what is pending, where that can be."""
        if self._writer is None or not self._pending:
            return
        pending = self._pending
        if self._writer.write(pending[0] if len(pending) == 1 else b"".join(pending)):
            self._clear()
            self._last_write_at = now
            if self._blocked_since:
                self.blocked_s += now - self._blocked_since
                self._blocked_since = 0.0
        elif not self._blocked_since:
            self._blocked_since = now

    def _go_on(self) -> None:
        self.flush(time.monotonic())

    def take(self) -> bytes:
        """What is pending, of a stream that has ended."""
        data = b"".join(self._pending)
        self._clear()
        return data

    def on_chunk(self, data: msgspec.Raw | bytes, now: float) -> bool:
        self._came(now)
        self._put(self._event(data) if self.sse else one_line(data))
        return self._bounded()

    def on_text(self, pattern: Pattern, text: msgspec.Raw, now: float) -> bool:
        if pattern is not self._pattern:
            self._pattern = pattern
            self._before, _, self._after = self._event(pattern.filled(_MARK)).partition(_MARK)
        self._came(now)
        line = one_line(text)
        if self._outbox.merging and self._extensible is pattern and line.startswith(b'"'):
            self._extend(line)
            return self._bounded()
        self._put(b"%b%b%b" % (self._before, line, self._after))
        self._extensible = pattern
        return self._bounded()

    def _extend(self, text: bytes) -> None:
        """Have the last event, which is yet to be written, say this, too."""
        event = self._pending[-1]
        self._pending[-1] = event[: -len(self._after) - 1] + text[1:] + self._after
        self._pending_bytes += len(text) - 2

    def _came(self, now: float) -> None:
        if self.first_chunk_at:
            self._gaps.append(now - self._last_chunk_at)
            if len(self._gaps) >= GAPS_MAX:
                self.count_gaps()
        else:
            self.first_chunk_at = now
        self._last_chunk_at = now
        self.chunks += 1

    def _bounded(self) -> bool:
        if self._pending_bytes <= self._bytes_max or not self.sse:
            return True
        self._clear()
        return False

    def count_gaps(self) -> None:
        """Into the metrics, all that came since the last time."""
        gaps, self._gaps = self._gaps, array("f")
        metrics.INTER_TOKEN.of(*self.scope).observe_all(gaps)

    def on_end(self, end: EndData) -> None:
        self.end = end
        self.ended_at = time.monotonic()
        self._wake()

    def on_error(self, error: ErrorData) -> None:
        """The stream ends with ``error``, after what is pending."""
        if not self.ended:
            self.error = error
            self.ended_at = time.monotonic()
            self._wake()

    def on_tick(self, now: float) -> None:
        """Commit a held status line in time, and keep a silent stream alive."""
        if not self.sse or self.ended or self._pending:
            return
        if self._writer is not None:
            if now - self._last_write_at >= KEEP_ALIVE_S:
                self._put(KEEP_ALIVE)
        elif now >= self._held_until:
            self.commit = True
            self._wake()

    def _clear(self) -> None:
        self._pending.clear()
        self._pending_bytes = 0
        self._extensible = None

    def _put(self, data: bytes) -> None:
        self._extensible = None
        self._pending.append(data)
        self._pending_bytes += len(data)
        if self._writer is None:
            self._wake()
        elif len(self._pending) == 1:
            self._outbox.add(self)

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
