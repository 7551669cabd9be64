"""One model during one term of ownership: what comes in, when time passes, when the term is over."""

import asyncio
import time
from contextlib import AsyncExitStack
from typing import Any

import msgspec
import structlog

from contracts import ids, subjects
from contracts.bus import Bus, BusError, Incoming
from contracts.clock import now_ms
from contracts.messages.admission import AdmissionRequest
from contracts.messages.base import Codec
from contracts.messages.control import (
    SERVICE_FAULTS,
    CacheChange,
    CancelRequest,
    LoopbackHeartbeat,
    StatusRequest,
    StreamOwnerHeartbeat,
    WorkerHeartbeat,
    WorkerPulse,
)
from contracts.messages.queues import QueueQuery
from contracts.messages.records import ModelRecord
from contracts.service.vitals import Vitals
from contracts.ticks import next_tick_s, tick
from scheduler.config import SchedulerConfig
from scheduler.core import events, views
from scheduler.core.core import Core
from scheduler.core.settings import Settings
from scheduler.effects import Effects
from scheduler.lease import Lease
from scheduler.recovery import Recovery, decoded

log = structlog.get_logger()

_admission: Codec[AdmissionRequest] = Codec(AdmissionRequest)
_cancel: Codec[CancelRequest] = Codec(CancelRequest)
_status: Codec[StatusRequest] = Codec(StatusRequest)
_queue_query: Codec[QueueQuery] = Codec(QueueQuery)
_worker_beat: Codec[WorkerHeartbeat] = Codec(WorkerHeartbeat)
_pulse: Codec[WorkerPulse] = Codec(WorkerPulse)
_cache_change: Codec[CacheChange] = Codec(CacheChange)
_loopback_beat: Codec[LoopbackHeartbeat] = Codec(LoopbackHeartbeat)
_stream_owner_beat: Codec[StreamOwnerHeartbeat] = Codec(StreamOwnerHeartbeat)
_encode = msgspec.json.Encoder().encode

TIME_EVERY_S = 0.1
"""Period of TimePassed: deadlines are met to a tenth of a second."""
TIME_IDLE_S = 0.5
"""Its period while there is no request: what is spent is told twice a second, and nothing is due more often."""


