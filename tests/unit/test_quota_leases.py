"""A tenant's limits over several shards: in thousands of random histories nobody spends more than they are.

Shards ask by compare-and-set, late or without ever hearing what came of it; they freeze, die and are followed by owners
that know only what is open; their clocks differ a little. An account that sees everything at once says what was spent.
"""

import random

import pytest

from contracts.errors import HeadraceError
from contracts.messages.base import Codec
from contracts.messages.records import SharedQuota, TenantLimits
from contracts.tokens import Cost
from scheduler.core.quota_leases import LEASE_MS, LEASE_SHARE, RENEW_MS, Ask, LeaseAwaited, LeasedQuota, exchange
from scheduler.core.quotas import TokenBucket

MONTH = "2026-11"
_record = Codec[SharedQuota](SharedQuota)


class Register:
    """The record on the bus."""

    def __init__(self) -> None:
        self.revision = 0
        self.value: bytes | None = None

    def read(self) -> tuple[int, SharedQuota | None]:
        return self.revision, None if self.value is None else _record.decode(self.value)

    def write(self, shared: SharedQuota, revision: int) -> bool:
        if revision != self.revision:
            return False
        self.revision, self.value = revision + 1, _record.encode(shared)
        return True


class Account:
    """What all shards together have really spent, in one bucket for each limit that begins full."""

    def __init__(self, limits: TenantLimits, budget: int | None) -> None:
        self.buckets = [TokenBucket(size, 0) for size in (limits.rpm, limits.input_tpm, limits.output_tpm)]
        self.budget = budget
        self.month_spent = 0
        self.open = 0
        self.admitted = 0

    def change(self, sign: int, requests: int, cost: Cost, total: int, now_ms: int) -> None:
        amounts = requests, cost.input_tokens, cost.output_tokens
        for bucket, amount in zip(self.buckets, amounts, strict=True):
            bucket.take(sign * amount, now_ms)
        self.month_spent += sign * total

    def overshoot(self, now_ms: int) -> list[float]:
        """Of each limit, as a part of it."""
        return [-bucket.level(now_ms) / bucket.size for bucket in self.buckets if bucket.size]


class Shard:
    """One shard's owner: its quota, and its requests."""

    def __init__(self, world: "World", name: str) -> None:
        self.world, self.name = world, name
        self.running: list[Cost] = []
        self.waiting: list[Cost] = []
        self.ahead_ms = world.fates.randrange(-200, 200)
        self.admitted = self.refused = 0
        self.begin()

    def begin(self) -> None:
        """Another owner, which finds what runs."""
        world = self.world
        self.quota = LeasedQuota(world.limits, self.now, shards=world.shards, budget=world.budget)
        self.asking: tuple[int, Ask, int, SharedQuota | None] | None = None
        self.waiting.clear()
        for cost in self.running:
            self.quota.adopt(cost, self.now - 120_000, self.now)

    @property
    def now(self) -> int:
        return self.world.now + self.ahead_ms

    def submit(self, cost: Cost) -> None:
        try:
            self.quota.check(cost, self.now, 100)
        except LeaseAwaited:
            self.waiting.append(cost)
            return
        except HeadraceError:
            self.refused += 1
            return
        self.quota.reserve(cost, self.now)
        self.running.append(cost)
        self.admitted += 1
        self.world.account.change(1, 1, cost, cost.total, self.world.now)
        self.world.account.open += 1
        self.world.look()

    def end(self, cost: Cost, used: Cost) -> None:
        self.running.remove(cost)
        unused = Cost(cost.input_tokens - used.input_tokens, cost.output_tokens - used.output_tokens)
        self.quota.settle(cost, used, self.now, billed_tokens=used.total)
        self.world.account.change(-1, 0, unused, unused.total, self.world.now)
        self.world.account.open -= 1

    def turn(self) -> None:
        """What its loop does: begin an exchange when it is time."""
        if self.asking is None and not self.quota.exchanging and (self.waiting or self.quota.is_due(self.now)):
            ask = self.quota.ask(self.waiting, self.now, month=MONTH, month_spent=0)
            self.asking = (self.world.now + self.world.fates.choice((0, 1, 5, 40)), ask, *self.world.register.read())
        elif self.asking is not None and self.asking[0] <= self.world.now:
            self.write()

    def write(self) -> None:
        assert self.asking is not None
        _, ask, revision, shared = self.asking
        after, grant = exchange(shared, self.name, ask, self.now)
        lost = self.world.fates.random() < self.world.losses
        if lost and self.world.fates.random() < 0.5:
            stored = True  # It never reached the bus.
        else:
            stored = self.world.register.write(after, revision)
        if not stored:
            self.asking = (self.world.now, ask, *self.world.register.read())
            return
        self.asking = None
        self.quota.exchanged(None if lost else grant, self.now)
        waiting, self.waiting = self.waiting, []
        if not lost:
            for cost in waiting:
                self.submit(cost)


