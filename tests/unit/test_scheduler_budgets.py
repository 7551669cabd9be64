"""Monthly budgets: what a month has cost is known without a gap, whatever becomes of the ledger and of owners."""

import random

import pytest

from contracts.messages.control import CancelRequest
from contracts.messages.records import Seen, Spending, TenantRecord
from scheduler.core import events
from scheduler.core.budgets import ENTRIES_MAX, TOLD_ENTRIES_MAX, Account
from tests.support.scheduler_world import World

MONTH = "1970-01"
"""Of the world's clock."""
BUDGET = 1000


class Ledger:
    """Counts the ends of a world's ATTEMPTS in their order, as far as it has come."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.inserted = self.acknowledged = 0

    def insert(self) -> None:
        self.inserted = len(self._world.attempts)

    def publish(self) -> None:
        """The total may be ahead of the sequence number that goes with it, and never behind."""
        tokens = billed(self._world, self.inserted)
        self._world.budgets["t2"] = events.BudgetSeen("t2", MONTH, tokens, self.acknowledged)
        self._world.feed(self._world.budgets["t2"])

    def book_all(self) -> None:
        self.insert()
        self.acknowledged = self.inserted
        self.publish()


def billed(world: World, up_to: int | None = None) -> int:
    ends = list(world.attempts.values())[:up_to]
    return sum(end.prompt_tokens + end.completion_tokens for end in ends if end.tenant == "t2" and end.billable)


def with_budget(budget: int = BUDGET) -> World:
    """A tenant ``t2`` without any limit but its budget, and a worker."""
    world = World()
    world.tenants["t2"] = TenantRecord(name="t2", monthly_budget_tokens=budget)
    world.feed(events.TenantChanged("t2", world.tenants["t2"]))
    world.ready_worker(slots=8, kv_tokens=100_000)
    return world


def run(world: World, **fields: object) -> bool:
    """One request of 200 tokens, to its end; whether it was admitted."""
    request_id = world.submit(tenant="t2", prompt_tokens=190, max_output_tokens=10, **fields)
    if not world.answers[request_id].admitted:
        assert world.answers[request_id].code == "insufficient_quota"
        return False
    world.run_pending()
    [worker] = world.workers
    world.pull(worker)
    world.end(worker, worker.running.pop((request_id, 1)), "completed")
    world.run_pending()
    return True


def spent(world: World) -> int:
    return world.core.admission.budgets.counted("t2", MONTH)[0]


def test_d02_a_budget_of_0_admits_nothing_from_the_first_request_on() -> None:
    world = with_budget(0)
    answer = world.answers[world.submit(tenant="t2", prompt_tokens=1, max_output_tokens=1)]
    assert (answer.code, answer.admitted) == ("insufficient_quota", False)
    assert "budget is 0" in answer.message and answer.retry_after_s
    world.feed(events.TenantChanged("t2", TenantRecord(name="t2")))
    assert world.answers[world.submit(tenant="t2", prompt_tokens=1)].admitted


def test_d03_a_burst_passes_a_budget_by_one_request_at_most() -> None:
    world = with_budget()
    asked = [world.submit(tenant="t2", prompt_tokens=10, max_output_tokens=200) for _ in range(50)]
    admitted = [request_id for request_id in asked if world.answers[request_id].admitted]
    assert len(admitted) == 5, "1,050 tokens at most: one request over 1,000"
    refused = world.answers[asked[-1]]
    assert refused.code == "rate_limit_exceeded" and "open requests may use 1050" in refused.message
    assert refused.retry_after_s and refused.retry_after_s <= 60, "there may be room when they have ended"


def test_d03_without_the_ledger_the_owner_counts_what_it_sees() -> None:
    world = with_budget()
    assert [run(world) for _ in range(20)] == [True] * 6 + [False] * 14
    assert billed(world) == spent(world) == 6 * 190


def test_d03_with_the_ledger_away_a_new_owner_goes_on_from_what_was_told() -> None:
    world = with_budget()
    Ledger(world).book_all()
    for _ in range(3):
        run(world)
    world.pass_time(500)
    world.pass_time(500)
    world.attempts.clear()  # Too long ago to be read again.
    world.takeover()
    assert spent(world) == 3 * 190
    assert [run(world) for _ in range(3)] == [True] * 3
    world.takeover()
    assert not run(world) and spent(world) == 6 * 190


def test_what_the_ledger_counts_early_is_counted_once() -> None:
    world, ledger = with_budget(), None
    ledger = Ledger(world)
    run(world)
    ledger.book_all()
    run(world)
    ledger.insert()
    ledger.publish()
    assert spent(world) == 380, "the total holds the second end; its number does not cover it"
    run(world)
    assert spent(world) == 570
    world.takeover()
    assert spent(world) in (570, 760), "a new owner cannot tell, until the ledger's next word"
    ledger.book_all()
    assert spent(world) == 570


def test_a_new_month_begins_with_nothing_and_late_words_of_the_old_one_change_nothing() -> None:
    account = World().core.admission.budgets
    account.ledger_said("t", "2027-01", 500, 7)
    assert account.counted("t", "2027-01") == (500, 0)
    assert account.counted("t", "2027-02") == (0, 0)
    account.ledger_said("t", "2027-02", 20, 9)
    account.ledger_said("t", "2027-01", 600, 10)
    account.owner_said("other", "t", Spending(month="2027-01", later=[Seen(seq=11, tokens=5)], seq=11))
    assert account.counted("t", "2027-02") == (20, 0)


def test_owners_of_other_models_count_too_and_no_end_twice() -> None:
    account = Account(MONTH)
    account.own.add(5, 100)
    told = Spending(month=MONTH, later=[Seen(seq=3, tokens=50), Seen(seq=7, tokens=60)], seq=7, reserved_tokens=30)
    account.take_other("b", told)
    assert (account.spent, account.reserved_elsewhere) == (210, 30)
    account.take_other("b", told)
    assert account.spent == 210
    account.cover(150, 5)  # The ends 3 and 5.
    assert account.spent == 210
    account.take_other("b", Spending(month=MONTH, later=[Seen(seq=7, tokens=60)], seq=7))
    assert (account.spent, account.reserved_elsewhere) == (210, 0)
    account.cover(210, 7)
    account.take_other("b", None)
    assert account.spent == 210


def test_an_owner_tells_only_what_lies_before_a_gap() -> None:
    account = Account(MONTH)
    for seq in (1, 2, 9):
        account.own.add(seq, 10)
    assert [seen.seq for seen in account.own.told(4)] == [1, 2]


def test_what_is_merged_stays_counted_and_told_in_bounds() -> None:
    account, total = Account(MONTH), 0
    for seq in range(1, 4 * ENTRIES_MAX):
        account.own.add(seq, seq)
        account.own.add(max(1, seq - 3), 1)  # Told a second time.
        total += seq
    assert account.spent == total
    told = account.own.told(4 * ENTRIES_MAX)
    assert len(told) <= TOLD_ENTRIES_MAX and sum(seen.tokens for seen in told) == total
    account.cover(sum(range(1, 21)), 20)
    assert account.spent == total, "the ledger has come into the middle of what was merged"
    account.cover(total, 4 * ENTRIES_MAX)
    assert account.spent == total


@pytest.mark.parametrize("seed", range(30))
def test_d03_whatever_happens_a_budget_is_passed_by_one_request_at_most(seed: int) -> None:
    """Cancels, deaths, takeovers, a ledger that stops, lags or counts early: in any order."""
    rng = random.Random(seed)
    world = World()
    world.tenants["t2"] = TenantRecord(name="t2", monthly_budget_tokens=BUDGET)
    world.feed(events.TenantChanged("t2", world.tenants["t2"]))
    ledger, largest = Ledger(world), 0
    for _ in range(250):
        drawn = rng.randrange(100)
        if drawn < 45:
            tokens = rng.randrange(1, 150)
            world.submit(tenant="t2", prompt_tokens=tokens, max_output_tokens=rng.choice([3, 100]), stream=drawn < 20)
            largest = max(largest, tokens + 100)
        elif drawn < 50 and world.asked:
            cancel = CancelRequest(request_id=rng.choice(sorted(world.asked)))
            world.feed(events.CancelAsked("t2", cancel, None))
        elif drawn < 55 and sum(worker.alive for worker in world.workers) < 3:
            world.start_worker(rng.randrange(1, 5))
        elif drawn < 57 and world.workers:
            rng.choice(world.workers).alive = False
        elif drawn < 60:
            world.takeover()
        elif drawn < 63:
            ledger.insert()
        elif drawn < 66:
            ledger.acknowledged = ledger.inserted
        elif drawn < 70:
            ledger.publish()
        else:
            world.pass_time(rng.choice([1, 20, 100, 500]), [rng.randrange(100) for _ in range(6)])
        assert billed(world) <= BUDGET + largest
        assert spent(world) >= sum(
            end.prompt_tokens + end.completion_tokens
            for end in world.attempts.values()
            if end.tenant == "t2" and end.billable and end not in world.untold
        ), "nothing that the owner was told is forgotten"
    world.settle()
    ledger.book_all()
    assert spent(world) == billed(world), "exact once the ledger has caught up"
