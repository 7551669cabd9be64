"""The scheduler's decisions for one model: admission, order, placement, retry, loss, cancel, settlement.

Pure: events and time in, effects out. A request's life is the table TRANSITIONS; a pair that is not in it is a bug
and raises InvalidTransition with the request's recent history. The end of an attempt is what ATTEMPTS stored first,
whoever wrote it (TerminalStored); the core asks for an end by StoreTerminal and acts on the winner only.
"""

import enum
import heapq
from collections import OrderedDict
from collections.abc import Callable
from datetime import UTC, datetime

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
    Progress,
    QueueAnswer,
    Reply,
    RequestEnvelope,
    StatusAnswer,
    TenantLimits,
    TenantQueue,
    TenantRecord,
)
from scheduler import events as ev
from scheduler.drain import Drain
from scheduler.fair import Entry, FairQueue
from scheduler.limits import Cost, Quota, seconds
from scheduler.pool import Pool, Worker


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """Numbers of the core. All spans are milliseconds."""

    publish_within_ms: int = 10_000
    """From admission until REQUESTS must hold the request: twice the gateway's publish time limit."""
    lapse_margin_ms: int = 2_000
    """A reservation lapses this long after publish_by, so that a message stored in time is never refused."""
    lost_ticks: int = 6
    """Own ticks (500 ms apart) of silence until a worker or holder is lost: 3 s (DESIGN.md section 7)."""
    attempts_max: int = 2
    """Attempts that a worker held; DESIGN.md section 7."""
    dispatches_max: int = 8
    """Attempts in all, those that no worker ever held included: bounds a ping-pong of lost workers."""
    cancel_repeat_ms: int = 1_000
    ageing_ms: int = 30_000
    """A batch request that waited this long stands with the interactive ones: half the default deadline."""
    patience_ms: int = 5_000
    """How long a request that fits no worker may be passed by smaller ones."""
    deadline_ms_max: int = 3_600_000
    remember_ms: int = 600_000
    """How long ended requests and cancels of unknown ids are known: longer than any client repeats itself."""
    remember_max: int = 50_000


class State(enum.Enum):
    ADMITTED = "admitted"
    QUEUED = "queued"
    DISPATCHING = "dispatching"
    DISPATCHED = "dispatched"
    RUNNING = "running"
    ENDING = "ending"


class InvalidTransition(Exception):
    """An event that a request's state cannot have; carries the request's recent history."""


class Request:
    """One admitted request until its end is stored."""

    __slots__ = (
        "attempt",
        "cancel_reason",
        "cancel_sent_at_ms",
        "cancel_waiters",
        "charged",
        "cost",
        "counted",
        "deaths",
        "dispatched_at_ms",
        "envelope",
        "history",
        "progress",
        "request_seq",
        "state",
        "was_held",
        "work_seq",
        "worker",
    )

    def __init__(self, envelope: RequestEnvelope, state: State) -> None:
        self.envelope = envelope
        """Without a body; before REQUESTS stored it, with an empty reply."""
        self.state = state
        self.cost = Cost(envelope.prompt_tokens, envelope.max_output_tokens * envelope.choices)
        self.attempt = 0
        """Number of the last attempt that was dispatched; 0 before the first."""
        self.counted = 0
        """Attempts that a worker held and that ended without a result."""
        self.deaths = 0
        """Attempts that ended by the death of their engine or worker; above 0 the request is a suspect."""
        self.worker = ""
        self.request_seq = 0
        self.work_seq = 0
        self.charged = 0.0
        self.dispatched_at_ms = 0
        self.progress: Progress | None = None
        self.was_held = False
        """Whether the worker of the present attempt said that it holds it."""
        self.cancel_reason = ""
        self.cancel_sent_at_ms = 0
        self.cancel_waiters: list[object] = []
        self.history: list[str] = []

    @property
    def id(self) -> str:
        return self.envelope.request_id

    @property
    def tenant(self) -> str:
        return self.envelope.tenant

    @property
    def open_attempt(self) -> int:
        """Number under which the present attempt ends: 0 when nothing was ever dispatched."""
        if self.state in (State.ADMITTED, State.QUEUED):
            return self.attempt + 1 if self.attempt else 0
        return self.attempt

    def move(self, state: State, now_ms: int) -> None:
        self.history.append(f"{now_ms} {self.state.value} -> {state.value} attempt {self.attempt}")
        del self.history[:-16]
        self.state = state