class World:
    def __init__(self, seed: int, *, limits: TenantLimits, budget: int | None, shards: int, losses: float) -> None:
        self.fates = random.Random(seed)
        self.now = 1_000_000
        self.limits, self.budget, self.shards, self.losses = limits, budget, shards, losses
        self.register = Register()
        self.account = Account(limits, budget)
        self.permits_lost = 0
        self.worst = 0.0
        self.owners = [Shard(self, f"m#{number}") for number in range(shards)]

    def look(self) -> None:
        """The rule: no limit is passed by more than one lease; the budget by one request at most."""
        over = max(self.account.overshoot(self.now), default=0.0)
        self.worst = max(self.worst, over)
        assert over <= LEASE_SHARE, (over, self.now)
        if self.limits.concurrency is not None:
            assert self.account.open <= self.limits.concurrency + self.permits_lost
        if self.budget is not None:
            assert self.account.month_spent <= self.budget + 1_600

    def die(self, shard: Shard) -> None:
        shard.begin()

    def pass_time(self, ms: int) -> None:
        self.now += ms
        for shard in self.fates.sample(self.owners, len(self.owners)):
            shard.turn()


def cost(fates: random.Random) -> Cost:
    return Cost(fates.choice((10, 100, 600)), fates.choice((1, 50, 1_000)))


def _demand(world: World, steps: int, deaths: float) -> None:
    fates = world.fates
    for _ in range(steps):
        world.pass_time(fates.choice((0, 1, 10, 100, 1_000)))
        shard = fates.choice(world.owners)
        for _ in range(fates.choice((0, 1, 1, 8))):
            shard.submit(cost(fates))
        for ending in world.owners:
            if ending.running and fates.random() < 0.5:
                ended = fates.choice(ending.running)
                used = Cost(ended.input_tokens, fates.randrange(ended.output_tokens + 1))
                ending.end(ended, used)
        if fates.random() < deaths:
            world.die(fates.choice(world.owners))
        if fates.random() < 0.002:
            world.now += fates.choice((LEASE_MS // 2, 2 * LEASE_MS, 70_000))
            world.permits_lost = (world.shards - 1) * (world.limits.concurrency or 0)  # What was open is open.


CASES = {
    "wide": (TenantLimits(rpm=600, input_tpm=60_000, output_tpm=120_000, concurrency=40), None),
    "narrow": (TenantLimits(rpm=5, input_tpm=1_000, output_tpm=2_000, concurrency=2), 100_000),
    "one": (TenantLimits(concurrency=1), None),
    "budget": (TenantLimits(), 20_000),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("shards", [2, 5])
def test_no_history_passes_a_limit_by_more_than_a_lease(case: str, shards: int) -> None:
    limits, budget = CASES[case]
    admitted = 0
    for seed in range(150):
        losses, deaths = random.Random(seed).choice(((0.0, 0.0), (0.1, 0.0), (0.0, 0.01), (0.2, 0.02)))
        world = World(seed, limits=limits, budget=budget, shards=shards, losses=losses)
        _demand(world, 50, deaths)
        admitted += sum(shard.admitted for shard in world.owners)
    assert admitted > 300


def test_a_shard_alone_gets_all_of_the_limits_and_two_get_no_more() -> None:
    limits = TenantLimits(output_tpm=60_000)
    given = []
    for busy in (1, 2):
        world = World(1, limits=limits, budget=None, shards=2, losses=0.0)
        for _ in range(120):
            for _ in range(50):
                world.pass_time(10)
                for shard in world.owners[:busy]:
                    shard.submit(Cost(1, 100))
            for shard in world.owners:
                for running in list(shard.running):
                    shard.end(running, running)
        given.append([shard.admitted for shard in world.owners])
    assert 1_100 <= sum(given[0]) <= 1_600, "a full bucket and a minute's refill"
    assert sum(given[1]) == pytest.approx(sum(given[0]), rel=0.1)
    assert min(given[1]) > 0.25 * sum(given[1]), "each has a share"


def test_what_nobody_uses_comes_back_and_the_record_is_empty() -> None:
    world = World(3, limits=TenantLimits(rpm=100, output_tpm=10_000, concurrency=4), budget=None, shards=2, losses=0.0)
    shard = world.owners[0]
    shard.submit(Cost(5, 500))
    for _ in range(20):
        world.pass_time(10)
    assert shard.admitted == 1
    shard.end(shard.running[0], Cost(5, 1))
    for _ in range(100):
        world.pass_time(RENEW_MS // 20)
    _, shared = world.register.read()
    assert shared is not None and not shared.leases
    assert shared.taken.output_tokens <= 1.0


def test_one_permit_goes_to_whoever_waits_for_it() -> None:
    """A flood on one shard does not keep the only permit from the other."""
    world = World(4, limits=TenantLimits(concurrency=1), budget=None, shards=2, losses=0.0)
    flood, other = world.owners
    for _ in range(3_000):
        world.pass_time(10)
        flood.submit(Cost(1, 1))
        other.submit(Cost(1, 1))
        for shard in world.owners:
            for running in list(shard.running):
                shard.end(running, running)
    assert other.admitted > 30 and flood.admitted > 30


def test_the_next_owner_goes_on_with_what_its_shard_had_open() -> None:
    world = World(5, limits=TenantLimits(concurrency=2), budget=None, shards=2, losses=0.0)
    first, second = world.owners
    for _ in range(2):
        first.submit(Cost(1, 1))
    for _ in range(10):
        world.pass_time(10)
    assert len(first.running) == 2
    world.die(first)
    for _ in range(60):
        world.pass_time(1_000)
        second.submit(Cost(1, 1))
    assert second.admitted == 0 and second.refused > 0, "the two run on, whoever owns them"
    while first.running:
        first.end(first.running[0], Cost(1, 1))
    for _ in range(10):
        world.pass_time(1_000)
        second.submit(Cost(1, 1))
    assert second.admitted > 0
