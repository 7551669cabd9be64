"""Follows one request on the bus: what REQUESTS, WORK, ATTEMPTS, heartbeats and gateways tell of it, and the ledger.

Only an operator may: it hears what everybody publishes. Of messages that hold bodies only those of the request are
decoded, and no body is looked at.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import suppress

import msgspec

from compose.stack import records
from compose.stack.data_dir import ComposeError
from compose.watch.life import Life, Step
from contracts import clock, operations, subjects, topology
from contracts.bus import Bus, BusError, Incoming, Subscription
from contracts.bus.jetstream import rfc3339_ns
from contracts.errors import HeadraceError
from contracts.messages.attempts import AttemptEvent
from contracts.messages.base import Codec
from contracts.messages.control import StatusAnswer, StatusRequest, WorkerHeartbeat
from contracts.messages.deliveries import Deliveries, Delivery
from contracts.messages.request import RequestEnvelope, WorkItem
from contracts.messages.usage import RequestTimes
from ledger.core import phases, rows

UNKNOWN_S = 10.0
"""So long one is awaited that nobody knows yet: its caller named it before it came."""
ASK_S = 1.0
"""Between questions to its owner."""
SILENCE_S = 60.0
"""Nothing heard of it, and its owner does not know it: then it is out of sight."""
GATEWAY_S = 3.0
"""For a gateway's word after its end: it is told once a second."""

_envelope = Codec[RequestEnvelope](RequestEnvelope)
_item = Codec[WorkItem](WorkItem)
_event = Codec[AttemptEvent](AttemptEvent)
_beat = Codec[WorkerHeartbeat](WorkerHeartbeat)
_told = Codec[Deliveries](Deliveries)
_status = Codec[StatusRequest](StatusRequest)
_status_answer = Codec[StatusAnswer](StatusAnswer)


class NotFound(ComposeError):
    """Nobody knows the request."""


