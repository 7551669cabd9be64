"""Whether a request is admitted: the tenant's limits, its budget, the pool's queue and the predicted wait, in one step.

Checking charges nothing; a request is charged only when all of it fits. What waits is counted here because the queue's
bounds are. Which requests exist, and in what order they run, others decide.
"""

import math

from contracts import instants, shards
from contracts.errors import HeadraceError
from contracts.messages.admission import DEADLINE_MS_MAX, AdmissionRequest
from contracts.messages.records import ModelRecord, Spending, TenantLimits, TenantRecord
from contracts.tokens import Cost, reserved
from scheduler.core.budgets import Budgets
from scheduler.core.fair_queue import FairQueue
from scheduler.core.prompts import Expected
from scheduler.core.quota_leases import Ask, Grant, LeasedQuota
from scheduler.core.quotas import Quota, seconds
from scheduler.core.request import Request
from scheduler.core.retry_reservations import RetryReservations
from scheduler.core.throughput import ThroughputEstimate

RETRY_AFTER_S_MAX = 60
"""A full queue is worth another look within a minute whatever the estimate says."""
PREDICTION_MARGIN = 1.1
"""A predicted wait is taken this much longer: work ends in lumps, and the estimate is a mean."""


UNKNOWN = TenantRecord(name="")
"""Of every tenant that the registry has not told of."""
UNMEASURED = Expected()


