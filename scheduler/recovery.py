"""Reads a model's REQUESTS, WORK and ATTEMPTS for its owner: first all that they hold, then what is added.

Decides in which order a new owner reads, from when on, and when it may open; what is made of it is the core's
(``core.takeover``).
"""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from typing import TypeVar

import msgspec
import structlog

from contracts import subjects, topology
from contracts.bus import Bus, BusError, Incoming, OrderedConsumer, PullConsumer, unreadable
from contracts.messages.base import NOTHING, Codec
from scheduler.core import events, idempotency
from scheduler.core.core import Core
from scheduler.effects import ENVELOPE, WORK_ITEM, Effects
from scheduler.lease import Lease

M = TypeVar("M")

log = structlog.get_logger()

ACK_WAIT_S = 2 * 3600.0
"""Beyond the longest deadline: a request stays with its owner until it is dispatched or settled."""
CREDIT = 512
"""Messages of REQUESTS asked for at once."""
HEARD_WITHIN_S = 1.2
"""After a takeover: time in which every live worker and stream owner has sent two heartbeats."""
ACKNOWLEDGED_EVERY_S = 0.1
"""Period of the look whether all workers know the epoch."""
SWEEP_EVERY_S = 60.0
"""Period of the comparison with WORK and BODIES: a worker's lost acknowledgement, a late publish, an end that was not
told, a gateway that died between a body and its request."""
STANDSTILL_S = 30.0
"""A stream that gives nothing new for so long while it is read has been given up."""
REPLAY_MS = idempotency.KEPT_MS + 10_000
"""Ends read back at a takeover, for idempotency keys and for the token buckets (a minute); with some delay."""
CLOCKS_APART_MS = 5_000
"""What an owner's time and the bus's may have come to differ: a request's ends are stored after its admission."""


def decoded(codec: Codec[M], message: Incoming, event: str) -> M | None:
    """The message; None when nobody can read it, which is counted and told as ``event``."""
    try:
        return codec.decode(message.data)
    except msgspec.MsgspecError as error:
        unreadable(event, message, error, seq=message.stream_seq)
        return None


