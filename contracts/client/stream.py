"""One request of a client's: submitted with retries, read with ``async for``, cancelled when its reader leaves.

Admission is decided by the gateway that answers ``submit``; order, repair and ends by contracts.streaming.relay.
"""

import asyncio
import contextlib
import itertools
import time
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from dataclasses import dataclass, field
from types import TracebackType
from typing import Generic, Self, TypeVar

import msgspec

from contracts import subjects
from contracts.bus import Bus, BusError, NoResponder, TooLarge
from contracts.client.answers import ApiObject
from contracts.errors import TABLE, HeadraceError
from contracts.messages.base import Codec
from contracts.messages.control import CancelReason
from contracts.messages.frames import EndData, ErrorData
from contracts.messages.request import SubmitAnswer, SubmitRequest
from contracts.streaming.relay import Relay
from contracts.streaming.subscriber import RelayedStream, Subscriber

A = TypeVar("A", bound=ApiObject)

SUBMIT_TIMEOUT_S = 30.0
"""Longer than a gateway takes for the largest body; its own bounds are shorter."""
RETRY_WAIT_S_MAX = 60
"""A refusal that asks for a longer pause is given to the caller at once."""
RETRY_WAIT_S = 1
"""Pause where an answer names none."""
CANCEL_WAIT_S = 10.0
"""How long ``ClientStream.cancel`` waits for the confirmation. The cancel itself goes on (subscriber.CANCEL_S_MAX)."""
UNREAD_BYTES_MAX = 16 << 20
"""What a stream's reader may be behind; then the stream fails as ``slow_reader``."""

_RETRIED = (429, 503, 529)

_submit_answer_of = Codec[SubmitAnswer](SubmitAnswer).decode
_encode = msgspec.json.Encoder().encode


@dataclass(frozen=True, slots=True)
class Access:
    """What all streams of a connected client share."""

    bus: Bus
    subscriber: Subscriber
    tenant: str
    retries: int
    incarnation: str
    names: Iterator[int] = field(default_factory=lambda: itertools.count(1))

    def new_name(self) -> str:
        """Of a stream: no other one of the tenant's has it."""
        return f"{self.incarnation}-{next(self.names)}"


