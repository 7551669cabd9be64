"""The streams of one stream owner: their frames in, the effects of their relays out. Gateway and client share it.

One subscription on the reply inbox and one decode per message. What a frame means is decided by each stream's relay
(contracts.streaming.relay); what becomes of a chunk or an end by the stream's own class, a RelayedStream. Here:
questions to workers and schedulers, cancels until they are durable, heartbeats and the goodbye, ticks.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

import msgspec
import prometheus_client
import structlog

from contracts import clock, subjects
from contracts.bus import Bus, BusError, Incoming, Subscription, unreadable
from contracts.messages.base import Codec
from contracts.messages.control import (
    CancelAnswer,
    CancelReason,
    CancelRequest,
    StatusAnswer,
    StatusRequest,
    StreamOwnerHeartbeat,
)
from contracts.messages.frames import EndData, ErrorData, FramesAnswer, FramesRequest, ReplyMessage
from contracts.streaming.pattern import Pattern
from contracts.streaming.relay import AskFrames, AskStatus, Effects, Fail, Finish, Forward, Relay
from contracts.ticks import tick

log = structlog.get_logger(__name__)

REPAIRS = prometheus_client.Counter(
    "headrace_stream_repairs", "Questions about missing frames and silent streams", ["kind"]
)

for _kind in ("frames", "status"):  # From the beginning: an increase from nothing is none to Prometheus.
    REPAIRS.labels(_kind)

TICK_S = 0.5
"""The relay's ``repair_again_ms``: a shorter pause would find nothing more to ask."""
TICKED_AT_ONCE = 500
"""Streams, some 2 us each, before frames have their turn: 10,000 in one go would hold them up by 20 ms."""
HEARTBEAT_S = 0.5
"""The protocol's: schedulers count an owner as lost after 3 s of silence, six heartbeats."""
QUESTION_TIMEOUT_S = 2.0
"""Below the relay's ``answer_ms_max`` of 5 s, after which it asks again."""
QUESTIONS_MAX = 64
"""Questions and cancels on their way at once: after an outage thousands of streams have one each."""
CANCEL_PAUSE_S, CANCEL_PAUSE_S_MAX = 0.5, 5.0
"""Doubled after each try. A worker confirms within an engine step, some tens of milliseconds; a new scheduler within
seconds; and while others read a request its cancel waits for them."""
CANCEL_S_MAX = 2 * 3600.0
"""Beyond the longest deadline and generation; as long as the bus itself keeps a request. What is given up runs on for
nobody."""
CANCELS_MAX = 20_000
"""Cancels that are kept: all that hung up during an outage of the bus, some 3 KB each. Then the oldest are given up."""
CLOSE_S_MAX = 2.0
"""What is under way may settle for so long. Heartbeats go on meanwhile."""

MAY_STILL_RUN: dict[str, CancelReason] = {
    "stream_interrupted": "relay_failed",
    "unavailable": "relay_failed",
    "internal_error": "relay_failed",
    "worker_lost": "worker_lost",
}
"""Failures that a relay finds by itself, while a worker may go on generating for nobody: cancelled for this reason."""

T = TypeVar("T")

_reply_of = Codec[ReplyMessage](ReplyMessage).decode
_frames_of = Codec[FramesAnswer](FramesAnswer).decode
_status_of = Codec[StatusAnswer](StatusAnswer).decode
_cancelled_of = Codec[CancelAnswer](CancelAnswer).decode
_encode = msgspec.json.Encoder().encode