class Follower:
    """One request, by any id that its caller saw: our own, that in an answer's body, or the caller's own."""

    def __init__(self, bus: Bus, asked: str) -> None:
        self._bus = bus
        self._life = Life()
        self._own = rows.request_id_at_the_end(asked)
        self._named = asked
        self._heard: asyncio.Queue[Iterator[Step]] = asyncio.Queue(maxsize=10_000)
        self._delivery: Delivery | None = None
        self._subscriptions: list[Subscription] = []
        self._ahead_ms = 0
        """Of the bus's clock before this host's."""

    async def told(self) -> AsyncIterator[Step]:
        """What is known now. Raises NotFound."""
        await self._look_at_the_clock()
        async for step in self._known():
            yield step
        life = self._life
        if not life.request_id:
            async for step in self._from_the_ledger():
                yield step
        elif life.events and await self._is_over():
            for step in life.finish(await self._times(), self._now_ms()):
                yield step
        else:
            with suppress(BusError, HeadraceError):
                for beat in (await operations.queue(self._bus, life.model)).workers:
                    for step in life.progressed(beat, self._now_ms()):
                        yield step

    async def follow(self) -> AsyncIterator[Step]:
        """What is known now, and then what comes, until its end. Raises NotFound."""
        try:
            await self._look_at_the_clock()
            await self._listen("req.v1.>", self._on_request)
            await self._listen("work.v1.>", self._on_work)
            await self._listen(subjects.DELIVERIES, self._on_deliveries)
            async for step in self._known():
                yield step
            if not self._life.request_id:
                with suppress(NotFound):
                    async for step in self._from_the_ledger():
                        yield step
                    return
                async for step in self._first():
                    yield step
            if not self._life.ended:
                async for step in self._to_the_end():
                    yield step
            if self._life.ended and self._life.events:
                for step in self._life.finish(await self._times(), self._now_ms()):
                    yield step
        finally:
            for subscription in self._subscriptions:
                with suppress(BusError):
                    await subscription.close()

    async def _look_at_the_clock(self) -> None:
        """The server's answers tell the bus's time."""
        answer = await self._bus.jetstream.api(f"STREAM.INFO.{topology.ATTEMPTS}")
        if now := answer.get("ts"):
            self._ahead_ms = rfc3339_ns(now) // 1_000_000 - clock.now_ms()

    def _now_ms(self) -> int:
        return clock.now_ms() + self._ahead_ms

    # What is stored ---------------------------------------------------------------------------------------------

    async def _known(self) -> AsyncIterator[Step]:
        """What the streams hold. REQUESTS first: what is dispatched meanwhile is in WORK before it leaves there."""
        queued = [each async for each in self._stored(topology.REQUESTS, "req.v1.>")]
        working = [each async for each in self._stored(topology.WORK, "work.v1.>")]
        envelopes = [(_envelope.decode(each.data), each.stored_at_ms) for each in queued]
        items = [_item.decode(each.data) for each in working]
        ids = [each.request_id for each in (*(one for one, _ in envelopes), *(item.request for item in items))]
        newest = max((each for each in ids), default="")  # A caller may have given an id twice.
        for envelope, stored_at_ms in envelopes:
            if envelope.request_id == newest:
                for step in self._life.queued(envelope, stored_at_ms):
                    yield step
        for item in items:
            if item.request.request_id == newest:
                for step in self._life.dispatched(item):
                    yield step
        async for step in self._ends():
            yield step

    async def _stored(self, stream: str, subject: str) -> AsyncIterator[Incoming]:
        async for message in self._bus.jetstream.read(stream, subject):
            if self._may_be_it(message):
                work = stream == topology.WORK
                if self._is_it(_item.decode(message.data).request if work else _envelope.decode(message.data)):
                    yield message

    async def _ends(self) -> AsyncIterator[Step]:
        if request_id := self._life.request_id or self._own:
            subject = subjects.attempts_of_request(request_id)
            found = [_event.decode(each.data) async for each in self._bus.jetstream.read(topology.ATTEMPTS, subject)]
            for event in sorted(found, key=lambda each: each.attempt):
                for step in self._life.attempt_ended(event):
                    yield step

    async def _from_the_ledger(self) -> AsyncIterator[Step]:
        """One that the bus holds no longer, or never held. Raises NotFound."""
        try:
            answer = await records.explain(self._bus, self._named)
        except (ComposeError, BusError) as error:
            raise NotFound(f"the bus knows nothing of {self._named}; {error}") from error
        for event in answer.attempts:
            for step in self._life.attempt_ended(event):
                yield step
        if answer.times is not None:
            for step in self._life.finish(answer.times, self._now_ms()):
                yield step

    async def _is_over(self) -> bool:
        """Whether no attempt follows those whose ends are known: its owner says so, where they themselves do not."""
        life = self._life
        if not life.ended:
            question = _status.encode(StatusRequest(request_id=life.request_id))
            with suppress(BusError):
                data = await self._bus.request(subjects.status(life.model, life.tenant), question)
                if _status_answer.decode(data).state == "ended":
                    life.told_ended()
        return life.ended

    async def _times(self) -> RequestTimes:
        """Where its time went: by the gateway's word where that was heard, else as the ledger has it."""
        events = [self._life.events[number] for number in sorted(self._life.events)]
        if self._delivery is None:
            with suppress(ComposeError, BusError):
                answer = await records.explain(self._bus, self._life.request_id)
                if answer.times is not None and len(answer.attempts) == len(events):
                    return answer.times
        return phases.times(events, self._delivery)

    # What is heard ----------------------------------------------------------------------------------------------

    async def _first(self) -> AsyncIterator[Step]:
        """Wait for one that nobody knows yet: it comes, or is refused."""
        deadline = time.monotonic() + UNKNOWN_S
        while not self._life.request_id:
            if (left := deadline - time.monotonic()) <= 0:
                raise NotFound(f"neither the bus nor the ledger knows {self._named}, and it did not come")
            for step in await self._next(left):
                yield step
            if self._delivery is not None:
                self._life.ended = True
                for step in self._life.finish(phases.times([], self._delivery), self._now_ms()):
                    yield step

    async def _to_the_end(self) -> AsyncIterator[Step]:
        life = self._life
        await self._listen(subjects.attempts_of_request(life.request_id), self._on_attempt)
        await self._listen(subjects.worker_heartbeats_of(life.model), self._on_beat)
        async for step in self._ends():  # What ended before we listened.
            yield step
        heard_at = asked_at = time.monotonic()
        while not life.ended:
            for step in await self._next(ASK_S):
                heard_at = time.monotonic()
                yield step
            if time.monotonic() - asked_at < ASK_S:
                continue
            asked_at = time.monotonic()
            if await self._is_over():
                async for step in self._ends():
                    yield step
            elif asked_at - heard_at > SILENCE_S:
                yield life.lost_sight(self._now_ms())
                return
        deadline = time.monotonic() + (GATEWAY_S if subjects.is_gateway(life.stream_owner) else 0)
        while self._delivery is None and (left := deadline - time.monotonic()) > 0:
            await self._next(left)

    async def _next(self, within_s: float) -> Iterator[Step]:
        with suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                return await self._heard.get()
        return iter(())

    async def _listen(self, subject: str, take: Callable[[Incoming], Iterator[Step]]) -> None:
        def hear(message: Incoming) -> None:
            if self._may_be_it(message):
                with suppress(asyncio.QueueFull):
                    self._heard.put_nowait(take(message))

        self._subscriptions.append(await self._bus.subscribe(subject, hear))

    def _may_be_it(self, message: Incoming) -> bool:
        """Told from its bytes: most messages are others'."""
        known = self._life.request_id or self._own or self._named
        return msgspec.json.encode(known)[1:-1] in message.data

    def _is_it(self, request: RequestEnvelope | Delivery) -> bool:
        if known := self._life.request_id or self._own:
            return request.request_id == known
        return request.client_request_id == self._named

    def _on_request(self, message: Incoming) -> Iterator[Step]:
        if self._is_it(envelope := _envelope.decode(message.data)):
            yield from self._life.queued(envelope, self._now_ms())

    def _on_work(self, message: Incoming) -> Iterator[Step]:
        if self._is_it((item := _item.decode(message.data)).request):
            yield from self._life.dispatched(item)

    def _on_attempt(self, message: Incoming) -> Iterator[Step]:
        yield from self._life.attempt_ended(_event.decode(message.data))

    def _on_beat(self, message: Incoming) -> Iterator[Step]:
        yield from self._life.progressed(_beat.decode(message.data), self._now_ms())

    def _on_deliveries(self, message: Incoming) -> Iterator[Step]:
        for each in _told.decode(message.data).deliveries:
            if self._is_it(each):
                self._delivery = each
        return iter(())
