"""The scheduler's decisions for one model: what each event leads to.

Pure: events and time in, effects out. A request's life is the table TRANSITIONS (``request``), its steps are in
``lifecycle``; a pair that is not in the table is a bug and raises InvalidTransition with the request's recent
history. The end of an attempt is what ATTEMPTS stored first, whoever wrote it (TerminalStored); the core asks for an
end by StoreTerminal and acts on the winner only.
"""

import heapq
from collections.abc import Callable

from contracts.errors import HeadraceError
from contracts.messages.admission import AdmissionAnswer, AdmissionRequest
from contracts.messages.attempts import AttemptEvent
from contracts.messages.base import Epoch
from contracts.messages.control import Announce, CancelAnswer, Evict
from contracts.messages.records import Manifest
from contracts.tokens import Cost
from scheduler.config import Settings
from scheduler.core import events as ev
from scheduler.core import outcomes, views
from scheduler.core.lifecycle import Lifecycle, cancelled
from scheduler.core.request import WAITING, WITH_WORKER, Request, State
from scheduler.core.takeover import Takeover
from scheduler.core.worker_pool import Worker

WAITERS_MAX = 16
"""Cancels of one request that wait for its end; who was dropped asks again."""


class Core(Lifecycle):
    """One model's scheduler during one term. ``step`` is the only way in."""

    def __init__(
        self, *, model: str, owner: str, epoch: Epoch, manifest: Manifest, settings: Settings, now_ms: int
    ) -> None:
        super().__init__(epoch=epoch, manifest=manifest, settings=settings, now_ms=now_ms)
        self.model = model
        self.owner = owner
        self.refusals: dict[str, int] = {}
        """Refused admissions by code, for metrics."""
        self.lost_workers = 0
        self._takeover = Takeover(self)
        self._lapses: list[tuple[int, str]] = []
        """A heap of (when the reservation lapses, request id)."""
        self._handlers = self._table()

    def _table(self) -> dict[type[ev.Event], Callable[..., None]]:
        return {
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
            self.do(ev.AnswerAdmission(event.handle, self._admitted(known)))
            return
        try:
            if known is not None or self.memory.ended(asked.request_id) is not None:
                raise HeadraceError("conflict", "A request with this id is known already.")
            if self.memory.cancelled(asked.request_id):
                raise HeadraceError("cancelled", "The request was cancelled.")
            deadline_ms = self.admission.check(asked, self._now, has_room=self.pool.has_room())
        except HeadraceError as error:
            self.refusals[error.code] = self.refusals.get(error.code, 0) + 1
            self.do(ev.AnswerAdmission(event.handle, self._refused(asked, error)))
            return
        request = Request.admitted(
            asked,
            now_ms=self._now,
            publish_by_ms=self._now + self.settings.publish_within_ms,
            deadline_at_ms=self._now + deadline_ms,
        )
        self.admission.reserve(request, self._now)
        self.requests[request.id] = request
        heapq.heappush(self._lapses, (self._lapses_at_ms(request), request.id))
        self.do(ev.AnswerAdmission(event.handle, self._admitted(request)))

    def _admitted(self, request: Request) -> AdmissionAnswer:
        return AdmissionAnswer(
            admitted=True,
            epoch=self.epoch,
            publish_by_ms=request.envelope.publish_by_ms,
            deadline_at_ms=request.envelope.deadline_at_ms,
            limits=self.admission.quota(request.tenant, self._now).rate_limits(self._now),
        )

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

    def _lapses_at_ms(self, request: Request) -> int:
        return request.envelope.publish_by_ms + self.settings.lapse_margin_ms

    # -- what the streams hold ---------------------------------------------------------------------------

    def _request_stored(self, event: ev.RequestStored) -> None:
        request = self.requests.get(event.envelope.request_id)
        if request is None:
            self._takeover.request_found(event, self._now)
        elif request.request_seq and request.request_seq != event.seq:
            self.do(ev.AckRequest(event.seq))  # A second copy under the same id.
        elif request.state is State.ADMITTED:
            self._arrived(request, event)
        elif request.state in WITH_WORKER and request.work_seq:
            self.do(ev.AckRequest(event.seq))
        else:
            request.request_seq = event.seq  # Acknowledged when WORK has it or the end is stored.

    def _arrived(self, request: Request, event: ev.RequestStored) -> None:
        request.stored(event.envelope, event.seq)
        if event.stored_at_ms > self._lapses_at_ms(request):
            self.end_waiting(request, "expired", "deadline_exceeded", "The request reached the queue too late.")
            return
        self.advance(request, "stored")
        self.hold(request)
        self.enqueue(request)
        self.dispatch()

    def _work_found(self, event: ev.WorkFound) -> None:
        self._takeover.work_found(event.item, event.seq, self._now)

    def _recovered(self, event: ev.Recovered) -> None:
        self._takeover.finish()

    # -- what was asked of WORK and ATTEMPTS -------------------------------------------------------------

    def awaits_work(self, effect: ev.StoreWork) -> Request | None:
        """The request of an effect that is still wanted; None when its attempt has ended meanwhile."""
        request = self.requests.get(effect.request_id)
        if request is None or request.attempt != effect.attempt or request.state is not State.DISPATCHING:
            return None
        return request

    def may_have_been_pulled(self, event: AttemptEvent) -> int:
        """Sequence in WORK of a lost attempt that its worker, now lost, may have begun and not told of; else 0."""
        request = self.requests.get(event.request_id)
        if request is None or event.outcome != "lost" or event.attempt != request.attempt or request.was_held:
            return 0
        return request.work_seq if event.worker in self.pool.evicted else 0

    def _work_stored(self, event: ev.WorkStored) -> None:
        request = self.requests.get(event.request_id)
        if request is None or request.attempt != event.attempt or request.state in WAITING:
            self.do(ev.DeleteWork(event.seq))  # The attempt ended before its message was confirmed.
            return
        if request.work_seq and request.work_seq != event.seq:
            self.do(ev.DeleteWork(request.work_seq))  # The attempt before this one.
        request.work_seq = event.seq
        if request.request_seq:
            self.do(ev.AckRequest(request.request_seq))
            request.request_seq = 0
        if request.state is not State.ENDING:
            self.advance(request, "work_stored")
        if request.cancel_reason:
            self.send_cancel(request)

    def _work_refused(self, event: ev.WorkRefused) -> None:
        request = self.requests.get(event.request_id)
        if request is None or request.attempt != event.attempt or request.state is not State.DISPATCHING:
            return
        if event.body_missing:
            self.end(request, "failed", "internal_error", "The request's body is gone.")
        else:
            self.end(request, "lost", "worker_lost", "The attempt could not be handed to its worker.")

    def _terminal_stored(self, stored: ev.TerminalStored) -> None:
        event = stored.event
        self._takeover.end_found(event, self._now)
        request = self.requests.get(event.request_id)
        if request is None:
            return
        if request.state in WAITING:
            # An attempt above ours was an earlier owner's last word: its number is used up.
            if event.attempt == request.open_attempt or event.attempt > request.attempt:
                self._decide_waiting(request, event)
        elif event.attempt == request.attempt:
            self.decide(request, event)
        self.dispatch()

    def _decide_waiting(self, request: Request, event: AttemptEvent) -> None:
        """An end that was stored while the request waits here."""
        if outcomes.is_void(event):
            request.attempt = event.attempt
            outcomes.count(request, event)
            if outcomes.may_retry(request, event):
                return
        self.leave_queue(request)
        self.finish(request, event)

    # -- cancel and status -----------------------------------------------------------------------------

    def _cancel_asked(self, event: ev.CancelAsked) -> None:
        request_id = event.request.request_id
        request = self.requests.get(request_id)
        if request is not None and request.tenant == event.tenant:
            request.cancel_waiters = [*request.cancel_waiters[1 - WAITERS_MAX :], event.handle]
            self.cancel(request, event.request.reason)
            return
        ended = self.memory.ended(request_id)
        if ended is not None and ended.event.tenant == event.tenant:
            self.do(ev.AnswerCancel(event.handle, CancelAnswer(durable=True, outcome=ended.event.outcome)))
            return
        if request is None and ended is None:
            self.memory.add_cancelled(request_id, self._now)
        self.do(ev.AnswerCancel(event.handle, CancelAnswer(durable=True)))

    def _control_answered(self, event: ev.ControlAnswered) -> None:
        """A worker that never held the attempt will not start it: the scheduler stores the end itself."""
        request = self.requests.get(event.request_id)
        if request is None or request.attempt != event.attempt or request.state not in WITH_WORKER:
            return
        if event.answer is not None and event.answer.status == "unknown" and request.cancel_reason:
            self.end(request, "cancelled", "cancelled", cancelled(request))

    def _status_asked(self, event: ev.StatusAsked) -> None:
        self.do(ev.AnswerStatus(event.handle, views.status(self, event.tenant, event.request_id)))

    # -- workers and holders ---------------------------------------------------------------------------

    def _worker_seen(self, event: ev.WorkerSeen) -> None:
        beat = event.beat
        if beat.worker in self.pool.evicted:
            self.do(ev.SendControl(beat.worker, Evict(epoch=self.epoch)))
            return
        worker, held = self.pool.seen(beat)
        if beat.epoch < self.epoch:
            self.do(ev.SendControl(beat.worker, Announce(epoch=self.epoch)))
        for progress in held:
            request = self.requests.get(progress.request_id)
            if request is None or request.attempt != progress.attempt or request.worker != beat.worker:
                continue
            request.was_held = True
            request.progress = progress
            if progress.completion_tokens > 0 and request.state in WITH_WORKER:
                worker.suspects.discard(request.id)
                if request.state is not State.RUNNING:
                    self.advance(request, "progress")
        if beat.epoch >= self.epoch:
            self._drop_unstarted(worker)
        self.dispatch()

    def _drop_unstarted(self, worker: Worker) -> None:
        """A worker that knows this epoch starts no work of an earlier one: what it does not hold by now is void."""
        for request_id in worker.adopted:
            request = self.requests.get(request_id)
            started = request_id in worker.held
            if request is not None and not started and request.adopted and request.state in WITH_WORKER:
                self.end(request, "lost", "worker_lost", "The attempt of an earlier owner was not started.")
        worker.adopted.clear()

    def _holder_seen(self, event: ev.HolderSeen) -> None:
        self.holders.heard(event.beat.stream_owner, self.pool.tick)
        if event.beat.leaving:
            self._holder_gone(event.beat.stream_owner)

    def _holder_gone(self, holder: str) -> None:
        for request_id in self.holders.leave(holder):
            self.cancel(self.requests[request_id], "stream_owner_lost")

    def _own_tick_seen(self, event: ev.OwnTickSeen) -> None:
        self.pool.tick += 1
        for worker in self.pool.silent():
            self._worker_lost(worker)
        for holder in self.holders.silent(self.pool.tick, self.settings.lost_ticks):
            self._holder_gone(holder)
        self.dispatch()

    def _worker_lost(self, worker: Worker) -> None:
        self.pool.evict(worker)
        self.do(ev.SendControl(worker.beat.worker, Evict(epoch=self.epoch)))
        if worker.work or worker.beat.state != "draining":
            self.lost_workers += 1
        for request_id in list(worker.work):
            request = self.requests[request_id]
            if request.state in WITH_WORKER:
                begun = request.progress is not None and request.progress.completion_tokens > 0
                request.spared = begun and worker.blames_another(request_id)
                message = f"Worker {worker.beat.worker} was not heard for too long."
                self.end(request, "lost", "worker_lost", message, worker_died=True)

    # -- time ------------------------------------------------------------------------------------------

    def _time_passed(self, event: ev.TimePassed) -> None:
        now = self._now
        while self.deadlines and self.deadlines[0][0] <= now:
            _, request_id = heapq.heappop(self.deadlines)
            request = self.requests.get(request_id)
            if request is not None and request.state is State.QUEUED and request.envelope.deadline_at_ms <= now:
                self.expire(request)
        while self._lapses and self._lapses[0][0] <= now:
            _, request_id = heapq.heappop(self._lapses)
            request = self.requests.get(request_id)
            if request is not None and request.state is State.ADMITTED:
                self._lapse(request)
        self._withdraw_unheld()
        for request_id in list(self.cancelling):
            request = self.requests[request_id]
            repeat_at = request.cancel_sent_at_ms + self.settings.cancel_repeat_ms
            if request.state in WITH_WORKER and repeat_at <= now:
                self.send_cancel(request)
        self.memory.pass_time(now)
        self.admission.pass_time(now)
        self.dispatch()

    def _withdraw_unheld(self) -> None:
        for worker in self.pool.workers.values():
            for request_id in worker.work if self.pool.usable(worker) else ():
                request = self.requests[request_id]
                overdue = request.dispatched_at_ms + self.settings.unheld_ms <= self._now
                unheld = request_id not in worker.held and not request.was_held
                if request.state is State.DISPATCHED and overdue and unheld:
                    self.end(request, "lost", "worker_lost", "The attempt did not reach its worker.")

    def _lapse(self, request: Request) -> None:
        """Admitted and never published: the reservation comes back. Should it be stored yet, it is a late one."""
        self.leave_queue(request)
        self.admission.settle(request, Cost(0, 0), self._now, refund_request=True)
        self.forget(request)
        for handle in request.cancel_waiters:
            self.do(ev.AnswerCancel(handle, CancelAnswer(durable=True)))

    # -- settings --------------------------------------------------------------------------------------

    def _tenant_changed(self, event: ev.TenantChanged) -> None:
        self.admission.set_tenant(event.name, event.record, self._now)

    def _manifest_changed(self, event: ev.ManifestChanged) -> None:
        self.admission.manifest = event.manifest
        self.pool.kv_overbooking = event.manifest.limits.kv_overbooking

    def _budget_seen(self, event: ev.BudgetSeen) -> None:
        self.admission.budgets[event.tenant] = (event.month, event.tokens)
