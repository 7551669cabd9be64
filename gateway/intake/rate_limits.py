"""The rate limits of tenants as the schedulers last told this gateway of them: for answers about which none is asked.

Pure; time comes in. What was left then has been refilled since, as the scheduler's bucket is. Another gateway may have
used some of it meanwhile: who needs the exact number finds it in the answer of an admitted or refused request.
"""

import math
from collections import OrderedDict

from contracts.messages.admission import RateLimit, RateLimits
from contracts.messages.records import TenantRecord

KEPT_MAX = 10_000
"""Tenants and models; of the others the limits are told as if nothing were used."""
MINUTE_MS = 60_000


class RateLimitsSeen:
    """By tenant and model."""

    def __init__(self) -> None:
        self._seen: OrderedDict[tuple[str, str], tuple[RateLimits, int]] = OrderedDict()
        self._last: dict[str, str] = {}
        """Tenant -> model of which was told last."""

    def keep(self, tenant: str, model: str, limits: RateLimits | None, now_ms: int) -> None:
        """What a scheduler has answered."""
        if limits is None:
            return
        self._seen[tenant, model] = (limits, now_ms)
        self._seen.move_to_end((tenant, model))
        self._last[tenant] = model
        if len(self._seen) > KEPT_MAX:
            (gone, of_model), _ = self._seen.popitem(last=False)
            if self._last.get(gone) == of_model:
                del self._last[gone]

    def at(self, tenant: TenantRecord, model: str, now_ms: int) -> RateLimits:
        """The tenant's limits on a model; without one on the model that it used last."""
        model = model or self._last.get(tenant.name, "")
        limits = tenant.limits_of(model)
        seen, at_ms = self._seen.get((tenant.name, model), (RateLimits(), 0))
        elapsed_ms = max(0, now_ms - at_ms)
        return RateLimits(
            requests=_now(limits.rpm, seen.requests, elapsed_ms),
            input_tokens=_now(limits.input_tpm, seen.input_tokens, elapsed_ms),
            output_tokens=_now(limits.output_tpm, seen.output_tokens, elapsed_ms),
        )


def _now(limit: int | None, seen: RateLimit | None, elapsed_ms: int) -> RateLimit | None:
    """A bucket as it was ``elapsed_ms`` ago, refilled since; one whose limit has changed is told full."""
    if limit is None:
        return None
    if seen is None or seen.limit != limit:
        return RateLimit(limit=limit, remaining=limit, reset_ms=0)
    remaining = min(limit, seen.remaining + math.floor(limit * elapsed_ms / MINUTE_MS))
    return RateLimit(limit=limit, remaining=remaining, reset_ms=max(0, seen.reset_ms - elapsed_ms))