class Ended(msgspec.Struct, frozen=True):
    """What is remembered of a request that ended, or of a stored end whose request is not known (yet)."""

    event: AttemptEvent
    error: ErrorData | None
    until_ms: int


_WITH_WORKER = (State.DISPATCHING, State.DISPATCHED, State.RUNNING)

WAITING = (State.ADMITTED, State.QUEUED)
"""States that count against queue limits."""

TRANSITIONS: dict[tuple[State, str], State] = {
    (State.ADMITTED, "stored"): State.QUEUED,
    (State.ADMITTED, "end"): State.ENDING,
    (State.QUEUED, "dispatch"): State.DISPATCHING,
    (State.QUEUED, "end"): State.ENDING,
    (State.DISPATCHING, "work_stored"): State.DISPATCHED,
    (State.DISPATCHING, "progress"): State.RUNNING,
    (State.DISPATCHING, "end"): State.ENDING,
    (State.DISPATCHED, "progress"): State.RUNNING,
    (State.DISPATCHED, "end"): State.ENDING,
    (State.RUNNING, "work_stored"): State.RUNNING,
    (State.RUNNING, "progress"): State.RUNNING,
    (State.RUNNING, "end"): State.ENDING,
    (State.ENDING, "work_stored"): State.ENDING,
    (State.DISPATCHING, "retry"): State.QUEUED,
    (State.DISPATCHED, "retry"): State.QUEUED,
    (State.RUNNING, "retry"): State.QUEUED,
    (State.ENDING, "retry"): State.QUEUED,
}
"""(state, what happened) -> next state. Any stored terminal event of the present attempt ends or retries."""


