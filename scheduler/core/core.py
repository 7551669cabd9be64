"""The scheduler's decisions for one model: what each event leads to.

Pure: events and time in, effects out. A request's states are the table of ``transitions``, its steps are in
``lifecycle``; who asks is answered in ``asking``, signs of life are heard in ``watch``. The end of an attempt is what
ATTEMPTS stored first, whoever wrote it (TerminalStored); the core asks for an end by StoreTerminal and acts on the
winner only.
"""

import heapq
from collections.abc import Callable

from contracts.messages.attempts import AttemptEvent
from contracts.messages.base import Epoch
from contracts.messages.control import WITHDRAWN, CancelAnswer
from contracts.messages.records import ModelRecord
from scheduler.core import events, outcomes, views
from scheduler.core.asking import READERS_MAX, WAITERS_MAX, Asking
from scheduler.core.lifecycle import cancelled
from scheduler.core.request import Request
from scheduler.core.settings import Settings
from scheduler.core.takeover import Takeover
from scheduler.core.transitions import WAITING, WITH_WORKER, State, Trigger

PLAN_EVERY_MS = 2_000
"""Of the wanted number of workers: there is a heartbeat of the owner's own within it, unless the bus is away."""


class Core(Asking):
    """One model's scheduler during one term. ``step`` is the only way in."""

    def __init__(
        self, *, model: str, owner: str, epoch: Epoch, record: ModelRecord, settings: Settings, now_ms: int
    ) -> None:
        super().__init__(model=model, owner=owner, epoch=epoch, record=record, settings=settings, now_ms=now_ms)
        self._quiet_since_ms = now_ms
        self._planned_ms = now_ms
        self._planned_beats = 0
        self._planned_for = record.limits
        self._takeover = Takeover(self)
        self._handlers = self._table()

    def _table(self) -> dict[type[events.Event], Callable[..., None]]:
        return {
            events.AdmissionAsked: self._admission_asked,
            events.RequestStored: self._request_stored,
            events.WorkFound: self._work_found,
            events.Recovered: self._recovered,
            events.WorkStored: self._work_stored,
            events.WorkRefused: self._work_refused,
            events.TerminalStored: self._terminal_stored,
            events.EndUnreadable: self._end_unreadable,
            events.EndMissing: self._end_missing,
            events.WorkSwept: self._work_swept,
            events.CancelAsked: self._cancel_asked,
            events.ControlAnswered: self._control_answered,
            events.StatusAsked: self._status_asked,
            events.WorkerSeen: self._worker_seen,
            events.PulseSeen: self._pulse_seen,
            events.CacheChanged: self._cache_changed,
            events.StreamOwnerSeen: self._stream_owner_seen,
            events.LoopbackSeen: self._loopback_seen,
            events.TimePassed: self._time_passed,
            events.TenantChanged: self._tenant_changed,
            events.ModelChanged: self._model_changed,
            events.BudgetSeen: self._budget_seen,
            events.SpendingSeen: self._spending_seen,
            events.SpendingUntold: self._spending_untold,
            events.LeaseExchanged: self._lease_exchanged,
            events.RolloutChanged: self._rollout_changed,
        }

    @property
    def over(self) -> bool:
        """The model was removed, and whoever was served by it has had time to learn how that ended."""
        return self.admission.record.removed and self.now_ms - self._quiet_since_ms >= self.settings.removed_quiet_ms

    def step(self, event: events.Event, now_ms: int) -> list[events.Effect]:
        """Take in one event at ``now_ms`` (Unix ms, never going back); gives what is to be done, in order."""
        self.now_ms = max(self.now_ms, now_ms)
        self.effects = []
        self._handlers[type(event)](event)
        for tenant in self._short_of:
            self._exchange_lease(tenant)
        self._short_of.clear()
        if self.requests or self.recovering or not self.admission.record.removed:
            self._quiet_since_ms = self.now_ms
        return self.effects

    def _request_stored(self, event: events.RequestStored) -> None:
        request = self.requests.get(event.envelope.request_id)
        if request is None:
            self._takeover.request_found(event)
        elif request.request_seq and request.request_seq != event.seq:
            self.do(events.AckRequest(event.seq))  # A second copy under the same id.
        elif request.state is State.ADMITTED:
            request.stored(event.envelope, event.seq)  # In time, for its reservation stands.
            self.queue_up(request)
            self.versions.copy(request)
            joining, request.joining = request.joining, []
            for asked in joining:
                self._admission_asked(asked)
        elif request.state in WITH_WORKER and request.work_seq:
            self.do(events.AckRequest(event.seq))
        else:
            request.request_seq = event.seq  # Acknowledged when WORK has it or the end is stored.

    def _work_found(self, event: events.WorkFound) -> None:
        self._takeover.work_found(event.item, event.seq)

    def _recovered(self, event: events.Recovered) -> None:
        self._takeover.finish()
        unsure, self._unsure = self._unsure, []
        for asked in unsure:
            self._admission_asked(asked)

    def awaits_work(self, effect: events.StoreWork) -> Request | None:
        """The request of an effect that is still wanted; None when its attempt has ended meanwhile."""
        request = self.requests.get(effect.request_id)
        if request is None or request.attempt != effect.attempt or request.state is not State.DISPATCHING:
            return None
        return request

    def may_have_been_pulled(self, event: AttemptEvent) -> int:
        """Sequence in WORK of a lost attempt that its worker, now lost, may have begun unseen; else 0."""
        request = self.requests.get(event.request_id)
        if request is None or event.outcome != "lost" or event.attempt != request.attempt or request.was_in_flight:
            return 0
        return request.work_seq if event.worker in self.pool.evicted else 0

    def _work_stored(self, event: events.WorkStored) -> None:
        request = self.requests.get(event.request_id)
        if request is None or request.attempt != event.attempt or request.state in WAITING:
            self.do(events.DeleteWork(event.seq))  # The attempt ended before its message was confirmed.
            return
        if request.work_seq and request.work_seq != event.seq:
            self.do(events.DeleteWork(request.work_seq))  # The attempt before this one.
        request.work_seq, request.work_attempt = event.seq, event.attempt
        self.ack_request(request)
        if request.state is not State.ENDING:
            request.advance(Trigger.WORK_STORED, self.now_ms)
        if request.cancel_reason:
            self.send_cancel(request)

    def _work_refused(self, event: events.WorkRefused) -> None:
        request = self.requests.get(event.request_id)
        if request is None or request.attempt != event.attempt or request.state is not State.DISPATCHING:
            return
        if event.body_missing:
            self.propose_end(request, "failed", "internal_error", "The request's body is gone.")
        else:
            self.propose_end(request, "lost", "worker_lost", "The attempt could not be handed to its worker.")

    def _terminal_stored(self, stored: events.TerminalStored) -> None:
        event = stored.event
        self.admission.budgets.ended(event, stored.seq, in_order=stored.in_order)
        known = self.requests.get(event.request_id)
        self.accused.take(event, event if known is None else known.envelope, self.now_ms)
        self._takeover.end_found(event)
        request = self.requests.get(event.request_id)
        if request is None:
            return
        if request.state in WAITING:
            # An attempt above ours was an earlier owner's last word: its number is used up.
            if event.attempt == request.open_attempt or event.attempt > request.attempt:
                self._decide_waiting(request, event)
        elif event.attempt == request.attempt:
            if request.end_asked:
                self.count_mended("attempts")
            self.decide(request, event)
        self.dispatch()

    def _end_unreadable(self, event: events.EndUnreadable) -> None:
        """It has ended, and nobody knows how: it is not tried again."""
        request = self.requests.get(event.request_id)
        self._terminal_stored(
            events.TerminalStored(outcomes.unreadable(request, event.request_id, event.attempt, self.model))
        )

    def _end_missing(self, event: events.EndMissing) -> None:
        """No end is stored of an attempt that its worker does not have: nobody will store one."""
        request = self.requests.get(event.request_id)
        if request is None or request.attempt != event.attempt or request.state not in WITH_WORKER:
            return
        if request.gone_since_ms:
            self.propose_end(request, "lost", "worker_lost", "The attempt's worker no longer has it.")

    def _work_swept(self, event: events.WorkSwept) -> None:
        """What WORK does not hold any more has ended, or will never begin."""
        for request in self.requests.values():
            confirmed = request.state in WITH_WORKER and request.state is not State.DISPATCHING
            if confirmed and request.work_seq <= event.newest and request.work_seq not in event.found:
                request.gone_since_ms = request.gone_since_ms or self.now_ms

    def _decide_waiting(self, request: Request, event: AttemptEvent) -> None:
        """An end that was stored while the request waits here."""
        if outcomes.is_void(event):
            request.attempt = event.attempt
            self.versions.keep(request, event.version)
            outcomes.count(request, event, self.pool.beats)
            if outcomes.may_retry(request, self.accused.of(request.envelope), event):
                # One that waits for its message is another owner's by now, and this one deposed.
                if request.state is not State.ADMITTED and outcomes.may_have_been_seen(request, event):
                    self.clear(request, event)
                return
        self.leave_queue(request)
        self.settle(request, event)

    def _cancel_asked(self, event: events.CancelAsked) -> None:
        request_id = event.asked.request_id
        if key := event.asked.idempotency_key:
            named = self.keys.find(event.tenant, key)
            if named is None or not named.request_id:
                self.keys.forbid(event.tenant, key, self.now_ms)
                self.do(events.AnswerCancel(event.handle, CancelAnswer(durable=True)))
                return
            request_id = named.request_id
        request = self.requests.get(request_id)
        if request is not None and request.tenant == event.tenant:
            if event.asked.reader and not self.left_by(request, event.asked.reader):
                request.unconfirmed |= event.asked.reason == WITHDRAWN
                self.do(events.AnswerCancel(event.handle, CancelAnswer(durable=False)))
                return
            request.cancel_waiters = [*request.cancel_waiters[1 - WAITERS_MAX :], event.handle]
            self.cancel(request, event.asked.reason)
            return
        ended = self.tombstones.ended(request_id)
        if ended is not None and ended.event.tenant == event.tenant:
            self.do(events.AnswerCancel(event.handle, CancelAnswer(durable=True, outcome=ended.event.outcome)))
            return
        if request is None and ended is None:
            self.tombstones.add_cancelled(request_id, self.now_ms)
        self.do(events.AnswerCancel(event.handle, CancelAnswer(durable=True)))

    def _control_answered(self, event: events.ControlAnswered) -> None:
        """A worker that never had the attempt will not start it: the scheduler stores the end itself."""
        request = self.requests.get(event.request_id)
        if request is None or request.attempt != event.attempt or request.state not in WITH_WORKER:
            return
        if event.answer is None:
            return
        if event.answer.status == "ended":
            request.gone_since_ms = request.gone_since_ms or self.now_ms
        elif event.answer.status == "unknown" and request.cancel_reason:
            self.propose_end(request, "cancelled", "cancelled", cancelled(request))

    def _status_asked(self, event: events.StatusAsked) -> None:
        request = self.requests.get(event.request_id)
        if request is not None and request.tenant == event.tenant and len(request.readers or ()) < READERS_MAX:
            self.read_by(request, event.reader, event.stream_owner)
        may_clear = request is not None and request.tenant == event.tenant and request.id in self.clearing
        if request is not None and may_clear and event.void_below > request.attempt:
            self.cleared(request)
        self.do(events.AnswerStatus(event.handle, views.status(self, event.tenant, event.request_id)))

    def _time_passed(self, event: events.TimePassed) -> None:
        now = self.now_ms
        while self.deadlines and self.deadlines[0][0] <= now:
            _, request_id = heapq.heappop(self.deadlines)
            request = self.requests.get(request_id)
            waits = request is not None and request.state in (State.QUEUED, State.CLEARING)
            if request is not None and waits and request.envelope.deadline_at_ms <= now:
                self.expire(request)
        while self._expiries and self._expiries[0][0] <= now:
            _, request_id = heapq.heappop(self._expiries)
            request = self.requests.get(request_id)
            if request is not None and request.state is State.ADMITTED:
                self.expire_reservation(request)
        self._withdraw_lost_work()
        self._look_for_missed_ends()
        self.clear_again()
        for request_id in list(self.cancelling):
            request = self.requests[request_id]
            repeat_at = request.cancel_sent_at_ms + self.settings.cancel_repeat_ms
            if request.state in WITH_WORKER and repeat_at <= now:
                self.send_cancel(request)
        self._hear_no_more()
        self.versions.pass_time()
        if not self.admission.record.removed:
            self.moves.pass_time()
        self.tombstones.pass_time(now)
        self.keys.pass_time(now)
        self.accused.pass_time(now, (request.envelope for request in self.requests.values()))
        self.clocks.pass_time(now)
        self.admission.pass_time(now)
        self._plan_replicas()
        if not self.recovering:
            for tenant, spending in self.admission.spending_due(now):
                self.do(events.TellSpending(tenant, spending))
        for tenant in self.admission.leases_due(now):
            self._exchange_lease(tenant)
        self.dispatch()

    def _plan_replicas(self) -> None:
        limits, beats = self.admission.record.limits, self.pool.beats
        if self.now_ms - self._planned_ms < PLAN_EVERY_MS and limits is self._planned_for:
            return
        silent = self.recovering or beats == self._planned_beats
        self._planned_ms, self._planned_beats, self._planned_for = self.now_ms, beats, limits
        self.replicas.pass_time(
            self.now_ms,
            limits,
            self.pool.workers.values(),
            self.requests.values(),
            silent=silent,
            rolling_out=self.versions.is_rolling_out,
        )

    def _tenant_changed(self, event: events.TenantChanged) -> None:
        self.admission.set_tenant(event.name, event.record, self.now_ms)

    def _model_changed(self, event: events.ModelChanged) -> None:
        self.admission.record = event.record
        self.pool.overbook(event.record.limits.kv_overbooking)
        self.versions.stable_changed(event.record.stable)
        self.dispatch()

    def _rollout_changed(self, event: events.RolloutChanged) -> None:
        self.versions.rollout_changed(event.plan, event.progress)
        self.dispatch()

    def _budget_seen(self, event: events.BudgetSeen) -> None:
        self.admission.budgets.ledger_said(event.tenant, event.month, event.tokens, event.covers_seq)

    def _spending_seen(self, event: events.SpendingSeen) -> None:
        self.admission.budgets.owner_said(event.model, event.tenant, event.spending)

    def _spending_untold(self, event: events.SpendingUntold) -> None:
        self.admission.budgets.touch(event.tenant)
