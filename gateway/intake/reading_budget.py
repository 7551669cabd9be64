"""What a tenant may have read and counted for it that nobody runs. Pure: time comes in.

Reading and counting a body comes before any limit of the scheduler's: only afterwards is known what the request would
use. So each body is charged here by its bytes first, and given back once the scheduler has admitted the request (its
own limits hold from there on) or the service itself was at fault. What stays charged are counts for their own sake,
refused requests and invalid ones: an agent that counts its context all the time stays far below, a flood does not.
"""

import math

from contracts.errors import HeadraceError

BYTES_PER_S = 1 << 20
"""Per tenant and gateway: some 300,000 tokens a second, for which a core is busy half the time (measured)."""
REQUEST_BYTES = 4 << 10
"""A smaller body is charged as this: what any request costs. 256 refused requests a second."""


class ReadingBudget:
    """A token bucket of bytes for each tenant. Holds those alone that are not full."""

    def __init__(self, burst: int) -> None:
        self._burst = burst
        self._buckets: dict[str, tuple[float, float]] = {}
        """Bytes left, and when that was."""

    def take(self, tenant: str, size: int, now: float) -> None:
        """Charge a body; raises HeadraceError (rate_limit_exceeded) when too much was read in vain."""
        left, cost = self._left(tenant, now), self._cost(size)
        if left < cost:
            wait_s = math.ceil((cost - left) / BYTES_PER_S)
            raise HeadraceError(
                "rate_limit_exceeded",
                "Too many bytes of requests that were not run: counts, invalid and refused requests. "
                f"Try again in {wait_s} s.",
                retry_after_s=wait_s,
            )
        self._buckets[tenant] = left - cost, now

    def give_back(self, tenant: str, size: int, now: float) -> None:
        """What was taken for a request that is run after all."""
        left = self._left(tenant, now) + self._cost(size)
        if left < self._burst:
            self._buckets[tenant] = left, now
        else:
            self._buckets.pop(tenant, None)

    def _left(self, tenant: str, now: float) -> float:
        left, then = self._buckets.get(tenant, (float(self._burst), now))
        return min(self._burst, left + (now - then) * BYTES_PER_S)

    def _cost(self, size: int) -> int:
        return min(max(size, REQUEST_BYTES), self._burst)
