"""What production is compared with: a number of workers by counting requests, as Kubernetes does it.

The HorizontalPodAutoscaler's rule with its defaults, which is KEDA's above zero, too (kubernetes.io, "Horizontal Pod
Autoscaling"): every 15 s the count over what a worker should have, rounded up; nothing within a tenth; up at most to
twice as many or four more, whichever is more; down to the most that was wanted in the last five minutes.
"""

import math
from collections import deque

SYNC_MS = 15_000
TOLERANCE = 0.1
DOWN_MS = 300_000
MORE = 4


class RequestCount:
    """The wanted number of one model's workers; pure."""

    def __init__(self, per_worker: float, least: int, most: int) -> None:
        self._per_worker = per_worker
        self._least = least
        self._most = most
        self._wanted: deque[tuple[int, int]] = deque()
        self._synced_ms = 0
        self._last = 0

    def desired(self, now_ms: int, requests: int, there: int) -> int:
        """With so many requests now, and so many workers."""
        if self._synced_ms and now_ms - self._synced_ms < SYNC_MS:
            return self._last
        self._synced_ms = now_ms
        self._last = min(self._most, max(self._least, self._steadied(now_ms, requests, there)))
        return self._last

    def _steadied(self, now_ms: int, requests: int, there: int) -> int:
        load = requests / self._per_worker
        wanted = there if there and abs(load / there - 1) <= TOLERANCE else math.ceil(load)
        self._wanted.append((now_ms, wanted if self._wanted else max(wanted, there)))
        while self._wanted[0][0] < now_ms - DOWN_MS:
            self._wanted.popleft()
        highest = max(each for _, each in self._wanted)
        if wanted > there:
            return min(wanted, max(2 * there, there + MORE))
        return min(there, highest)
