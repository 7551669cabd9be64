"""One name of a worker on the bus: where its work, its orders and the questions for its frames arrive.

A name lasts as long as its process, or until an eviction. What arrives is handed on undecided.
"""

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

import msgspec
import structlog

from contracts import ids, subjects, topology
from contracts.bus import Bus, BusError, Incoming, PullConsumer, Subscription, unreadable
from contracts.messages.base import Codec
from contracts.messages.frames import FramesAnswer, FramesRequest
from worker.frame_buffer import KEEP_S, FrameBuffer

T = TypeVar("T")

ACK_WAIT_S = 6 * 3600.0
"""Beyond the longest attempt: while the worker lives a repeated delivery tells it nothing."""
INACTIVE_S = 300.0
"""The server forgets the consumer of a dead name after this."""
RETRY_S = 0.5
EXPIRE_EVERY_S = 5.0

_log = structlog.get_logger()
_frames_request: Codec[FramesRequest] = Codec(FramesRequest)
_frames_answer: Codec[FramesAnswer] = Codec(FramesAnswer)


class Instance:
    """``open`` once, then ``close``. After ``abandon`` nothing of it reaches the bus any more.

    Its tasks run in ``tasks``, so that one that breaks ends the worker.
    """

    def __init__(
        self,
        bus: Bus,
        tasks: asyncio.TaskGroup,
        *,
        model: str,
        version: str,
        on_work: Callable[[Incoming], None],
        on_control: Callable[[Incoming], None],
        credit: Callable[[], int],
    ) -> None:
        self.name = ids.incarnation(bus.user)
        self.abandoned = False
        self.buffer = FrameBuffer(self.name, self._publish, max_payload=bus.session.max_payload, now=time.monotonic)
        self._bus = bus
        self._group = tasks
        self._work_subject = subjects.work(model, version, self.name)
        self._on_work = on_work
        self._on_control = on_control
        self._credit = credit
        self._puller: PullConsumer | None = None
        self._subscriptions: list[Subscription] = []
        self._tasks: set[asyncio.Task[None]] = set()

    async def open(self) -> None:
        """Listen for orders and questions, send frames, pull work; tries until the bus agrees."""
        for subject, handler in (
            (subjects.control(self.name), self._take_control),
            (subjects.frames_of(self.name), self._repair),
        ):
            self._subscriptions.append(await self._insist(self._bus.subscribe, subject, handler))
        for loop in (self.buffer.run(), self._expire()):
            self.spawn(loop)
        work = PullConsumer(
            self._bus.jetstream,
            topology.WORK,
            f"w-{self.name}",
            self._work_subject,
            self._take_work,
            ack_wait_s=ACK_WAIT_S,
            credit=self._credit_now,
            inactive_s=INACTIVE_S,
            recreate=True,  # after each reconnect, too: what was sent into the lost connection comes again
        )
        self._puller = await self._insist(work.start)

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run something that ends with this name at the latest."""
        task = self._group.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def notify(self) -> None:
        """The credit may have grown: pull again."""
        if self._puller:
            self._puller.notify()

    def abandon(self) -> None:
        """Send and hear nothing more, at once."""
        self.abandoned = True
        self.buffer.close()
        for task in self._tasks:
            task.cancel()

    async def retire(self) -> None:
        """Take no more work and orders; hand out frames for as long as somebody may miss some, then close."""
        self._credit = lambda: 0
        self._on_control = self._on_work = lambda incoming: None
        try:
            await asyncio.sleep(KEEP_S)
        finally:
            await self.close()

    async def close(self) -> None:
        """Abandon it, and give back what it has on the bus."""
        self.abandon()
        if self._tasks:
            await asyncio.wait(self._tasks)
        for opened in (self._puller, *self._subscriptions):
            if opened:
                with contextlib.suppress(BusError):
                    await opened.close()

    def _credit_now(self) -> int:
        return 0 if self.abandoned else self._credit()

    def _take_work(self, incoming: Incoming) -> None:
        if not self.abandoned:
            self._on_work(incoming)

    def _take_control(self, incoming: Incoming) -> None:
        if not self.abandoned:
            self._on_control(incoming)

    async def _publish(self, subject: str, data: bytes) -> None:
        """While the bus is away nothing is sent: who misses frames asks for them."""
        if self._bus.connected:
            try:
                await self._bus.publish(subject, data)
            except BusError as error:
                _log.warning("frames_not_sent", worker=self.name, reason=str(error))

    def _repair(self, incoming: Incoming) -> None:
        try:
            tenant = subjects.tenant_of_last_token(incoming.subject)
            request = _frames_request.decode(incoming.data)
        except (subjects.InvalidName, msgspec.MsgspecError) as error:
            unreadable("frames_request_undecodable", incoming, error)
            return
        with contextlib.suppress(BusError):  # who asked asks again
            incoming.respond(_frames_answer.encode(self.buffer.read(tenant, request)))

    async def _expire(self) -> None:
        while True:
            await asyncio.sleep(EXPIRE_EVERY_S)
            self.buffer.expire()

    async def _insist(self, call: Callable[..., Awaitable[T]], *arguments: Any, **options: Any) -> T:
        while True:
            try:
                return await call(*arguments, **options)
            except BusError as error:
                _log.warning("bus_refused", worker=self.name, call=call.__name__, reason=str(error))
                await asyncio.sleep(RETRY_S)