class Recovery:
    """The streams of one model during one term."""

    def __init__(
        self, bus: Bus, lease: Lease, core: Core, effects: Effects, feed: Callable[[events.Event], None]
    ) -> None:
        self._bus = bus
        self._lease = lease
        self._core = core
        self._effects = effects
        self._feed = feed
        self._requests = subjects.requests_of(core.model)
        self._work = subjects.work_of(core.model)
        self._attempts = subjects.attempts_of(core.model)
        self._last_request_seq = 0
        self._last_attempt_seq = 0
        self._attempts_from_ms = 0
        self._fresh = False
        self._unneeded_bodies: set[str] = set()
        """At the last look."""

    async def read(self, stack: AsyncExitStack) -> None:
        """Feed the core what the streams hold; what is added follows until ``stack`` closes.

        Raises BusError, and TimeoutError when a stream stands still.
        """
        work, oldest = await self._find_work()
        async for message in self._bus.jetstream.read(topology.REQUESTS, self._requests):
            oldest.append(message.stored_at_ms)
            break
        self._attempts_from_ms = min([*oldest, self._lease.clock.now_ms() - REPLAY_MS])
        attempts = OrderedConsumer(
            self._bus.jetstream, topology.ATTEMPTS, self._attempts, self._on_attempt, start_at_ms=self._attempts_from_ms
        )
        await attempts.start()
        stack.push_async_callback(attempts.close)
        await self._catch_up()
        for event in work:
            self._feed(event)
        requests = PullConsumer(
            self._bus.jetstream,
            topology.REQUESTS,
            f"sched-{subjects.encode(self._core.model)}",
            self._requests,
            self._on_request,
            ack_wait_s=ACK_WAIT_S,
            credit=lambda: CREDIT if self._lease.held else 0,  # A deposed owner must not take the next one's messages.
            recreate=True,
        )
        await requests.start()
        stack.push_async_callback(requests.close)
        await self._until(self._requests_read, lambda: self._last_request_seq)
        self._fresh = not oldest and self._last_attempt_seq == 0

    async def open(self) -> None:
        """Let the core dispatch: at once on an empty system, else when every live worker knows the epoch."""
        if not self._fresh:
            await asyncio.sleep(HEARD_WITHIN_S)
            while self._core.pool.unacknowledged():  # noqa: ASYNC110
                await asyncio.sleep(ACKNOWLEDGED_EVERY_S)
            await self._read_work()  # What the owner before us stored while it did not know better.
            await self._catch_up()  # What left WORK meanwhile has ended.
        self._feed(events.Recovered())

    async def sweep(self) -> None:
        """Compare the core with all of WORK and BODIES from time to time, until cancelled."""
        while True:
            await asyncio.sleep(SWEEP_EVERY_S)
            try:
                _, newest = await self._bus.jetstream.stream_state(topology.WORK)
                found = await self._read_work()
                self._feed(events.WorkSwept(found, newest))
                await self._sweep_bodies()
            except BusError as error:
                log.warning("not_swept", model=self._core.model, reason=str(error))

    async def _sweep_bodies(self) -> None:
        """Delete those whose request was not open at two looks: its upload came to nothing, or its owner died.

        Between the looks lies more than a body's upload and its request's storing may take.
        """
        found = await self._bus.objects.subjects(topology.BODIES, subjects.bodies_of(self._core.model))
        if self._core.recovering:
            return
        unneeded = {body for body in found if subjects.request_of_body(body) not in self._core.requests}
        abandoned, self._unneeded_bodies = unneeded & self._unneeded_bodies, unneeded
        for body in abandoned:
            log.warning("body_abandoned", model=self._core.model, request_id=subjects.request_of_body(body))
            await self._effects.delete_body(body)

    async def _find_work(self) -> tuple[list[events.WorkFound], list[int]]:
        """What WORK holds, and instants from which on ends in ATTEMPTS count."""
        work: list[events.WorkFound] = []
        oldest: list[int] = []
        async for message in self._bus.jetstream.read(topology.WORK, self._work):
            oldest.append(message.stored_at_ms)
            if (event := self._work_found(message)) is not None:
                work.append(event)
                if event.item.attempt > 1:  # The ends of the attempts before it count, too.
                    oldest.append(event.item.request.admitted_at_ms - CLOCKS_APART_MS)
        return work, oldest

    async def _read_work(self) -> frozenset[int]:
        """Feed the core all of WORK; gives the sequences."""
        found = []
        async for message in self._bus.jetstream.read(topology.WORK, self._work):
            found.append(message.stream_seq)
            if (event := self._work_found(message)) is not None:
                self._feed(event)
        return frozenset(found)

    def _work_found(self, message: Incoming) -> events.WorkFound | None:
        """The message without its body; None when nobody can read it, and then it is dropped."""
        item = decoded(WORK_ITEM, message, "work_undecodable")
        if item is None:
            self._effects.spawn(self._effects.delete(topology.WORK, message.stream_seq))
            return None
        request = msgspec.structs.replace(item.request, body=NOTHING)
        return events.WorkFound(msgspec.structs.replace(item, request=request), message.stream_seq)

    async def _on_request(self, message: Incoming) -> None:
        # Awaited, so in a later turn: a cancel that was read with it comes before it, and it never runs.
        self._last_request_seq = max(self._last_request_seq, message.stream_seq)
        envelope = decoded(ENVELOPE, message, "request_undecodable")
        if envelope is None:
            self._effects.spawn(self._effects.delete(topology.REQUESTS, message.stream_seq))
            return
        self._effects.bodies.add(message, envelope.body)
        bodiless = msgspec.structs.replace(envelope, body=NOTHING)
        self._feed(events.RequestStored(bodiless, message.stream_seq, message.stored_at_ms))

    def _on_attempt(self, message: Incoming) -> None:
        self._last_attempt_seq = max(self._last_attempt_seq, message.stream_seq)
        self._effects.tell_end(message, in_order=True)

    async def _catch_up(self) -> None:
        """Wait until every end that is stored by now has been fed."""
        await self._until(self._attempts_read, lambda: self._last_attempt_seq)

    async def _requests_read(self) -> bool:
        """Whether all of REQUESTS has been fed; what the owner before us acknowledges meanwhile is gone."""
        newest = await self._bus.jetstream.last(topology.REQUESTS, self._requests)
        return newest is None or self._last_request_seq >= newest.stream_seq

    async def _attempts_read(self) -> bool:
        newest = await self._bus.jetstream.last(topology.ATTEMPTS, self._attempts)
        if newest is None or newest.stored_at_ms < self._attempts_from_ms:
            return True
        return self._last_attempt_seq >= newest.stream_seq

    async def _until(self, reached: Callable[[], Awaitable[bool]], progress: Callable[[], int]) -> None:
        """Wait for a stream to be read; raises TimeoutError when that stands still."""
        at = progress()
        while True:
            try:
                async with asyncio.timeout(STANDSTILL_S):
                    while not await reached():  # noqa: ASYNC110
                        await asyncio.sleep(0.005)
                return
            except TimeoutError:
                if progress() == at:
                    raise
                at = progress()
