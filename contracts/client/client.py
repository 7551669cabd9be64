"""Client for internal services: the APIs of ``submit`` over NATS, frames straight from the worker.

    async with Client("nats://...", tenant="search") as client:
        async for chunk in client.chat(model="smol", messages=[{"role": "user", "content": "Hello"}]):
            print(chunk.text, end="")
        answer = await client.chat_once(model="smol", messages=[{"role": "user", "content": "Hello"}])
        print(answer.text, answer.usage)

One connection and one inbox subscription serve all streams. While the client is open it sends heartbeats;
when they stop, or with the goodbye of ``close``, the schedulers cancel what it left open. Order, repair and
ends are decided by contracts.streaming.relay, admission by the gateway that answers ``submit``.
"""

import asyncio
import itertools
import time
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine, Mapping, Sequence
from types import TracebackType
from typing import Any, Generic, Literal, Self, TypeVar

import msgspec
import structlog

from contracts import ids, permissions, subjects
from contracts.bus import Bus, BusError, Incoming, NoResponder, TooLarge
from contracts.client.answers import (
    Answer,
    ChatAnswer,
    ChatChunk,
    CompletionChunk,
    EmbeddingsAnswer,
    MessageAnswer,
    MessageEvent,
    ResponseAnswer,
    ResponseEvent,
)
from contracts.errors import TABLE, HeadraceError
from contracts.messages.base import Codec, Endpoint
from contracts.messages.control import CancelAnswer, CancelRequest, StatusAnswer, StatusRequest, StreamOwnerHeartbeat
from contracts.messages.frames import EndData, ErrorData, FramesAnswer, FramesRequest, ReplyMessage
from contracts.messages.request import Reply, SubmitAnswer, SubmitRequest
from contracts.streaming.relay import AskFrames, AskStatus, Effects, Fail, Finish, Forward, Relay

log = structlog.get_logger(__name__)

A = TypeVar("A", bound=Answer)
M = TypeVar("M")
CancelReason = Literal["client_cancelled", "slow_reader"]

TICK_S = 0.25
HEARTBEAT_TICKS = 2
"""A heartbeat every 500 ms (DESIGN.md section 7)."""
SUBMIT_TIMEOUT_S = 30.0
"""Longer than a gateway takes for the largest body; its own bounds are shorter."""
ASK_TIMEOUT_S = 2.0
CANCEL_TIMEOUT_S = 10.0
CANCEL_AGAIN_S = 0.3
CLOSE_TIMEOUT_S = 2.0
RETRY_WAIT_S_MAX = 60
"""A refusal that asks for a longer pause is given to the caller at once."""
RETRY_WAIT_S = 1
"""Pause where an answer names none."""
UNREAD_BYTES_MAX = 16 << 20
"""What a stream's reader may be behind; then the stream fails as ``slow_reader``."""

_RETRIED = (429, 503, 529)

_replies = Codec[ReplyMessage](ReplyMessage)
_submits = Codec[SubmitAnswer](SubmitAnswer)
_cancels = Codec[CancelAnswer](CancelAnswer)
_statuses = Codec[StatusAnswer](StatusAnswer)
_pages = Codec[FramesAnswer](FramesAnswer)
_encode = msgspec.json.Encoder().encode


