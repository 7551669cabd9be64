"""The scheduler's shell: holds leases, feeds the cores from the bus and performs their effects.

A process is a candidate for every model of the registry; for each one that it owns it runs a Term.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any, Protocol

import msgspec
import structlog

from contracts import ids, subjects, topology
from contracts.bus import Bus, BusError, Incoming, KvEntry, OrderedConsumer, PullConsumer, Unconfirmed, WrongSequence
from contracts.clock import now_ms
from contracts.messages.admission import AdmissionRequest
from contracts.messages.attempts import AttemptEvent, Quarantined
from contracts.messages.base import NOTHING, Codec
from contracts.messages.control import (
    CancelAttempt,
    CancelRequest,
    ControlAnswer,
    ControlRequest,
    LoopbackHeartbeat,
    StatusRequest,
    StreamOwnerHeartbeat,
    WorkerHeartbeat,
)
from contracts.messages.frames import ReplyMessage
from contracts.messages.records import Manifest, TenantRecord
from contracts.messages.request import RequestEnvelope, WorkItem
from scheduler.config import SchedulerConfig
from scheduler.core import events, views
from scheduler.core.core import Core
from scheduler.core.settings import Settings
from scheduler.lease import Lease
from scheduler.metrics import Collector

log = structlog.get_logger()

ADMISSION = Codec(AdmissionRequest)
ENVELOPE = Codec(RequestEnvelope)
WORK_ITEM = Codec(WorkItem)
ATTEMPT = Codec(AttemptEvent)
CANCEL = Codec(CancelRequest)
STATUS = Codec(StatusRequest)
WORKER_BEAT = Codec(WorkerHeartbeat)
STREAM_OWNER_BEAT = Codec(StreamOwnerHeartbeat)
CONTROL_ANSWER = Codec(ControlAnswer)
MANIFEST = Codec(Manifest)
TENANT = Codec(TenantRecord)
ENCODER = msgspec.json.Encoder()

ACK_WAIT_S = 2 * 3600.0
"""Beyond the longest deadline: a request stays with its owner until it is dispatched or over."""
LOOK_EVERY_S = 0.1
"""Period of TimePassed: deadlines are met to a tenth of a second."""
HEARD_WITHIN_S = 1.2
"""After a takeover: time in which every live worker and stream owner has sent two heartbeats."""
SWEEP_EVERY_S = 60.0
"""Period of the look for messages in WORK that nobody needs: a worker's lost acknowledgement, a late publish."""
STANDSTILL_S = 30.0
"""A stream that gives nothing new for so long while it is read has been given up."""
REPLAY_MS = 70_000
"""Ends read back at a takeover to fill the buckets: a bucket's minute, and some delay."""
CLOCKS_APART_MS = 5_000
"""What the clocks of schedulers and of the bus may differ: a request's ends are stored after its admission."""


