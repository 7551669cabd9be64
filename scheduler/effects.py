"""Performs on the bus what the core wants done; decides nothing.

Each effect is a task of its own. Whatever stores, deletes or acknowledges looks at the lease right before, so that a
deposed owner changes nothing; orders and frames carry the epoch, by which their receivers refuse them.
"""

import asyncio
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any

import msgspec
import structlog

from contracts import registry, sealed, shards, subjects, topology
from contracts.administration import Administration
from contracts.audit import Actor
from contracts.bus import Bus, BusError, Incoming, KvEntry, Unconfirmed, WrongSequence
from contracts.errors import HeadraceError
from contracts.messages.attempts import AttemptEvent, Quarantined
from contracts.messages.base import NOTHING, Codec
from contracts.messages.control import CancelAttempt, ControlAnswer, ControlRequest, Evict
from contracts.messages.frames import ReplyMessage
from contracts.messages.records import SharedQuota, Spending
from contracts.messages.request import RequestEnvelope, WorkItem
from contracts.messages.rollouts import RolloutEvent, RolloutProgress
from contracts.traceparent import headers as tracing_headers
from scheduler import metrics
from scheduler.core import events
from scheduler.core.core import Core
from scheduler.core.quota_leases import Ask, Grant, exchange
from scheduler.lease import Lease

log = structlog.get_logger()

ENVELOPE: Codec[RequestEnvelope] = Codec(RequestEnvelope)
WORK_ITEM: Codec[WorkItem] = Codec(WorkItem)
EVENT: Codec[AttemptEvent] = Codec(AttemptEvent)
_shared_quota: Codec[SharedQuota] = Codec(SharedQuota)
_control_answer: Codec[ControlAnswer] = Codec(ControlAnswer)
_encode = msgspec.json.Encoder().encode

AGAIN_S = 0.5
"""Pause before something that the bus did not take is tried again."""
QUARANTINED_BYTES_MAX = 1 << 20
"""Larger bodies are not kept in QUARANTINE, which holds 128 MiB."""
CONTROL_TIMEOUT_S = 2.0
"""How long a worker's answer to an order is awaited; what counts is repeated by the core."""


def work_id(item: WorkItem) -> str:
    """Message id in WORK. With the epoch: what a deposed owner's late dispatch stores must not pass for ours."""
    epoch = item.epoch
    parts = item.request.request_id, item.attempt, item.worker, epoch.era, epoch.revision
    return ".".join(map(str, parts))


