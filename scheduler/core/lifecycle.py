"""A request's way from the queue to its stored end: what may be done with it, in whatever event that is decided.

It waits, is placed on a worker, ends or is tried again, is cancelled. Which event leads to what is the core's
(``core``), and what is found of an earlier owner's requests is ``takeover``'s.
"""

import heapq

import msgspec

from contracts.messages.attempts import AttemptEvent
from contracts.messages.base import Epoch, Outcome
from contracts.messages.control import CancelAnswer, CancelAttempt
from contracts.messages.frames import Frame, FrameKind, LostData
from contracts.messages.records import Manifest
from contracts.tokens import Cost
from scheduler.config import Settings
from scheduler.core import events as ev
from scheduler.core import outcomes
from scheduler.core.admission import Admission
from scheduler.core.callers import Holders
from scheduler.core.fair_queue import Entry, FairQueue
from scheduler.core.request import TRANSITIONS, WAITING, WITH_WORKER, InvalidTransition, Request, State
from scheduler.core.tombstones import Memory
from scheduler.core.worker_pool import Pool, Worker


class Lifecycle:
    """The open requests of one model during one term, and everything that they take up."""

    def __init__(self, *, epoch: Epoch, manifest: Manifest, settings: Settings, now_ms: int) -> None:
        self.epoch = epoch
        self.settings = settings
        self.recovering = True
        """Nothing is dispatched yet, and no waiting request ended: an earlier owner may have dispatched it."""
        self.requests: dict[str, Request] = {}
        self.memory = Memory()
        self.queue = FairQueue(ageing_ms=settings.ageing_ms)
        self.admission = Admission(manifest, self.queue, now_ms)
        self.pool = Pool(
            epoch=epoch,
            lost_ticks=settings.lost_ticks,
            kv_overbooking=manifest.limits.kv_overbooking,
            patience_ms=settings.patience_ms,
        )
        self.holders = Holders()
        self.outcomes: dict[str, int] = {}
        """Ended requests by outcome, for metrics."""
        self.deadlines: list[tuple[int, str]] = []
        """A heap of (deadline, request id) of all that was queued."""
        self.cancelling: dict[str, None] = {}
        """Requests whose cancel is repeated at their worker."""
        self.deferred: dict[str, tuple[Outcome, str, str]] = {}
        """Ends of waiting requests, put off while ``recovering``."""
        self._claim_freed = False
        self._effects: list[ev.Effect] = []
        self._now = now_ms

    def do(self, effect: ev.Effect) -> None:
        self._effects.append(effect)

    def advance(self, request: Request, what: str) -> None:
        state = TRANSITIONS.get((request.state, what))
        if state is None:
            raise InvalidTransition(f"{request.id}: {what} in state {request.state.value}; {request.history}")
        request.move(state, self._now)

    # -- the queue ---------------------------------------------------------------------------------------

    def hold(self, request: Request) -> None:
        """From now on its holder's silence ends it."""
        if request.envelope.stream_owner:
            self.holders.add(request.envelope.stream_owner, request.id, self.pool.tick)

    def enqueue(self, request: Request) -> None:
        envelope = request.envelope
        self.queue.set_weight(request.tenant, self.admission.tenant(request.tenant).weight)
        self.queue.push(
            request.id,
            request.tenant,
            envelope.priority,
            envelope.deadline_at_ms,
            request.cost.total,
            self._now,
        )
        heapq.heappush(self.deadlines, (envelope.deadline_at_ms, request.id))

    def leave_queue(self, request: Request) -> None:
        self.queue.remove(request.id)
        self.admission.wait(request, -1, self._now)

    # -- dispatch ----------------------------------------------------------------------------------------

    def dispatch(self) -> None:
        """Place what waits, in fair order, while a worker has room."""
        if self.recovering or not len(self.queue) or not self.pool.has_room():
            return
        self._claim_freed = True
        while self._claim_freed:  # What a claim kept out may fit beside its request.
            self._claim_freed = False
            self.queue.scan(self._now, self._take)

    def _take(self, entry: Entry) -> bool:
        request = self.requests[entry.key]
        if request.envelope.deadline_at_ms <= self._now:
            self.expire(request)
            return True
        worker = self.pool.place(
            request.id,
            choices=request.envelope.choices,
            tokens=request.cost.total,
            version=request.envelope.version,
            suspect=request.deaths > 0,
        )
        if worker is None:
            if request.deaths == 0:
                waited_ms = self._now - entry.since_ms
                self.pool.claim(request.id, version=request.envelope.version, waited_ms=waited_ms)
            return False
        self._dispatch_to(request, worker)
        return True

    def _dispatch_to(self, request: Request, worker: Worker) -> None:
        self._claim_freed |= self.pool.drop_claim(request.id)
        request.charged = self.queue.serve(request.id)
        self.admission.wait(request, -1, self._now)
        self.advance(request, "dispatch")
        self.place_on(request, worker, request.attempt + 1)
        request.dispatched_at_ms = self._now
        self.do(
            ev.StoreWork(
                request_id=request.id,
                attempt=request.attempt,
                worker=worker.beat.worker,
                version=worker.beat.version,
                request_seq=request.request_seq,
                work_seq=request.work_seq,
            )
        )

    def place_on(self, request: Request, worker: Worker, attempt: int) -> None:
        """``attempt`` is the present one from now on, and takes up room on ``worker``."""
        request.attempt = attempt
        request.worker = worker.beat.worker
        request.progress = None
        request.was_held = False
        request.spared = False
        request.adopted = False
        self.pool.assign(
            worker,
            request.id,
            choices=request.envelope.choices,
            tokens=request.cost.total,
            suspect=request.deaths > 0,
        )

    # -- ends --------------------------------------------------------------------------------------------

    def end(self, request: Request, outcome: Outcome, code: str, message: str, *, worker_died: bool = False) -> None:
        """Ask for the present attempt's end; what is stored first decides (TerminalStored)."""
        number = request.open_attempt
        event = outcomes.proposed(
            request,
            number,
            outcome,
            code,
            message,
            version=self._version_of(request),
            worker_died=worker_died,
            now_ms=self._now,
        )
        if request.state is not State.ENDING:
            if request.state in WAITING:
                self.leave_queue(request)
            request.attempt = number
            self.advance(request, "end")
        self.do(ev.StoreTerminal(event))

    def end_waiting(self, request: Request, outcome: Outcome, code: str, message: str) -> None:
        """End a request that waits; during a takeover only when it is sure that nobody dispatched it."""
        if self.recovering:
            self.deferred[request.id] = (outcome, code, message)
        else:
            self.end(request, outcome, code, message)

    def expire(self, request: Request) -> None:
        waited = self._now - request.envelope.admitted_at_ms
        message = f"No first token within the deadline; waited {waited} ms."
        self.end_waiting(request, "expired", "deadline_exceeded", message)

    def _version_of(self, request: Request) -> str:
        worker = self.pool.workers.get(request.worker)
        return (
            worker.beat.version if worker is not None else request.envelope.version or self.admission.manifest.version
        )

    def decide(self, request: Request, event: AttemptEvent) -> None:
        """The present attempt has ended with ``event``: retry before the first token, else settle for good."""
        worker = self.pool.workers.get(request.worker)
        if worker is not None and event.engine_death:
            request.spared = event.completion_tokens > 0 and worker.blames_another(request.id)
        if worker is not None and event.outcome == "lost":
            # It lives, and may have the attempt or get it yet. An order before the loss is stored would end the
            # request: the worker's own end, cancelled, would be first.
            self.do(ev.SendControl(request.worker, self._cancel_order(request)))
        self._release(request, event)
        if outcomes.is_void(event):
            outcomes.count(request, event)
            if request.cancel_reason:
                self._requeue(request)
                self.end_waiting(request, "cancelled", "cancelled", cancelled(request))
                return
            if outcomes.may_retry(request, event):
                self._send_frame(request, "lost", msgspec.json.encode(LostData(retry=True)))
                self._requeue(request)
                return
        self.finish(request, event)

    def _requeue(self, request: Request) -> None:
        self.advance(request, "retry")
        self.admission.wait(request, 1, self._now)
        self.enqueue(request)

    def _release(self, request: Request, event: AttemptEvent) -> None:
        """The attempt no longer runs: its worker has room again, unused and void work is given back."""
        worker = self.pool.workers.get(request.worker)
        if worker is not None:
            worker.release(request.id, died=event.engine_death)
        if not request.dispatched_at_ms:
            return  # Ended without ever running.
        used = 0.0
        if event.outcome in ("completed", "cancelled"):
            used = event.prompt_tokens - event.cached_tokens + event.completion_tokens
        self.queue.settle(request.tenant, request.charged, used)
        self.admission.drain.done(request.charged, self._now - request.dispatched_at_ms)
        request.charged = 0.0
        request.dispatched_at_ms = 0

    def finish(self, request: Request, event: AttemptEvent) -> None:
        """``event`` is the request's last end: tell its caller what its worker did not, settle, forget."""
        error = outcomes.final_error(request, event)
        if error is not None and (event.reporter == "scheduler" or outcomes.is_void(event)):
            self._send_frame(request, "error", msgspec.json.encode(error))
        used = Cost(0, 0)
        if event.outcome in ("completed", "cancelled"):
            used = Cost(event.prompt_tokens, event.completion_tokens)
        self.admission.settle(request, used, self._now)
        if error is not None and error.code == "request_quarantined":
            self.do(ev.Quarantine(request.envelope, event, error.message, request.request_seq, request.work_seq))
        else:
            self._drop_messages(request, event)
        for handle in request.cancel_waiters:
            self.do(ev.AnswerCancel(handle, CancelAnswer(durable=True, outcome=event.outcome)))
        self.outcomes[event.outcome] = self.outcomes.get(event.outcome, 0) + 1
        self.forget(request)
        self.memory.add_ended(event, error, self._now)

    def _drop_messages(self, request: Request, event: AttemptEvent) -> None:
        if request.request_seq:
            self.do(ev.AckRequest(request.request_seq))
        if request.work_seq and (event.reporter == "scheduler" or event.retryable or self.recovering):
            self.do(ev.DeleteWork(request.work_seq))

    def forget(self, request: Request) -> None:
        del self.requests[request.id]
        self.cancelling.pop(request.id, None)
        self.pool.drop_claim(request.id)
        self.holders.discard(request.envelope.stream_owner, request.id)

    def _send_frame(self, request: Request, kind: FrameKind, data: bytes) -> None:
        reply = request.envelope.reply
        if reply.subject:
            frame = Frame(stream=reply.stream, attempt=request.open_attempt, seq=-1, kind=kind, data=msgspec.Raw(data))
            self.do(ev.SendFrame(reply.subject, frame))

    # -- cancel ------------------------------------------------------------------------------------------

    def cancel(self, request: Request, reason: str) -> None:
        if request.cancel_reason:
            return
        request.cancel_reason = reason
        if request.state in WAITING:
            self.end_waiting(request, "cancelled", "cancelled", cancelled(request))
        elif request.state in WITH_WORKER:
            self.cancelling[request.id] = None
            if request.work_seq or request.was_held:
                self.send_cancel(request)

    def send_cancel(self, request: Request) -> None:
        request.cancel_sent_at_ms = self._now
        self.cancelling[request.id] = None
        self.do(ev.SendControl(request.worker, self._cancel_order(request)))

    def _cancel_order(self, request: Request) -> CancelAttempt:
        return CancelAttempt(
            epoch=self.epoch,
            request_id=request.id,
            attempt=request.attempt,
            reason=request.cancel_reason or "withdrawn",
        )


def cancelled(request: Request) -> str:
    return f"The request was cancelled: {request.cancel_reason}."