class Core:
    """One model's scheduler during one term. ``step`` is the only way in."""

    def __init__(
        self, *, model: str, owner: str, epoch: Epoch, manifest: Manifest, settings: Settings, now_ms: int
    ) -> None:
        self.model = model
        self.owner = owner
        self.epoch = epoch
        self.settings = settings
        self.manifest = manifest
        self.recovering = True
        self.requests: dict[str, Request] = {}
        self.ended: OrderedDict[str, Ended] = OrderedDict()
        self.quotas: dict[str, Quota] = {}
        self.tenants: dict[str, TenantRecord] = {}
        self.budgets: dict[str, tuple[str, int]] = {}
        self.queue = FairQueue(ageing_ms=settings.ageing_ms)
        self.pool = Pool(
            epoch=epoch,
            lost_ticks=settings.lost_ticks,
            kv_overbooking=manifest.limits.kv_overbooking,
            patience_ms=settings.patience_ms,
        )
        self.drain = Drain(now_ms)
        self.waiting = 0
        self.waiting_tokens = 0
        self.reserved_tokens = 0
        self.refusals: dict[str, int] = {}
        """Refused admissions by code, for metrics."""
        self.outcomes: dict[str, int] = {}
        """Ended requests by outcome, for metrics."""
        self.lost_workers = 0
        self._cancelled_unknown: OrderedDict[str, int] = OrderedDict()
        self._holders: dict[str, tuple[int, set[str]]] = {}
        self._deadlines: list[tuple[int, str]] = []
        self._lapses: list[tuple[int, str]] = []
        self._cancelling: set[str] = set()
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
        quota = self._quota(asked.tenant)
        try:
            deadline_ms = self._check_admission(asked, quota)
        except HeadraceError as error:
            self.refusals[error.code] = self.refusals.get(error.code, 0) + 1
            self._do(
                ev.AnswerAdmission(
                    event.handle,
                    AdmissionAnswer(
                        admitted=False,
                        epoch=self.epoch,
                        code=error.code,
                        message=error.message,
                        param=error.param,
                        retry_after_s=error.retry_after_s,
                        limits=quota.rate_limits(self._now),
                    ),
                )
            )
            return
        request = Request(self._envelope_of(asked, deadline_ms), State.ADMITTED)
        quota.reserve(request.cost, self._now)
        self._enter(request)
        heapq.heappush(self._lapses, (request.envelope.publish_by_ms + self.settings.lapse_margin_ms, request.id))
        self._do(ev.AnswerAdmission(event.handle, self._admitted(request)))

    def _check_admission(self, asked: AdmissionRequest, quota: Quota) -> int:
        """Milliseconds to the first token that the request is promised; raises HeadraceError, charges nothing."""
        tenant = self._tenant(asked.tenant)
        cost = Cost(asked.prompt_tokens, asked.max_output_tokens * asked.choices)
        deadline_ms = min(asked.deadline_ms or tenant.deadline_ms, self.settings.deadline_ms_max)
        if asked.request_id in self.ended:
            raise HeadraceError("conflict", "A request with this id has ended.")
        if asked.request_id in self._cancelled_unknown:
            raise HeadraceError("cancelled", "The request was cancelled.")
        if asked.priority not in tenant.priorities:
            raise HeadraceError(
                "permission_denied", f"The tenant may not use priority {asked.priority}.", param="priority"
            )
        self._check_budget(tenant)
        quota.check(cost, self._now, self.drain.turnover_ms(quota.open))
        limits = self.manifest.limits
        own_full = (
            quota.waiting + 1 > limits.tenant_queued_requests
            or quota.waiting_tokens + cost.total > limits.tenant_queued_tokens
        )
        full = self.waiting + 1 > limits.queued_requests or self.waiting_tokens + cost.total > limits.queued_tokens
        wait_ms = self._predicted_wait_ms(asked.tenant, quota, cost)
        if own_full:
            raise HeadraceError(
                "rate_limit_exceeded",
                "The tenant's share of the model's queue is full.",
                retry_after_s=min(60, seconds(wait_ms / max(1, quota.waiting))),
            )
        if full:
            raise HeadraceError(
                "overloaded",
                "The model's queue is full.",
                retry_after_s=min(60, seconds(wait_ms / max(1, self.waiting))),
            )
        if wait_ms > deadline_ms:
            raise HeadraceError(
                "overloaded",
                f"The first token is expected after {wait_ms} ms, later than the deadline of {deadline_ms} ms.",
                retry_after_s=seconds(wait_ms - deadline_ms),
            )
        return deadline_ms

    def _check_budget(self, tenant: TenantRecord) -> None:
        budget = tenant.monthly_budget_tokens
        if budget is None:
            return
        moment = datetime.fromtimestamp(self._now / 1000, UTC)
        month, used = self.budgets.get(tenant.name, ("", 0))
        if month == moment.strftime("%Y-%m") and used >= budget:
            following = moment.replace(day=28, hour=0, minute=0, second=0, microsecond=0)
            following = (
                following.replace(day=1, month=following.month % 12 + 1)
                if following.month < 12
                else (following.replace(day=1, month=1, year=following.year + 1))
            )
            raise HeadraceError(
                "insufficient_quota",
                f"The monthly budget of {budget} tokens is used up; it starts anew on {following:%Y-%m-%d} UTC.",
                retry_after_s=seconds(following.timestamp() * 1000 - self._now),
            )

    def _predicted_wait_ms(self, tenant: str, quota: Quota, cost: Cost) -> int:
        """Expected time to dispatch: the work that goes first over the measured drain rate; 0 when unknown."""
        if self.waiting == 0 and self.pool.has_room():
            return 0
        share = self.queue.shares.get(tenant)
        weight = share.weight if share is not None else self._tenant(tenant).weight
        others = self.queue.waiting_weight - (weight if share is not None and share.waiting else 0.0)
        fair_ahead = (quota.waiting_tokens + cost.total) * (others + weight) / weight
        return self.drain.wait_ms(min(float(self.waiting_tokens + cost.total), fair_ahead))

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
            limits=self._quota(request.tenant).rate_limits(self._now),
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
            if request.state in _WITH_WORKER and request.work_seq:
                self._do(ev.AckRequest(event.seq))
            elif not request.request_seq:
                request.request_seq = event.seq  # Ending; acknowledged when the end is stored.
            return
        request.request_seq = event.seq
        request.envelope = self._trusted(envelope, request.envelope)
        if event.stored_at_ms > request.envelope.publish_by_ms + self.settings.lapse_margin_ms:
            self._end(request, "expired", "deadline_exceeded", "The request reached the queue too late.")
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
        ended = self.ended.get(envelope.request_id)
        if ended is not None and not self._may_follow(ended.event):
            self._do(ev.AckRequest(event.seq))
            return
        request = Request(envelope, State.ADMITTED)
        request.request_seq = event.seq
        self._quota(request.tenant).adopt(request.cost, request.envelope.admitted_at_ms, self._now)
        self._enter(request)
        if envelope.request_id in self._cancelled_unknown:
            self._end(request, "cancelled", "cancelled", "The request was cancelled.")
        elif event.stored_at_ms > envelope.publish_by_ms:
            self._end(request, "expired", "deadline_exceeded", "The request reached the queue too late.")
        else:
            self._advance(request, "stored")
            self._hold(request)
            self._enqueue(request)
            if ended is not None:
                self._resume(request, ended.event)
            self._dispatch()

    def _resume(self, request: Request, event: AttemptEvent) -> None:
        """A queued request whose attempt ended under an earlier owner: the next attempt has the next number."""
        request.attempt = event.attempt
        request.counted = event.attempt
        request.deaths = int(event.engine_death or event.outcome == "lost")
        self.ended.pop(request.id, None)

    def _enqueue(self, request: Request) -> None:
        envelope = request.envelope
        self.queue.set_weight(request.tenant, self._tenant(request.tenant).weight)
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
        self.pool.drop_claim(request.id)
        request.charged = self.queue.serve(request.id)
        self._waits(request, -1)
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
        slots, kv_tokens = self.pool.need(worker, request.envelope.choices, request.cost.total)
        worker.assign(request.id, slots, kv_tokens)
        if request.deaths > 0:
            worker.suspects.add(request.id)

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
        self._do(ev.SendControl(request.worker, self._cancel_order(request)))
        if event.body_missing:
            self._end(request, "failed", "internal_error", "The request's body is gone.")
        else:
            self._end(request, "lost", "worker_lost", "The attempt could not be handed to its worker.")

    # -- ends --------------------------------------------------------------------------------------------

    def _end(self, request: Request, outcome: Outcome, code: str, message: str) -> None:
        """Ask for the present attempt's end; what is stored first decides (TerminalStored)."""
        number = request.open_attempt
        progress = request.progress
        envelope = request.envelope
        if request.state is not State.ENDING:
            if request.state in WAITING:
                self._leave_queue(request)
            else:
                request.history.append(f"{self._now} asks for {outcome}")
            request.attempt = number
            self._advance(request, "end")
        self._do(
            ev.StoreTerminal(
                AttemptEvent(
                    request_id=request.id,
                    attempt=number,
                    tenant=request.tenant,
                    key_id=envelope.key_id,
                    model=self.model,
                    version=self._version_of(request),
                    endpoint=envelope.endpoint,
                    priority=envelope.priority,
                    outcome=outcome,
                    reporter="scheduler",
                    worker=request.worker if outcome == "lost" else "",
                    stream=envelope.stream,
                    error_code=code,
                    error_message=message,
                    retryable=outcome == "lost",
                    engine_death=outcome == "lost" and request.was_held,
                    choices=envelope.choices,
                    prompt_tokens=progress.prompt_tokens if progress else 0,
                    cached_tokens=progress.cached_tokens if progress else 0,
                    completion_tokens=progress.completion_tokens if progress else 0,
                    reserved_tokens=request.cost.total,
                    admitted_at_ms=envelope.admitted_at_ms,
                    dispatched_at_ms=request.dispatched_at_ms if number else 0,
                    ended_at_ms=self._now,
                    client_request_id=envelope.client_request_id,
                )
            )
        )

    def _version_of(self, request: Request) -> str:
        worker = self.pool.workers.get(request.worker)
        return worker.beat.version if worker is not None else request.envelope.version or self.manifest.version

    def _terminal_stored(self, stored: ev.TerminalStored) -> None:
        event = stored.event
        request = self.requests.get(event.request_id)
        if request is None:
            known = self.ended.get(event.request_id)
            if known is None or known.event.attempt < event.attempt:
                self._remember(event, None)
                if known is None and self.recovering and event.outcome in ("completed", "cancelled"):
                    used = Cost(event.prompt_tokens, event.completion_tokens)
                    self._quota(event.tenant).replay(used, event.admitted_at_ms, self._now)
            return
        if event.attempt != request.open_attempt:
            return
        self._decide(request, event)
        self._dispatch()

    def _decide(self, request: Request, event: AttemptEvent) -> None:
        """The present attempt has ended with ``event``: retry before the first token, else settle for good."""
        if request.state in WAITING:
            self._leave_queue(request)
        else:
            self._release(request, event)
        void = event.outcome == "lost" or (event.outcome == "failed" and event.retryable)
        if void and event.reporter == "worker":
            request.was_held = True
        if void and request.was_held:
            request.counted += 1
            request.deaths += int(event.outcome == "lost" or event.engine_death)
        if void and self._may_retry(request, event):
            self._retry(request)
            return
        error = self._final_error(request, event) if event.outcome not in ("completed", "cancelled") else None
        if event.outcome == "cancelled" and event.reporter == "scheduler":
            error = ErrorData(code="cancelled", message=event.error_message)
        if error is not None and (event.reporter == "scheduler" or void):
            self._send_frame(request, "error", msgspec.json.encode(error))
        self._finish(request, event, error)

    def _may_retry(self, request: Request, event: AttemptEvent) -> bool:
        tokens_seen = event.completion_tokens > 0 or request.state is State.RUNNING
        return (
            not request.cancel_reason
            and not (request.envelope.stream and tokens_seen)
            and request.counted < self.settings.attempts_max
            and request.attempt < self.settings.dispatches_max
        )

    def _may_follow(self, event: AttemptEvent) -> bool:
        """Whether a stored end of an unknown request lets another attempt follow."""
        void = event.outcome == "lost" or (event.outcome == "failed" and event.retryable)
        unseen = not event.stream or event.completion_tokens == 0
        return void and unseen and event.attempt < self.settings.attempts_max

    def _retry(self, request: Request) -> None:
        self._send_frame(request, "lost", msgspec.json.encode(LostData(retry=True)))
        self._advance(request, "retry")
        self._waits(request, 1)
        self._enqueue(request)

    def _final_error(self, request: Request, event: AttemptEvent) -> ErrorData:
        if event.outcome == "expired":
            return ErrorData(code="deadline_exceeded", message=event.error_message)
        if request.deaths >= self.settings.attempts_max:
            return ErrorData(
                code="request_quarantined",
                message=f"Request {request.id} ended {request.deaths} workers or engines and is not tried again.",
            )
        if event.outcome == "lost":
            return ErrorData(
                code="worker_lost",
                message=f"The worker of request {request.id}, attempt {event.attempt}, was lost.",
            )
        message = event.error_message or "The attempt failed."
        return ErrorData(
            code=event.error_code or "engine_error",
            message=f"{message} (request {request.id}, attempt {event.attempt})",
        )

    def _release(self, request: Request, event: AttemptEvent) -> None:
        """The attempt no longer runs: its worker has room again, unused and void work is given back."""
        worker = self.pool.workers.get(request.worker)
        if worker is not None:
            worker.release(request.id)
        if not request.dispatched_at_ms:
            return  # Ended without ever running.
        used = 0.0
        if event.outcome in ("completed", "cancelled"):
            used = event.prompt_tokens - event.cached_tokens + event.completion_tokens
        self.queue.settle(request.tenant, request.charged, used)
        self.drain.done(request.charged, self._now - request.dispatched_at_ms)
        request.charged = 0.0
        request.dispatched_at_ms = 0

    def _finish(self, request: Request, event: AttemptEvent, error: ErrorData | None) -> None:
        used = Cost(0, 0)
        if event.outcome in ("completed", "cancelled"):
            used = Cost(event.prompt_tokens, event.completion_tokens)
        self._quota(request.tenant).settle(request.cost, used, self._now, refund_request=False)
        if request.request_seq:
            self._do(ev.AckRequest(request.request_seq))
        if request.work_seq and (event.reporter == "scheduler" or event.retryable or self.recovering):
            self._do(ev.DeleteWork(request.work_seq))
        for handle in request.cancel_waiters:
            self._do(ev.AnswerCancel(handle, CancelAnswer(durable=True, outcome=event.outcome)))
        self.outcomes[event.outcome] = self.outcomes.get(event.outcome, 0) + 1
        self._forget(request)
        self._remember(event, error)

    def _forget(self, request: Request) -> None:
        del self.requests[request.id]
        self.reserved_tokens -= request.cost.total
        self._cancelling.discard(request.id)
        self.pool.drop_claim(request.id)
        if holder := request.envelope.holder:
            held = self._holders.get(holder)
            if held is not None:
                held[1].discard(request.id)

    def _remember(self, event: AttemptEvent, error: ErrorData | None) -> None:
        self.ended.pop(event.request_id, None)
        self.ended[event.request_id] = Ended(event, error, self._now + self.settings.remember_ms)
        while len(self.ended) > self.settings.remember_max:
            self.ended.popitem(last=False)

    def _expire(self, request: Request) -> None:
        waited = self._now - request.envelope.admitted_at_ms
        self._end(
            request,
            "expired",
            "deadline_exceeded",
            f"No first token within the deadline; waited {waited} ms.",
        )

    # -- cancel and status -------------------------------------------------------------------------------

    def _cancel_asked(self, event: ev.CancelAsked) -> None:
        request_id = event.request.request_id
        request = self.requests.get(request_id)
        if request is not None and request.tenant == event.tenant:
            request.cancel_waiters.append(event.handle)
            self._cancel(request, event.request.reason)
            return
        ended = self.ended.get(request_id)
        if ended is not None and ended.event.tenant == event.tenant:
            self._do(ev.AnswerCancel(event.handle, CancelAnswer(durable=True, outcome=ended.event.outcome)))
            return
        if request is None and ended is None:
            self._cancelled_unknown[request_id] = self._now + self.settings.remember_ms
            while len(self._cancelled_unknown) > self.settings.remember_max:
                self._cancelled_unknown.popitem(last=False)
        self._do(ev.AnswerCancel(event.handle, CancelAnswer(durable=True)))

    def _cancel(self, request: Request, reason: str) -> None:
        if request.cancel_reason:
            return
        request.cancel_reason = reason
        if request.state in WAITING:
            self._end(request, "cancelled", "cancelled", f"The request was cancelled: {reason}.")
        elif request.state in _WITH_WORKER:
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
        if request is None or request.attempt != event.attempt or request.state not in _WITH_WORKER:
            return
        if event.answer is not None and event.answer.status == "unknown" and request.cancel_reason:
            self._end(request, "cancelled", "cancelled", f"The request was cancelled: {request.cancel_reason}.")

    def _status_asked(self, event: ev.StatusAsked) -> None:
        request = self.requests.get(event.request_id)
        answer = StatusAnswer(state="unknown")
        if request is not None and request.tenant == event.tenant:
            state = request.state
            answer = StatusAnswer(
                state="admitted"
                if state is State.ADMITTED
                else "queued"
                if state in (State.QUEUED, State.DISPATCHING)
                else "dispatched"
                if state is State.DISPATCHED
                else "running",
                attempt=request.attempt,
                worker=request.worker,
            )
        elif (ended := self.ended.get(event.request_id)) is not None and ended.event.tenant == event.tenant:
            stored = ended.event
            answer = StatusAnswer(
                state="ended",
                attempt=stored.attempt,
                worker=stored.worker,
                outcome=stored.outcome,
                last_seq=stored.last_seq,
                error=ended.error,
            )
        self._do(ev.AnswerStatus(event.handle, answer))

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
            if progress.completion_tokens > 0 and request.state in _WITH_WORKER:
                worker.suspects.discard(request.id)
                if request.state is not State.RUNNING:
                    self._advance(request, "progress")
        self._dispatch()

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
            if request.state in _WITH_WORKER:
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
        for request_id in list(self._cancelling):
            request = self.requests[request_id]
            repeat_at = request.cancel_sent_at_ms + self.settings.cancel_repeat_ms
            if request.state in _WITH_WORKER and repeat_at <= now:
                self._send_cancel(request)
        self._forget_old()
        self.drain.pass_time(now, saturated=len(self.queue) > 0)
        self._dispatch()

    def _lapse(self, request: Request) -> None:
        """Admitted and never published: the reservation comes back; the id is remembered, should it come later."""
        self._leave_queue(request)
        self._quota(request.tenant).settle(request.cost, Cost(0, 0), self._now, refund_request=True)
        self._forget(request)
        for handle in request.cancel_waiters:
            self._do(ev.AnswerCancel(handle, CancelAnswer(durable=True)))

    def _forget_old(self) -> None:
        while self.ended and next(iter(self.ended.values())).until_ms <= self._now:
            self.ended.popitem(last=False)
        while self._cancelled_unknown and next(iter(self._cancelled_unknown.values())) <= self._now:
            self._cancelled_unknown.popitem(last=False)

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
        if known is not None:
            return  # Queued again here; the attempt found is dropped when the next one is stored.
        ended = self.ended.get(request_id)
        if not self.recovering or (ended is not None and ended.event.attempt > item.attempt):
            self._do(ev.DeleteWork(event.seq))  # Nobody needs it: ended here, or stored too late.
            return
        request = Request(item.request, State.DISPATCHED)
        self._quota(request.tenant).adopt(request.cost, request.envelope.admitted_at_ms, self._now)
        self.queue.set_weight(request.tenant, self._tenant(request.tenant).weight)
        self.queue.adopt(request.tenant, request.cost.total)
        request.charged = request.cost.total
        request.work_seq = event.seq
        request.dispatched_at_ms = item.dispatched_at_ms
        request.counted = item.attempt - 1
        self._place_on(request, self.pool.expect(item.worker, self.model, item.version), item.attempt)
        self.requests[request_id] = request
        self.reserved_tokens += request.cost.total
        self._hold(request)
        if ended is not None and ended.event.attempt == item.attempt:
            del self.ended[request_id]
            self._decide(request, ended.event)

    def _recovered(self, event: ev.Recovered) -> None:
        self.recovering = False
        self._dispatch()

    # -- settings ----------------------------------------------------------------------------------------

    def _tenant_changed(self, event: ev.TenantChanged) -> None:
        if event.record is None:
            self.tenants.pop(event.name, None)
            return
        self.tenants[event.name] = event.record
        self.queue.set_weight(event.name, event.record.weight)
        if (quota := self.quotas.get(event.name)) is not None:
            quota.set_limits(self._limits_of(event.record), self._now)

    def _manifest_changed(self, event: ev.ManifestChanged) -> None:
        self.manifest = event.manifest
        self.pool.kv_overbooking = event.manifest.limits.kv_overbooking

    def _budget_seen(self, event: ev.BudgetSeen) -> None:
        self.budgets[event.tenant] = (event.month, event.tokens)

    # -- small things ------------------------------------------------------------------------------------

    def _do(self, effect: ev.Effect) -> None:
        self._effects.append(effect)

    def _advance(self, request: Request, what: str) -> None:
        state = TRANSITIONS.get((request.state, what))
        if state is None:
            raise InvalidTransition(f"{request.id}: {what} in state {request.state.value}; {request.history}")
        request.move(state, self._now)

    def _enter(self, request: Request) -> None:
        self.requests[request.id] = request
        self.reserved_tokens += request.cost.total
        self._waits(request, 1)

    def _waits(self, request: Request, sign: int) -> None:
        quota = self._quota(request.tenant)
        tokens = sign * request.cost.total
        quota.waiting += sign
        quota.waiting_tokens += tokens
        self.waiting += sign
        self.waiting_tokens += tokens

    def _leave_queue(self, request: Request) -> None:
        self.queue.remove(request.id)
        self._waits(request, -1)

    def _send_frame(self, request: Request, kind: FrameKind, data: bytes) -> None:
        reply = request.envelope.reply
        if reply.subject:
            frame = Frame(stream=reply.stream, attempt=request.open_attempt, seq=-1, kind=kind, data=msgspec.Raw(data))
            self._do(ev.SendFrame(reply.subject, frame))

    def _tenant(self, name: str) -> TenantRecord:
        return self.tenants.get(name) or TenantRecord(name=name)

    def _limits_of(self, record: TenantRecord) -> TenantLimits:
        return record.model_limits.get(self.model, record.limits)

    def _quota(self, tenant: str) -> Quota:
        quota = self.quotas.get(tenant)
        if quota is None:
            quota = self.quotas[tenant] = Quota(self._limits_of(self._tenant(tenant)), self._now)
        return quota

    def queues(self) -> QueueAnswer:
        """The live queues, for operators and gateways' readiness."""
        oldest: dict[str, int] = {}
        running: dict[str, int] = {}
        for request in self.requests.values():
            if request.state in WAITING:
                oldest[request.tenant] = min(
                    oldest.get(request.tenant, request.envelope.admitted_at_ms),
                    request.envelope.admitted_at_ms,
                )
            else:
                running[request.tenant] = running.get(request.tenant, 0) + 1
        tenants = []
        for name, quota in self.quotas.items():
            if quota.open:
                share = self.queue.shares.get(name)
                tenants.append(
                    TenantQueue(
                        tenant=name,
                        waiting=quota.waiting,
                        waiting_tokens=quota.waiting_tokens,
                        running=running.get(name, 0),
                        reserved_tokens=quota.reserved_tokens,
                        served_counter=share.counter if share else 0.0,
                        oldest_wait_ms=self._now - oldest[name] if name in oldest else 0,
                    )
                )
        return QueueAnswer(
            model=self.model,
            owner=self.owner,
            epoch=self.epoch,
            waiting=self.waiting,
            running=len(self.requests) - self.waiting,
            reserved_tokens=self.reserved_tokens,
            workers=[worker.beat for worker in self.pool.workers.values()],
            tenants=sorted(tenants, key=lambda line: line.tenant),
        )

    def check_invariants(self) -> None:
        """Raise AssertionError when the state contradicts itself; tests call it after every step."""
        waiting = [r for r in self.requests.values() if r.state in WAITING]
        queued = [r for r in waiting if r.state is State.QUEUED]
        assert self.waiting == len(waiting), (self.waiting, len(waiting))
        assert self.waiting_tokens == sum(r.cost.total for r in waiting)
        assert self.reserved_tokens == sum(r.cost.total for r in self.requests.values())
        assert len(self.queue) == len(queued) and all(r.id in self.queue for r in queued)
        assert not set(self.requests) & set(self.ended)
        for name, quota in self.quotas.items():
            own = [r for r in self.requests.values() if r.tenant == name]
            assert quota.open == len(own), name
            assert quota.waiting == sum(r.state in WAITING for r in own), name
            assert quota.reserved_tokens == sum(r.cost.total for r in own), name
        for name, share in self.queue.shares.items():
            own = [r for r in self.requests.values() if r.tenant == name]
            assert share.waiting == sum(r.state is State.QUEUED for r in own), name
            assert share.running == sum(r.dispatched_at_ms > 0 for r in own), name
        for worker in self.pool.workers.values():
            assert worker.slots_reserved == sum(slots for slots, _ in worker.work.values())
            assert worker.kv_reserved == sum(tokens for _, tokens in worker.work.values())
            for request_id in worker.work:
                assert self.requests[request_id].worker == worker.beat.worker
            assert worker.slots_reserved <= max(worker.beat.slots, 0) or worker.beat.state == "starting"
        for request in self.requests.values():
            assert not (request.state is State.QUEUED and request.dispatched_at_ms)