class RelayedStream:
    """One stream as a Subscriber knows it. Subclasses say what becomes of its chunks and of its end."""

    __slots__ = ("attempt", "idempotency_key", "model", "name", "relay", "request_id", "tenant", "wanted")

    def __init__(self, *, name: str, request_id: str, model: str, tenant: str, relay: Relay) -> None:
        self.name = name
        """What frames call the stream."""
        self.request_id = request_id
        """Empty until it is known: then nobody can be asked about the request."""
        self.model = model
        self.tenant = tenant
        self.relay = relay
        self.attempt = 0
        """Highest attempt heard of."""
        self.idempotency_key = ""
        """Under which others may read the request, too, and by which it can be cancelled before its id is known."""
        self.wanted: dict[str, AskFrames | AskStatus] = {}
        """What its relay wants to know, by whom it is asked, and one task is asking about."""

    def on_chunk(self, data: msgspec.Raw | bytes, now: float) -> bool:
        """The next chunk; False when the reader is too far behind, and then the stream fails as ``slow_reader``.

        ``data`` may be part of a whole bus message: who keeps it copies it.
        """
        raise NotImplementedError

    def on_text(self, pattern: Pattern, text: msgspec.Raw, now: float) -> bool:
        """``on_chunk``, of the chunk that ``pattern`` is with this text."""
        return self.on_chunk(pattern.filled(bytes(text)), now)

    def on_end(self, end: EndData) -> None:
        """The stream is complete, or was cancelled; nothing follows."""
        raise NotImplementedError

    def on_error(self, error: ErrorData) -> None:
        """The stream ends with ``error``; nothing follows."""
        raise NotImplementedError

    def on_tick(self, now: float) -> None:
        """``now`` (time.monotonic) is TICK_S later than the last time."""


