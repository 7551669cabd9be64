"""The fair queue of one model: a weighted virtual token counter per tenant, two priority classes, deadlines inside.

Each tenant has a counter of the tokens it was served, divided by its weight; the waiting tenant with the lowest
counter goes next (Sheng et al., "Fairness in Serving Large Language Models", OSDI 2024). The counter is charged at
dispatch with prompt plus maximum output and corrected at the end, so failed and unused work is given back.

Bound: while two tenants both wait, their counters differ by at most the two largest charges divided by weight,
plus one such charge per slot that the pool runs at once, because a charge is an estimate until its request ends.

A tenant is active while it waits or runs. One that returns is lifted to the lowest active counter (with nobody
active, to that of the tenant that left last), so idleness banks no credit.
"""

import heapq
from collections import deque
from collections.abc import Callable, Iterator

from contracts.messages.base import Priority

SCAN_PER_TENANT = 4
"""Requests of one tenant looked at when its first ones fit no worker: a guess, enough to pass one large one."""
SCAN_TOTAL = 32
"""Requests looked at in one pass; bounds the cost of a pass when little fits (about 0.1 ms)."""


class QueuedRequest:
    """One waiting request. ``order``: earliest deadline first, then arrival."""

    __slots__ = ("charge", "key", "order", "priority", "since_ms", "tenant")

    def __init__(
        self, key: str, tenant: str, priority: Priority, deadline_at_ms: int, number: int, charge: float, since_ms: int
    ) -> None:
        self.key = key
        self.tenant = tenant
        self.priority: Priority = priority
        self.order = (deadline_at_ms, number)
        self.charge = charge
        self.since_ms = since_ms


class Share:
    """A tenant's place in the queue."""

    __slots__ = ("counter", "heaps", "running", "waiting", "weight")

    def __init__(self, weight: float) -> None:
        self.counter = 0.0
        self.weight = weight
        self.waiting = 0
        self.running = 0
        self.heaps: dict[Priority, list[tuple[tuple[int, int], str]]] = {"interactive": [], "batch": []}

    @property
    def active(self) -> bool:
        """Whether the tenant waits or runs."""
        return self.waiting > 0 or self.running > 0


