"""Who was refused for capacity and told when to come back: a line without a queue.

Each refusal reserves its tokens for the retry, so the next one is told a later time and who obeys finds room. A
reservation is known by its tenant and size, for a client that repeats a request says nothing else; one that is not
used within its own span again expires. How far a tenant's reservations count against others, ``admission`` decides.
"""

import heapq
from collections import Counter, deque

from contracts.tokens import Cost

PER_TENANT_MAX = 1000
"""Beyond it nothing is reserved, and callers are told about the same time as the last."""


class RetryReservations:
    """Tokens that refused requests will ask for again."""

    def __init__(self) -> None:
        self.tokens = 0
        self._own_tokens: Counter[str] = Counter()
        self._own_count: Counter[str] = Counter()
        self._due_at: dict[tuple[str, Cost], deque[int]] = {}
        self._expiries: list[tuple[int, str, Cost, int]] = []

    def of(self, tenant: str) -> int:
        """Tokens reserved for retries of ``tenant``."""
        return self._own_tokens[tenant]

    def due(self, tenant: str, cost: Cost, now_ms: int) -> bool:
        """Whether such a request of the tenant was told to come back by now."""
        line = self._due_at.get((tenant, cost))
        return line is not None and line[0] <= now_ms

    def use(self, tenant: str, cost: Cost, now_ms: int) -> None:
        """Such a request was admitted: the oldest reservation of its kind, if one is due, is used up."""
        if self.due(tenant, cost, now_ms):
            self._drop(tenant, cost)

    def add(self, tenant: str, cost: Cost, now_ms: int, wait_ms: int) -> None:
        """Such a request was refused and told to come back after ``wait_ms``."""
        if self._own_count[tenant] >= PER_TENANT_MAX:
            return
        due_at_ms = now_ms + wait_ms
        self._due_at.setdefault((tenant, cost), deque()).append(due_at_ms)
        heapq.heappush(self._expiries, (due_at_ms + wait_ms, tenant, cost, due_at_ms))
        self.tokens += cost.total
        self._own_tokens[tenant] += cost.total
        self._own_count[tenant] += 1

    def pass_time(self, now_ms: int) -> None:
        """Drop what has expired."""
        while self._expiries and self._expiries[0][0] <= now_ms:
            _, tenant, cost, due_at_ms = heapq.heappop(self._expiries)
            line = self._due_at.get((tenant, cost))
            if line and line[0] <= due_at_ms:
                self._drop(tenant, cost)

    def _drop(self, tenant: str, cost: Cost) -> None:
        line = self._due_at[tenant, cost]
        line.popleft()
        if not line:
            del self._due_at[tenant, cost]
        self.tokens -= cost.total
        self._own_tokens[tenant] -= cost.total
        self._own_count[tenant] -= 1
        if not self._own_count[tenant]:
            del self._own_count[tenant], self._own_tokens[tenant]
