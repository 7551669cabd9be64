"""A request's way through a term: what is done with it at each step, whichever event leads to the step.

It is counted, waits, is placed on a worker, ends or is tried again, is cancelled. Which event leads to what is the
core's (``core``); what is made of an earlier owner's requests is ``takeover``'s; what a caller is told ``outcomes``'.
"""

import heapq
from collections.abc import Hashable
from typing import NamedTuple

import msgspec

from contracts.messages.attempts import AttemptEvent
from contracts.messages.base import Epoch, Outcome
from contracts.messages.control import WITHDRAWN, CancelAnswer, CancelAttempt
from contracts.messages.frames import Frame, FrameKind, LostData
from contracts.messages.records import ModelRecord
from contracts.messages.request import RequestEnvelope, WorkItem
from contracts.tokens import Cost
from scheduler.core import events, outcomes
from scheduler.core.accused import ENGINES_MAX, Accused, body_key, may_share
from scheduler.core.admission import AdmissionControl
from scheduler.core.clocks import Clocks
from scheduler.core.fair_queue import FairQueue, QueuedRequest
from scheduler.core.idempotency import IdempotencyKeys
from scheduler.core.moves import Moves
from scheduler.core.replicas import ReplicaPlanner
from scheduler.core.request import Request
from scheduler.core.settings import Settings
from scheduler.core.stream_owners import StreamOwners
from scheduler.core.tombstones import Tombstones
from scheduler.core.transitions import WAITING, WITH_WORKER, State, Trigger
from scheduler.core.versions import Versions
from scheduler.core.worker_pool import TooLate, Worker, WorkerPool, lane

UNHEARD = ""
"""In the place of the readers who joined a request under an earlier owner, until they have had time to say so again."""


class Clearing(NamedTuple):
    """A lost attempt of a stream: since when, and when last, its stream owner is asked what its caller has seen."""

    event: AttemptEvent
    since_ms: int
    asked_at_ms: int