class Term:
    """One model during one term of ownership."""

    def __init__(self, bus: Bus, config: SchedulerConfig, model: str, manifest: Manifest, lease: Lease) -> None:
        self.model = model
        self._bus = bus
        self._config = config
        self._lease = lease
        self._observer = f"{subjects.encode(model)}-{ids.incarnation('s')}"
        settings = Settings(lost_after_beats=round(config.lost_after_s / config.tick_s))
        self.core = Core(
            model=model,
            owner=self._observer,
            epoch=lease.epoch,
            manifest=manifest,
            settings=settings,
            now_ms=now_ms(),
        )
        self._requests: dict[int, Incoming] = {}
        """Messages of REQUESTS by sequence, as far as their bodies fit into memory."""
        self._requests_bytes = 0
        self._last_request_seq = 0
        self._last_attempt_seq = 0
        self._attempts_from_ms = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self._over = False
        self._failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    # -- the term ----------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Serve until the lease is lost; raises what broke the core."""
        async with AsyncExitStack() as stack:
            stack.push_async_callback(self._stop_tasks)
            keeping = asyncio.create_task(self._lease.keep())
            serving = asyncio.create_task(self._serve(stack))
            try:
                waiting: set[asyncio.Future[Any]] = {keeping, serving, self._failed}
                await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                for ended in (self._failed, serving):
                    if ended.done():
                        ended.result()
            finally:
                self._over = True
                for task in (keeping, serving):
                    task.cancel()
                await asyncio.gather(keeping, serving, return_exceptions=True)
                log.info("model_released", model=self.model)

    async def _serve(self, stack: AsyncExitStack) -> None:
        """Recover, then answer and keep time until cancelled."""
        fresh = await self._recover(stack)
        for subject, handler in (
            (subjects.admit(self.model), self._on_admission),
            (subjects.cancels_of(self.model), self._on_cancel),
            (subjects.statuses_of(self.model), self._on_status),
            (subjects.queues(self.model), self._on_queues),
        ):
            await stack.enter_async_context(_closing(await self._bus.subscribe(subject, handler)))
        log.info("model_owned", model=self.model, epoch=list(msgspec.structs.astuple(self.core.epoch)))
        try:
            async with asyncio.TaskGroup() as loops:
                for loop in (self._tick(), self._look(), self._open(fresh=fresh), self._sweep()):
                    loops.create_task(loop)
        except* (BusError, TimeoutError) as group:
            raise BusError(f"a loop of the term failed: {group.exceptions[0]!r}") from group

    def feed(self, event: events.Event) -> None:
        """Step the core and start its effects; a deposed owner does neither."""
        if self._over or self._failed.done():
            return
        try:
            for effect in self.core.step(event, now_ms()):
                self._perform(effect)
        except Exception as error:
            self._fail(error)

    def _fail(self, error: Exception) -> None:
        """A bug, in the core or in an effect: the process ends, a standby takes over."""
        log.critical("term_broken", model=self.model, error=repr(error), exc_info=error)
        if not self._failed.done():
            self._failed.set_exception(error)

    async def _stop_tasks(self) -> None:
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    # -- takeover ----------------------------------------------------------------------------------------

    async def _recover(self, stack: AsyncExitStack) -> bool:
        """Read what the streams hold; gives whether there was nothing at all."""
        await stack.enter_async_context(_closing(await self._bus.subscribe(subjects.HEARTBEATS, self._on_heartbeat)))
        work: list[events.WorkFound] = []
        oldest: list[int] = []
        async for message in self._bus.jetstream.read(topology.WORK, subjects.work_of(self.model)):
            oldest.append(message.stored_at_ms)
            if (event := self._work_found(message)) is not None:
                work.append(event)
                if event.item.attempt > 1:  # The ends of the attempts before it count, too.
                    oldest.append(event.item.request.admitted_at_ms - CLOCKS_APART_MS)
        async for message in self._bus.jetstream.read(topology.REQUESTS, subjects.requests_of(self.model)):
            oldest.append(message.stored_at_ms)
            break
        self._attempts_from_ms = min([*oldest, now_ms() - REPLAY_MS])
        await self._read_attempts(stack)
        for event in work:
            self.feed(event)
        requests = PullConsumer(
            self._bus.jetstream,
            topology.REQUESTS,
            f"sched-{subjects.encode(self.model)}",
            subjects.requests_of(self.model),
            self._on_request,
            ack_wait_s=ACK_WAIT_S,
            credit=lambda: 512 if self._lease.held else 0,  # A deposed owner must not take the next one's messages.
            recreate=True,
        )
        await requests.start()
        stack.push_async_callback(requests.close)
        await self._until(self._requests_read, lambda: self._last_request_seq)
        return not oldest and self._last_attempt_seq == 0

    async def _requests_read(self) -> bool:
        """Whether all of REQUESTS has been fed; what the owner before us acknowledges meanwhile is gone."""
        newest = await self._bus.jetstream.last(topology.REQUESTS, subjects.requests_of(self.model))
        return newest is None or self._last_request_seq >= newest.stream_seq

    async def _attempts_read(self) -> bool:
        newest = await self._bus.jetstream.last(topology.ATTEMPTS, subjects.attempts_of(self.model))
        known = newest is None or newest.stored_at_ms < self._attempts_from_ms
        return known or (newest is not None and self._last_attempt_seq >= newest.stream_seq)

    async def _read_attempts(self, stack: AsyncExitStack) -> None:
        attempts = OrderedConsumer(
            self._bus.jetstream,
            topology.ATTEMPTS,
            subjects.attempts_of(self.model),
            self._on_attempt,
            start_at_ms=self._attempts_from_ms,
        )
        await stack.enter_async_context(_closing(await attempts.start()))
        await self._catch_up()

    async def _catch_up(self) -> None:
        """Wait until every end that is stored by now has been fed."""
        await self._until(self._attempts_read, lambda: self._last_attempt_seq)

    async def _open(self, *, fresh: bool) -> None:
        """Begin to dispatch: at once on an empty system, else when every live worker knows the epoch."""
        if not fresh:
            await asyncio.sleep(HEARD_WITHIN_S)
            while self.core.pool.unacknowledged():  # noqa: ASYNC110
                await asyncio.sleep(LOOK_EVERY_S)
            await self._read_work()  # What the owner before us stored while it did not know better.
            await self._catch_up()  # What left WORK meanwhile has ended.
        self.feed(events.Recovered())

    async def _read_work(self) -> None:
        async for message in self._bus.jetstream.read(topology.WORK, subjects.work_of(self.model)):
            if (event := self._work_found(message)) is not None:
                self.feed(event)

    def _work_found(self, message: Incoming) -> events.WorkFound | None:
        """What WORK holds, without its body; None when it cannot be read, and then it is dropped."""
        try:
            item = WORK_ITEM.decode(message.data)
        except msgspec.MsgspecError as error:
            log.error("work_undecodable", subject=message.subject, seq=message.stream_seq, reason=str(error))
            self._spawn(self._drop(topology.WORK, message.stream_seq))
            return None
        request = msgspec.structs.replace(item.request, body=NOTHING)
        return events.WorkFound(msgspec.structs.replace(item, request=request), message.stream_seq)

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(SWEEP_EVERY_S)
            try:
                await self._read_work()
            except BusError as error:
                log.warning("work_not_swept", model=self.model, reason=str(error))

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

    # -- what comes in -----------------------------------------------------------------------------------

    def _on_admission(self, message: Incoming) -> None:
        if self._lease.held:
            self.feed(events.AdmissionAsked(ADMISSION.decode(message.data), message))

    def _on_cancel(self, message: Incoming) -> None:
        tenant = subjects.tenant_of_last_token(message.subject)
        self.feed(events.CancelAsked(tenant, CANCEL.decode(message.data), message))

    def _on_status(self, message: Incoming) -> None:
        tenant = subjects.tenant_of_last_token(message.subject)
        self.feed(events.StatusAsked(tenant, STATUS.decode(message.data).request_id, message))

    def _on_queues(self, message: Incoming) -> None:
        self._spawn(message.respond(ENCODER.encode(views.queues(self.core, now_ms()))))

    def _on_request(self, message: Incoming) -> None:
        self._last_request_seq = max(self._last_request_seq, message.stream_seq)
        try:
            envelope = ENVELOPE.decode(message.data)
        except msgspec.MsgspecError as error:
            log.error("request_undecodable", subject=message.subject, seq=message.stream_seq, reason=str(error))
            self._spawn(self._drop(topology.REQUESTS, message.stream_seq))
            return
        room = self._requests_bytes + len(message.data) <= self._config.body_cache_bytes
        if room and message.stream_seq not in self._requests:
            self._requests_bytes += len(message.data)
            self._requests[message.stream_seq] = message
        bodiless = msgspec.structs.replace(envelope, body=NOTHING)
        self.feed(events.RequestStored(bodiless, message.stream_seq, message.stored_at_ms))

    def _on_attempt(self, message: Incoming) -> None:
        self._last_attempt_seq = max(self._last_attempt_seq, message.stream_seq)
        try:
            event = ATTEMPT.decode(message.data)
        except msgspec.MsgspecError as error:
            log.error("attempt_undecodable", subject=message.subject, seq=message.stream_seq, reason=str(error))
            return
        self.feed(events.TerminalStored(event))

    def _on_heartbeat(self, message: Incoming) -> None:
        parts = message.subject.split(".")
        if parts[2] == "worker":
            if parts[3] == subjects.encode(self.model):
                self.feed(events.WorkerSeen(WORKER_BEAT.decode(message.data)))
        elif parts[2] == "stream-owner":
            owner = message.subject.removeprefix(subjects.STREAM_OWNER_HEARTBEATS)
            beat = STREAM_OWNER_BEAT.decode(message.data)
            self.feed(events.StreamOwnerSeen(msgspec.structs.replace(beat, stream_owner=owner)))
        elif message.subject == subjects.loopback_heartbeat(self._observer):
            self.feed(events.LoopbackSeen())

    async def _tick(self) -> None:
        number = 0
        while True:
            await asyncio.sleep(self._config.tick_s)
            if not self._bus.connected:
                continue  # What waits for a reconnect would come as a burst: seconds of silence in no time.
            tick = LoopbackHeartbeat(observer=self._observer, number=number)
            number += 1
            try:
                await self._bus.publish(subjects.loopback_heartbeat(self._observer), ENCODER.encode(tick))
            except BusError:
                continue  # No tick, no time: nobody is lost meanwhile.

    async def _look(self) -> None:
        while True:
            await asyncio.sleep(LOOK_EVERY_S)
            self.feed(events.TimePassed())

    # -- what is done ------------------------------------------------------------------------------------

    def _perform(self, effect: events.Effect) -> None:
        match effect:
            case events.AnswerAdmission(handle, answer) | events.AnswerCancel(handle, answer):
                self._spawn(handle.respond(ENCODER.encode(answer)))
            case events.AnswerStatus(handle, answer):
                self._spawn(handle.respond(ENCODER.encode(answer)))
            case events.StoreWork():
                self._spawn(self._store_work(effect))
            case events.StoreTerminal(event):
                self._spawn(self._store_terminal(event))
            case events.AckRequest(seq):
                self._spawn(self._ack_request(seq))
            case events.DeleteWork(seq):
                self._spawn(self._drop(topology.WORK, seq))
            case events.Quarantine():
                self._spawn(self._quarantine(effect))
            case events.SendControl(worker, order):
                self._spawn(self._send_control(worker, order))
            case events.SendFrame(subject, frame):
                message = ReplyMessage(epoch=self.core.epoch, frames=[frame])
                self._spawn(self._bus.publish(subject, ENCODER.encode(message)))
            case _:
                raise TypeError(f"unknown effect {effect!r}")

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(self._guard(work))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _guard(self, work: Coroutine[Any, Any, None]) -> None:
        try:
            await work
        except BusError as error:
            log.warning("effect_failed", model=self.model, reason=str(error))
        except Exception as error:
            self._fail(error)

    async def _store_work(self, effect: events.StoreWork) -> None:
        refused = events.WorkRefused(effect.request_id, effect.attempt)
        try:
            body = await self._body(effect)
        except BusError:
            self.feed(refused)
            return
        request = self.core.awaits_work(effect)
        if request is None or not self._lease.held:
            return
        if body is None:
            self.feed(events.WorkRefused(effect.request_id, effect.attempt, body_missing=True))
            return
        item = WorkItem(
            epoch=self.core.epoch,
            attempt=effect.attempt,
            version=effect.version,
            worker=effect.worker,
            dispatched_at_ms=now_ms(),
            request=msgspec.structs.replace(request.envelope, body=body),
        )
        try:
            stored = await self._bus.jetstream.store(
                subjects.work(self.model, effect.version, effect.worker),
                ENCODER.encode(item),
                msg_id=f"{effect.request_id}.{effect.attempt}.{effect.worker}",
            )
        except BusError as error:
            log.warning("work_not_stored", request_id=effect.request_id, attempt=effect.attempt, reason=str(error))
            self.feed(refused)
            return
        self.feed(events.WorkStored(effect.request_id, effect.attempt, stored.seq))

    async def _quarantine(self, effect: events.Quarantine) -> None:
        """Best effort: one that cannot be kept is removed all the same, since nobody may run it again."""
        envelope = effect.envelope
        try:
            body = await self._body(effect)
            request = msgspec.structs.replace(envelope, body=body if body is not None else NOTHING)
            kept = Quarantined(reason=effect.reason, quarantined_at_ms=now_ms(), request=request, last=effect.last)
            await self._bus.jetstream.store(
                subjects.quarantine(self.model, envelope.request_id), ENCODER.encode(kept), msg_id=envelope.request_id
            )
            log.error("request_quarantined", request_id=envelope.request_id, tenant=envelope.tenant, model=self.model)
        except BusError as error:
            log.error("request_not_kept", request_id=envelope.request_id, reason=str(error))
        if effect.request_seq:
            await self._ack_request(effect.request_seq)
        if effect.work_seq:
            await self._drop(topology.WORK, effect.work_seq)

    async def _body(self, effect: events.StoreWork | events.Quarantine) -> msgspec.Raw | None:
        if effect.request_seq:
            message = self._requests.get(effect.request_seq)
            if message is None:
                message = await self._bus.jetstream.get(topology.REQUESTS, effect.request_seq)
            if message is not None:
                return ENVELOPE.decode(message.data).body
        if effect.work_seq:
            message = await self._bus.jetstream.get(topology.WORK, effect.work_seq)
            if message is not None:
                return WORK_ITEM.decode(message.data).request.body
        return None

    async def _store_terminal(self, event: AttemptEvent) -> None:
        """Until some terminal event is stored; which one won comes back from ATTEMPTS."""
        subject = subjects.attempt(self.model, event.request_id, event.attempt)
        if (seq := self.core.may_have_been_pulled(event)) and await self._was_pulled(event.worker, seq):
            event = msgspec.structs.replace(event, engine_death=True)
        data = ENCODER.encode(event)
        while self._lease.held:
            try:
                await self._bus.jetstream.store(
                    subject, data, msg_id=f"{event.request_id}.{event.attempt}.scheduler", expect_last=0
                )
                log.info(
                    "attempt_ended_by_scheduler",
                    request_id=event.request_id,
                    attempt=event.attempt,
                    tenant=event.tenant,
                    model=event.model,
                    outcome=event.outcome,
                    code=event.error_code,
                )
                return
            except WrongSequence:
                return
            except Unconfirmed:
                continue
            except BusError as error:
                log.warning("terminal_not_stored", request_id=event.request_id, reason=str(error))
                await asyncio.sleep(0.5)

    async def _was_pulled(self, worker: str, work_seq: int) -> bool:
        """Whether the server had delivered the message to a worker that died before its next heartbeat."""
        try:
            info = await self._bus.jetstream.api(f"CONSUMER.INFO.{topology.WORK}.w-{worker}")
        except BusError:
            return False
        return int(info["delivered"]["stream_seq"]) >= work_seq

    async def _ack_request(self, seq: int) -> None:
        message = self._requests.pop(seq, None)
        if message is not None:
            self._requests_bytes -= len(message.data)
            if await message.ack():
                return
        await self._drop(topology.REQUESTS, seq)

    async def _drop(self, stream: str, seq: int) -> None:
        while self._lease.held:
            try:
                await self._bus.jetstream.delete(stream, seq)
                return
            except BusError as error:
                log.warning("message_not_deleted", stream=stream, seq=seq, reason=str(error))
                await asyncio.sleep(0.5)

    async def _send_control(self, worker: str, order: ControlRequest) -> None:
        answer: ControlAnswer | None = None
        try:
            answer = CONTROL_ANSWER.decode(
                await self._bus.request(subjects.control(worker), ENCODER.encode(order), timeout_s=2.0)
            )
        except (BusError, msgspec.MsgspecError) as error:
            log.debug("worker_did_not_answer", worker=worker, reason=str(error))
        if isinstance(order, CancelAttempt):
            self.feed(events.ControlAnswered(order.request_id, order.attempt, answer))


