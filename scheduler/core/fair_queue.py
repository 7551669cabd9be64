"""The fair queue of one model: a weighted virtual token counter per tenant, two priority classes, deadlines inside.

Each tenant has a counter of the tokens it was served, divided by its weight; the waiting tenant with the lowest
counter goes next (Sheng et al., "Fairness in Serving Large Language Models", OSDI 2024). The counter is charged at
dispatch with prompt plus maximum output and corrected at the end, so failed and unused work is given back.

What a worker must have for a request puts it into a *lane* (the caller says which). A lane whose first requests fit
nowhere is passed over, so that what cannot be placed never stands before what can.

Bound: while two tenants both wait, their counters differ by at most the two largest charges divided by weight,
plus one such charge per slot that the pool runs at once, because a charge is an estimate until its request ends.

A tenant is active while it waits or runs. One that returns is lifted to the lowest active counter (with nobody
active, to that of the tenant that left last), so idleness banks no credit.
"""

import heapq
from collections import deque
from collections.abc import Callable, Hashable, Iterator
from typing import get_args

from contracts.messages.base import Priority

SCAN_PER_TENANT = 4
"""Requests of one tenant and lane looked at when its first ones fit no worker: a guess."""
SCAN_PER_LANE = 8
"""Requests of one lane that may fit no worker before the rest of the lane is passed over: those of a lane are much
alike, and it bounds the cost of a pass when little fits (20 us for each lane)."""

PRIORITIES: tuple[Priority, ...] = get_args(Priority)
"""In the order in which they are served."""

Place = tuple[Priority, Hashable]
"""Class and lane: where a tenant's requests wait in the order of their deadlines."""


class QueuedRequest:
    """One waiting request. ``order``: earliest deadline first, then arrival."""

    __slots__ = ("charge", "key", "order", "place", "since_ms", "tenant")

    def __init__(
        self, key: str, tenant: str, place: Place, order: tuple[int, int], charge: float, since_ms: int
    ) -> None:
        self.key = key
        self.tenant = tenant
        self.place = place
        self.order = order
        self.charge = charge
        self.since_ms = since_ms

    @property
    def lane(self) -> Hashable:
        """As it was pushed."""
        return self.place[1]


class Share:
    """A tenant's place in the queue."""

    __slots__ = ("counter", "heaps", "running", "waiting", "weight")

    def __init__(self, weight: float) -> None:
        self.counter = 0.0
        self.weight = weight
        self.waiting = 0
        self.running = 0
        self.heaps: dict[Place, list[tuple[tuple[int, int], str]]] = {}

    @property
    def active(self) -> bool:
        """Whether the tenant waits or runs."""
        return self.waiting > 0 or self.running > 0


class FairQueue:
    """Waiting requests of all tenants. All operations cost O(log n)."""

    def __init__(self, *, ageing_ms: int) -> None:
        self.shares: dict[str, Share] = {}
        self._entries: dict[str, QueuedRequest] = {}
        self._order: dict[Place, list[tuple[float, str]]] = {}
        """Tenants that wait there, by counter; some have gone, or have another counter by now."""
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

    def push(
        self,
        key: str,
        tenant: str,
        priority: Priority,
        deadline_at_ms: int,
        charge: float,
        now_ms: int,
        lane: Hashable = None,
    ) -> None:
        """Add a waiting request that will be charged ``charge`` tokens at dispatch."""
        share = self._activate(tenant)
        self._wait(share, 1)
        self._number += 1
        entry = QueuedRequest(key, tenant, (priority, lane), (deadline_at_ms, self._number), charge, now_ms)
        self._entries[key] = entry
        self._line_up(entry, share)
        if priority == "batch":
            self._ageing.append((now_ms, key))

    def move(self, key: str, lane: Hashable) -> None:
        """The request waits in another lane from now on, where it stood in line."""
        entry = self._entries[key]
        entry.place = (entry.place[0], lane)
        self._line_up(entry, self.shares[entry.tenant])

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

        Ends when nothing waits, or what waits is in lanes of which SCAN_PER_LANE entries were not taken. Gives the
        number taken.
        """
        self._promote(now_ms)
        return sum(self._scan(priority, take) for priority in PRIORITIES)

    def _scan(self, priority: Priority, take: Callable[[QueuedRequest], bool]) -> int:
        taken = 0
        passed = {place: 0 for place in self._order if place[0] == priority}
        aside: dict[Place, set[str]] = {place: set() for place in passed}
        while passed:
            first = min(filter(None, (self._first(place, aside[place]) for place in list(passed))), default=None)
            if first is None:
                break
            _, _, tenant, place = first
            share = self.shares[tenant]
            for entry in self._heads(share, place):
                if take(entry):
                    taken += 1
                    break
                passed[place] += 1
            else:
                aside[place].add(tenant)
            if passed[place] >= SCAN_PER_LANE:
                del passed[place]
        for place, tenants in aside.items():
            for tenant in tenants:
                self._offer(place, tenant, self.shares[tenant])
        return taken

    def _first(self, place: Place, aside: set[str]) -> "tuple[float, tuple[int, int], str, Place] | None":
        """Who goes next in a lane: its counter, its request's order, the tenant; None when nobody does."""
        order = self._order.get(place, [])
        while order:
            counter, tenant = order[0]
            share = self.shares[tenant]
            if share.counter == counter and tenant not in aside and (head := self._head(share, place)) is not None:
                return counter, head, tenant, place
            heapq.heappop(order)  # Offered again since, or a second time, or it has gone.
        self._order.pop(place, None)
        return None

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
        for place in share.heaps:
            self._offer(place, tenant, share)

    def _line_up(self, entry: QueuedRequest, share: Share) -> None:
        heapq.heappush(share.heaps.setdefault(entry.place, []), (entry.order, entry.key))
        self._offer(entry.place, entry.tenant, share)

    def _offer(self, place: Place, tenant: str, share: Share) -> None:
        order = self._order.setdefault(place, [])
        heapq.heappush(order, (share.counter, tenant))
        if len(order) > 64 + 4 * len(self.shares):
            order[:] = [(s.counter, t) for t, s in self.shares.items() if place in s.heaps]
            heapq.heapify(order)

    def _head(self, share: Share, place: Place) -> tuple[int, int] | None:
        """Order of the tenant's first entry there; None when it has none."""
        heap = share.heaps.get(place, [])
        while heap:
            order, key = heap[0]
            entry = self._entries.get(key)
            if entry is not None and entry.order == order and entry.place == place:
                return order
            heapq.heappop(heap)
        share.heaps.pop(place, None)
        return None

    def _heads(self, share: Share, place: Place) -> Iterator[QueuedRequest]:
        """The tenant's first SCAN_PER_TENANT entries there; the caller may serve the one just given."""
        aside: list[tuple[tuple[int, int], str]] = []
        try:
            while len(aside) < SCAN_PER_TENANT and self._head(share, place) is not None:
                aside.append(heapq.heappop(share.heaps[place]))
                yield self._entries[aside[-1][1]]
        finally:
            for item in aside:
                if item[1] in self._entries:
                    heapq.heappush(share.heaps.setdefault(place, []), item)

    def _promote(self, now_ms: int) -> None:
        """Batch requests that waited for the ageing time go with the interactive ones from now on."""
        while self._ageing and self._ageing[0][0] + self._ageing_ms <= now_ms:
            _, key = self._ageing.popleft()
            entry = self._entries.get(key)
            if entry is not None and entry.place[0] == "batch":
                entry.place = ("interactive", entry.place[1])
                self._line_up(entry, self.shares[entry.tenant])