class Client:
    """A tenant's access; ``async with`` connects and closes.

    ``retries``: how often a refusal (429, 503, 529) is tried again, after the pause that it names.
    """

    def __init__(self, nats_url: str, *, tenant: str, retries: int = 2) -> None:
        self.tenant = tenant
        self.stream_owner = ids.incarnation("c")
        """Name of this client's life, under which it sends heartbeats."""
        self.inbox = subjects.tenant_reply_prefix(tenant) + subjects.encode(self.stream_owner)
        self.retries = retries
        self._nats_url = nats_url
        self._bus: Bus | None = None
        self._streams: dict[str, Stream[Any]] = {}
        self._named = 0
        self._tasks: set[asyncio.Task[Any]] = set()
        self._beating: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        inbox = permissions.user_of_tenant(self.tenant)
        self._bus = await Bus.connect(self._nats_url, name=self.stream_owner, inbox=inbox)
        try:
            await self._bus.subscribe(self.inbox, self._on_reply)
        except BaseException:
            await self._bus.close()
            raise
        self._beating = asyncio.create_task(self._beat())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """End every open stream and say goodbye, on which the schedulers cancel what still runs."""
        for stream in list(self._streams.values()):
            stream._end(HeadraceError("cancelled", "The client was closed."))
        if self._beating is None or self._bus is None:
            return
        self._beating.cancel()
        await asyncio.wait([self._beating])
        self._beating = None
        await self._heartbeat(leaving=True)
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=CLOSE_TIMEOUT_S)
        for task in self._tasks:
            task.cancel()
        await self._bus.close()

    # Calls --------------------------------------------------------------------------------------------------
    #
    # One pair for each API that ``submit`` serves: ``chat`` streams, ``chat_once`` gives the whole answer, with its
    # usage. ``fields`` are the API's own. Each raises HeadraceError: ``submit``'s refusal, or how the request failed.
    # ``deadline_ms`` bounds the time to the first token, pauses between tries included; else the tenant's default does.

    def chat(
        self, *, model: str, messages: Sequence[Mapping[str, Any]], deadline_ms: int | None = None, **fields: Any
    ) -> "Stream[ChatChunk]":
        """OpenAI's chat completions, streamed. Sent when the iteration begins, as every stream."""
        return self._stream("chat/completions", ChatChunk, model, deadline_ms, fields | {"messages": messages})

    async def chat_once(
        self, *, model: str, messages: Sequence[Mapping[str, Any]], deadline_ms: int | None = None, **fields: Any
    ) -> ChatAnswer:
        """A whole chat answer. The service tries again when a worker is lost: nothing has been shown."""
        return await self._once("chat/completions", ChatAnswer, model, deadline_ms, fields | {"messages": messages})

    def complete(
        self, *, model: str, prompt: object, deadline_ms: int | None = None, **fields: Any
    ) -> "Stream[CompletionChunk]":
        """OpenAI's completions, streamed."""
        return self._stream("completions", CompletionChunk, model, deadline_ms, fields | {"prompt": prompt})

    async def complete_once(
        self, *, model: str, prompt: object, deadline_ms: int | None = None, **fields: Any
    ) -> CompletionChunk:
        """A whole completion."""
        return await self._once("completions", CompletionChunk, model, deadline_ms, fields | {"prompt": prompt})

    def respond(
        self, *, model: str, input: object, deadline_ms: int | None = None, **fields: Any
    ) -> "Stream[ResponseEvent]":
        """OpenAI's Responses, streamed."""
        return self._stream("responses", ResponseEvent, model, deadline_ms, fields | {"input": input})

    async def respond_once(
        self, *, model: str, input: object, deadline_ms: int | None = None, **fields: Any
    ) -> ResponseAnswer:
        """A whole response."""
        return await self._once("responses", ResponseAnswer, model, deadline_ms, fields | {"input": input})

    def message(
        self, *, model: str, messages: Sequence[Mapping[str, Any]], deadline_ms: int | None = None, **fields: Any
    ) -> "Stream[MessageEvent]":
        """Anthropic's Messages, streamed; they want ``max_tokens``."""
        return self._stream("messages", MessageEvent, model, deadline_ms, fields | {"messages": messages})

    async def message_once(
        self, *, model: str, messages: Sequence[Mapping[str, Any]], deadline_ms: int | None = None, **fields: Any
    ) -> MessageAnswer:
        """A whole message."""
        return await self._once("messages", MessageAnswer, model, deadline_ms, fields | {"messages": messages})

    async def embed(
        self, *, model: str, input: object, deadline_ms: int | None = None, **fields: Any
    ) -> EmbeddingsAnswer:
        """OpenAI's embeddings, as lists of floats."""
        body = fields | {"input": input, "encoding_format": "float"}
        return await self._once("embeddings", EmbeddingsAnswer, model, deadline_ms, body)

    def _stream(
        self, endpoint: Endpoint, kind: type[A], model: str, deadline_ms: int | None, body: dict[str, Any]
    ) -> "Stream[A]":
        return Stream(self, model, endpoint, body | {"stream": True}, deadline_ms, kind)

    async def _once(
        self, endpoint: Endpoint, kind: type[A], model: str, deadline_ms: int | None, body: dict[str, Any]
    ) -> A:
        return await Stream(self, model, endpoint, body | {"stream": False}, deadline_ms, kind)._whole()

    # For streams --------------------------------------------------------------------------------------------

    @property
    def bus(self) -> Bus:
        if self._bus is None:
            raise RuntimeError("the client is not connected: use it as `async with Client(...) as client`")
        return self._bus

    def _register(self, stream: "Stream[Any]") -> str:
        self._named += 1
        name = str(self._named)
        self._streams[name] = stream
        return name

    def _forget(self, name: str) -> None:
        self._streams.pop(name, None)

    def _spawn(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Run ``work`` as a task of the client's, which a cancellation of the caller's does not touch."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _on_reply(self, message: Incoming) -> None:
        try:
            reply = _replies.decode(message.data)
        except msgspec.MsgspecError:
            log.warning("client_malformed_reply", subject=message.subject, bytes=len(message.data))
            return
        now = _now_ms()
        for frame in reply.frames:
            if (stream := self._streams.get(frame.stream)) is not None:
                stream._perform(stream._relay.on_frame(reply.worker, frame, now, reply.epoch))

    async def _beat(self) -> None:
        for count in itertools.count():
            if count % HEARTBEAT_TICKS == 0:
                await self._heartbeat()
            for stream in list(self._streams.values()):
                if self.bus.closed.is_set():
                    stream._end(HeadraceError("unavailable", "The connection to the bus is lost for good."))
                else:
                    stream._tick(_now_ms())
            await asyncio.sleep(TICK_S)

    async def _heartbeat(self, leaving: bool = False) -> None:
        if not self.bus.connected:
            return  # Old heartbeats sent late would say nothing.
        try:
            owner = subjects.tenant_stream_owner(self.tenant, self.stream_owner)
            beat = StreamOwnerHeartbeat(stream_owner=owner, leaving=leaving)
            await self.bus.publish(subjects.stream_owner_heartbeat(owner), _encode(beat))
        except BusError as error:
            log.warning("client_heartbeat_failed", error=repr(error))


class Stream(Generic[A]):
    """One request. Read it once with ``async for``; leaving the loop early, or cancelling its task, cancels
    the generation. ``async with`` does so at the end of its block, whoever still holds the iterator.
    """

    def __init__(
        self,
        client: Client,
        model: str,
        endpoint: Endpoint,
        body: dict[str, Any],
        deadline_ms: int | None,
        kind: type[A],
    ) -> None:
        self.request_id = ""
        """Empty until admitted."""
        self.usage: EndData | None = None
        """Set at the end: outcome, finish reason and token counts, as the ledger holds them."""
        self._client = client
        self._model = model
        self._endpoint = endpoint
        self._stream = bool(body["stream"])
        self._body = msgspec.Raw(_encode(body))
        self._deadline_ms = deadline_ms
        self._kind = kind
        self._relay = self._new_relay()
        self._name = ""
        self._begun = False
        self._unread: deque[bytes] = deque()
        self._unread_bytes = 0
        self._news = asyncio.Event()
        self._left = asyncio.Event()
        """The caller wants no more."""
        self._submitting: asyncio.Task[None] | None = None
        self._cancelling: asyncio.Task[bool] | None = None
        self._ended = False
        self._error: HeadraceError | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._leave()

    def __aiter__(self) -> AsyncIterator[A]:
        if self._begun:
            raise RuntimeError("a stream is read once")
        self._begun = True
        # Not kept here: a loop that is left drops the generator, and its ``finally`` runs.
        return self._read()

    async def cancel(self) -> None:
        """Stop the generation; returns once that is durable, else raises HeadraceError ``unavailable``.

        The iteration then ends by itself after what has arrived, with ``usage`` of outcome cancelled.
        """
        self._left.set()
        if self._submitting is None:
            self._end(None)
        if not self._ended and not await asyncio.shield(self._cancel("client_cancelled")):
            raise HeadraceError("unavailable", "The cancellation was not confirmed in time.")

    # Reading ------------------------------------------------------------------------------------------------

    async def _read(self) -> AsyncGenerator[A, None]:
        try:
            if not self._ended:
                self._name = self._client._register(self)
                self._submitting = self._client._spawn(self._submit())
                await asyncio.wait([self._submitting])  # Frames may come first; the id is known before them.
            while True:
                while self._unread:
                    yield self._take()
                if self._ended:
                    break
                self._news.clear()
                await self._news.wait()
            if self._error is not None:
                if self.request_id:
                    self._error.add_note(f"request {self.request_id}")
                raise self._error
        finally:
            self._leave()

    async def _whole(self) -> A:
        answers = [answer async for answer in self]
        return answers[0]  # The relay forwards exactly one, or the iteration raises.

    def _take(self) -> A:
        data = self._unread.popleft()
        self._unread_bytes -= len(data)
        try:
            chunk = msgspec.json.decode(data, type=self._kind)
        except msgspec.MsgspecError as error:
            raise HeadraceError("internal_error", "The service sent what is no part of this API.") from error
        chunk.raw = msgspec.Raw(data)
        return chunk

    def _leave(self) -> None:
        """The caller reads no further: forget the stream, and let nothing go on running for it."""
        self._left.set()
        if not self._ended:
            self._end(None)
            self._cancel("client_cancelled")

    def _end(self, error: HeadraceError | None) -> None:
        if self._ended:
            return
        self._ended = True
        self._error = error
        self._client._forget(self._name)
        self._news.set()

    # Submitting ---------------------------------------------------------------------------------------------

    def _new_relay(self) -> Relay:
        return Relay(stream=self._stream, now_ms=_now_ms())

    async def _submit(self) -> None:
        """Ask any gateway until admitted, within the bounds of retrying; never raises."""
        began_ms = _now_ms()
        for tries_left in range(self._client.retries, -1, -1):
            left_ms = None if self._deadline_ms is None else self._deadline_ms - (_now_ms() - began_ms)
            error, may_retry = await self._try(left_ms)
            if error is None:
                return
            pause_s = error.retry_after_s if error.retry_after_s is not None else RETRY_WAIT_S
            too_long = pause_s > RETRY_WAIT_S_MAX or (left_ms is not None and pause_s * 1000 >= left_ms)
            if not may_retry or too_long or not tries_left:
                self._end(error)
                return
            try:
                await asyncio.wait_for(self._left.wait(), pause_s)
            except TimeoutError:
                continue
            self._end(None)
            return

    async def _try(self, deadline_ms: int | None) -> tuple[HeadraceError | None, bool]:
        """One submission: the refusal, None when admitted, and whether another try may help."""
        bus = self._client.bus
        request = SubmitRequest(
            endpoint=self._endpoint,
            reply=Reply(subject=self._client.inbox, stream=self._name),
            body=self._body,
            deadline_ms=deadline_ms,
            stream_owner=self._client.stream_owner,
        )
        self._relay = self._new_relay()
        try:
            subject = subjects.submit(self._client.tenant, self._model)
            answer = _submits.decode(await bus.request(subject, _encode(request), timeout_s=SUBMIT_TIMEOUT_S))
        except subjects.InvalidName as error:
            return HeadraceError("model_not_found", f"No model can have this name: {error}", param="model"), False
        except TooLarge as error:
            return HeadraceError("request_too_large", f"The request does not fit a message: {error}"), False
        except (BusError, msgspec.MsgspecError) as error:
            # After a time-out the request may have been admitted: another try could run it twice.
            may_retry = isinstance(error, NoResponder)
            return HeadraceError("unavailable", f"No gateway answered: {error}"), may_retry
        if answer.admitted:
            self.request_id = answer.request_id
            self._model = answer.model or self._model
            return None, False
        refusal = _raised(answer.error or ErrorData(code="internal_error", message="Refused without a reason."))
        status = answer.status if answer.status >= 400 else refusal.status
        return refusal, status in _RETRIED

    # Frames and questions -----------------------------------------------------------------------------------

    def _tick(self, now_ms: int) -> None:
        if self.request_id:
            self._perform(self._relay.on_tick(now_ms))

    def _perform(self, effects: Effects) -> None:
        for effect in effects:
            match effect:
                case Forward(data):
                    self._append(bytes(data))
                case Finish(end):
                    self.usage = end
                    cancelled = end.outcome == "cancelled" and not self._left.is_set()
                    self._end(HeadraceError("cancelled", "The request was cancelled.") if cancelled else None)
                case Fail(error):
                    wanted = error.code == "cancelled" and self._left.is_set()
                    self._end(None if wanted else _raised(error))
                    self._cancel("client_cancelled")
                case AskFrames():
                    self._client._spawn(self._ask_frames(effect))
                case AskStatus():
                    self._client._spawn(self._ask_status())

    def _append(self, data: bytes) -> None:
        if self._ended:
            return
        if self._unread and self._unread_bytes + len(data) > UNREAD_BYTES_MAX:
            self._end(HeadraceError("slow_reader", "The stream was not read fast enough."))
            self._cancel("slow_reader")
            return
        self._unread.append(data)
        self._unread_bytes += len(data)
        self._news.set()

    async def _ask_frames(self, ask: AskFrames) -> None:
        question = FramesRequest(request_id=self.request_id, attempt=ask.attempt, from_seq=ask.from_seq)
        answer = await self._ask(subjects.frames(ask.worker, self._client.tenant), question, _pages)
        self._perform(self._relay.on_frames_answer(ask.worker, ask.attempt, answer, _now_ms()))

    async def _ask_status(self) -> None:
        subject = subjects.status(self._model, self._client.tenant)
        answer = await self._ask(subject, StatusRequest(request_id=self.request_id), _statuses)
        self._perform(self._relay.on_status(answer, _now_ms()))

    async def _ask(self, subject: str, question: msgspec.Struct, codec: Codec[M]) -> M | None:
        """The answer, or None when there is none (also before the request has an id to ask about)."""
        if not self.request_id:
            return None
        try:
            return codec.decode(await self._client.bus.request(subject, _encode(question), timeout_s=ASK_TIMEOUT_S))
        except (BusError, msgspec.MsgspecError):
            return None

    def _cancel(self, reason: CancelReason) -> "asyncio.Task[bool]":
        """Ask for the cancellation, once, in a task of the client's."""
        if self._cancelling is None:
            self._cancelling = self._client._spawn(self._cancel_until_durable(reason))
        return self._cancelling

    async def _cancel_until_durable(self, reason: CancelReason) -> bool:
        if self._submitting is not None:
            await asyncio.wait([self._submitting])  # What is being admitted has no id yet.
        if not self.request_id:
            return True
        subject = subjects.cancel(self._model, self._client.tenant)
        question = CancelRequest(request_id=self.request_id, reason=reason)
        until_s = time.monotonic() + CANCEL_TIMEOUT_S
        while time.monotonic() < until_s:
            answer = await self._ask(subject, question, _cancels)
            if answer is not None and answer.durable:
                return True
            await asyncio.sleep(CANCEL_AGAIN_S)
        log.warning("client_cancel_unconfirmed", request_id=self.request_id)
        return False


def _raised(error: ErrorData) -> HeadraceError:
    """``error`` as an exception; a code that this version does not know becomes ``internal_error``."""
    code = error.code if error.code in TABLE else "internal_error"
    return HeadraceError(code, error.message, param=error.param, retry_after_s=error.retry_after_s)


def _now_ms() -> int:
    return time.monotonic_ns() // 1_000_000
