"""C29 on the scheduler's whole core: tenants share one slot by the tokens that they use, not by their requests."""

import msgspec
import pytest

from contracts.messages.base import Outcome
from contracts.messages.control import CancelRequest
from contracts.messages.records import TenantLimits, TenantRecord
from scheduler.core import events
from tests.support.scheduler_world import FakeWorker, World

LARGE = {"tenant": "t1", "prompt_tokens": 4000, "max_output_tokens": 200}
SMALL = {"tenant": "t2", "prompt_tokens": 50, "max_output_tokens": 50}
MAXIMAL = 4200
DEADLINE_MS = 24 * 3_600_000


class OneSlot:
    """A pool of one slot; each call of ``serve`` runs the next request, a token in a millisecond."""

    def __init__(self, **weights: float) -> None:
        self.made: World = World()
        for tenant in ("t1", "t2"):
            record = TenantRecord(name=tenant, limits=TenantLimits(), weight=weights.get(tenant, 1.0))
            self.made.feed(events.TenantChanged(tenant, record))
        self.worker: FakeWorker = self.made.ready_worker()
        self.served = {"t1": 0.0, "t2": 0.0}
        """Used tokens by weight."""
        self.weights = weights
        self.ends: dict[str, tuple[Outcome, float]] = {}
        """By tenant: how its requests end, and the share of their output that they have given by then."""

    def submit(self, count: int, request: dict[str, object], keys: int = 1) -> None:
        for number in range(count):
            request_id = self.made.submit(**request, key_id=f"key{number % keys}", deadline_ms=DEADLINE_MS)
            assert self.made.answers[request_id].admitted, self.made.answers[request_id]

    def waiting(self, tenant: str) -> int:
        return self.made.core.queue.shares[tenant].waiting

    def serve(self) -> str:
        """The tenant that was served."""
        self.made.run_pending()
        self.made.pull(self.worker)
        [(key, progress)] = self.worker.running.items()
        request = self.made.core.requests[key[0]].envelope
        outcome, share = self.ends.get(request.tenant, ("completed", 1.0))
        progress = msgspec.structs.replace(progress, completion_tokens=int(share * request.max_output_tokens))
        self.worker.running[key] = progress
        self.made.now += progress.prompt_tokens + progress.completion_tokens
        if outcome == "cancelled":
            self.made.feed(events.CancelAsked(request.tenant, CancelRequest(request_id=key[0]), None))
        else:
            del self.worker.running[key]
            self.made.end(self.worker, progress, outcome)
        self.made.run_pending()
        used = 0 if outcome == "failed" else progress.prompt_tokens + progress.completion_tokens
        self.served[request.tenant] += used / self.weights.get(request.tenant, 1.0)
        return request.tenant

    def apart(self) -> float:
        return abs(self.served["t1"] - self.served["t2"])


@pytest.mark.parametrize("weight", [1.0, 3.0])
def test_c29_large_and_small_requests_share_by_tokens(weight: float) -> None:
    pool = OneSlot(t1=weight)
    pool.submit(40, LARGE)
    pool.submit(400, SMALL)
    turns = {"t1": 0, "t2": 0}
    while pool.waiting("t1") and pool.waiting("t2"):
        turns[pool.serve()] += 1
        assert pool.apart() <= 2 * MAXIMAL
    assert turns["t2"] > 10 * turns["t1"] > 0


def test_c29_a_burst_after_idleness_takes_half() -> None:
    pool = OneSlot()
    pool.submit(1, SMALL)
    pool.submit(3, LARGE)
    until = pool.made.now + 600_000
    while pool.made.now < until:
        pool.serve()
        pool.submit(1, LARGE)
    pool.served = {"t1": -MAXIMAL, "t2": 0.0}  # What runs at this moment is of the time before.
    pool.submit(400, SMALL)
    while pool.waiting("t2"):
        if pool.serve() == "t1":
            pool.submit(1, LARGE)
        assert pool.apart() <= 2 * MAXIMAL
    assert pool.served["t1"] > 30_000


def test_c29_more_keys_give_no_more() -> None:
    def order(keys: int) -> list[str]:
        pool = OneSlot()
        pool.submit(100, SMALL | {"tenant": "t1"}, keys)
        pool.submit(100, SMALL)
        return [pool.serve() for _ in range(200)]

    assert order(50) == order(1)
    assert abs(order(1)[:100].count("t1") - 50) <= 2


@pytest.mark.parametrize("end", [("completed", 0.0), ("cancelled", 0.1), ("failed", 0.5)])
def test_c29_what_is_not_used_is_given_back(end: tuple[Outcome, float]) -> None:
    """T1's requests reserve 2000 tokens and use few: it is served until both have used the same."""
    pool = OneSlot()
    pool.ends["t1"] = end
    pool.submit(100, {"tenant": "t1", "prompt_tokens": 100, "max_output_tokens": 1900})
    pool.submit(100, SMALL)
    turns = []
    while pool.waiting("t1") and pool.waiting("t2"):
        turns.append(pool.serve())
        assert pool.apart() <= 2 * 2000
    assert turns.count("t1") > 25
