"""What is done for a request before any limit of the scheduler's: bounded by tenant, and none waits for another."""

import asyncio
import threading

import pytest

from contracts.errors import HeadraceError
from gateway.intake.reading_budget import BYTES_PER_S, REQUEST_BYTES, ReadingBudget
from gateway.prompt.threads import Lane
from tests.support.polling import until

MIB = 1 << 20


def refused(budget: ReadingBudget, tenant: str, size: int, now: float) -> HeadraceError:
    with pytest.raises(HeadraceError) as caught:
        budget.take(tenant, size, now)
    assert caught.value.status == 429
    return caught.value


def test_a_flood_of_counts_is_refused_and_told_when_to_come_back() -> None:
    budget = ReadingBudget(32 * MIB)
    for _ in range(6):
        budget.take("flood", 5 * MIB, 100.0)
    error = refused(budget, "flood", 5 * MIB, 100.0)
    assert error.retry_after_s == 3 * MIB // BYTES_PER_S
    refused(budget, "flood", 5 * MIB, 100.0 + error.retry_after_s - 0.1)
    budget.take("flood", 5 * MIB, 100.0 + error.retry_after_s)
    budget.take("other", 5 * MIB, 100.0)


def test_a_flood_of_small_requests_is_one_too() -> None:
    budget = ReadingBudget(MIB)
    for _ in range(MIB // REQUEST_BYTES):
        budget.take("flood", 1, 0.0)
    assert refused(budget, "flood", 1, 0.0).retry_after_s == 1


def test_an_agent_that_counts_its_context_all_the_time_is_not_refused() -> None:
    budget = ReadingBudget(32 * MIB)
    for turn in range(10_000):
        budget.take("agent", 400_000, turn * 0.5)


def test_what_is_run_costs_nothing() -> None:
    budget = ReadingBudget(32 * MIB)
    for _ in range(1000):
        budget.take("t", 10 * MIB, 0.0)
        budget.give_back("t", 10 * MIB, 0.0)
    budget.take("t", 32 * MIB, 0.0)
    budget.give_back("t", 32 * MIB, 5.0)
    refused_now = ReadingBudget(MIB)
    refused_now.take("t", MIB, 0.0)
    refused_now.give_back("t", MIB, 100.0)  # Never more than the burst.
    refused_now.take("t", MIB, 100.0)
    refused(refused_now, "t", MIB, 100.0)


def test_a_body_larger_than_all_there_is_waits_for_a_full_bucket() -> None:
    budget = ReadingBudget(MIB)
    budget.take("t", 40 * MIB, 0.0)
    assert refused(budget, "t", 40 * MIB, 0.0).retry_after_s == 1


async def test_a_tenant_that_asks_for_much_waits_behind_itself() -> None:
    lane = Lane("test", threads=2, share=1)
    go_on, begun = threading.Event(), []

    def work(name: str) -> str:
        begun.append(name)
        assert go_on.wait(60)
        return name

    flood = [asyncio.create_task(lane.run("flood", lambda: work("flood"))) for _ in range(20)]
    await asyncio.sleep(0)
    other = asyncio.create_task(lane.run("other", lambda: work("other")))
    await until(lambda: len(begun) == 2)
    assert sorted(begun) == ["flood", "other"]
    go_on.set()
    assert await other == "other"
    assert await asyncio.gather(*flood) == ["flood"] * 20
    assert not lane._tenants


async def test_who_leaves_a_lane_or_fails_in_it_gives_its_place_back() -> None:
    lane = Lane("test", threads=1, share=1)
    go_on = threading.Event()
    first = asyncio.create_task(lane.run("t", lambda: go_on.wait(60)))
    waiting = asyncio.create_task(lane.run("t", lambda: True))
    await asyncio.sleep(0)
    waiting.cancel()
    go_on.set()
    assert await first
    with pytest.raises(ZeroDivisionError):
        await lane.run("t", lambda: 1 // 0)
    assert await lane.run("t", lambda: 1) == 1
    assert not lane._tenants