class AdmissionControl:
    """Quotas, budgets and queue bounds of one model."""

    def __init__(self, record: ModelRecord, queue: FairQueue, now_ms: int) -> None:
        self.record = record
        self.tenants: dict[str, TenantRecord] = {}
        self.budgets = Budgets(record.name)
        self.quotas: dict[str, Quota] = {}
        self._leasing: dict[str, LeasedQuota] = {}
        """Of a model with several shards those that the others are to be told of, by tenant."""
        self.throughput = ThroughputEstimate(now_ms)
        self.retry_reservations = RetryReservations()
        self.waiting = 0
        """Admitted requests that no worker has, the tokens that they reserve, and those of prompts among them."""
        self.waiting_tokens = 0
        self.waiting_input_tokens = 0
        self.reserved_tokens = 0
        """Of all open requests."""
        self.body_bytes = 0
        """Of their bodies in BODIES."""
        self._queue = queue

    def tenant(self, name: str) -> TenantRecord:
        """The tenant's record; one without any limit while the registry has not told of it."""
        return self.tenants.get(name, UNKNOWN)

    def set_tenant(self, name: str, record: TenantRecord | None, now_ms: int) -> None:
        """The registry's record has changed, or is deleted (None)."""
        if record is None:
            self.tenants.pop(name, None)
            return
        self.tenants[name] = record
        self.budgets.touch(name)  # It may have a budget from now on.
        self._queue.set_weight(name, record.weight)
        if (quota := self.quotas.get(name)) is not None:
            quota.set_limits(self._limits_of(record), now_ms)
            if isinstance(quota, LeasedQuota):
                quota.budget = record.monthly_budget_tokens

    def quota(self, tenant: str, now_ms: int) -> Quota:
        """The tenant's buckets and counts; full and empty on first sight."""
        quota = self.quotas.get(tenant)
        if quota is None:
            quota = self.quotas[tenant] = self._new_quota(self.tenant(tenant), now_ms)
        return quota

    def _new_quota(self, tenant: TenantRecord, now_ms: int) -> Quota:
        limits, number = self._limits_of(tenant), self.record.shards
        if number == 1:
            return Quota(limits, now_ms)
        return LeasedQuota(limits, now_ms, shards=number, budget=tenant.monthly_budget_tokens)

    def lease(self, tenant: str, waiting: list[Cost], now_ms: int) -> Ask | None:
        """What to ask of the tenant's limits, which all shards share, for those who wait; None: an answer is due."""
        quota = self.quota(tenant, now_ms)
        if not isinstance(quota, LeasedQuota) or quota.exchanging:
            return None
        self._leasing[tenant] = quota
        month = instants.month_of(now_ms)
        return quota.ask(waiting, now_ms, month=month, month_spent=self.budgets.counted(tenant, month)[0])

    def leased(self, tenant: str, grant: Grant | None, now_ms: int) -> None:
        """The answer; None: nobody knows it."""
        if (quota := self._leasing.get(tenant)) is not None:
            quota.exchanged(grant, now_ms)
            if not quota.is_held:
                del self._leasing[tenant]

    def leases_due(self, now_ms: int) -> list[str]:
        """Tenants of which the other shards are to be told now."""
        return [tenant for tenant, quota in self._leasing.items() if quota.is_due(now_ms)]

    def check(
        self, asked: AdmissionRequest, now_ms: int, *, has_room: bool, start_ms: int = 0, prompt: Expected = UNMEASURED
    ) -> int:
        """Milliseconds to the first token that the request is promised; raises HeadraceError and charges nothing.

        Raises LeaseAwaited where the model has several shards.

        ``has_room``: a worker could start something now. ``start_ms``: until the first worker is there. ``prompt``:
        what is expected of its own.
        """
        if self.record.removed:
            raise HeadraceError("model_not_found", f"The model {asked.model!r} was removed.", param="model")
        tenant = self.tenant(asked.tenant)
        quota = self.quota(asked.tenant, now_ms)
        cost = reserved(asked)
        deadline_ms = min(asked.deadline_ms or tenant.deadline_ms, DEADLINE_MS_MAX)
        if asked.priority not in tenant.priorities:
            raise HeadraceError(
                "permission_denied", f"The tenant may not use priority {asked.priority}.", param="priority"
            )
        self._check_budget(tenant, quota, now_ms)
        quota.check(cost, now_ms, self.throughput.turnover_ms(quota.open))
        wait_ms = start_ms + prompt.first_token_ms
        if self.waiting or not has_room:
            wait_ms += self._predicted_wait_ms(asked.tenant, quota, cost, now_ms, prompt.per_ms)
        self._check_queue(quota, cost.total, wait_ms)
        self._check_bodies(quota, asked.body_bytes)
        if prompt.alone_ms > deadline_ms:
            raise HeadraceError(
                "deadline_exceeded",
                f"To compute the prompt takes about {prompt.alone_ms} ms, and its first token should come within "
                f"{deadline_ms} ms: ask for a longer deadline (X-Headrace-Deadline-Ms, or deadline_ms over the bus).",
            )
        if wait_ms > deadline_ms:
            room_in_s = seconds(wait_ms - deadline_ms)
            if room_in_s <= RETRY_AFTER_S_MAX:  # the line is no longer than that, or its end would run away
                self.retry_reservations.add(asked.tenant, cost, now_ms, room_in_s * 1000)
            raise HeadraceError(
                "overloaded",
                f"The first token is expected after {wait_ms} ms, later than the deadline of {deadline_ms} ms.",
                retry_after_s=min(RETRY_AFTER_S_MAX, room_in_s),
            )
        self.retry_reservations.use(asked.tenant, cost, now_ms)
        return deadline_ms

    def spending_due(self, now_ms: int) -> list[tuple[str, Spending]]:
        """What other owners are to be told now, by tenant: of those that have a budget."""
        month = instants.month_of(now_ms)
        return [
            (name, self.budgets.telling(name, month, self.quota(name, now_ms).reserved_tokens))
            for name in self.budgets.due(now_ms)
            if self.tenant(name).monthly_budget_tokens is not None
        ]

    def pass_time(self, now_ms: int) -> None:
        """Measure what was worked off, and let retry reservations expire."""
        running = self.reserved_tokens - self.waiting_tokens
        self.throughput.pass_time(now_ms, saturated=len(self._queue) > 0, running_tokens=running)
        self.retry_reservations.pass_time(now_ms)

    def reserve(self, request: Request, now_ms: int) -> None:
        """Charge a request that was checked; it waits."""
        quota = self.quota(request.tenant, now_ms)
        tokens = request.cost.total
        quota.reserve(request.cost, now_ms)
        quota.waiting += 1
        quota.waiting_tokens += tokens
        self.waiting += 1
        self.waiting_tokens += tokens
        self.waiting_input_tokens += request.cost.input_tokens
        self.reserved_tokens += tokens
        self.budgets.touch(request.tenant)
        self._count_body(request, 1, now_ms)

    def adopt(self, request: Request, now_ms: int) -> None:
        """Charge a request that an earlier owner admitted; whether it waits is counted apart."""
        quota = self.quota(request.tenant, now_ms)
        quota.adopt(request.cost, request.envelope.admitted_at_ms, now_ms)
        if isinstance(quota, LeasedQuota):
            self._leasing[request.tenant] = quota
        self.reserved_tokens += request.cost.total
        self.budgets.touch(request.tenant)
        self._count_body(request, 1, now_ms)

    def settle(
        self, request: Request, used: Cost, now_ms: int, *, refund_request: bool = False, billed_tokens: int = 0
    ) -> None:
        """Charge a request what it used instead of what it reserved; it no longer waits."""
        self.quota(request.tenant, now_ms).settle(
            request.cost, used, now_ms, refund_request=refund_request, billed_tokens=billed_tokens
        )
        self.reserved_tokens -= request.cost.total
        self.budgets.touch(request.tenant)
        self._count_body(request, -1, now_ms)

    def count_waiting(self, request: Request, sign: int, now_ms: int) -> None:
        """One more (1) or fewer (-1) request waits."""
        quota = self.quota(request.tenant, now_ms)
        tokens = sign * request.cost.total
        quota.waiting += sign
        quota.waiting_tokens += tokens
        self.waiting += sign
        self.waiting_tokens += tokens
        self.waiting_input_tokens += sign * request.cost.input_tokens

    def _count_body(self, request: Request, sign: int, now_ms: int) -> None:
        body_bytes = sign * request.envelope.body_bytes
        self.quota(request.tenant, now_ms).body_bytes += body_bytes
        self.body_bytes += body_bytes

    def _limits_of(self, record: TenantRecord) -> TenantLimits:
        return record.limits_of(shards.model_of(self.record.name))

    def _check_budget(self, tenant: TenantRecord, quota: Quota, now_ms: int) -> None:
        """What is open counts as if it used all that it reserves, so that one request alone may pass the budget."""
        budget = tenant.monthly_budget_tokens
        if budget is None:
            return
        spent, elsewhere = self.budgets.counted(tenant.name, instants.month_of(now_ms))
        if spent >= budget:
            _, following_ms = instants.month_around(now_ms)
            used_up = f"of {budget} tokens is used up" if budget else "is 0 tokens: nothing is admitted"
            raise HeadraceError(
                "insufficient_quota",
                f"The tenant's monthly budget {used_up}; it starts again on {instants.month_of(following_ms)}-01 UTC.",
                retry_after_s=seconds(following_ms - now_ms),
            )
        running = quota.reserved_tokens + elsewhere
        if spent + running >= budget:
            raise HeadraceError(
                "rate_limit_exceeded",
                f"Of the tenant's monthly budget of {budget} tokens {spent} are used, and its open requests may use "
                f"{running}: there may be more when they have ended.",
                retry_after_s=seconds(self.throughput.turnover_ms(quota.open)),
            )

    def _check_queue(self, quota: Quota, tokens: int, wait_ms: int) -> None:
        limits = self.record.limits
        if (
            quota.waiting >= limits.tenant_queued_requests
            or quota.waiting_tokens + tokens > limits.tenant_queued_tokens
        ):
            raise HeadraceError(
                "rate_limit_exceeded",
                "The tenant's share of the model's queue is full.",
                retry_after_s=min(RETRY_AFTER_S_MAX, seconds(wait_ms / max(1, quota.waiting))),
            )
        if self.waiting >= limits.queued_requests or self.waiting_tokens + tokens > limits.queued_tokens:
            raise HeadraceError(
                "overloaded",
                "The model's queue is full.",
                retry_after_s=min(RETRY_AFTER_S_MAX, seconds(wait_ms / max(1, self.waiting))),
            )

    def _check_bodies(self, quota: Quota, body_bytes: int) -> None:
        limits = self.record.limits
        if not body_bytes:
            return
        largest = min(limits.tenant_body_bytes, limits.body_bytes)
        if body_bytes > largest:
            raise HeadraceError(
                "request_too_large", f"The body has {body_bytes} bytes; this model takes at most {largest}."
            )
        if quota.body_bytes + body_bytes > limits.tenant_body_bytes:
            raise HeadraceError(
                "rate_limit_exceeded",
                f"The tenant's open requests hold {quota.body_bytes} of the {limits.tenant_body_bytes} bytes "
                f"that large bodies may take; this one has {body_bytes}.",
                retry_after_s=seconds(self.throughput.turnover_ms(quota.open)),
            )
        if self.body_bytes + body_bytes > limits.body_bytes:
            raise HeadraceError(
                "overloaded",
                f"The model's store for large bodies is full: {limits.body_bytes} bytes.",
                retry_after_s=seconds(self.throughput.turnover_ms(sum(each.open for each in self.quotas.values()))),
            )

    def _predicted_wait_ms(self, tenant: str, quota: Quota, cost: Cost, now_ms: int, prompts_per_ms: float) -> int:
        """Expected time to dispatch: the work that goes first over the estimated throughput, or the prompts of it over
        the speed of all workers, whichever takes longer; 0 while both are unknown.

        The tenant's own queue is worked off at its share of the throughput, once the others have caught up with what
        it was served before them; nobody waits longer than for all that is queued. Who was not told to come back by
        now waits behind those who were.
        """
        share = self._queue.shares.get(tenant)
        waits = share is not None and share.waiting > 0
        weight = self.tenant(tenant).weight
        weights = self._queue.waiting_weight + (0.0 if waits else weight)
        retries = own_retries = 0
        if self.retry_reservations.tokens and not self.retry_reservations.due(tenant, cost, now_ms):
            retries, own_retries = self.retry_reservations.tokens, self.retry_reservations.of(tenant)
        total = self.waiting_tokens + retries + cost.total
        own = (quota.waiting_tokens + own_retries + cost.total) / weight
        fair = (own + self._queue.lead(tenant)) * weights
        before = PREDICTION_MARGIN * min(float(total), fair)
        wait_ms = self.throughput.wait_ms(before)
        if prompts_per_ms:
            prompts = (self.waiting_input_tokens + cost.input_tokens) / (self.waiting_tokens + cost.total)
            wait_ms = max(wait_ms, math.ceil(before * prompts / prompts_per_ms))
        return wait_ms
