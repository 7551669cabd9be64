"""The scheduler's decisions for one model: what each event leads to.

Pure: events and time in, effects out. A request's states are the table of ``transitions``, its steps are in
``lifecycle``. The end of an attempt is what ATTEMPTS stored first, whoever wrote it (TerminalStored); the core asks
for an end by StoreTerminal and acts on the winner only.
"""

import heapq
from collections.abc import Callable

from contracts import subjects
from contracts.accusations import Exposed, put_down_to
from contracts.errors import HeadraceError
from contracts.messages.admission import AdmissionAnswer, AdmissionRequest
from contracts.messages.attempts import AttemptEvent
from contracts.messages.base import Epoch
from contracts.messages.control import WITHDRAWN, Announce, CancelAnswer, CancelAttempt, Evict, Progress
from contracts.messages.records import ModelRecord
from contracts.tokens import reserved
from scheduler.core import events, outcomes, views
from scheduler.core.accused import body_key
from scheduler.core.admission import RETRY_AFTER_S_MAX
from scheduler.core.lifecycle import UNHEARD, Lifecycle, cancelled
from scheduler.core.quota_leases import LeaseAwaited
from scheduler.core.quotas import seconds
from scheduler.core.request import Request
from scheduler.core.settings import Settings
from scheduler.core.takeover import Takeover
from scheduler.core.transitions import WAITING, WITH_WORKER, State, Trigger
from scheduler.core.worker_pool import Worker

READERS_MAX = 16
"""Of one request under an idempotency key."""
UNSURE_MAX = 1000
"""Askings under unknown idempotency keys that wait for the end of a takeover; who was dropped asks again."""
PLAN_EVERY_MS = 2_000
"""Of the wanted number of workers: there is a heartbeat of the owner's own within it, unless the bus is away."""
WAITERS_MAX = 16
"""Cancels of one request that wait for its end, and askings that wait to join it; who was dropped asks again."""


