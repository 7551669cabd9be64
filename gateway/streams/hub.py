"""Streams of this gateway: one reply inbox, one decode per message, and each frame to its stream's relay.

The relay (contracts.streaming.relay) decides what a frame means. Here its effects are performed: text is put before the
task that writes to the caller, questions to workers and schedulers run as bounded tasks, cancels are repeated
until they are durable.
"""

import asyncio
import time
from collections.abc import Coroutine
from typing import Any, Literal

import msgspec
import structlog

from contracts import subjects
from contracts.bus import Bus, Incoming, Subscription, Unavailable
from contracts.messages.base import Codec
from contracts.messages.control import CancelAnswer, CancelRequest, StatusAnswer, StatusRequest, StreamOwnerHeartbeat
from contracts.messages.frames import EndData, ErrorData, FramesAnswer, FramesRequest, ReplyMessage
from contracts.messages.request import RequestEnvelope
from contracts.streaming.relay import AskFrames, AskStatus, Effects, Fail, Finish, Forward, Relay
from gateway import metrics
from gateway.apis.table import APIS

_log = structlog.get_logger()

TICK_S = 0.5
HEARTBEAT_S = 0.5
KEEP_ALIVE_S = 10.0
"""Pause of a stream after which a comment goes out, so that at least every 15 s there are bytes."""
QUESTION_TIMEOUT_S = 2.0
QUESTIONS_MAX = 64
"""Questions under way at once: after an outage thousands of streams have one each."""
CANCEL_S_MAX = 60.0
CANCEL_PAUSE_S = 0.5

KEEP_ALIVE = b": keep-alive\n"
"""A comment line and no blank line: some SSE parsers take a block without data for an empty event."""

Reason = Literal["client_disconnected", "client_cancelled", "slow_reader", "shutdown"]

_MAY_STILL_RUN = ("stream_interrupted", "unavailable", "internal_error", "worker_lost")
"""Failures that a relay finds by itself, while a worker may go on generating for nobody."""

_reply_codec = Codec[ReplyMessage](ReplyMessage)
_frames_request_codec = Codec[FramesRequest](FramesRequest)
_frames_answer_codec = Codec[FramesAnswer](FramesAnswer)
_status_request_codec = Codec[StatusRequest](StatusRequest)
_status_answer_codec = Codec[StatusAnswer](StatusAnswer)
_cancel_codec = Codec[CancelRequest](CancelRequest)
_cancel_answer_codec = Codec[CancelAnswer](CancelAnswer)
_heartbeat_codec = Codec[StreamOwnerHeartbeat](StreamOwnerHeartbeat)


