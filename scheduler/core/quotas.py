"""Quotas of one tenant on one model: token buckets and counts, decided together in one step.

A token bucket holds one minute's worth and refills evenly. A decision checks everything first and charges only when all
of it fits, so a refused request burns nothing. At the end a request is settled to what it used, at once; refunds
stop at the bucket's size.
"""

import math

from contracts.errors import HeadraceError
from contracts.limits import NAMES, refuse_zero
from contracts.messages.admission import RateLimit, RateLimits
from contracts.messages.records import TenantLimits
from contracts.tokens import Cost

MINUTE_MS = 60_000


class TokenBucket:
    """``size`` tokens a minute, refilled evenly, full at the start. ``size`` None never limits."""

    __slots__ = ("_at_ms", "_level", "size")

    def __init__(self, size: int | None, now_ms: int) -> None:
        self.size = size
        self._level = float(size or 0)
        self._at_ms = now_ms

    def resize(self, size: int | None, now_ms: int) -> None:
        """A changed limit holds at once: what is spent stays spent."""
        if size == self.size:
            return
        spent = 0.0 if self.size is None else self.size - self.level(now_ms)
        self.size = size
        self._level = float(size or 0) - spent
        self._at_ms = now_ms

    def level(self, now_ms: int) -> float:
        """Tokens available now; negative after a lowered limit."""
        if self.size is None:
            return math.inf
        elapsed = max(0, now_ms - self._at_ms)
        return min(float(self.size), self._level + self.size * elapsed / MINUTE_MS)

    def wait_ms(self, amount: int, now_ms: int) -> int:
        """Milliseconds until ``amount`` is available, 0 when it is; ``amount`` must not exceed ``size``."""
        missing = amount - self.level(now_ms)
        if missing <= 0 or not self.size:
            return 0
        return math.ceil(missing * MINUTE_MS / self.size)

    def shown(self, now_ms: int) -> RateLimit | None:
        """As callers see it; None when it never limits."""
        if self.size is None:
            return None
        remaining = max(0, math.floor(self.level(now_ms)))
        return RateLimit(limit=self.size, remaining=remaining, reset_ms=self.wait_ms(self.size, now_ms))

    def take(self, amount: float, now_ms: int) -> None:
        """Take (or with a negative amount give back) tokens; the level never exceeds ``size``."""
        if self.size is not None:
            self._level = min(float(self.size), self.level(now_ms) - amount)
            self._at_ms = now_ms