class Core(Lifecycle):
    """One model's scheduler during one term. ``step`` is the only way in."""

    def __init__(
        self, *, model: str, owner: str, epoch: Epoch, record: ModelRecord, settings: Settings, now_ms: int
    ) -> None:
        super().__init__(model=model, owner=owner, epoch=epoch, record=record, settings=settings, now_ms=now_ms)
        self.refusals: dict[str, int] = {}
        """Refused admissions by code, for metrics."""
        self.lost_workers = 0
        self._quiet_since_ms = now_ms
        self._planned_ms = now_ms
        self._planned_beats = 0
        self._planned_for = record.limits
        self._takeover = Takeover(self)
        self._unsure: list[events.AdmissionAsked] = []
        self._awaiting: dict[str, dict[str, events.AdmissionAsked]] = {}
        """Askings that wait for a lease, by tenant and request id; who was dropped asks again."""
        self._short_of: dict[str, None] = {}
        """Tenants for whom more is to be leased at the end of this step."""
        self._expiries: list[tuple[int, str]] = []
        """A heap of (when the reservation expires, request id) of all that was admitted."""
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

    def _admission_asked(self, event: events.AdmissionAsked) -> None:
        asked = event.asked
        known = self.requests.get(asked.request_id)
        if known is not None and known.tenant == asked.tenant:
            self.do(events.AnswerAdmission(event.handle, self._admitted(known)))
            return
        try:
            if known is not None or self.tombstones.ended(asked.request_id) is not None:
                raise HeadraceError("conflict", "A request with this id is known already.")
            if self.tombstones.cancelled(asked.request_id):
                raise HeadraceError("cancelled", "The request was cancelled.")
            if joined := self._joined(asked):
                unstored = self.requests.get(joined)
                if unstored is not None and unstored.state is State.ADMITTED:  # It may never be.
                    unstored.joining = [*unstored.joining[1 - WAITERS_MAX :], event]
                    return
                limits = self.admission.quota(asked.tenant, self.now_ms).rate_limits(self.now_ms)
                self.do(
                    events.AnswerAdmission(event.handle, AdmissionAnswer(admitted=True, joined=joined, limits=limits))
                )
                return
            if self.recovering and asked.idempotency is not None:
                # What the owner before us dispatched under this key may yet be found.
                self._unsure = [*self._unsure[1 - UNSURE_MAX :], event]
                return
            body = self.accused.of(asked)
            if body.condemned:
                raise HeadraceError("request_quarantined", outcomes.quarantined(asked.request_id, body))
            self._check_workers()
            version, arm = self.versions.assign(asked)
            deadline_ms = self.admission.check(
                asked,
                self.now_ms,
                has_room=self.pool.has_room(version),
                start_ms=self._worker_start_ms(),
                prompt=self.pool.expected(asked.prompt_tokens, self.replicas.means.uncached, version, self.now_ms),
            )
        except LeaseAwaited:
            self._await_lease(event)
            return
        except HeadraceError as error:
            self.refusals[error.code] = self.refusals.get(error.code, 0) + 1
            if error.code == "overloaded":
                self.replicas.refused(body_key(asked), reserved(asked).input_tokens, self.now_ms)
            self.do(events.AnswerAdmission(event.handle, self._refused(asked, error)))
            return
        request = Request.admitted(
            asked,
            version=version,
            arm=arm,
            now_ms=self.now_ms,
            publish_within_ms=self.settings.publish_within_ms,
            deadline_ms=deadline_ms,
        )
        self.admit(request)
        self.read_by(request, asked.reader, asked.stream_owner)
        heapq.heappush(self._expiries, (self._expires_at_ms(request), request.id))
        self.do(events.AnswerAdmission(event.handle, self._admitted(request)))

    def _await_lease(self, event: events.AdmissionAsked) -> None:
        """Ask again once this shard has leased what the request needs of its tenant's limits."""
        tenant, request_id = event.asked.tenant, event.asked.request_id
        waiting = self._awaiting.setdefault(tenant, {})
        if len(waiting) < UNSURE_MAX:
            waiting[request_id] = event
            self._short_of[tenant] = None

    def _exchange_lease(self, tenant: str) -> None:
        waiting = [reserved(event.asked) for event in self._awaiting.get(tenant, {}).values()]
        if (ask := self.admission.lease(tenant, waiting, self.now_ms)) is not None:
            self.do(events.ExchangeLease(tenant, ask))

    def _lease_exchanged(self, event: events.LeaseExchanged) -> None:
        self.admission.leased(event.tenant, event.grant, self.now_ms)
        waiting = self._awaiting.pop(event.tenant, {})
        if event.grant is not None:  # Else nobody is answered, and who asked asks again.
            for asked in waiting.values():
                self._admission_asked(asked)

    def _check_workers(self) -> None:
        """Raises HeadraceError while every worker is slow: what is admitted would wait for nobody knows how long."""
        if since_ms := self.pool.all_slow_since_ms():
            raise HeadraceError(
                "overloaded",
                "The model's workers have more to do than they can, and take nothing new.",
                # What has lasted for so long lasts as long again, as far as anybody knows.
                retry_after_s=min(RETRY_AFTER_S_MAX, seconds(self.now_ms - since_ms)),
            )

    def _worker_start_ms(self) -> int:
        """How long until there is a worker, where there is none."""
        if any(worker.beat.state == "ready" for worker in self.pool.workers.values()):
            return 0
        return self.replicas.wait_for_worker_ms(self.now_ms)

    def _joined(self, asked: AdmissionRequest) -> str:
        """Id of the request that runs or ran under the same key; empty when there is none. Raises HeadraceError."""
        given = asked.idempotency
        named = self.keys.find(asked.tenant, given.key) if given is not None else None
        if given is None or named is None:
            if asked.join_only:
                raise HeadraceError("not_found", "No request has this idempotency key here.")
            return ""
        if not named.request_id:
            raise HeadraceError("cancelled", "The request of this idempotency key was cancelled.")
        if named.digest != given.digest:
            raise HeadraceError(
                "idempotency_key_reused",
                f"This idempotency key names another request, {named.request_id}: use a key for one request only.",
            )
        request = self.requests.get(named.request_id)
        if request is None:
            if self.tombstones.ended(named.request_id) is None:
                raise HeadraceError(
                    "conflict", f"Request {named.request_id} of this idempotency key has ended; its answer is not kept."
                )
        elif request.is_withdrawn or (request.unconfirmed and set(request.readers or ()) == {UNHEARD}):
            raise HeadraceError(
                "unavailable", "The request of this idempotency key is still being withdrawn.", retry_after_s=1
            )
        elif len(request.readers or ()) >= READERS_MAX:
            raise HeadraceError("conflict", f"{READERS_MAX} callers read the request of this idempotency key already.")
        elif request.state is not State.ADMITTED:
            self.read_by(request, asked.reader, asked.stream_owner)
        return named.request_id

    def _admitted(self, request: Request) -> AdmissionAnswer:
        return AdmissionAnswer(
            admitted=True,
            epoch=self.epoch,
            admitted_at_ms=request.envelope.admitted_at_ms,
            publish_within_ms=request.envelope.publish_within_ms,
            deadline_ms=request.envelope.deadline_ms,
            version=request.envelope.version,
            arm=request.envelope.arm,
            limits=self.admission.quota(request.tenant, self.now_ms).rate_limits(self.now_ms),
        )

    def _refused(self, asked: AdmissionRequest, error: HeadraceError) -> AdmissionAnswer:
        return AdmissionAnswer(
            admitted=False,
            epoch=self.epoch,
            code=error.code,
            message=error.message,
            param=error.param,
            retry_after_s=error.retry_after_s,
            limits=self.admission.quota(asked.tenant, self.now_ms).rate_limits(self.now_ms),
        )

    def _expires_at_ms(self, request: Request) -> int:
        return request.envelope.publish_by_ms + self.settings.expiry_margin_ms

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

    def _worker_seen(self, event: events.WorkerSeen) -> None:
        beat = event.beat
        self.clocks.heard(beat.worker, beat.sent_at_ms, self.now_ms)
        if beat.epoch > self.epoch:
            self.do(events.RiseAbove(beat.epoch))
        if beat.worker in self.pool.evicted:
            self.do(events.SendControl(beat.worker, Evict(epoch=self.epoch)))
            return
        worker, in_flight = self.pool.seen(beat)
        self.replicas.heard(beat, self.now_ms, computing=worker.load.prompts.enough)
        if beat.epoch < self.epoch:
            self.do(events.SendControl(beat.worker, Announce(epoch=self.epoch)))
        elif beat.cache_number != max(0, worker.cache_number):
            self.pool.cache_missed(worker)
            self._ask_cache(worker)
        for progress in in_flight:
            request = self.requests.get(progress.request_id)
            if request is None and self.tombstones.cancelled(progress.request_id):
                self._cancel_unknown(beat.worker, progress)
            if request is None or request.attempt != progress.attempt or request.worker != beat.worker:
                continue
            request.was_in_flight = True
            request.progress = progress
            if self.versions.rollout is not None:
                self.versions.progressed(progress)
            if worker.suspects and progress.completion_tokens >= request.suspect_tokens:
                worker.suspects.discard(request.id)
            if progress.completion_tokens > 0 and request.state in (State.DISPATCHING, State.DISPATCHED):
                self.pool.placement.prefilled(request, worker.load, self.now_ms)
                request.advance(Trigger.GENERATING, self.now_ms)
        if beat.epoch >= self.epoch:
            self._drop_unstarted(worker)
        self.dispatch()

    def _cache_changed(self, event: events.CacheChanged) -> None:
        worker = self.pool.workers.get(event.change.worker)
        if worker is not None and not self.pool.cache_changed(worker, event.change):
            self._ask_cache(worker)

    def _ask_cache(self, worker: Worker) -> None:
        """Something that it told was missed; a heartbeat asks again where this is lost, too."""
        self.do(events.SendControl(worker.beat.worker, Announce(epoch=self.epoch)))

    def _pulse_seen(self, event: events.PulseSeen) -> None:
        self.pool.pulsed(event.pulse, self.now_ms)
        self.dispatch()

    def _cancel_unknown(self, worker: str, progress: Progress) -> None:
        """A cancelled attempt of which the streams know nothing, after a restore of the bus: nobody pays for it."""
        attempt, reason = progress.attempt, "worker_lost"
        order = CancelAttempt(epoch=self.epoch, request_id=progress.request_id, attempt=attempt, reason=reason)
        self.do(events.SendControl(worker, order))

    def _drop_unstarted(self, worker: Worker) -> None:
        """A worker that knows this epoch starts no work of an earlier one: what it does not have by now is void."""
        for request_id in worker.adopted:
            request = self.requests.get(request_id)
            started = request_id in worker.in_flight
            if request is not None and not started and request.adopted and request.state in WITH_WORKER:
                self.propose_end(request, "lost", "worker_lost", "The attempt of an earlier owner was not started.")
        worker.adopted.clear()

    def _stream_owner_seen(self, event: events.StreamOwnerSeen) -> None:
        if event.beat.lag_ms < self.settings.given_up_ms:
            self.stream_owners.heard(event.beat.stream_owner, self.pool.beats)
        self.clocks.heard(event.beat.stream_owner, event.beat.sent_at_ms, self.now_ms)
        if event.beat.leaving:
            self._stream_owner_lost(event.beat.stream_owner)

    def _stream_owner_lost(self, owner: str) -> None:
        for request_id in self.stream_owners.leave(owner):
            request = self.requests[request_id]
            for reader in [reader for reader, its in (request.readers or {}).items() if its == owner]:
                self.left_by(request, reader)
            if not request.readers:
                self.cancel(request, _owner_lost(owner))

    def _loopback_seen(self, event: events.LoopbackSeen) -> None:
        self.pool.beats += 1
        self.clocks.heard(self.owner, event.sent_at_ms, self.now_ms)
        for worker, why in self.pool.lost():
            self._worker_lost(worker, why)
        for owner in self.stream_owners.silent(self.pool.beats, self.settings.lost_after_beats):
            self._stream_owner_lost(owner)
        self.dispatch()

    def _worker_lost(self, worker: Worker, why: str) -> None:
        self.pool.evict(worker)
        if missed := bool(worker.work) or worker.beat.state != "draining":
            self.lost_workers += 1
        order = Evict(epoch=self.epoch, reason=why if missed else "")
        self.do(events.SendControl(worker.beat.worker, order))
        held = [request for request in map(self.requests.__getitem__, worker.work) if request.state in WITH_WORKER]
        held.sort(key=lambda request: not request.was_in_flight)  # Of several copies one that surely ran.
        accused = put_down_to({it.id: Exposed(body_key(it.envelope), suspect=it.id in worker.suspects) for it in held})
        for request in held:
            message = f"Worker {worker.beat.worker} {why}."
            self.propose_end(request, "lost", "worker_lost", message, accused=accused[request.id])

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

    def _hear_no_more(self) -> None:
        """Who joined a request under an earlier owner has said so by now, or is gone."""
        while self.unheard and (request_id := next(iter(self.unheard))) and self.unheard[request_id] <= self.now_ms:
            del self.unheard[request_id]
            if (request := self.requests.get(request_id)) is not None and self.left_by(request, UNHEARD):
                self.cancel(request, _owner_lost(request.envelope.stream_owner))

    def _withdraw_lost_work(self) -> None:
        """What a usable worker should have pulled long ago did not reach it."""
        overdue_ms = self.now_ms - self.settings.pickup_timeout_ms
        for worker in self.pool.workers.values():
            if not self.pool.usable(worker):
                continue
            for request_id in [each for each in worker.work if each not in worker.in_flight]:
                request = self.requests[request_id]
                waited = max(request.dispatched_at_ms, worker.slow_until_ms) <= overdue_ms
                if waited and not request.was_in_flight and request.state is State.DISPATCHED:
                    self.propose_end(request, "lost", "worker_lost", "The attempt did not reach its worker.")

    def _look_for_missed_ends(self) -> None:
        """What a worker had in flight and has no longer is over, whether its end was told here or not."""
        for worker in self.pool.workers.values():
            for request_id in worker.work:
                request = self.requests[request_id]
                if request_id in worker.in_flight:
                    if request.gone_since_ms:
                        request.gone_since_ms, request.end_asked = 0, False
                    continue
                if request.was_in_flight and request.state in WITH_WORKER and not request.gone_since_ms:
                    request.gone_since_ms = self.now_ms
                overdue = request.gone_since_ms and self.now_ms - request.gone_since_ms >= self.settings.end_overdue_ms
                if overdue and request.state in WITH_WORKER:
                    request.gone_since_ms = self.now_ms  # To ask again when no answer comes.
                    request.end_asked = True
                    self.do(events.ReadEnd(request.id, request.attempt))

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


def _owner_lost(owner: str) -> str:
    """Reason of a cancel because its stream owner is lost: a gateway is the service's own."""
    return "gateway_lost" if subjects.is_gateway(owner) else "stream_owner_lost"