class Scheduler:
    """The process: a candidate for every model, owner of some."""

    def __init__(self, bus: Bus, config: SchedulerConfig) -> None:
        self._bus = bus
        self._config = config
        self._manifests: dict[str, Manifest] = {}
        self._tenants: dict[str, TenantRecord] = {}
        self._budgets: dict[str, events.BudgetSeen] = {}
        self._terms: dict[str, Term] = {}
        self._candidates: dict[str, asyncio.Task[None]] = {}
        self._broken: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._stopping = asyncio.Event()
        Collector(lambda: [term.core for term in self._terms.values()]).register()

    def not_ready(self) -> str:
        """Why the process cannot do its part, or an empty string; a standby is ready."""
        return "" if self._bus.connected else "not connected to the bus"

    def stop(self) -> None:
        """End ``run``; what is owned is released for the standbys."""
        self._stopping.set()

    async def run(self) -> None:
        """Until ``stop``; raises what broke a core."""
        async with AsyncExitStack() as stack:
            for bucket, handler in (
                (topology.TENANTS, self._on_tenant),
                (topology.BUDGETS, self._on_budget),
                (topology.MODELS, self._on_manifest),
            ):
                await stack.enter_async_context(_closing(await self._bus.kv.watch(bucket, handler)))
            stopping = asyncio.create_task(self._stopping.wait())
            try:
                waiting: set[asyncio.Future[Any]] = {stopping, self._broken}
                await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                if self._broken.done():
                    self._broken.result()
            finally:
                tasks = [stopping, *self._candidates.values()]
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)

    async def _stand(self, model: str) -> None:
        """Candidate for ``model`` until cancelled."""
        try:
            while True:
                lease = Lease(
                    self._bus,
                    subjects.encode(model),
                    ids.incarnation("s"),
                    ttl_s=self._config.lease_ttl_s,
                    renew_s=self._config.lease_renew_s,
                )
                await lease.acquire()
                try:
                    await self._own(model, lease)
                except (BusError, TimeoutError) as error:
                    log.warning("term_failed", model=model, reason=str(error))
                finally:
                    self._terms.pop(model, None)
                    await lease.release()
        except Exception as error:
            if not self._broken.done():
                self._broken.set_exception(error)
            raise

    async def _own(self, model: str, lease: Lease) -> None:
        term = Term(self._bus, self._config, model, self._manifests[model], lease)
        for name, record in self._tenants.items():
            term.feed(events.TenantChanged(name, record))
        for seen in self._budgets.values():
            term.feed(seen)
        self._terms[model] = term
        await term.run()

    def _on_manifest(self, key: str, entry: KvEntry | None) -> None:
        if entry is None:
            if (task := self._candidates.pop(subjects.decode(key), None)) is not None:
                task.cancel()
            return
        manifest = MANIFEST.decode(entry.value)
        self._manifests[manifest.name] = manifest
        if (term := self._terms.get(manifest.name)) is not None:
            term.feed(events.ManifestChanged(manifest))
        if manifest.name not in self._candidates:
            self._candidates[manifest.name] = asyncio.create_task(self._stand(manifest.name))

    def _on_tenant(self, key: str, entry: KvEntry | None) -> None:
        name = subjects.decode(key)
        record = None if entry is None else TENANT.decode(entry.value)
        if record is None:
            self._tenants.pop(name, None)
        else:
            self._tenants[name] = record
        for term in self._terms.values():
            term.feed(events.TenantChanged(name, record))

    def _on_budget(self, key: str, entry: KvEntry | None) -> None:
        if entry is None:
            return
        usage = msgspec.json.decode(entry.value)
        seen = events.BudgetSeen(subjects.decode(key), usage["month"], usage["tokens"])
        self._budgets[seen.tenant] = seen
        for term in self._terms.values():
            term.feed(seen)


class _Closable(Protocol):
    async def close(self) -> None: ...


@asynccontextmanager
async def _closing(subscription: _Closable) -> AsyncIterator[None]:
    try:
        yield
    finally:
        await subscription.close()