class Lifecycle:
    """The open requests of one model during one term, and everything that they take up."""

    def __init__(
        self, *, model: str, owner: str, epoch: Epoch, record: ModelRecord, settings: Settings, now_ms: int
    ) -> None:
        self.model = model
        self.owner = owner
        self.epoch = epoch
        self.settings = settings
        self.recovering = True
        """Nothing is dispatched yet, and no waiting request ended: an earlier owner may have dispatched it."""
        self.requests: dict[str, Request] = {}
        self.tombstones = Tombstones()
        self.keys = IdempotencyKeys()
        self.accused = Accused()
        self.queue = FairQueue(ageing_ms=settings.ageing_ms)
        self.admission = AdmissionControl(record, self.queue, now_ms)
        self.pool = WorkerPool(epoch=epoch, settings=settings, kv_overbooking=record.limits.kv_overbooking)
        self.versions = Versions(self, record.stable)
        self.moves = Moves(self)
        self.replicas = ReplicaPlanner(model, now_ms)
        self.stream_owners = StreamOwners()
        self.clocks = Clocks()
        self.mended: dict[str, int] = {}
        """What was found to differ between here, WORK and ATTEMPTS, and set right, by stream; for metrics."""
        self.outcomes: dict[str, int] = {}
        """Settled requests by outcome, for metrics."""
        self.deadlines: list[tuple[int, str]] = []
        """A heap of (deadline, request id) of all that was queued."""
        self.cancelling: dict[str, None] = {}
        """Requests whose cancel is repeated at their worker."""
        self.deferred: dict[str, tuple[Outcome, str, str]] = {}
        """Ends of waiting requests, put off while ``recovering``."""
        self.clearing: dict[str, Clearing] = {}
        """Of the requests in this state."""
        self.lost_workers = 0
        """Those whose death was noticed; for metrics."""
        self._scan_again = False
        self.now_ms = now_ms
        """Of the present step, Unix ms."""
        self.unheard: dict[str, int] = {}
        """Requests of an earlier owner that may have readers of whom this one has not heard: how long it waits for."""
        self.effects: list[events.Effect] = []
        """Of the present step, in order."""

    def count_mended(self, stream: str) -> None:
        """``stream``: work or attempts."""
        self.mended[stream] = self.mended.get(stream, 0) + 1

    def do(self, effect: events.Effect) -> None:
        """Add an effect of the present step."""
        self.effects.append(effect)

    def admit(self, request: Request) -> None:
        """Reserve for a new request, which was checked, and wait for its message."""
        self.admission.reserve(request, self.now_ms)
        self.requests[request.id] = request
        self.is_named(request)
        self.versions.admitted(request)
        self.replicas.came(request.cost.input_tokens, self.now_ms)
        request.advance(Trigger.ADMITTED, self.now_ms)

    def take_in(self, envelope: RequestEnvelope) -> Request:
        """Reserve for an open request of an earlier owner; a change of its state must follow."""
        admitted_at_ms = min(envelope.admitted_at_ms, self.now_ms)  # The bus's clock may have been set back between us.
        request = Request(msgspec.structs.replace(envelope, admitted_at_ms=admitted_at_ms))
        self.admission.adopt(request, self.now_ms)
        self.requests[request.id] = request
        self.tombstones.forget(request.id)
        self.versions.taken_in(request)
        self.is_named(request)
        self.read_by(request, envelope.reply.stream, envelope.stream_owner)
        if request.readers:
            request.readers[UNHEARD] = ""
            self.unheard[request.id] = self.now_ms + self.settings.readers_heard_ms
        self.watch_stream_owner(request)
        return request

    def is_named(self, request: Request) -> bool:
        """Whether its idempotency key, if it has one, names it from now on; else another request has the key."""
        given = request.envelope.idempotency
        return given is None or self.keys.name(request.tenant, given, request.id)

    def read_by(self, request: Request, reader: str, owner: str) -> None:
        """While ``owner`` is heard, ``reader`` reads the request, if that can have several readers."""
        if request.envelope.idempotency is None or not reader:
            return
        if request.readers is None:
            request.readers = {}
        request.readers[reader] = owner
        if owner:
            self.stream_owners.add(owner, request.id, self.pool.beats)

    def left_by(self, request: Request, reader: str) -> bool:
        """``reader`` reads the request no more; whether nobody does now."""
        if request.readers is None:
            return True
        owner = request.readers.pop(reader, "")
        if owner and owner not in request.readers.values():
            self.stream_owners.discard(owner, request.id)
        return not request.readers

    def admit_again(self, request: Request) -> None:
        """A request that was taken in waits, in no queue yet."""
        request.advance(Trigger.ADMITTED, self.now_ms)
        self.admission.count_waiting(request, 1, self.now_ms)

    def watch_stream_owner(self, request: Request) -> None:
        """From now on its stream owner's silence ends it."""
        if request.envelope.stream_owner:
            self.stream_owners.add(request.envelope.stream_owner, request.id, self.pool.beats)

    def queue_up(self, request: Request) -> None:
        """REQUESTS holds it."""
        request.advance(Trigger.STORED, self.now_ms)
        self.watch_stream_owner(request)
        self._enqueue(request)
        self.dispatch()

    def leave_queue(self, request: Request) -> None:
        """It waits no longer."""
        self.clearing.pop(request.id, None)
        self.queue.remove(request.id)
        self.admission.count_waiting(request, -1, self.now_ms)

    def _enqueue(self, request: Request) -> None:
        envelope = request.envelope
        self.queue.set_weight(request.tenant, self.admission.tenant(request.tenant).weight)
        self.queue.push(
            request.id,
            request.tenant,
            envelope.priority,
            envelope.deadline_at_ms,
            request.cost.total,
            self.now_ms,
            lane=self.lane(request),
        )
        heapq.heappush(self.deadlines, (envelope.deadline_at_ms, request.id))

    def lane(self, request: Request) -> Hashable:
        """Where it waits among those that are placed alike."""
        return lane(request, suspect=self.accused.of(request.envelope).suspect)

    def place(self, request: Request) -> Worker | None:
        """The worker that takes it now, or None; raises TooLate as the pool does.

        Copies of a suspect run on so few workers that three die at most.
        """
        body = self.accused.of(request.envelope)
        if not body.suspect:
            return self.pool.place(request, self.now_ms)
        key = body_key(request.envelope)
        holders = {name for name, worker in self.pool.workers.items() if key in worker.bodies.values()}

        def may_hold(worker: Worker) -> bool:
            beside = [self.accused.of(self.requests[request_id].envelope) for request_id in worker.suspects]
            exposed = len(holders | {worker.beat.worker})
            return body.deaths + exposed <= ENGINES_MAX and may_share(body, beside)

        return self.pool.place(request, self.now_ms, may_hold)

    def dispatch(self) -> None:
        """Place what waits, in fair order, while a worker has room."""
        if self.recovering or not len(self.queue) or not self.pool.has_room():
            return
        self._scan_again = True
        while self._scan_again:  # What a reserved worker did not take may fit beside the request it was kept for.
            self._scan_again = False
            self.queue.scan(self.now_ms, self._take)

    def _take(self, queued: QueuedRequest) -> bool:
        request = self.requests[queued.key]
        if request.envelope.deadline_at_ms <= self.now_ms:
            self.expire(request)
            return True
        body = self.accused.of(request.envelope)
        if queued.lane != self.lane(request):  # Its body is accused, or cleared, since it waits.
            self.queue.remove(request.id)
            self._enqueue(request)
            self._scan_again = True
            return True
        if body.condemned:
            self.end_waiting(request, "failed", "request_quarantined", outcomes.quarantined(request.id, body))
            return True
        try:
            worker = self.place(request)
        except TooLate:
            self.expire(request)
            return True
        if worker is None:
            if not body.suspect:
                self.pool.reserve_worker(request, self.now_ms - queued.since_ms)
            return False
        self._dispatch_to(request, worker)
        return True

    def _dispatch_to(self, request: Request, worker: Worker) -> None:
        self._scan_again |= self.pool.free_worker(request.id)
        request.charged = self.queue.serve(request.id)
        self.admission.count_waiting(request, -1, self.now_ms)
        request.advance(Trigger.PLACED, self.now_ms)
        suspect_tokens = self.accused.of(request.envelope).suspect_tokens
        self._place_on(request, worker, request.attempt + 1, suspect_tokens)
        request.dispatched_at_ms = self.now_ms
        self.do(
            events.StoreWork(
                request_id=request.id,
                attempt=request.attempt,
                worker=worker.beat.worker,
                version=worker.beat.version,
                request_seq=request.request_seq,
                work_seq=request.work_seq,
            )
        )

    def adopt(self, request: Request, item: WorkItem, seq: int) -> None:
        """Its present attempt is ``item``, dispatched by an earlier owner and held by WORK under ``seq``."""
        if request.state in WAITING:
            self.leave_queue(request)
        elif request.state is not State.NEW:  # The attempt before has ended, and its end was not read yet.
            self._release(request, None)
        request.advance(Trigger.ADOPTED, self.now_ms)
        request.withdrawn = False  # It had begun.
        self.queue.set_weight(request.tenant, self.admission.tenant(request.tenant).weight)
        self.queue.adopt(request.tenant, request.cost.total)
        request.charged = request.cost.total
        if request.work_seq:
            self.do(events.DeleteWork(request.work_seq))
        request.work_seq, request.work_attempt = seq, item.attempt
        worker = self.pool.expect(item.worker, item.request.model, item.version)
        self._place_on(request, worker, item.attempt, item.suspect_tokens)
        request.dispatched_at_ms = min(item.dispatched_at_ms, self.now_ms)
        request.adopted = True
        worker.adopted[request.id] = None
        self.ack_request(request)

    def _place_on(self, request: Request, worker: Worker, attempt: int, suspect_tokens: int) -> None:
        """``attempt`` is the present one from now on, and takes up room on ``worker``."""
        request.attempt = attempt
        request.worker = worker.beat.worker
        request.progress = None
        request.was_in_flight = False
        request.gone_since_ms = 0
        request.end_asked = False
        request.adopted = False
        request.suspect_tokens = suspect_tokens
        self.pool.assign(worker, request, self.now_ms)
        self.versions.dispatched(request)

    def ack_request(self, request: Request) -> None:
        """REQUESTS need not hold it any more."""
        if request.request_seq:
            self.do(events.AckRequest(request.request_seq))
            request.request_seq = 0

    def propose_end(
        self, request: Request, outcome: Outcome, code: str, message: str, *, accused: int | None = None
    ) -> None:
        """Ask for the present attempt's end; what is stored first decides (TerminalStored). ``accused``: see
        outcomes.proposed."""
        number = request.open_attempt
        event = outcomes.proposed(
            request,
            number,
            outcome,
            code,
            message,
            version=self._version_of(request),
            accused=accused,
            now_ms=self.now_ms,
        )
        if request.state is not State.ENDING:
            if request.state in WAITING:
                self.leave_queue(request)
            request.attempt = number
            request.advance(Trigger.END_PROPOSED, self.now_ms)
        self.do(events.StoreTerminal(event))

    def end_waiting(self, request: Request, outcome: Outcome, code: str, message: str) -> None:
        """End a request that waits; during a takeover only when it is sure that nobody dispatched it."""
        if self.recovering:
            self.deferred[request.id] = (outcome, code, message)
        else:
            self.propose_end(request, outcome, code, message)

    def expire(self, request: Request) -> None:
        """Its deadline has passed while it waits, or would before a worker gave its first token."""
        waited = self.now_ms - request.envelope.admitted_at_ms
        late = "No first token" if self.now_ms >= request.envelope.deadline_at_ms else "No first token is expected"
        message = f"{late} within the deadline; waited {waited} ms."
        self.end_waiting(request, "expired", "deadline_exceeded", message)

    def open(self) -> None:
        """The takeover is complete: end what was put off, and dispatch."""
        self.recovering = False
        deferred, self.deferred = self.deferred, {}
        for request_id, (outcome, code, message) in deferred.items():
            request = self.requests.get(request_id)
            if request is not None and request.state in WAITING:
                self.propose_end(request, outcome, code, message)
            elif request is not None and request.cancel_reason and request.state in WITH_WORKER:
                self.send_cancel(request)
        self.dispatch()

    def _version_of(self, request: Request) -> str:
        worker = self.pool.workers.get(request.worker)
        if worker is not None:
            return worker.beat.version
        return request.envelope.version or self.admission.record.stable

    def decide(self, request: Request, event: AttemptEvent) -> None:
        """The present attempt has ended with ``event``: retry before the first token, else settle for good."""
        self.versions.ended(event)
        worker = self.pool.workers.get(request.worker)
        if worker is not None and event.outcome == "lost":
            # It lives, and may have the attempt or get it yet. An order before the loss is stored would end the
            # request: the worker's own end, cancelled, would be first.
            self.do(events.SendControl(request.worker, self._cancel_order(request)))
        if request.dispatched_at_ms and event.completion_tokens:
            self.replicas.ended(event, request.envelope.choices, self.now_ms - request.dispatched_at_ms)
        self._release(request, event)
        if outcomes.is_void(event):
            outcomes.count(request, event, self.pool.beats)
            if request.cancel_reason:
                self._retry(request)
                self.end_waiting(request, "cancelled", "cancelled", cancelled(request))
                return
            if outcomes.may_retry(request, self.accused.of(request.envelope), event):
                if outcomes.may_have_been_seen(request, event):
                    self.admission.count_waiting(request, 1, self.now_ms)
                    self.clear(request, event)
                else:
                    self._send_lost(request, event, tell=False)
                    self._retry(request)
                return
        self.settle(request, event)

    def _retry(self, request: Request) -> None:
        request.advance(Trigger.RETRIED, self.now_ms)
        self.admission.count_waiting(request, 1, self.now_ms)
        self._enqueue(request)

    def clear(self, request: Request, event: AttemptEvent) -> None:
        """Its caller may have had text that no heartbeat told of: what it saw only its stream owner knows."""
        if request.state is not State.CLEARING:
            request.advance(Trigger.LOST, self.now_ms)
        self.queue.remove(request.id)
        heapq.heappush(self.deadlines, (request.envelope.deadline_at_ms, request.id))
        self.clearing[request.id] = Clearing(event, self.now_ms, self.now_ms)
        self._send_lost(request, event)

    def cleared(self, request: Request) -> None:
        """Its caller has seen nothing of the attempts so far, and will not: another may follow."""
        del self.clearing[request.id]
        request.advance(Trigger.RETRIED, self.now_ms)
        self._enqueue(request)
        self.dispatch()

    def clear_again(self) -> None:
        """Repeat the question; who sends no heartbeats is given up in time."""
        for request_id, clearing in list(self.clearing.items()):
            request = self.requests[request_id]
            bare = not request.envelope.stream_owner and not self.recovering
            if bare and self.now_ms - clearing.since_ms >= self.settings.clearing_ms_max:
                self.leave_queue(request)
                self.settle(request, clearing.event)
            elif self.now_ms - clearing.asked_at_ms >= self.settings.cancel_repeat_ms:
                self.clearing[request_id] = clearing._replace(asked_at_ms=self.now_ms)
                self._send_lost(request, clearing.event)

    def _send_lost(self, request: Request, event: AttemptEvent, *, tell: bool = True) -> None:
        self._send_frame(request, "lost", msgspec.json.encode(LostData(retry=True, tell=tell)), attempt=event.attempt)

    def _release(self, request: Request, event: AttemptEvent | None) -> None:
        """The attempt no longer runs: its worker has room again, its tenant is charged for what it was served.

        ``event``: how it ended, if that is known.
        """
        worker = self.pool.workers.get(request.worker)
        if worker is not None:
            self.pool.release(request, worker, event, self.now_ms)
        if not request.dispatched_at_ms:
            return  # Ended without ever running.
        self.queue.settle(request.tenant, request.charged, outcomes.served(event) if event is not None else 0)
        self.admission.throughput.done(request.charged, self.now_ms - request.dispatched_at_ms)
        request.charged = 0.0
        request.dispatched_at_ms = 0

    def settle(self, request: Request, event: AttemptEvent) -> None:
        """``event`` is the request's last end: tell its caller what its worker did not, settle, forget."""
        error = outcomes.final_error(request, self.accused.of(request.envelope), event)
        if error is not None and (event.reporter == "scheduler" or outcomes.is_void(event)):
            self._send_frame(request, "error", msgspec.json.encode(error))
        used = outcomes.used(event, self.admission.record.limits.cached_input_share)
        billed_tokens = event.prompt_tokens + event.completion_tokens if event.billable else 0
        self.admission.settle(request, used, self.now_ms, billed_tokens=billed_tokens)
        if error is not None and error.code == "request_quarantined":
            self.do(events.Quarantine(request.envelope, event, error.message, request.request_seq, request.work_seq))
        else:
            self._drop_messages(request, event)
            self.delete_body(request.envelope)
        for handle in request.cancel_waiters:
            self.do(events.AnswerCancel(handle, CancelAnswer(durable=True, outcome=event.outcome)))
        self.outcomes[event.outcome] = self.outcomes.get(event.outcome, 0) + 1
        self._forget(request)
        self.tombstones.add_ended(event, error, self.now_ms)
        self.key_ended(event)

    def key_ended(self, event: AttemptEvent) -> None:
        """The request of ``event`` has ended; its key goes on naming it, unless who asked was told to ask again."""
        if event.idempotency is None:
            return
        if event.withdrawn:
            self.keys.free(event.tenant, event.idempotency, event.request_id)
        else:
            self.keys.end(event.tenant, event.idempotency, event.request_id, self.now_ms)

    def expire_reservation(self, request: Request) -> None:
        """Admitted and never published: its reservation comes back. Should it be stored yet, it is a late one."""
        self.leave_queue(request)
        self.admission.settle(request, Cost(0, 0), self.now_ms, refund_request=True)
        self.delete_body(request.envelope)
        self._forget(request)
        if (given := request.envelope.idempotency) is not None:
            self.keys.free(request.tenant, given, request.id)
        for handle in request.cancel_waiters:
            self.do(events.AnswerCancel(handle, CancelAnswer(durable=True)))

    def _drop_messages(self, request: Request, event: AttemptEvent) -> None:
        if request.request_seq:
            self.do(events.AckRequest(request.request_seq))
        if request.work_seq and (event.reporter == "scheduler" or event.retryable or self.recovering):
            self.do(events.DeleteWork(request.work_seq))

    def delete_body(self, envelope: RequestEnvelope) -> None:
        """Nobody needs the body any more."""
        if envelope.body_bytes:
            self.do(events.DeleteBody(envelope.request_id, envelope.tenant))

    def _forget(self, request: Request) -> None:
        request.advance(Trigger.SETTLED, self.now_ms)
        del self.requests[request.id]
        self.versions.forget(request.id)
        self.cancelling.pop(request.id, None)
        self.pool.free_worker(request.id)
        for owner in {request.envelope.stream_owner, *(request.readers or {}).values()}:
            self.stream_owners.discard(owner, request.id)

    def _send_frame(self, request: Request, kind: FrameKind, data: bytes, *, attempt: int | None = None) -> None:
        reply = request.envelope.reply
        if reply.subject:
            number = request.open_attempt if attempt is None else attempt
            frame = Frame(stream=reply.stream, attempt=number, seq=-1, kind=kind, data=msgspec.Raw(data))
            self.do(events.SendFrame(reply.subject, frame))

    def cancel(self, request: Request, reason: str) -> None:
        """End it where it is; a second cancel changes nothing."""
        if request.cancel_reason:
            return
        # Who was told to ask again, and gives up instead, says that it cancels: nobody pays for that.
        request.cancel_reason = WITHDRAWN if request.unconfirmed else reason
        if request.state in WAITING:
            self.end_waiting(request, "cancelled", "cancelled", cancelled(request))
        elif request.state in WITH_WORKER:
            self.cancelling[request.id] = None
            if request.work_seq or request.was_in_flight:
                self.send_cancel(request)

    def send_cancel(self, request: Request) -> None:
        """Order its worker to stop it; repeated until an end is stored."""
        request.cancel_sent_at_ms = self.now_ms
        self.cancelling[request.id] = None
        self.do(events.SendControl(request.worker, self._cancel_order(request)))

    def _cancel_order(self, request: Request) -> CancelAttempt:
        return CancelAttempt(
            epoch=self.epoch,
            request_id=request.id,
            attempt=request.attempt,
            reason=request.cancel_reason or "worker_lost",
        )


def cancelled(request: Request) -> str:
    """What its caller reads."""
    return f"The request was cancelled: {request.cancel_reason}."