class Stream:
    """One answer on its way to a caller. One task awaits ``ready`` and takes what there is."""

    __slots__ = (
        "_bytes_max",
        "_event",
        "_gaps",
        "_held_until",
        "_last_chunk_at",
        "_pending",
        "_pending_bytes",
        "_waiter",
        "attempt",
        "chunks",
        "commit",
        "committed",
        "end",
        "error",
        "first_chunk_at",
        "last_write_at",
        "model",
        "relay",
        "request_id",
        "sse",
        "tenant",
    )

    def __init__(self, envelope: RequestEnvelope, *, hold_s: float, bytes_max: int) -> None:
        now = time.monotonic()
        self.request_id = envelope.request_id
        self.model = envelope.model
        self.tenant = envelope.tenant
        self.sse = envelope.stream
        self.chunks = 0
        self.relay = Relay(stream=envelope.stream, now_ms=int(now * 1000))
        self.attempt = 0
        """Highest attempt heard of."""
        self.end: EndData | None = None
        self.error: ErrorData | None = None
        self.commit = False
        """The status line must not wait any longer for the first frame."""
        self.committed = False
        """The writer has sent the status line."""
        self.first_chunk_at = 0.0
        self.last_write_at = now
        self._held_until = now + hold_s
        self._last_chunk_at = 0.0
        self._pending: list[bytes] = []
        self._pending_bytes = 0
        self._bytes_max = bytes_max
        self._waiter: asyncio.Future[None] | None = None
        self._gaps = metrics.INTER_TOKEN.of(envelope.model)
        self._event = APIS[envelope.endpoint].format.event

    @property
    def ended(self) -> bool:
        return self.end is not None or self.error is not None

    async def ready(self) -> None:
        """Returns when there is something to write, the status line is due, or the stream has ended."""
        if not self._pending and not self.ended and (self.committed or not self.commit):
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None

    def take(self) -> bytes:
        """Everything that is to be written now."""
        pending = self._pending
        if not pending:
            return b""
        self._pending = []
        self._pending_bytes = 0
        return pending[0] if len(pending) == 1 else b"".join(pending)

    def forward(self, data: msgspec.Raw | bytes, now: float) -> bool:
        """Put a chunk before the writer; False when the caller reads too slowly for it."""
        if self.first_chunk_at:
            self._gaps.observe(now - self._last_chunk_at)
        else:
            self.first_chunk_at = now
        self._last_chunk_at = now
        self.chunks += 1
        self._put(self._event(data) if self.sse else bytes(data))
        return self._pending_bytes <= self._bytes_max or not self.sse

    def finish(self, end: EndData) -> None:
        self.end = end
        self._wake()

    def fail(self, error: ErrorData) -> None:
        """The stream ends with ``error``, after what is pending."""
        if not self.ended:
            self.error = error
            self._wake()

    def drop_pending(self) -> None:
        self._pending = []
        self._pending_bytes = 0

    def tick(self, now: float) -> None:
        """Commit a held status line in time, and keep a silent stream alive."""
        if not self.sse or self.ended or self._pending:
            return
        if self.committed:
            if now - self.last_write_at >= KEEP_ALIVE_S:
                self._put(KEEP_ALIVE)
        elif now >= self._held_until:
            self.commit = True
            self._wake()

    def _put(self, data: bytes) -> None:
        self._pending.append(data)
        self._pending_bytes += len(data)
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class Hub:
    """All streams of one gateway incarnation."""

    def __init__(self, bus: Bus, incarnation: str) -> None:
        self.incarnation = incarnation
        self.stream_owner = subjects.gateway_stream_owner(incarnation)
        self.reply_inbox = subjects.gateway_reply_inbox(incarnation)
        self._bus = bus
        self._streams: dict[str, Stream] = {}
        self._questions: set[asyncio.Task[None]] = set()
        self._cancels: set[asyncio.Task[None]] = set()
        self._asking = asyncio.Semaphore(QUESTIONS_MAX)
        self._loops: list[asyncio.Task[None]] = []
        self._subscription: Subscription | None = None

    async def start(self) -> None:
        self._subscription = await self._bus.subscribe(self.reply_inbox, self._on_reply)
        await self._beat()
        self._loops = [asyncio.create_task(self._tick()), asyncio.create_task(self._beats())]

    async def close(self) -> None:
        """After the streams have ended: settle cancels, say goodbye."""
        if self._cancels:
            await asyncio.wait(self._cancels, timeout=2.0)
        for task in [*self._loops, *self._questions, *self._cancels]:
            task.cancel()
        await asyncio.gather(*self._loops, *self._questions, *self._cancels, return_exceptions=True)
        if self._subscription is not None:
            await self._subscription.close()
        await self._beat(leaving=True)

    def __len__(self) -> int:
        return len(self._streams)

    def open(self, stream: Stream) -> None:
        """Listen for the stream's frames; before the request is stored."""
        self._streams[stream.request_id] = stream
        metrics.STREAMS.set(len(self._streams))

    def leave(self, stream: Stream, reason: Reason | None = None) -> None:
        """Forget the stream; with a ``reason`` its generation is cancelled."""
        self._streams.pop(stream.request_id, None)
        metrics.STREAMS.set(len(self._streams))
        if reason is not None:
            self.cancel(CancelRequest(request_id=stream.request_id, reason=reason), stream.model, stream.tenant)

    def fail_all(self, error: ErrorData, reason: Reason) -> None:
        """End every stream with ``error`` and cancel its generation."""
        for stream in list(self._streams.values()):
            if not stream.ended:
                stream.fail(error)
                self.leave(stream, reason)

    def cancel(self, request: CancelRequest, model: str, tenant: str) -> None:
        """Cancel in the background, repeated until the scheduler says that it is durable."""
        task = asyncio.create_task(self._cancel(request, subjects.cancel(model, tenant)))
        self._cancels.add(task)
        task.add_done_callback(self._cancels.discard)

    # Frames ---------------------------------------------------------------------------------------------------

    def _on_reply(self, message: Incoming) -> None:
        try:
            reply = _reply_codec.decode(message.data)
        except msgspec.MsgspecError as error:
            _log.error("reply_unreadable", reason=str(error))
            return
        now = time.monotonic()
        now_ms = int(now * 1000)
        streams = self._streams
        for frame in reply.frames:
            stream = streams.get(frame.stream)
            if stream is None or stream.ended:
                continue
            stream.attempt = max(stream.attempt, frame.attempt)
            effects = stream.relay.on_frame(reply.worker, frame, now_ms, reply.epoch)
            if effects:
                self._perform(stream, effects, now)

    def _perform(self, stream: Stream, effects: Effects, now: float) -> None:
        for effect in effects:
            if type(effect) is Forward:
                if not stream.forward(effect.data, now):
                    self._too_slow(stream)
                    return
            elif type(effect) is Finish:
                stream.finish(effect.end)
            elif type(effect) is Fail:
                stream.fail(effect.error)
                self.leave(stream, "client_cancelled" if effect.error.code in _MAY_STILL_RUN else None)
            elif type(effect) is AskFrames:
                metrics.REPAIRS.labels("frames").inc()
                self._ask(self._ask_frames(stream, effect))
            elif type(effect) is AskStatus:
                metrics.REPAIRS.labels("status").inc()
                self._ask(self._ask_status(stream))

    def _too_slow(self, stream: Stream) -> None:
        stream.drop_pending()
        stream.fail(ErrorData(code="slow_reader", message="The answer was not read fast enough."))
        self.leave(stream, "slow_reader")

    # Questions ------------------------------------------------------------------------------------------------

    def _ask(self, question: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(question)
        self._questions.add(task)
        task.add_done_callback(self._questions.discard)

    async def _ask_frames(self, stream: Stream, effect: AskFrames) -> None:
        question = FramesRequest(request_id=stream.request_id, attempt=effect.attempt, from_seq=effect.from_seq)
        data = await self._request(
            subjects.frames(effect.worker, stream.tenant), _frames_request_codec.encode(question)
        )
        answer = _decoded(_frames_answer_codec, data)
        now = time.monotonic()
        if not stream.ended:
            effects = stream.relay.on_frames_answer(effect.worker, effect.attempt, answer, int(now * 1000))
            self._perform(stream, effects, now)

    async def _ask_status(self, stream: Stream) -> None:
        question = StatusRequest(request_id=stream.request_id)
        data = await self._request(subjects.status(stream.model, stream.tenant), _status_request_codec.encode(question))
        answer = _decoded(_status_answer_codec, data)
        now = time.monotonic()
        if not stream.ended:
            if answer is not None and answer.attempt > stream.attempt:
                stream.attempt = answer.attempt
            self._perform(stream, stream.relay.on_status(answer, int(now * 1000)), now)

    async def _request(self, subject: str, question: bytes) -> bytes | None:
        try:
            async with self._asking:
                return await self._bus.request(subject, question, timeout_s=QUESTION_TIMEOUT_S)
        except Unavailable:
            return None

    async def _cancel(self, request: CancelRequest, subject: str) -> None:
        question = _cancel_codec.encode(request)
        give_up_at = time.monotonic() + CANCEL_S_MAX
        while time.monotonic() < give_up_at:
            answer = _decoded(_cancel_answer_codec, await self._request(subject, question))
            if answer is not None and answer.durable:
                return
            await asyncio.sleep(CANCEL_PAUSE_S)
        _log.warning("cancel_unconfirmed", request_id=request.request_id, reason=request.reason)

    # Time -----------------------------------------------------------------------------------------------------

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            now = time.monotonic()
            now_ms = int(now * 1000)
            for stream in list(self._streams.values()):
                if not stream.ended:
                    self._perform(stream, stream.relay.on_tick(now_ms), now)
                    stream.tick(now)

    async def _beats(self) -> None:
        while True:
            await asyncio.sleep(HEARTBEAT_S)
            await self._beat()

    async def _beat(self, *, leaving: bool = False) -> None:
        beat = StreamOwnerHeartbeat(stream_owner=self.stream_owner, leaving=leaving)
        try:
            await self._bus.publish(subjects.stream_owner_heartbeat(self.stream_owner), _heartbeat_codec.encode(beat))
        except Unavailable:
            pass  # The bus is away; whoever counts our silence counts it by ticks that are away, too.


def _decoded(codec: Codec[Any], data: bytes | None) -> Any:
    if data is None:
        return None
    try:
        return codec.decode(data)
    except msgspec.MsgspecError as error:
        _log.error("answer_unreadable", reason=str(error))
        return None
