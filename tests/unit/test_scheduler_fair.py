"""The fair queue: served tokens by weight, ageing, deadlines, and no banked idleness."""

import itertools
from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler.core.fair_queue import FairQueue, QueuedRequest


def serve_one(queue: FairQueue, now_ms: int = 0) -> QueuedRequest | None:
    """The next request in fair order, served to its end with its whole charge used."""
    found: list[QueuedRequest] = []

    def take(entry: QueuedRequest) -> bool:
        if found:
            return False
        queue.serve(entry.key)
        found.append(entry)
        return True

    queue.scan(now_ms, take)
    if not found:
        return None
    queue.settle(found[0].tenant, found[0].charge, found[0].charge)
    return found[0]


def fill(queue: FairQueue, tenant: str, count: int, charge: float, start: int = 0) -> None:
    for number in range(start, start + count):
        queue.push(f"{tenant}{number}", tenant, "interactive", 60_000, charge, 0)


@pytest.mark.parametrize("weights", [(1.0, 1.0), (3.0, 1.0)])
def test_served_tokens_by_weight_differ_by_at_most_two_of_the_largest(weights: tuple[float, float]) -> None:
    queue = FairQueue(ageing_ms=30_000)
    queue.set_weight("a", weights[0])
    queue.set_weight("b", weights[1])
    fill(queue, "a", 40, 4200)
    fill(queue, "b", 400, 100)
    served = {"a": 0.0, "b": 0.0}
    while queue.shares["a"].waiting and queue.shares["b"].waiting:
        entry = serve_one(queue)
        assert entry is not None
        served[entry.tenant] += entry.charge
        assert abs(served["a"] / weights[0] - served["b"] / weights[1]) <= 2 * 4200
    assert served["b"] > 0 and served["a"] > 0


def test_idleness_banks_no_credit() -> None:
    queue = FairQueue(ageing_ms=30_000)
    fill(queue, "b", 1, 100)
    serve_one(queue)
    fill(queue, "a", 400, 100)
    for _ in range(200):
        serve_one(queue)
    fill(queue, "b", 400, 100, start=10)
    share = [entry.tenant for _ in range(100) if (entry := serve_one(queue))]
    assert 45 <= share.count("a") <= 55


def test_a_tenant_that_returns_when_nobody_is_active_starts_at_the_last_leaver() -> None:
    queue = FairQueue(ageing_ms=30_000)
    fill(queue, "a", 10, 100)
    while serve_one(queue):
        pass
    fill(queue, "new", 1, 1)
    assert queue.shares["new"].counter == queue.shares["a"].counter == 1000


def test_failed_work_is_given_back() -> None:
    queue = FairQueue(ageing_ms=30_000)
    fill(queue, "a", 1, 500)
    queue.scan(0, lambda entry: bool(queue.serve(entry.key)))
    queue.settle("a", 500, 0)
    assert queue.shares["a"].counter == 0


def test_interactive_goes_before_batch_and_batch_ages() -> None:
    queue = FairQueue(ageing_ms=1_000)
    queue.push("old", "b", "batch", 90_000, 10, 0)
    queue.push("new", "a", "interactive", 60_000, 10, 500)
    first = serve_one(queue, 500)
    assert first is not None and first.key == "new"
    fill(queue, "a", 50, 10)
    keys = [entry.key for _ in range(3) if (entry := serve_one(queue, 1_500))]
    assert "old" in keys


def test_within_a_tenant_the_earliest_deadline_goes_first_then_arrival() -> None:
    queue = FairQueue(ageing_ms=30_000)
    for key, deadline in (("late", 900), ("soon", 100), ("first", 500), ("second", 500)):
        queue.push(key, "a", "interactive", deadline, 1, 0)
    order = [entry.key for _ in range(4) if (entry := serve_one(queue))]
    assert order == ["soon", "first", "second", "late"]


def test_what_fits_nobody_does_not_stop_the_others() -> None:
    queue = FairQueue(ageing_ms=30_000)
    fill(queue, "large", 1, 100)
    fill(queue, "small", 3, 1)

    def take(entry: QueuedRequest) -> bool:
        return entry.tenant == "small" and bool(queue.serve(entry.key))

    assert queue.scan(0, take) == 3
    assert len(queue) == 1 and serve_one(queue) is not None


NAMES = ["a", "b", "c", "d"]


class Round(NamedTuple):
    """What happens between two looks: a running request ends having used ``share`` of its charge; one is withdrawn."""

    ends: int
    share: float
    withdrawn: int | None


rounds = st.builds(
    Round, ends=st.integers(0, 3), share=st.sampled_from([0, 0.5, 1]), withdrawn=st.none() | st.integers(0, 11)
)


@settings(max_examples=200, deadline=None)
@given(
    weights=st.tuples(*[st.sampled_from([1.0, 2.0, 5.0])] * len(NAMES)),
    slots=st.integers(1, 4),
    charges=st.lists(st.integers(1, 1000), min_size=1, max_size=60),
    history=st.lists(rounds, max_size=150),
)
def test_counters_of_waiting_tenants_stay_within_the_stated_bound(
    weights: tuple[float, ...], slots: int, charges: list[int], history: list[Round]
) -> None:
    """Two largest charges by weight, plus one per slot, while every tenant has three requests waiting."""
    queue = FairQueue(ageing_ms=10**9)
    for name, weight in zip(NAMES, weights, strict=True):
        queue.set_weight(name, weight)
    bound = (2 + slots) * max(charges) / min(weights)
    running: list[QueuedRequest] = []
    charge = itertools.cycle(charges)
    number = itertools.count()

    def take(entry: QueuedRequest) -> bool:
        if len(running) == slots:
            return False
        queue.serve(entry.key)
        running.append(entry)
        return True

    for ends, share, withdrawn in history:
        for name in NAMES:
            while queue.shares[name].waiting < 3:
                key = next(number)
                queue.push(str(key), name, "interactive", key, next(charge), 0)
        queue.scan(0, take)
        if running:
            entry = running.pop(ends % len(running))
            queue.settle(entry.tenant, entry.charge, share * entry.charge)
        if withdrawn is not None:
            queue.remove(str(next(number) - withdrawn))
        counters = [queue.shares[name].counter for name in NAMES]
        assert max(counters) - min(counters) <= bound
        assert sum(share.waiting for share in queue.shares.values()) == len(queue)