class BodyCache:
    """Messages of REQUESTS and the bodies in them, by sequence, as far as ``bytes_max`` goes; others are read again."""

    def __init__(self, bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self._bytes = 0
        self._messages: dict[int, tuple[Incoming, msgspec.Raw]] = {}

    def add(self, message: Incoming, body: msgspec.Raw) -> None:
        """Keep the message, of which ``body`` is a part, if there is room."""
        if message.stream_seq not in self._messages and self._bytes + len(message.data) <= self._bytes_max:
            self._bytes += len(message.data)
            self._messages[message.stream_seq] = message, body

    def body(self, seq: int) -> msgspec.Raw | None:
        """The message's body, if it is kept."""
        kept = self._messages.get(seq)
        return None if kept is None else kept[1]

    def pop(self, seq: int) -> Incoming | None:
        """The message, if it was kept; it is no longer."""
        message, _ = self._messages.pop(seq, (None, None))
        if message is not None:
            self._bytes -= len(message.data)
        return message


class Effects:
    """The effects of one term. ``feed`` takes what became of them, ``fail`` what broke."""

    def __init__(
        self,
        bus: Bus,
        lease: Lease,
        core: Core,
        *,
        feed: Callable[[events.Event], None],
        fail: Callable[[Exception], None],
        cache_bytes: int,
        quarantine_key: str = "",
    ) -> None:
        self.bodies = BodyCache(cache_bytes)
        self._bus = bus
        self._lease = lease
        self._core = core
        self._quarantine_key = quarantine_key
        self._feed = feed
        self._fail = fail
        self._tasks: set[asyncio.Task[None]] = set()
        self._progress: RolloutProgress | None = None
        """Of the roll-out: to be written."""

    def perform(self, effect: events.Effect) -> None:
        """Start the effect."""
        match effect:
            case events.AnswerAdmission() | events.AnswerCancel() | events.AnswerStatus():
                self.answer(effect.handle, _encode(effect.answer))
            case events.StoreWork():
                self.spawn(self._store_work(effect))
            case events.StoreTerminal(event):
                self.spawn(self._store_terminal(event))
            case events.AckRequest(seq):
                self._ack_request(seq)
            case events.DeleteWork(seq):
                self.spawn(self.delete(topology.WORK, seq))
            case events.DeleteBody(request_id, tenant):
                self.spawn(self.delete_body(subjects.body(self._core.model, tenant, request_id)))
            case events.Quarantine():
                self.spawn(self._quarantine(effect))
            case events.ReadEnd(request_id, attempt):
                self.spawn(self._read_end(request_id, attempt))
            case events.SendControl(worker, order):
                if isinstance(order, Evict) and order.reason:
                    log.warning("worker_lost", model=self._core.model, worker=worker, reason=order.reason)
                self.spawn(self._send_control(worker, order))
            case events.RiseAbove(epoch):
                self.spawn(self._lease.rise_above(epoch))
            case events.TellSpending(tenant, spending):
                self.spawn(self._tell_spending(tenant, spending))
            case events.ExchangeLease(tenant, ask):
                self.spawn(self._exchange_lease(tenant, ask))
            case events.KeepRollout(progress):
                self._keep_rollout(progress)
            case events.TellRollout(event):
                self.spawn(self._tell_rollout(event))
            case events.SetStable(version):
                self.spawn(self._set_stable(version))
            case events.StoreCopy(envelope, request_seq):
                self.spawn(self._store_copy(envelope, request_seq))
            case events.SendFrame(subject, frame):
                message = ReplyMessage(epoch=self._core.epoch, frames=[frame])
                try:
                    self._bus.send(subject, _encode(message))
                except BusError as error:
                    self._failed(error)
            case _:
                raise TypeError(f"unknown effect {effect!r}")

    def answer(self, asked: Incoming, data: bytes) -> None:
        """Answer; who gets none asks again."""
        try:
            asked.respond(data)
        except BusError as error:
            self._failed(error)

    def _failed(self, error: BusError) -> None:
        log.warning("effect_failed", model=self._core.model, reason=str(error))

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Run ``work`` as a task of the term; the bus's refusals are logged, all else ends the term."""
        task = asyncio.create_task(self._guard(work))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        """Stop what still runs."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _guard(self, work: Coroutine[Any, Any, None]) -> None:
        try:
            await work
        except BusError as error:
            self._failed(error)
        except Exception as error:
            self._fail(error)

    async def _store_work(self, effect: events.StoreWork) -> None:
        refused = events.WorkRefused(effect.request_id, effect.attempt)
        if (body := self.bodies.body(effect.request_seq)) is None:
            try:
                body = await self._body(effect.request_seq, effect.work_seq)
            except BusError:
                self._feed(refused)
                return
        request = self._core.awaits_work(effect)
        if request is None or not self._lease.held:
            return
        if body is None:
            self._feed(events.WorkRefused(effect.request_id, effect.attempt, body_missing=True))
            return
        item = WorkItem(
            epoch=self._core.epoch,
            attempt=effect.attempt,
            version=effect.version,
            worker=effect.worker,
            dispatched_at_ms=request.dispatched_at_ms,
            suspect_tokens=request.suspect_tokens,
            request=msgspec.structs.replace(request.envelope, body=body),
        )
        try:
            stored = await self._bus.jetstream.store(
                subjects.work(self._core.model, effect.version, effect.worker),
                _encode(item),
                msg_id=work_id(item),
                headers=tracing_headers(item.request.traceparent),
            )
        except BusError as error:
            log.warning("work_not_stored", request_id=effect.request_id, attempt=effect.attempt, reason=str(error))
            self._feed(refused)
            return
        metrics.count_dispatch(item)
        self._feed(events.WorkStored(effect.request_id, effect.attempt, stored.seq))

    async def _body(self, request_seq: int, work_seq: int) -> msgspec.Raw | None:
        """The request's body, from the cache, REQUESTS or WORK; None when it is gone."""
        if request_seq:
            if (body := self.bodies.body(request_seq)) is not None:
                return body
            message = await self._bus.jetstream.get(topology.REQUESTS, request_seq)
            if message is not None:
                return ENVELOPE.decode(message.data).body
        if work_seq:
            message = await self._bus.jetstream.get(topology.WORK, work_seq)
            if message is not None:
                return WORK_ITEM.decode(message.data).request.body
        return None

    async def _send_control(self, worker: str, order: ControlRequest) -> None:
        answer: ControlAnswer | None = None
        try:
            data = await self._bus.request(subjects.control(worker), _encode(order), timeout_s=CONTROL_TIMEOUT_S)
            answer = _control_answer.decode(data)
        except (BusError, msgspec.MsgspecError) as error:
            log.debug("worker_did_not_answer", worker=worker, reason=str(error))
        if isinstance(order, CancelAttempt):
            self._feed(events.ControlAnswered(order.request_id, order.attempt, answer))

    async def _store_terminal(self, event: AttemptEvent) -> None:
        """Until some terminal event is stored; the core is told which one won, and by ATTEMPTS once more."""
        subject = subjects.attempt(self._core.model, event.request_id, event.attempt)
        if (seq := self._core.may_have_been_pulled(event)) and await self._was_pulled(event.worker, seq):
            event = msgspec.structs.replace(event, engine_death=True)
        data = _encode(event)
        while self._lease.held:
            try:
                stored = await self._bus.jetstream.store(
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
                self._feed(events.TerminalStored(event, stored.seq))
                return
            except WrongSequence as error:
                if error.found is not None:
                    self.tell_end(error.found)
                    return
            except Unconfirmed:
                continue
            except BusError as error:
                log.warning("terminal_not_stored", request_id=event.request_id, reason=str(error))
                await asyncio.sleep(AGAIN_S)

    async def _read_end(self, request_id: str, attempt: int) -> None:
        subject = subjects.attempt(self._core.model, request_id, attempt)
        found = await self._bus.jetstream.last(topology.ATTEMPTS, subject)
        if found is not None:
            self.tell_end(found)
        else:
            self._feed(events.EndMissing(request_id, attempt))

    def tell_end(self, message: Incoming, *, in_order: bool = False) -> None:
        """Tell the core of an end that ATTEMPTS holds; ``in_order``: it has been told all before it."""
        try:
            self._feed(events.TerminalStored(EVENT.decode(message.data), message.stream_seq, in_order))
        except msgspec.MsgspecError as error:  # The ledger sets it aside.
            log.error("event_undecodable", subject=message.subject, seq=message.stream_seq, reason=str(error))
            *_, request_id, attempt = message.subject.split(".")
            self._feed(events.EndUnreadable(subjects.decode(request_id), int(attempt)))

    async def _tell_spending(self, tenant: str, spending: Spending) -> None:
        if not self._lease.held:
            return
        key = f"{subjects.encode(self._core.model)}.{subjects.encode(tenant)}"
        try:
            await self._bus.kv.put(topology.SPENDING, key, _encode(spending))
        except BusError:
            self._feed(events.SpendingUntold(tenant))
            raise

    async def _exchange_lease(self, tenant: str, ask: Ask) -> None:
        """Until it is stored, or nobody knows whether it is."""
        key = f"{subjects.encode(shards.model_of(self._core.model))}.{subjects.encode(tenant)}"
        grant: Grant | None = None
        try:
            while self._lease.held and grant is None:
                entry = await self._bus.kv.get(topology.QUOTAS, key)
                after, given = exchange(_shared(entry), self._core.model, ask, self._lease.clock.now_ms())
                with suppress(WrongSequence):
                    if entry is None:
                        await self._bus.kv.create(topology.QUOTAS, key, _encode(after))
                    else:
                        await self._bus.kv.update(topology.QUOTAS, key, _encode(after), revision=entry.revision)
                    grant = given
        finally:
            self._feed(events.LeaseExchanged(tenant, grant))

    async def _was_pulled(self, worker: str, work_seq: int) -> bool:
        """Whether the server had delivered the message to a worker that died before its next heartbeat."""
        try:
            info = await self._bus.jetstream.api(f"CONSUMER.INFO.{topology.WORK}.w-{worker}")
        except BusError:
            return False
        return int(info["delivered"]["stream_seq"]) >= work_seq

    async def _quarantine(self, effect: events.Quarantine) -> None:
        """Best effort: one that cannot be kept is removed all the same, since nobody may run it again."""
        envelope = effect.envelope
        try:
            kept = Quarantined(
                reason=effect.reason,
                quarantined_at_ms=effect.last.ended_at_ms,
                request=msgspec.structs.replace(envelope, body=NOTHING),
                last=effect.last,
                sealed_body=await self._sealed_body(effect),
            )
            if not self._lease.held:
                return
            await self._bus.jetstream.store(
                subjects.quarantine(self._core.model, envelope.request_id), _encode(kept), msg_id=envelope.request_id
            )
            log.error(
                "request_quarantined", request_id=envelope.request_id, tenant=envelope.tenant, model=envelope.model
            )
        except BusError as error:
            log.error("request_not_kept", request_id=envelope.request_id, reason=str(error))
        if effect.request_seq:
            self._ack_request(effect.request_seq)
        if effect.work_seq:
            await self.delete(topology.WORK, effect.work_seq)
        if envelope.body_bytes:
            await self.delete_body(subjects.body(envelope.model, envelope.tenant, envelope.request_id))

    async def _large_body(self, envelope: RequestEnvelope) -> msgspec.Raw | None:
        """From BODIES, for QUARANTINE; None where it is too large for that, too."""
        if not 0 < envelope.body_bytes <= QUARANTINED_BYTES_MAX:
            return None
        subject = subjects.body(envelope.model, envelope.tenant, envelope.request_id)
        size, digest = envelope.body_bytes, envelope.body_digest
        body = await self._bus.objects.get(topology.BODIES, subject, size=size, digest=digest)
        return None if body is None else msgspec.Raw(body)

    async def _sealed_body(self, effect: events.Quarantine) -> bytes:
        """Empty where nobody is to read it."""
        if not self._quarantine_key:
            return b""
        body = await self._body(effect.request_seq, effect.work_seq) or await self._large_body(effect.envelope)
        return sealed.seal(bytes(body), self._quarantine_key) if body else b""

    def _ack_request(self, seq: int) -> None:
        message = self.bodies.pop(seq)
        if message is None or not self._lease.held:
            self.spawn(self.delete(topology.REQUESTS, seq))
            return

        def told(acknowledged: asyncio.Future[bool]) -> None:
            if acknowledged.cancelled() or not acknowledged.result():
                self.spawn(self.delete(topology.REQUESTS, seq))

        message.ack().add_done_callback(told)

    def _keep_rollout(self, progress: RolloutProgress) -> None:
        """One write at a time, of what is newest then."""
        writing, self._progress = self._progress is not None, progress
        if not writing:
            self.spawn(self._write_rollout())

    async def _write_rollout(self) -> None:
        while (progress := self._progress) is not None and self._lease.held:
            try:
                await registry.keep_progress(self._bus, progress)
                if self._progress is progress:
                    self._progress = None
            except BusError as error:
                log.warning("rollout_not_kept", model=self._core.model, reason=str(error))
                await asyncio.sleep(AGAIN_S)

    async def _tell_rollout(self, event: RolloutEvent) -> None:
        """Once, whoever owns the model: by the bus's deduplication; a repetition would do no harm."""
        say = log.warning if event.news in ("stopped", "bad_worker") else log.info
        say(
            "rollout",
            model=event.model,
            rollout=event.id,
            news=event.news,
            stable=event.stable,
            to=event.to,
            share=event.share,
            reason=event.reason,
        )
        while self._lease.held:
            try:
                msg_id = f"{event.id}.{event.news}.{event.share}.{event.at_ms}"
                await self._bus.jetstream.store(subjects.rollout(event.model), _encode(event), msg_id=msg_id)
                metrics.count_news(event.model, event.news)
                return
            except BusError as error:
                log.warning("rollout_not_told", model=event.model, reason=str(error))
                await asyncio.sleep(AGAIN_S)

    async def _set_stable(self, version: str) -> None:
        """Until it is; the audit trail says that a roll-out did it."""
        do = Administration(self._bus, Actor(name="rollout", address="", via="api"))
        while self._lease.held:
            try:
                await do.set_stable(self._core.model, version)
                return
            except (BusError, HeadraceError) as error:
                log.error("rollout_not_promoted", model=self._core.model, version=version, reason=str(error))
                await asyncio.sleep(10 * AGAIN_S)

    async def _store_copy(self, envelope: RequestEnvelope, request_seq: int) -> None:
        """Best effort: one that is not stored is one less to compare."""
        body = await self._body(request_seq, 0)
        if body is not None and self._lease.held:
            data = ENVELOPE.encode(msgspec.structs.replace(envelope, body=body))
            subject = subjects.request(envelope.model, envelope.tenant)
            await self._bus.jetstream.store(subject, data, msg_id=envelope.request_id)

    async def delete(self, stream: str, seq: int) -> None:
        """Remove a message, for as long as the lease is held."""
        while self._lease.held:
            try:
                await self._bus.jetstream.delete(stream, seq)
                return
            except BusError as error:
                log.warning("message_not_deleted", stream=stream, seq=seq, reason=str(error))
                await asyncio.sleep(AGAIN_S)

    async def delete_body(self, subject: str) -> None:
        """Remove a body, which may be gone; what is left after all is the sweep's."""
        while self._lease.held:
            try:
                await self._bus.objects.delete(topology.BODIES, subject)
                return
            except BusError as error:
                log.warning("body_not_deleted", subject=subject, reason=str(error))
                await asyncio.sleep(AGAIN_S)


def _shared(entry: KvEntry | None) -> SharedQuota | None:
    """What nobody can read begins anew."""
    try:
        return None if entry is None else _shared_quota.decode(entry.value)
    except msgspec.MsgspecError as error:
        log.error("quota_unreadable", seq=entry.revision if entry else 0, reason=str(error))
        return None
