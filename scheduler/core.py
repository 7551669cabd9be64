"""The scheduler's decisions for one model: admission, order, placement, retry, loss, cancel, settlement.

Pure: events and time in, effects out. A request's life is the table TRANSITIONS; a pair that is not in it is a bug
and raises InvalidTransition with the request's recent history. The end of an attempt is what ATTEMPTS stored first,
whoever wrote it (TerminalStored); the core asks for an end by StoreTerminal and acts on the winner only.
"""

import heapq
from collections.abc import Callable

import msgspec

from contracts.errors import HeadraceError
from contracts.messages import (
    AdmissionAnswer,
    AdmissionRequest,
    Announce,
    AttemptEvent,
    CancelAnswer,
    CancelAttempt,
    Epoch,
    ErrorData,
    Evict,
    Frame,
    FrameKind,
    LostData,
    Manifest,
    Outcome,
    Reply,
    RequestEnvelope,
    WorkItem,
)
from scheduler import endings, views
from scheduler import events as ev
from scheduler.admission import Admission
from scheduler.fair import Entry, FairQueue
from scheduler.limits import Cost
from scheduler.memory import Memory
from scheduler.pool import Pool, Worker
from scheduler.request import TRANSITIONS, WAITING, WITH_WORKER, InvalidTransition, Request, State


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """Numbers of the core. All spans are milliseconds."""

    publish_within_ms: int = 10_000
    """From admission until REQUESTS must hold the request: twice the gateway's publish time limit."""
    lapse_margin_ms: int = 2_000
    """A reservation lapses this long after publish_by, so that a message stored in time is never refused."""
    lost_ticks: int = 6
    """Own ticks (500 ms apart) of silence until a worker or holder is lost: 3 s (DESIGN.md section 7)."""
    cancel_repeat_ms: int = 1_000
    ageing_ms: int = 30_000
    """A batch request that waited this long stands with the interactive ones: half the default deadline."""
    unheld_ms: int = 15_000
    """An attempt in WORK that its worker, heard and ready, does not hold for this long is withdrawn and given anew.
    It happens only when something was lost on the way; a worker pulls within milliseconds."""
    patience_ms: int = 5_000
    """How long a request that fits no worker may be passed by smaller ones."""