class ClientStream(RelayedStream, Generic[A]):
    """One request. Read it once with ``async for``, which raises HeadraceError when the request is refused or fails.

    Leaving the loop early, or cancelling its task, cancels the generation. ``async with`` does so at the end of its
    block, whoever still has the iterator.
    """

    def __init__(self, access: Access, request: SubmitRequest, kind: type[A], *, model: str, stream: bool) -> None:
        self._access = access
        self._request = request
        self._kind = kind
        self._stream = stream
        super().__init__(
            name=request.reply.stream, request_id="", model=model, tenant=access.tenant, relay=self._new_relay()
        )
        self.idempotency_key = request.idempotency_key
        self.usage: EndData | None = None
        """Set at the end: outcome, finish reason and token counts, as the ledger holds them."""
        self._begun = False
        self._in_doubt = False
        """A try got no answer: something may run that nobody here has heard of."""
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
        else:
            await asyncio.wait([self._submitting])  # What is being admitted has no id yet.
        if self._ended:
            return
        cancelling = self._access.subscriber.cancel(self, "client_cancelled", for_all=True)
        await asyncio.wait([cancelling], timeout=CANCEL_WAIT_S)
        if not cancelling.done() or cancelling.cancelled() or not cancelling.result():
            raise HeadraceError("unavailable", "The cancellation was not confirmed in time.")

    async def whole(self) -> A:
        """The one answer of a request that does not stream."""
        answers = [answer async for answer in self]
        return answers[0]  # The relay forwards exactly one, or the iteration raises.

    async def _read(self) -> AsyncGenerator[A, None]:
        try:
            if not self._ended:
                self._access.subscriber.open(self)
                self._submitting = self._access.subscriber.spawn(self._submit())
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
            if self.request_id:  # Else ``_submit`` cancels what is admitted.
                self._cancel("client_cancelled")

    def _end(self, error: HeadraceError | None) -> None:
        if self._ended:
            return
        self._ended = True
        self._error = error
        self._access.subscriber.leave(self)
        self._news.set()

    def _cancel(self, reason: CancelReason) -> asyncio.Task[bool]:
        if self._cancelling is None:
            self._cancelling = self._access.subscriber.cancel(self, reason)
        return self._cancelling

    def _cancel_if_unwanted(self) -> None:
        """What happened before the request had an id: its reader left, or its first frames ended the stream."""
        if self._error is not None:
            self._cancel("slow_reader" if self._error.code == "slow_reader" else "relay_failed")
        elif self._left.is_set():
            self._cancel("client_cancelled")

    def _new_relay(self) -> Relay:
        return Relay(stream=self._stream, now_ms=int(time.monotonic() * 1000))

    async def _submit(self) -> None:
        """Ask any gateway until admitted, within the bounds of retrying; never raises."""
        began = time.monotonic()
        deadline_ms = self._request.deadline_ms
        for tries_left in range(self._access.retries, -1, -1):
            left_ms = None if deadline_ms is None else deadline_ms - int((time.monotonic() - began) * 1000)
            if tries_left < self._access.retries:
                self._begin_anew()
            error, may_retry = await self._try(left_ms)
            if error is None:
                self._cancel_if_unwanted()
                return
            pause_s = error.retry_after_s if error.retry_after_s is not None else RETRY_WAIT_S
            too_long = pause_s > RETRY_WAIT_S_MAX or (left_ms is not None and pause_s * 1000 >= left_ms)
            if not may_retry or too_long or not tries_left:
                break
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._left.wait(), pause_s)
                error = None
                break
        if self._in_doubt:
            self._cancel("client_cancelled")
        self._end(error)

    def _begin_anew(self) -> None:
        """Under a new name: what an earlier try left behind, and still sends, is not read."""
        self._access.subscriber.leave(self)
        self._unread.clear()
        self._unread_bytes = 0
        self._ended, self._error, self.usage = False, None, None
        self.name, self.relay = self._access.new_name(), self._new_relay()
        self._access.subscriber.open(self)

    async def _try(self, deadline_ms: int | None) -> tuple[HeadraceError | None, bool]:
        """One submission: the refusal, None when admitted, and whether another try may help."""
        reply = msgspec.structs.replace(self._request.reply, stream=self.name)
        request = _encode(msgspec.structs.replace(self._request, deadline_ms=deadline_ms, reply=reply))
        try:
            subject = subjects.submit(self.tenant, self.model)
            answer = _submit_answer_of(await self._access.bus.request(subject, request, timeout_s=SUBMIT_TIMEOUT_S))
        except subjects.InvalidName as error:
            return HeadraceError("model_not_found", f"No model can have this name: {error}", param="model"), False
        except TooLarge as error:
            return HeadraceError("request_too_large", f"The request does not fit a message: {error}"), False
        except NoResponder as error:
            return HeadraceError("unavailable", f"No gateway can be reached: {error}"), True
        except (BusError, msgspec.MsgspecError) as error:
            # It may have been admitted: another try under the same key joins it.
            self._in_doubt = True
            return HeadraceError("unavailable", f"No gateway answered: {error}"), True
        if answer.admitted:
            self._in_doubt = False
            self.model = answer.model or self.model
            if answer.joined:
                self._access.subscriber.join(self, answer.request_id, streamed=self._stream)
            else:
                self.request_id = answer.request_id
            return None, False
        refusal = _raised(answer.error or ErrorData(code="internal_error", message="Refused without a reason."))
        status = answer.status if answer.status >= 400 else refusal.status
        return refusal, status in _RETRIED

    def on_chunk(self, data: msgspec.Raw | bytes, now: float) -> bool:
        chunk = bytes(data)
        if self._unread and self._unread_bytes + len(chunk) > UNREAD_BYTES_MAX:
            return False
        self._unread.append(chunk)
        self._unread_bytes += len(chunk)
        self._news.set()
        return True

    def on_end(self, end: EndData) -> None:
        self.usage = end
        cancelled = end.outcome == "cancelled" and not self._left.is_set()
        self._end(HeadraceError("cancelled", "The request was cancelled.") if cancelled else None)

    def on_error(self, error: ErrorData) -> None:
        wanted = error.code == "cancelled" and self._left.is_set()
        self._end(None if wanted else _raised(error))


def _raised(error: ErrorData) -> HeadraceError:
    """``error`` as an exception; a code that this version does not know becomes ``internal_error``."""
    code = error.code if error.code in TABLE else "internal_error"
    return HeadraceError(code, error.message, param=error.param, retry_after_s=error.retry_after_s)