class Term:
    """``run`` serves from the taking of the lease until it is lost."""

    def __init__(
        self, bus: Bus, vitals: Vitals, config: SchedulerConfig, model: str, record: ModelRecord, lease: Lease
    ) -> None:
        self._bus = bus
        self._vitals = vitals
        self._config = config
        self._lease = lease
        self.core = Core(
            model=model,
            owner=ids.incarnation(bus.user),
            epoch=lease.epoch,
            record=record,
            settings=Settings(
                lost_after_beats=round(config.lost_after_s / config.heartbeat_s),
                given_up_ms=round(config.given_up_after_s * 1000),
            ),
            now_ms=lease.clock.now_ms(),
        )
        self._loopback = subjects.loopback_heartbeat(self.core.owner)
        self._effects = Effects(
            bus,
            lease,
            self.core,
            feed=self.feed,
            fail=self._fail,
            cache_bytes=config.body_cache_bytes,
            quarantine_key=config.quarantine_public_key,
        )
        self._recovery = Recovery(bus, lease, self.core, self._effects, self.feed)
        self._over = False
        self._finished = asyncio.Event()
        self._busy = asyncio.Event()
        """There are requests, or time has passed without any."""
        self._failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def run(self) -> None:
        """Serve until the lease is lost or a removed model's last request has ended.

        Raises BusError, TimeoutError when a stream stands still, what broke.
        """
        async with AsyncExitStack() as stack:
            stack.push_async_callback(self._effects.close)
            keeping = asyncio.create_task(self._vitals.run(self._keep_lease))
            serving = asyncio.create_task(self._serve(stack))
            finished = asyncio.create_task(self._finished.wait())
            try:
                waiting: set[asyncio.Future[Any]] = {keeping, serving, finished, self._failed}
                await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                for ended in (self._failed, serving):
                    if ended.done():
                        ended.result()
            finally:
                self._over = True
                for task in (keeping, serving, finished):
                    task.cancel()
                await asyncio.gather(keeping, serving, finished, return_exceptions=True)
                log.info("model_released", model=self.core.model)

    async def _keep_lease(self, bus: Bus) -> None:
        """In the thread of the signs of life: an owner that is late goes on owning."""
        given_up_ms = self._config.given_up_after_s * 1000
        await self._lease.keep(bus, lambda: self._vitals.lag_ms < given_up_ms)

    async def _serve(self, stack: AsyncExitStack) -> None:
        """Recover, then answer and keep time until cancelled."""
        model = self.core.model
        beats = await self._bus.subscribe(subjects.HEARTBEATS, self._on_heartbeat)
        stack.push_async_callback(beats.close)
        await self._recovery.read(stack)
        for subject, handler in (
            (subjects.admit(model), self._on_admission),
            (subjects.cancels_of(model), self._on_cancel),
            (subjects.statuses_of(model), self._on_status),
            (subjects.queues(model), self._on_queues),
        ):
            subscription = await self._bus.subscribe(subject, handler)
            stack.push_async_callback(subscription.close)
        log.info("model_owned", model=model, epoch=list(msgspec.structs.astuple(self.core.epoch)))
        try:
            async with asyncio.TaskGroup() as loops:
                for loop in (self._beat(), self._keep_time(), self._recovery.open(), self._recovery.sweep()):
                    loops.create_task(loop)
        except* (BusError, TimeoutError) as group:
            raise BusError(f"a loop of the term failed: {group.exceptions[0]!r}") from group

    def end(self) -> None:
        """Let the next one begin with what it reads."""
        self._finished.set()

    def feed(self, event: events.Event) -> None:
        """Step the core and start its effects; after the term neither."""
        if self._over or self._failed.done():
            return
        try:
            for effect in self.core.step(event, self._lease.clock.now_ms()):
                self._effects.perform(effect)
            if self.core.over:
                self._finished.set()
            if self.core.requests:
                self._busy.set()
        except Exception as error:
            self._fail(error)

    def _fail(self, error: Exception) -> None:
        """A bug, in the core or in an effect: the process ends, a standby takes over."""
        log.critical("term_broken", model=self.core.model, error=repr(error), exc_info=error)
        if not self._failed.done():
            self._failed.set_exception(error)

    # Without the lease nothing is answered: the next owner gets the same question, and knows better.

    def _on_admission(self, message: Incoming) -> None:
        asked = decoded(_admission, message, "admission_undecodable")
        if asked is not None and self._lease.held:
            self.feed(events.AdmissionAsked(asked, message))

    def _on_cancel(self, message: Incoming) -> None:
        asked = decoded(_cancel, message, "cancel_undecodable")
        if asked is not None and self._lease.held:
            if asked.reason in SERVICE_FAULTS and not subjects.is_gateway_cancel(message.subject):
                asked = msgspec.structs.replace(asked, reason="client_cancelled")  # Else nobody would have to pay.
            self.feed(events.CancelAsked(subjects.tenant_of_last_token(message.subject), asked, message))

    def _on_status(self, message: Incoming) -> None:
        asked = decoded(_status, message, "status_undecodable")
        if asked is not None and self._lease.held:
            tenant = subjects.tenant_of_last_token(message.subject)
            self.feed(
                events.StatusAsked(
                    tenant, asked.request_id, message, asked.reader, asked.stream_owner, asked.void_below
                )
            )

    def _on_queues(self, message: Incoming) -> None:
        asked = decoded(_queue_query, message, "queue_query_undecodable")
        if asked is not None and self._lease.held:
            self._effects.answer(message, _encode(views.queues(self.core, asked)))

    def _on_heartbeat(self, message: Incoming) -> None:
        kind, model = message.subject.split(".")[2:4]
        if message.subject == self._loopback:
            if (own := decoded(_loopback_beat, message, "heartbeat_undecodable")) is not None:
                self.feed(events.LoopbackSeen(own.sent_at_ms))
        elif kind == "worker" and model == subjects.encode(self.core.model):
            if (beat := decoded(_worker_beat, message, "heartbeat_undecodable")) is not None:
                self.feed(events.WorkerSeen(beat))
        elif kind == "pulse" and model == subjects.encode(self.core.model):
            if (pulse := decoded(_pulse, message, "heartbeat_undecodable")) is not None:
                self.feed(events.PulseSeen(pulse))
        elif kind == "cache" and model == subjects.encode(self.core.model):
            if (change := decoded(_cache_change, message, "heartbeat_undecodable")) is not None:
                self.feed(events.CacheChanged(change))
        elif message.subject.startswith(subjects.STREAM_OWNER_HEARTBEATS):
            owner = message.subject.removeprefix(subjects.STREAM_OWNER_HEARTBEATS)
            if (sign := decoded(_stream_owner_beat, message, "heartbeat_undecodable")) is not None:
                self.feed(events.StreamOwnerSeen(msgspec.structs.replace(sign, stream_owner=owner)))

    async def _beat(self) -> None:
        """Loopback heartbeats, by which the silence of others is counted."""
        number = 0
        while True:
            await tick(self._config.heartbeat_s)
            if not self._bus.connected:
                continue  # What waits for a reconnect would come as a burst: seconds of silence in no time.
            beat = LoopbackHeartbeat(observer=self.core.owner, number=number, sent_at_ms=now_ms())
            number += 1
            try:
                await self._bus.publish(self._loopback, _encode(beat))
            except BusError:
                continue  # Without it no time passes: nobody is lost meanwhile.

    async def _keep_time(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            if self.core.requests or self.core.recovering:
                await asyncio.sleep(TIME_EVERY_S)
            else:
                self._busy.clear()
                timer = loop.call_later(next_tick_s(TIME_IDLE_S, time.monotonic()), self._busy.set)
                await self._busy.wait()
                timer.cancel()
            self.feed(events.TimePassed())