class Core:
    """One model's scheduler during one term. ``step`` is the only way in."""

    def __init__(
        self, *, model: str, owner: str, epoch: Epoch, manifest: Manifest, settings: Settings, now_ms: int
    ) -> None:
        self.model = model
        self.owner = owner
        self.epoch = epoch
        self.settings = settings
        self.recovering = True
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
        self.refusals: dict[str, int] = {}
        """Refused admissions by code, for metrics."""
        self.outcomes: dict[str, int] = {}
        """Ended requests by outcome, for metrics."""
        self.lost_workers = 0
        self._holders: dict[str, tuple[int, set[str]]] = {}
        self._deadlines: list[tuple[int, str]] = []
        self._lapses: list[tuple[int, str]] = []
        self._cancelling: set[str] = set()
        self._deferred: dict[str, tuple[Outcome, str, str]] = {}
        self._claim_freed = False
        self._effects: list[ev.Effect] = []
        self._now = now_ms
        self._handlers: dict[type[ev.Event], Callable[..., None]] = {
            ev.AdmissionAsked: self._admission_asked,
            ev.RequestStored: self._request_stored,
            ev.WorkFound: self._work_found,
            ev.Recovered: self._recovered,
            ev.WorkStored: self._work_stored,
            ev.WorkRefused: self._work_refused,
            ev.TerminalStored: self._terminal_stored,
            ev.CancelAsked: self._cancel_asked,
            ev.ControlAnswered: self._control_answered,
            ev.StatusAsked: self._status_asked,
            ev.WorkerSeen: self._worker_seen,
            ev.HolderSeen: self._holder_seen,
            ev.OwnTickSeen: self._own_tick_seen,
            ev.TimePassed: self._time_passed,
            ev.TenantChanged: self._tenant_changed,
            ev.ManifestChanged: self._manifest_changed,
            ev.BudgetSeen: self._budget_seen,
        }

    def step(self, event: ev.Event, now_ms: int) -> list[ev.Effect]:
        """Take in one event at ``now_ms`` (Unix ms, never going back); gives what is to be done, in order."""
        self._now = max(self._now, now_ms)
        self._effects = []
        self._handlers[type(event)](event)
        return self._effects

    # -- admission ---------------------------------------------------------------------------------------

    def _admission_asked(self, event: ev.AdmissionAsked) -> None:
        asked = event.request
        known = self.requests.get(asked.request_id)
        if known is not None and known.tenant == asked.tenant:
            self._do(ev.AnswerAdmission(event.handle, self._admitted(known)))
            return
        try:
            if self.memory.ended(asked.request_id) is not None:
                raise HeadraceError("conflict", "A request with this id has ended.")
            if self.memory.cancelled(asked.request_id):
                raise HeadraceError("cancelled", "The request was cancelled.")
            deadline_ms = self.admission.check(asked, self._now, has_room=self.pool.has_room())
        except HeadraceError as error:
            self.refusals[error.code] = self.refusals.get(error.code, 0) + 1
            self._do(ev.AnswerAdmission(event.handle, self._refused(asked, error)))
            return
        request = Request(self._envelope_of(asked, deadline_ms), State.ADMITTED)
        self.admission.reserve(request, self._now)
        self.requests[request.id] = request
        lapses_at_ms = request.envelope.publish_by_ms + self.settings.lapse_margin_ms
        heapq.heappush(self._lapses, (lapses_at_ms, request.id))
        self._do(ev.AnswerAdmission(event.handle, self._admitted(request)))

    def _refused(self, asked: AdmissionRequest, error: HeadraceError) -> AdmissionAnswer:
        return AdmissionAnswer(
            admitted=False,
            epoch=self.epoch,
            code=error.code,
            message=error.message,
            param=error.param,
            retry_after_s=error.retry_after_s,
            limits=self.admission.quota(asked.tenant, self._now).rate_limits(self._now),
        )

    def _envelope_of(self, asked: AdmissionRequest, deadline_ms: int) -> RequestEnvelope:
        return RequestEnvelope(
            request_id=asked.request_id,
            tenant=asked.tenant,
            key_id=asked.key_id,
            model=asked.model,
            endpoint=asked.endpoint,
            stream=asked.stream,
            prompt_tokens=asked.prompt_tokens,
            max_output_tokens=asked.max_output_tokens,
            choices=asked.choices,
            priority=asked.priority,
            admitted_at_ms=self._now,
            publish_by_ms=self._now + self.settings.publish_within_ms,
            deadline_at_ms=self._now + deadline_ms,
            reply=Reply(subject="", stream=asked.request_id),
            holder=asked.holder,
            version=asked.version,
        )

    def _admitted(self, request: Request) -> AdmissionAnswer:
        return AdmissionAnswer(
            admitted=True,
            epoch=self.epoch,
            publish_by_ms=request.envelope.publish_by_ms,
            deadline_at_ms=request.envelope.deadline_at_ms,
            limits=self.admission.quota(request.tenant, self._now).rate_limits(self._now),
        )

    # -- arrival -----------------------------------------------------------------------------------------

    def _request_stored(self, event: ev.RequestStored) -> None:
        envelope = event.envelope
        request = self.requests.get(envelope.request_id)
        if request is None:
            self._unknown_stored(event)
            return
        if request.request_seq and request.request_seq != event.seq:
            self._do(ev.AckRequest(event.seq))  # A second copy under the same id.
            return
        if request.state is not State.ADMITTED:
            if request.state in WITH_WORKER and request.work_seq:
                self._do(ev.AckRequest(event.seq))
            elif not request.request_seq:
                request.request_seq = event.seq  # Ending; acknowledged when the end is stored.
            return
        request.request_seq = event.seq
        request.envelope = self._trusted(envelope, request.envelope)
        if event.stored_at_ms > request.envelope.publish_by_ms + self.settings.lapse_margin_ms:
            self._end_waiting(request, "expired", "deadline_exceeded", "The request reached the queue too late.")
            return
        self._advance(request, "stored")
        self._hold(request)
        self._enqueue(request)
        self._dispatch()

    def _trusted(self, envelope: RequestEnvelope, admitted: RequestEnvelope) -> RequestEnvelope:
        """What was admitted, with what only the message knows: a gateway cannot widen its own reservation."""
        return msgspec.structs.replace(
            admitted,
            reply=envelope.reply,
            tokenizer_fingerprint=envelope.tokenizer_fingerprint,
            client_request_id=envelope.client_request_id,
            body_object=envelope.body_object,
            prefix_caching=envelope.prefix_caching,
        )

    def _unknown_stored(self, event: ev.RequestStored) -> None:
        """A stored request that this term did not admit: an earlier owner's, a late one, or one already ended."""
        envelope = event.envelope
        ended = self.memory.ended(envelope.request_id)
        if ended is not None:
            self._found_ended(envelope, ended.event, request_seq=event.seq)
            return
        request = Request(envelope, State.ADMITTED)
        request.request_seq = event.seq
        self.admission.adopt(request, self._now, waits=True)
        self.requests[request.id] = request
        if self.memory.cancelled(envelope.request_id):
            self._end_waiting(request, "cancelled", "cancelled", "The request was cancelled.")
        elif event.stored_at_ms > envelope.publish_by_ms:
            self._end_waiting(request, "expired", "deadline_exceeded", "The request reached the queue too late.")
        else:
            self._advance(request, "stored")
            self._hold(request)
            self._enqueue(request)
            self._dispatch()

    def _found_ended(
        self, envelope: RequestEnvelope, event: AttemptEvent, *, request_seq: int = 0, work_seq: int = 0
    ) -> None:
        """A message of a request whose last attempt has a stored end: drop it, or decide about the next attempt."""
        if not endings.is_void(event):
            if request_seq:
                self._do(ev.AckRequest(request_seq))
            if work_seq:
                self._do(ev.DeleteWork(work_seq))
            return
        request = Request(envelope, State.ENDING)
        request.request_seq = request_seq
        request.work_seq = work_seq
        request.attempt = event.attempt
        request.counted = event.attempt - 1
        request.was_held = event.engine_death
        self.admission.adopt(request, self._now, waits=False)
        self.requests[request.id] = request
        self.memory.forget(request.id)
        self._hold(request)
        self._decide(request, event)
        self._dispatch()

    def _enqueue(self, request: Request) -> None:
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
        heapq.heappush(self._deadlines, (envelope.deadline_at_ms, request.id))

    def _hold(self, request: Request) -> None:
        """Its holder's silence ends the request; one that was never heard counts from now."""
        if holder := request.envelope.holder:
            tick, held = self._holders.setdefault(holder, (self.pool.tick, set()))
            held.add(request.id)
            self._holders[holder] = (tick, held)

    # -- dispatch ----------------------------------------------------------------------------------------

    def _dispatch(self) -> None:
        if self.recovering or not len(self.queue) or not self.pool.has_room():
            return
        self._claim_freed = True
        while self._claim_freed:  # What a claim kept out may fit beside its request.
            self._claim_freed = False
            self.queue.scan(self._now, self._take)

    def _take(self, entry: Entry) -> bool:
        request = self.requests[entry.key]
        if request.envelope.deadline_at_ms <= self._now:
            self._expire(request)
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
        self._advance(request, "dispatch")
        self._place_on(request, worker, request.attempt + 1)
        request.dispatched_at_ms = self._now
        self._do(
            ev.StoreWork(
                request_id=request.id,
                attempt=request.attempt,
                worker=worker.beat.worker,
                version=worker.beat.version,
                request_seq=request.request_seq,
                work_seq=request.work_seq,
            )
        )

    def _place_on(self, request: Request, worker: Worker, attempt: int) -> None:
        request.attempt = attempt
        request.worker = worker.beat.worker
        request.progress = None
        request.was_held = False
        request.spared = False
        request.adopted = False
        slots, kv_tokens = self.pool.need(worker, request.envelope.choices, request.cost.total)
        worker.assign(request.id, slots, kv_tokens)
        if request.deaths > 0:
            worker.suspects.add(request.id)

    def may_have_been_pulled(self, event: AttemptEvent) -> int:
        """Sequence in WORK of a lost attempt that its worker, now lost, may have begun and not told of; else 0."""
        request = self.requests.get(event.request_id)
        if request is None or event.outcome != "lost" or event.attempt != request.attempt or request.was_held:
            return 0
        return request.work_seq if event.worker in self.pool.evicted else 0

    def awaits_work(self, effect: ev.StoreWork) -> Request | None:
        """The request of an effect that is still wanted; None when its attempt has ended meanwhile."""
        request = self.requests.get(effect.request_id)
        if request is None or request.attempt != effect.attempt or request.state is not State.DISPATCHING:
            return None
        return request

    def _work_stored(self, event: ev.WorkStored) -> None:
        request = self.requests.get(event.request_id)
        if request is None or request.attempt != event.attempt or request.state in WAITING:
            self._do(ev.DeleteWork(event.seq))  # The attempt ended before its message was confirmed.
            return
        if request.work_seq and request.work_seq != event.seq:
            self._do(ev.DeleteWork(request.work_seq))  # The attempt before this one.
        request.work_seq = event.seq
        if request.request_seq:
            self._do(ev.AckRequest(request.request_seq))
            request.request_seq = 0
        if request.state is not State.ENDING:
            self._advance(request, "work_stored")
        if request.cancel_reason:
            self._send_cancel(request)

    def _work_refused(self, event: ev.WorkRefused) -> None:
        request = self.requests.get(event.request_id)
        if request is None or request.attempt != event.attempt or request.state is not State.DISPATCHING:
            return
        if event.body_missing:
            self._end(request, "failed", "internal_error", "The request's body is gone.")
        else:
            self._end(request, "lost", "worker_lost", "The attempt could not be handed to its worker.")

    # -- ends --------------------------------------------------------------------------------------------

    def _end(self, request: Request, outcome: Outcome, code: str, message: str) -> None:
        """Ask for the present attempt's end; what is stored first decides (TerminalStored)."""
        number = request.open_attempt
        event = endings.proposed(
            request, number, outcome, code, message, version=self._version_of(request), now_ms=self._now
        )
        if request.state is not State.ENDING:
            if request.state in WAITING:
                self._leave_queue(request)
            request.attempt = number
            self._advance(request, "end")
        self._do(ev.StoreTerminal(event))

    def _end_waiting(self, request: Request, outcome: Outcome, code: str, message: str) -> None:
        """End a request that waits; during a takeover only when it is sure that nobody dispatched it."""
        if self.recovering:
            self._deferred[request.id] = (outcome, code, message)
        else:
            self._end(request, outcome, code, message)

    def _version_of(self, request: Request) -> str:
        worker = self.pool.workers.get(request.worker)
        return (
            worker.beat.version if worker is not None else request.envelope.version or self.admission.manifest.version
        )

    def _terminal_stored(self, stored: ev.TerminalStored) -> None:
        event = stored.event
        request = self.requests.get(event.request_id)
        if request is None:
            self._unknown_ended(event)
            return
        if request.state in WAITING:
            # An attempt above ours was an earlier owner's last word: its number is used up.
            if event.attempt == request.open_attempt or event.attempt > request.attempt:
                self._decide_waiting(request, event)
        elif event.attempt == request.attempt:
            self._decide(request, event)
        self._dispatch()

    def _decide_waiting(self, request: Request, event: AttemptEvent) -> None:
        """An end that was stored while the request waits here."""
        if endings.is_void(event):
            request.attempt = event.attempt
            self._count_void(request, event)
            return
        self._leave_queue(request)
        self._finish(request, event, endings.final_error(request, event))

    def _decide(self, request: Request, event: AttemptEvent) -> None:
        """The present attempt has ended with ``event``: retry before the first token, else settle for good."""
        worker = self.pool.workers.get(request.worker)
        if worker is not None and event.engine_death:
            request.spared = event.completion_tokens > 0 and worker.blames_another(request.id)
        if worker is not None and event.outcome == "lost":
            # It lives, and may have the attempt or get it yet. An order before the loss is stored would end the
            # request: the worker's own end, cancelled, would be first.
            self._do(ev.SendControl(request.worker, self._cancel_order(request)))
        self._release(request, event)
        void = endings.is_void(event)
        if void:
            self._count_void(request, event)
            if request.cancel_reason:
                self._requeue(request)
                self._end_waiting(request, "cancelled", "cancelled", _cancelled(request))
                return
            if endings.may_retry(request, event):
                self._send_frame(request, "lost", msgspec.json.encode(LostData(retry=True)))
                self._requeue(request)
                return
        error = endings.final_error(request, event)
        if error is not None and (event.reporter == "scheduler" or void):
            self._send_frame(request, "error", msgspec.json.encode(error))
        self._finish(request, event, error)

    def _count_void(self, request: Request, event: AttemptEvent) -> None:
        """Attempts that no worker ever held do not count against the request, nor deaths by a suspect beside it."""
        died = event.outcome == "lost" or event.engine_death
        was_held = event.reporter == "worker" or request.was_held or event.engine_death
        if was_held and not (died and request.spared):
            request.counted += 1
            request.deaths += int(died)

    def _unknown_ended(self, event: AttemptEvent) -> None:
        """The end of a request that this term does not know: an earlier term's, or one whose WORK comes next."""
        known = self.memory.ended(event.request_id)
        if known is None or known.event.attempt < event.attempt:
            self.memory.add_ended(event, None, self._now)
        if known is None and self.recovering and event.outcome in ("completed", "cancelled"):
            used = Cost(event.prompt_tokens, event.completion_tokens)
            self.admission.quota(event.tenant, self._now).replay(used, event.admitted_at_ms, self._now)

    def _requeue(self, request: Request) -> None:
        self._advance(request, "retry")
        self.admission.wait(request, 1, self._now)
        self._enqueue(request)

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

    def _finish(self, request: Request, event: AttemptEvent, error: ErrorData | None) -> None:
        used = Cost(0, 0)
        if event.outcome in ("completed", "cancelled"):
            used = Cost(event.prompt_tokens, event.completion_tokens)
        self.admission.settle(request, used, self._now)
        if error is not None and error.code == "request_quarantined":
            self._do(ev.Quarantine(request.envelope, event, error.message, request.request_seq, request.work_seq))
        else:
            self._drop_messages(request, event)
        for handle in request.cancel_waiters:
            self._do(ev.AnswerCancel(handle, CancelAnswer(durable=True, outcome=event.outcome)))
        self.outcomes[event.outcome] = self.outcomes.get(event.outcome, 0) + 1
        self._forget(request)
        self.memory.add_ended(event, error, self._now)

    def _drop_messages(self, request: Request, event: AttemptEvent) -> None:
        if request.request_seq:
            self._do(ev.AckRequest(request.request_seq))
        if request.work_seq and (event.reporter == "scheduler" or event.retryable or self.recovering):
            self._do(ev.DeleteWork(request.work_seq))

    def _forget(self, request: Request) -> None:
        del self.requests[request.id]
        self._cancelling.discard(request.id)
        self.pool.drop_claim(request.id)
        if holder := request.envelope.holder:
            held = self._holders.get(holder)
            if held is not None:
                held[1].discard(request.id)

    def _expire(self, request: Request) -> None:
        waited = self._now - request.envelope.admitted_at_ms
        message = f"No first token within the deadline; waited {waited} ms."
        self._end_waiting(request, "expired", "deadline_exceeded", message)

    # -- cancel and status -------------------------------------------------------------------------------

    def _cancel_asked(self, event: ev.CancelAsked) -> None:
        request_id = event.request.request_id
        request = self.requests.get(request_id)
        if request is not None and request.tenant == event.tenant:
            request.cancel_waiters.append(event.handle)
            self._cancel(request, event.request.reason)
            return
        ended = self.memory.ended(request_id)
        if ended is not None and ended.event.tenant == event.tenant:
            self._do(ev.AnswerCancel(event.handle, CancelAnswer(durable=True, outcome=ended.event.outcome)))
            return
        if request is None and ended is None:
            self.memory.add_cancelled(request_id, self._now)
        self._do(ev.AnswerCancel(event.handle, CancelAnswer(durable=True)))

    def _cancel(self, request: Request, reason: str) -> None:
        if request.cancel_reason:
            return
        request.cancel_reason = reason
        if request.state in WAITING:
            self._end_waiting(request, "cancelled", "cancelled", _cancelled(request))
        elif request.state in WITH_WORKER:
            self._cancelling.add(request.id)
            if request.work_seq or request.was_held:
                self._send_cancel(request)

    def _send_cancel(self, request: Request) -> None:
        request.cancel_sent_at_ms = self._now
        self._cancelling.add(request.id)
        self._do(ev.SendControl(request.worker, self._cancel_order(request)))

    def _cancel_order(self, request: Request) -> CancelAttempt:
        return CancelAttempt(
            epoch=self.epoch,
            request_id=request.id,
            attempt=request.attempt,
            reason=request.cancel_reason or "withdrawn",
        )

    def _control_answered(self, event: ev.ControlAnswered) -> None:
        """A worker that never held the attempt will not start it: the scheduler stores the end itself."""
        request = self.requests.get(event.request_id)
        if request is None or request.attempt != event.attempt or request.state not in WITH_WORKER:
            return
        if event.answer is not None and event.answer.status == "unknown" and request.cancel_reason:
            self._end(request, "cancelled", "cancelled", _cancelled(request))

    def _status_asked(self, event: ev.StatusAsked) -> None:
        self._do(ev.AnswerStatus(event.handle, views.status(self, event.tenant, event.request_id)))

    # -- workers and holders -----------------------------------------------------------------------------

    def _worker_seen(self, event: ev.WorkerSeen) -> None:
        beat = event.beat
        if beat.worker in self.pool.evicted:
            self._do(ev.SendControl(beat.worker, Evict(epoch=self.epoch)))
            return
        worker, held = self.pool.seen(beat)
        if beat.epoch < self.epoch:
            self._do(ev.SendControl(beat.worker, Announce(epoch=self.epoch)))
        for progress in held:
            request = self.requests.get(progress.request_id)
            if request is None or request.attempt != progress.attempt or request.worker != beat.worker:
                continue
            request.was_held = True
            request.progress = progress
            if progress.completion_tokens > 0 and request.state in WITH_WORKER:
                worker.suspects.discard(request.id)
                if request.state is not State.RUNNING:
                    self._advance(request, "progress")
        if beat.epoch >= self.epoch:
            self._drop_unstarted(worker)
        self._dispatch()

    def _drop_unstarted(self, worker: Worker) -> None:
        """A worker that knows this epoch starts no work of an earlier one: what it does not hold by now is void."""
        for request_id in worker.adopted - worker.held:
            request = self.requests.get(request_id)
            if request is not None and request.adopted and request.state in WITH_WORKER:
                self._end(request, "lost", "worker_lost", "The attempt of an earlier owner was not started.")
        worker.adopted.clear()

    def _holder_seen(self, event: ev.HolderSeen) -> None:
        _, held = self._holders.get(event.beat.holder, (0, set()))
        self._holders[event.beat.holder] = (self.pool.tick, held)
        if event.beat.leaving:
            self._holder_gone(event.beat.holder)

    def _holder_gone(self, holder: str) -> None:
        _, held = self._holders.pop(holder, (0, set()))
        for request_id in list(held):
            if (request := self.requests.get(request_id)) is not None:
                self._cancel(request, "holder_lost")

    def _own_tick_seen(self, event: ev.OwnTickSeen) -> None:
        self.pool.tick += 1
        for worker in self.pool.silent():
            self._worker_lost(worker)
        for holder, (tick, _) in list(self._holders.items()):
            if self.pool.tick - tick > self.settings.lost_ticks:
                self._holder_gone(holder)
        self._dispatch()

    def _worker_lost(self, worker: Worker) -> None:
        self.pool.evict(worker)
        self._do(ev.SendControl(worker.beat.worker, Evict(epoch=self.epoch)))
        if worker.work or worker.beat.state != "draining":
            self.lost_workers += 1
        for request_id in list(worker.work):
            request = self.requests[request_id]
            if request.state in WITH_WORKER:
                begun = request.progress is not None and request.progress.completion_tokens > 0
                request.spared = begun and worker.blames_another(request_id)
                self._end(request, "lost", "worker_lost", f"Worker {worker.beat.worker} was not heard for too long.")

    # -- time --------------------------------------------------------------------------------------------

    def _time_passed(self, event: ev.TimePassed) -> None:
        now = self._now
        while self._deadlines and self._deadlines[0][0] <= now:
            _, request_id = heapq.heappop(self._deadlines)
            request = self.requests.get(request_id)
            if request is not None and request.state is State.QUEUED and request.envelope.deadline_at_ms <= now:
                self._expire(request)
        while self._lapses and self._lapses[0][0] <= now:
            _, request_id = heapq.heappop(self._lapses)
            request = self.requests.get(request_id)
            if request is not None and request.state is State.ADMITTED:
                self._lapse(request)
        self._withdraw_unheld()
        for request_id in list(self._cancelling):
            request = self.requests[request_id]
            repeat_at = request.cancel_sent_at_ms + self.settings.cancel_repeat_ms
            if request.state in WITH_WORKER and repeat_at <= now:
                self._send_cancel(request)
        self.memory.pass_time(now)
        self.admission.pass_time(now)
        self._dispatch()

    def _withdraw_unheld(self) -> None:
        for worker in self.pool.workers.values():
            for request_id in worker.work.keys() - worker.held if self.pool.usable(worker) else ():
                request = self.requests[request_id]
                overdue = request.dispatched_at_ms + self.settings.unheld_ms <= self._now
                if request.state is State.DISPATCHED and overdue and not request.was_held:
                    self._end(request, "lost", "worker_lost", "The attempt did not reach its worker.")

    def _lapse(self, request: Request) -> None:
        """Admitted and never published: the reservation comes back; the id is remembered, should it come later."""
        self._leave_queue(request)
        self.admission.settle(request, Cost(0, 0), self._now, refund_request=True)
        self._forget(request)
        for handle in request.cancel_waiters:
            self._do(ev.AnswerCancel(handle, CancelAnswer(durable=True)))

    # -- takeover ----------------------------------------------------------------------------------------

    def _work_found(self, event: ev.WorkFound) -> None:
        """At a takeover adopt what is dispatched; later drop what no request needs."""
        item = event.item
        request_id = item.request.request_id
        known = self.requests.get(request_id)
        if known is not None and known.attempt >= item.attempt:
            if known.work_seq != event.seq and known.state is not State.DISPATCHING:
                self._do(ev.DeleteWork(event.seq))
            return
        ended = self.memory.ended(request_id)
        if not self.recovering:
            self._do(ev.DeleteWork(event.seq))  # Nobody needs it: ended here, or stored too late.
            return
        if ended is not None and ended.event.attempt >= item.attempt:
            self._found_ended(item.request, ended.event, work_seq=event.seq)
            return
        if known is None:
            request = Request(item.request, State.DISPATCHED)
            self.admission.adopt(request, self._now, waits=False)
            self.requests[request_id] = request
            self._hold(request)
        else:
            request = known
            self._leave_queue(request)
            request.move(State.DISPATCHED, self._now)
        self._adopt(request, item, event.seq)
        self.memory.forget(request_id)

    def _adopt(self, request: Request, item: WorkItem, seq: int) -> None:
        """Take over an attempt that an earlier owner dispatched."""
        self.queue.set_weight(request.tenant, self.admission.tenant(request.tenant).weight)
        self.queue.adopt(request.tenant, request.cost.total)
        request.charged = request.cost.total
        if request.work_seq:
            self._do(ev.DeleteWork(request.work_seq))
        request.work_seq = seq
        request.dispatched_at_ms = item.dispatched_at_ms
        request.counted = item.attempt - 1
        worker = self.pool.expect(item.worker, self.model, item.version)
        self._place_on(request, worker, item.attempt)
        request.adopted = True
        worker.adopted.add(request.id)
        if request.request_seq:
            self._do(ev.AckRequest(request.request_seq))
            request.request_seq = 0

    def _recovered(self, event: ev.Recovered) -> None:
        self.recovering = False
        for request_id, (outcome, code, message) in self._deferred.items():
            request = self.requests.get(request_id)
            if request is not None and request.state in WAITING:
                self._end(request, outcome, code, message)
            elif request is not None and request.cancel_reason and request.state in WITH_WORKER:
                self._send_cancel(request)
        self._deferred.clear()
        self._dispatch()

    # -- settings ----------------------------------------------------------------------------------------

    def _tenant_changed(self, event: ev.TenantChanged) -> None:
        self.admission.set_tenant(event.name, event.record, self._now)

    def _manifest_changed(self, event: ev.ManifestChanged) -> None:
        self.admission.manifest = event.manifest
        self.pool.kv_overbooking = event.manifest.limits.kv_overbooking

    def _budget_seen(self, event: ev.BudgetSeen) -> None:
        self.admission.budgets[event.tenant] = (event.month, event.tokens)

    # -- small things ------------------------------------------------------------------------------------

    def _do(self, effect: ev.Effect) -> None:
        self._effects.append(effect)

    def _advance(self, request: Request, what: str) -> None:
        state = TRANSITIONS.get((request.state, what))
        if state is None:
            raise InvalidTransition(f"{request.id}: {what} in state {request.state.value}; {request.history}")
        request.move(state, self._now)

    def _leave_queue(self, request: Request) -> None:
        self.queue.remove(request.id)
        self.admission.wait(request, -1, self._now)

    def _send_frame(self, request: Request, kind: FrameKind, data: bytes) -> None:
        reply = request.envelope.reply
        if reply.subject:
            frame = Frame(stream=reply.stream, attempt=request.open_attempt, seq=-1, kind=kind, data=msgspec.Raw(data))
            self._do(ev.SendFrame(reply.subject, frame))


def _cancelled(request: Request) -> str:
    return f"The request was cancelled: {request.cancel_reason}."