class Quota:
    """A tenant's token buckets and open requests on one model.

    ``open`` counts admitted requests that are not settled, ``waiting`` those of them that no worker has; ``_tokens``
    are what they reserve.
    """

    def __init__(self, limits: TenantLimits, now_ms: int) -> None:
        self.limits = limits
        self.request_bucket = TokenBucket(limits.rpm, now_ms)
        self.input_bucket = TokenBucket(limits.input_tpm, now_ms)
        self.output_bucket = TokenBucket(limits.output_tpm, now_ms)
        self.open = 0
        self.waiting = 0
        self.waiting_tokens = 0
        self.reserved_tokens = 0
        self.body_bytes = 0
        """Of its open requests' bodies in BODIES."""

    def set_limits(self, limits: TenantLimits, now_ms: int) -> None:
        """Changed limits hold at once."""
        self.limits = limits
        self.request_bucket.resize(limits.rpm, now_ms)
        self.input_bucket.resize(limits.input_tpm, now_ms)
        self.output_bucket.resize(limits.output_tpm, now_ms)

    def check(self, cost: Cost, now_ms: int, turnover_ms: int) -> None:
        """Raise HeadraceError when the tenant's own limits refuse a request of ``cost``; charges nothing.

        ``turnover_ms``: after how long one of the tenant's open requests probably ends.
        """
        limits = self.limits
        refuse_zero(limits, generates=cost.output_tokens > 0)
        counts = (
            ("concurrency", limits.concurrency, self.open, 1),
            ("queued_requests", limits.queued_requests, self.waiting, 1),
            ("queued_tokens", limits.queued_tokens, self.waiting_tokens, cost.total),
        )
        sizes = [(field, bucket.size, amount) for field, bucket, amount in self._buckets(cost)]
        for field, size, amount in (*sizes, *((field, limit, amount) for field, limit, _, amount in counts)):
            if size is not None and amount > size:
                raise HeadraceError(
                    "request_exceeds_limit",
                    f"The request needs {amount} of the limit of {size} {NAMES[field]}; it can never be admitted. "
                    "Shorten the prompt or lower the maximum output.",
                )
        self.check_levels(cost, now_ms, turnover_ms)
        for field, limit, taken, amount in counts:
            if limit is not None and taken + amount > limit:
                raise HeadraceError(
                    "rate_limit_exceeded",
                    f"The limit of {limit} {NAMES[field]} is reached.",
                    retry_after_s=seconds(turnover_ms),
                )

    def _buckets(self, cost: Cost) -> tuple[tuple[str, TokenBucket, int], ...]:
        """And what a request takes of each."""
        return (
            ("rpm", self.request_bucket, 1),
            ("input_tpm", self.input_bucket, cost.input_tokens),
            ("output_tpm", self.output_bucket, cost.output_tokens),
        )

    def check_levels(self, cost: Cost, now_ms: int, turnover_ms: int) -> None:
        """Raise HeadraceError when the buckets have not what a request needs."""
        for field, bucket, amount in self._buckets(cost):
            wait = bucket.wait_ms(amount, now_ms)
            if wait > 0:
                raise HeadraceError(
                    "rate_limit_exceeded",
                    f"The limit of {bucket.size} {NAMES[field]} is reached: the request needs {amount}, "
                    f"{max(0, math.floor(bucket.level(now_ms)))} are left.",
                    retry_after_s=seconds(wait),
                )

    def reserve(self, cost: Cost, now_ms: int) -> None:
        """Charge a request that was checked."""
        self.request_bucket.take(1, now_ms)
        self.input_bucket.take(cost.input_tokens, now_ms)
        self.output_bucket.take(cost.output_tokens, now_ms)
        self.open += 1
        self.reserved_tokens += cost.total

    def adopt(self, cost: Cost, admitted_at_ms: int, now_ms: int) -> None:
        """Count a request that an earlier owner admitted."""
        self.replay(cost, admitted_at_ms, now_ms)
        self.open += 1
        self.reserved_tokens += cost.total

    def replay(self, cost: Cost, admitted_at_ms: int, now_ms: int) -> None:
        """Take what a request admitted earlier took, less what its bucket has refilled since."""
        left = 1 - max(0, now_ms - admitted_at_ms) / MINUTE_MS
        if left > 0:
            self.request_bucket.take(left, now_ms)
            self.input_bucket.take(cost.input_tokens * left, now_ms)
            self.output_bucket.take(cost.output_tokens * left, now_ms)

    def settle(
        self, cost: Cost, used: Cost, now_ms: int, *, refund_request: bool = False, billed_tokens: int = 0
    ) -> None:
        """The request of ``cost`` ended having used ``used`` of its limits, and ``billed_tokens`` of a budget."""
        if refund_request:
            self.request_bucket.take(-1, now_ms)
        self.input_bucket.take(used.input_tokens - cost.input_tokens, now_ms)
        self.output_bucket.take(used.output_tokens - cost.output_tokens, now_ms)
        self.open -= 1
        self.reserved_tokens -= cost.total

    def rate_limits(self, now_ms: int) -> RateLimits:
        """For the headers of an answer."""
        return RateLimits(
            requests=self.request_bucket.shown(now_ms),
            input_tokens=self.input_bucket.shown(now_ms),
            output_tokens=self.output_bucket.shown(now_ms),
        )


def seconds(milliseconds: float) -> int:
    """A Retry-After: whole seconds, rounded up, 1 at least."""
    return max(1, math.ceil(milliseconds / 1000))