class Subscriber:
    """Listens on ``reply_inbox`` for the streams that are open, and speaks for them as ``stream_owner``."""

    def __init__(
        self,
        bus: Bus,
        *,
        reply_inbox: str,
        stream_owner: str,
        cancel_subject: Callable[[str, str], str] = subjects.cancel,
    ) -> None:
        self.reply_inbox = reply_inbox
        """Reply subject of all streams."""
        self.stream_owner = stream_owner
        """Name on the bus under which heartbeats are sent."""
        self._bus = bus
        self._cancel_subject = cancel_subject
        """Of a model and a tenant: who may publish there may cancel for the tenant."""
        self._streams: dict[str, RelayedStream] = {}
        self._subscription: Subscription | None = None
        self._loops: list[asyncio.Task[None]] = []
        self._questions: set[asyncio.Task[None]] = set()
        self._cancels: dict[asyncio.Task[bool], None] = {}
        """The oldest first."""
        self._works: set[asyncio.Task[Any]] = set()
        self._asking = asyncio.Semaphore(QUESTIONS_MAX)

    def __len__(self) -> int:
        """Streams that are open."""
        return len(self._streams)

    async def start(self) -> None:
        """Listen and send heartbeats. Raises BusError when this user may not read ``reply_inbox``."""
        self._subscription = await self._bus.subscribe(self.reply_inbox, self._on_reply)
        await self._beat()
        self._loops = [asyncio.create_task(every(TICK_S, self._tick)), asyncio.create_task(self._live())]

    async def _live(self) -> None:
        """Send heartbeats, until cancelled."""
        await every(HEARTBEAT_S, self._beat)

    async def close(self) -> None:
        """Let spawned work settle, then say goodbye: schedulers cancel at once what is still open."""
        if self._works:
            await asyncio.wait(self._works, timeout=CLOSE_S_MAX)
        tasks = [*self._loops, *self._questions, *self._works]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._subscription is not None:
            await self._subscription.close()
            await self._beat(leaving=True)

    def open(self, stream: RelayedStream) -> None:
        """Listen for the stream's frames, until ``leave``. Before the request is submitted or stored."""
        self._streams[stream.name] = stream

    def leave(self, stream: RelayedStream, reason: CancelReason | None = None) -> None:
        """Forget the stream; with a ``reason`` its generation is cancelled."""
        self._streams.pop(stream.name, None)
        if reason is not None and (stream.request_id or stream.idempotency_key):
            self.cancel(stream, reason)

    def fail(self, stream: RelayedStream, error: ErrorData, reason: CancelReason | None = None) -> None:
        """End the stream with ``error`` and leave it."""
        stream.on_error(error)
        self.leave(stream, reason)

    def fail_all(self, error: ErrorData, reason: CancelReason | None = None) -> None:
        """End with ``error`` every stream whose end has not come."""
        for stream in list(self._streams.values()):
            if not stream.relay.finished:
                self.fail(stream, error, reason)

    def join(self, stream: RelayedStream, request_id: str, *, streamed: bool) -> None:
        """Read a request that another began under the same idempotency key, from its first frame on."""
        stream.request_id = request_id
        now = time.monotonic()
        now_ms = int(now * 1000)
        stream.relay = Relay(stream=streamed, now_ms=now_ms, joined=True)
        self._perform(stream, stream.relay.on_tick(now_ms), now)

    def cancel(self, stream: RelayedStream, reason: CancelReason, *, for_all: bool = False) -> asyncio.Task[bool]:
        """Cancel in the background, repeated until that is durable; the task's result is whether it became so.

        A stream whose request has no id yet is cancelled by its idempotency key. What others read goes on, but
        ``for_all``.
        """
        key = stream.idempotency_key
        question = CancelRequest(
            request_id=stream.request_id,
            reason=reason,
            idempotency_key="" if stream.request_id else key,
            reader=stream.name if key and not for_all else "",
        )
        return self.send_cancel(question, stream.model, stream.tenant)

    def send_cancel(self, question: CancelRequest, model: str, tenant: str) -> asyncio.Task[bool]:
        """``cancel``, of what may be no stream here."""
        if len(self._cancels) >= CANCELS_MAX:
            oldest = next(iter(self._cancels))
            del self._cancels[oldest]
            oldest.cancel()
            log.warning("cancel_given_up", kept=CANCELS_MAX)
        task = self.spawn(self._cancel(question, self._cancel_subject(model, tenant)))
        self._cancels[task] = None
        task.add_done_callback(lambda task: self._cancels.pop(task, None))
        return task

    def spawn(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Run ``work`` to its end whoever waits for it; ``close`` gives it CLOSE_S_MAX."""
        return _kept(self._works, work)

    def _on_reply(self, message: Incoming) -> None:
        try:
            reply = _reply_of(message.data)
        except msgspec.MsgspecError as error:
            unreadable("reply_undecodable", message, error)
            return
        now = time.monotonic()
        now_ms = int(now * 1000)
        streams, worker = self._streams, reply.worker
        for frame in reply.frames:
            stream = streams.get(frame.stream)
            if stream is None:
                continue
            if frame.kind == "text" and (pattern := stream.relay.next_text(worker, frame, now_ms)) is not None:
                if not stream.on_text(pattern, frame.data, now):
                    self._too_slow(stream)
                continue
            if frame.attempt != stream.attempt:
                stream.attempt = max(stream.attempt, frame.attempt)
            effects = stream.relay.on_frame(worker, frame, now_ms, reply.epoch)
            if effects:
                self._perform(stream, effects, now)

    def _perform(self, stream: RelayedStream, effects: Effects, now: float) -> None:
        for effect in effects:
            if type(effect) is Forward:
                if not stream.on_chunk(effect.data, now):
                    self._too_slow(stream)
                    return
            elif type(effect) is Finish:
                stream.on_end(effect.end)
            elif type(effect) is Fail:
                self.fail(stream, effect.error, MAY_STILL_RUN.get(effect.error.code))
            elif type(effect) is AskFrames:
                REPAIRS.labels("frames").inc()
                self._want(stream, effect.worker, effect, now)
            elif type(effect) is AskStatus:
                REPAIRS.labels("status").inc()
                self._want(stream, "", effect, now)

    def _too_slow(self, stream: RelayedStream) -> None:
        error = ErrorData(code="slow_reader", message="The answer was not read fast enough.")
        self.fail(stream, error, "slow_reader")

    def _want(self, stream: RelayedStream, of: str, ask: AskFrames | AskStatus, now: float) -> None:
        """One question of a stream is open at a time; while nobody can be asked the answer is at hand at once."""
        if not stream.request_id or not self._bus.connected:
            self._answered(stream, ask, None, now)
            return
        if not stream.wanted:
            _kept(self._questions, self._ask_all(stream))
        stream.wanted[of] = ask

    async def _ask_all(self, stream: RelayedStream) -> None:
        """What the stream wants to know, one after the other."""
        while stream.wanted:
            of, ask = next(iter(stream.wanted.items()))
            answer: FramesAnswer | StatusAnswer | None = None
            if type(ask) is AskFrames:
                question = FramesRequest(request_id=stream.request_id, attempt=ask.attempt, from_seq=ask.from_seq)
                answer = await self._ask(subjects.frames(ask.worker, stream.tenant), question, _frames_of)
            else:
                answer = await self._ask(subjects.status(stream.model, stream.tenant), self._about(stream), _status_of)
            if stream.wanted.get(of) is ask:
                del stream.wanted[of]
            if self._streams.get(stream.name) is stream:
                self._answered(stream, ask, answer, time.monotonic())
            else:
                stream.wanted.clear()

    def _about(self, stream: RelayedStream) -> StatusRequest:
        question = StatusRequest(request_id=stream.request_id, void_below=stream.relay.void_below)
        if not stream.relay.joined:
            return question
        return msgspec.structs.replace(question, reader=stream.name, stream_owner=self.stream_owner)

    def _answered(
        self, stream: RelayedStream, ask: AskFrames | AskStatus, answer: FramesAnswer | StatusAnswer | None, now: float
    ) -> None:
        """``answer`` is None where nobody gave one."""
        now_ms = int(now * 1000)
        if isinstance(ask, AskFrames):
            found = answer if isinstance(answer, FramesAnswer) else None
            self._perform(stream, stream.relay.on_frames_answer(ask.worker, ask.attempt, found, now_ms), now)
            return
        told = answer if isinstance(answer, StatusAnswer) else None
        if told is not None:
            stream.attempt = max(stream.attempt, told.attempt)
        self._perform(stream, stream.relay.on_status(told, now_ms), now)

    async def _ask(
        self, subject: str, question: FramesRequest | StatusRequest | CancelRequest, decode: Callable[[bytes], T]
    ) -> T | None:
        """The answer; None when there is none in time, or no bus to ask by."""
        async with self._asking:
            if not self._bus.connected:
                return None
            try:
                answer = await self._bus.request(subject, _encode(question), timeout_s=QUESTION_TIMEOUT_S)
            except BusError:
                return None
            try:
                return decode(answer)
            except msgspec.MsgspecError as error:
                log.error("answer_undecodable", subject=subject, bytes=len(answer), reason=str(error))
                return None

    async def _cancel(self, question: CancelRequest, subject: str) -> bool:
        give_up_at = time.monotonic() + CANCEL_S_MAX
        pause_s = CANCEL_PAUSE_S
        while (left_s := give_up_at - time.monotonic()) > 0:
            if not self._bus.connected:
                await self._bus.session.wait_connected(left_s)
                pause_s = CANCEL_PAUSE_S
            answer = await self._ask(subject, question, _cancelled_of)
            if answer is not None and answer.durable:
                return True
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, CANCEL_PAUSE_S_MAX)
        log.warning("cancel_unconfirmed", request_id=question.request_id, reason=question.reason)
        return False

    async def _tick(self) -> None:
        if self._bus.closed.is_set():
            self.fail_all(ErrorData(code="unavailable", message="The connection to the bus is lost for good."))
        streams = list(self._streams.values())
        for first in range(0, len(streams), TICKED_AT_ONCE):
            if first:
                await asyncio.sleep(0)
            now = time.monotonic()
            now_ms = int(now * 1000)
            for stream in streams[first : first + TICKED_AT_ONCE]:
                if self._streams.get(stream.name) is not stream:
                    continue  # It has been left meanwhile.
                if stream.request_id:
                    self._perform(stream, stream.relay.on_tick(now_ms), now)
                stream.on_tick(now)

    async def _beat(self, bus: Bus | None = None, *, leaving: bool = False, lag_ms: int = 0) -> None:
        """By ``bus``, or the main one. Nothing while that is away: frames could not come, either."""
        if not self._bus.connected:
            return
        beat = StreamOwnerHeartbeat(
            stream_owner=self.stream_owner, leaving=leaving, lag_ms=lag_ms, sent_at_ms=clock.now_ms()
        )
        try:
            await (bus or self._bus).publish(subjects.stream_owner_heartbeat(self.stream_owner), _encode(beat))
        except BusError as error:
            log.warning("heartbeat_failed", stream_owner=self.stream_owner, reason=str(error))


def _kept(tasks: set[asyncio.Task[T]], work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
    """``work`` as a task, in ``tasks`` until it is done: the loop alone would not keep it alive."""
    task = asyncio.create_task(work)
    tasks.add(task)
    task.add_done_callback(tasks.discard)
    return task


async def every(pause_s: float, act: Callable[[], Awaitable[None]]) -> None:
    """``act`` each ``pause_s``, until cancelled."""
    while True:
        await tick(pause_s)
        await act()