class FairQueue:
    """Waiting requests of all tenants. All operations cost O(log n)."""

    def __init__(self, *, ageing_ms: int) -> None:
        self.shares: dict[str, Share] = {}
        self._entries: dict[str, QueuedRequest] = {}
        self._order: dict[Priority, list[tuple[float, str]]] = {"interactive": [], "batch": []}
        self._active: list[tuple[float, str]] = []
        self._ageing: deque[tuple[int, str]] = deque()
        self._ageing_ms = ageing_ms
        self._last_leaver = 0.0
        self._number = 0
        self.waiting_weight = 0.0
        """Sum of the weights of the tenants that wait."""

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, key: str) -> bool:
        return key in self._entries

    def set_weight(self, tenant: str, weight: float) -> None:
        """Later charges are divided by ``weight``; what was served before stays."""
        share = self._share(tenant)
        if share.waiting:
            self.waiting_weight += weight - share.weight
        share.weight = weight

    def push(self, key: str, tenant: str, priority: Priority, deadline_at_ms: int, charge: float, now_ms: int) -> None:
        """Add a waiting request that will be charged ``charge`` tokens at dispatch."""
        share = self._activate(tenant)
        self._wait(share, 1)
        self._number += 1
        entry = QueuedRequest(key, tenant, priority, deadline_at_ms, self._number, charge, now_ms)
        self._entries[key] = entry
        heapq.heappush(share.heaps[priority], (entry.order, key))
        self._offer(priority, tenant, share)
        if priority == "batch":
            self._ageing.append((now_ms, key))

    def remove(self, key: str) -> None:
        """Take a waiting request out without serving it; does nothing when it does not wait."""
        entry = self._entries.pop(key, None)
        if entry is not None:
            share = self.shares[entry.tenant]
            self._wait(share, -1)
            self._left(share)

    def serve(self, key: str) -> float:
        """The request is dispatched: charge its tenant. Gives the charge, to be handed to ``settle``."""
        entry = self._entries.pop(key)
        share = self.shares[entry.tenant]
        self._wait(share, -1)
        share.running += 1
        self._charge(entry.tenant, share, entry.charge)
        return entry.charge

    def adopt(self, tenant: str, charge: float) -> None:
        """A request that already runs (after a takeover): charge its tenant."""
        share = self._activate(tenant)
        share.running += 1
        self._charge(tenant, share, charge)

    def settle(self, tenant: str, charged: float, used: float) -> None:
        """A served request ended having used ``used`` tokens of the ``charged`` ones."""
        share = self.shares[tenant]
        share.running -= 1
        self._charge(tenant, share, used - charged)
        self._left(share)

    def scan(self, now_ms: int, take: Callable[[QueuedRequest], bool]) -> int:
        """Offer waiting requests in fair order to ``take``, which serves an entry (calls ``serve``) and says True.

        Ends when nothing waits or SCAN_TOTAL entries were not taken. Gives the number taken.
        """
        self._promote(now_ms)
        taken = 0
        passed = 0
        for priority in self._order:
            aside: dict[str, float] = {}
            order = self._order[priority]
            while order and passed < SCAN_TOTAL:
                counter, tenant = heapq.heappop(order)
                share = self.shares.get(tenant)
                if share is None or share.counter != counter or tenant in aside:
                    continue  # Offered again since, or a second time.
                served = False
                waits = False
                for entry in self._heads(share, priority):
                    waits = True
                    if take(entry):
                        served = True
                        break
                    passed += 1
                if served:
                    taken += 1
                    self._offer(priority, tenant, share)
                elif waits:
                    aside[tenant] = counter
            for tenant, counter in aside.items():
                heapq.heappush(order, (counter, tenant))
        return taken

    def lead(self, tenant: str) -> float:
        """Weighted tokens by which the tenant was served more than the active one that was served least."""
        share = self.shares.get(tenant)
        return 0.0 if share is None else max(0.0, share.counter - self._lowest_active())

    def _share(self, tenant: str) -> Share:
        share = self.shares.get(tenant)
        if share is None:
            share = self.shares[tenant] = Share(1.0)
        return share

    def _activate(self, tenant: str) -> Share:
        share = self._share(tenant)
        if not share.active:
            share.counter = max(share.counter, self._lowest_active())
            heapq.heappush(self._active, (share.counter, tenant))
        return share

    def _lowest_active(self) -> float:
        while self._active:
            counter, tenant = self._active[0]
            share = self.shares.get(tenant)
            if share is not None and share.active and share.counter == counter:
                return counter
            heapq.heappop(self._active)
        return self._last_leaver

    def _wait(self, share: Share, sign: int) -> None:
        before = share.waiting
        share.waiting += sign
        if not before or not share.waiting:
            self.waiting_weight += sign * share.weight

    def _left(self, share: Share) -> None:
        if not share.active:
            self._last_leaver = share.counter

    def _charge(self, tenant: str, share: Share, tokens: float) -> None:
        if tokens == 0:
            return
        share.counter += tokens / share.weight
        if share.active:
            heapq.heappush(self._active, (share.counter, tenant))
            if len(self._active) > 64 + 4 * len(self.shares):
                self._active = [(s.counter, t) for t, s in self.shares.items() if s.active]
                heapq.heapify(self._active)
        for priority, heap in share.heaps.items():
            if heap:
                self._offer(priority, tenant, share)

    def _offer(self, priority: Priority, tenant: str, share: Share) -> None:
        order = self._order[priority]
        heapq.heappush(order, (share.counter, tenant))
        if len(order) > 64 + 4 * len(self.shares):
            order[:] = [(s.counter, t) for t, s in self.shares.items() if s.heaps[priority]]
            heapq.heapify(order)

    def _heads(self, share: Share, priority: Priority) -> Iterator[QueuedRequest]:
        """The tenant's first SCAN_PER_TENANT entries of a class; the caller may serve the one just given."""
        heap = share.heaps[priority]
        aside: list[tuple[tuple[int, int], str]] = []
        try:
            while heap and len(aside) < SCAN_PER_TENANT:
                order, key = heapq.heappop(heap)
                entry = self._entries.get(key)
                if entry is None or entry.order != order or entry.priority != priority:
                    continue
                aside.append((order, key))
                yield entry
        finally:
            for item in aside:
                if item[1] in self._entries:
                    heapq.heappush(heap, item)

    def _promote(self, now_ms: int) -> None:
        """Batch requests that waited for the ageing time go with the interactive ones from now on."""
        while self._ageing and self._ageing[0][0] + self._ageing_ms <= now_ms:
            _, key = self._ageing.popleft()
            entry = self._entries.get(key)
            if entry is not None and entry.priority == "batch":
                entry.priority = "interactive"
                share = self.shares[entry.tenant]
                heapq.heappush(share.heaps["interactive"], (entry.order, key))
                self._offer("interactive", entry.tenant, share)
