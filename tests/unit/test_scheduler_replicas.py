"""How many workers a model should have: by tokens, up at once, down slowly, and nothing where nothing is known."""

import itertools
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from contracts.messages.control import WorkerHeartbeat
from contracts.messages.queues import Replicas
from contracts.messages.records import PoolLimits
from scheduler.core.placement import Placement
from scheduler.core.replicas import STEP_MS, WINDOW_MS, ReplicaPlanner, Speed
from scheduler.core.transitions import State
from scheduler.core.worker_pool import Worker

LIMITS = PoolLimits(replicas_min=1, replicas_spare=0)
HOLD_MS = LIMITS.replicas_hold_s * 1000


class Fleet:
    """Workers of 16 slots and 100,000 KV tokens, each of which does 4,000 prompt or 500 output tokens a second."""

    def __init__(self, workers: int, limits: PoolLimits = LIMITS) -> None:
        self.now_ms = 1_000_000
        self.planner = ReplicaPlanner("m", self.now_ms)
        self.limits = limits
        self.workers: list[Worker] = []
        self.waiting: list[Any] = []
        self.more(workers)

    def more(self, count: int, state: Any = "ready") -> None:
        for _ in range(count):
            beat = self._beat(f"w{len(self.workers)}", state=state)
            self.workers.append(Worker(beat, 0, Placement().join()))

    @staticmethod
    def _beat(name: str, **more: Any) -> WorkerHeartbeat:
        defaults: dict[str, Any] = {"slots": 16, "kv_tokens": 100_000, "model": "m", "version": "1", "state": "ready"}
        return WorkerHeartbeat(worker=name, **(defaults | more))

    def full(self, seconds: int, prompt_tps: int, output_tps: int) -> None:
        """The first worker's slots are full, and it does so much."""
        prompt = output = 0
        for _ in range(seconds):
            beat = self._beat("w0", running=16, prefill_tokens_total=prompt, decode_tokens_total=output)
            self.planner.heard(beat, self.now_ms)
            self.now_ms += 1_000
            prompt, output = prompt + prompt_tps, output + output_tps

    def learn(self) -> None:
        """What a worker can do: on prompts alone, and on answers alone."""
        for split in (0.25, 0.5, 0.75):
            self.full(5, int(4_000 * split), int(500 * (1 - split)))

    def offer(
        self, seconds: int, a_second: float, prompt: int, output: int, took_ms: int = 1_000
    ) -> Iterator[Replicas]:
        """So many requests of that size, each of which ends as it should."""
        due = 0.0
        for _ in range(seconds):
            due += a_second
            while due >= 1:
                due -= 1
                self.planner.came(prompt, self.now_ms)
                self.planner.ended(_used(prompt, output), 1, took_ms)
            self.now_ms += 1_000
            yield self.plan()

    def plan(self, **more: Any) -> Replicas:
        return self.planner.pass_time(self.now_ms, self.limits, self.workers, self.waiting, **more)

    def quiet(self, seconds: int) -> list[int]:
        planned = []
        for _ in range(seconds):
            self.now_ms += 1_000
            planned.append(self.plan().desired)
        return planned


def _used(prompt: int, output: int) -> Any:
    return SimpleNamespace(prompt_tokens=prompt, cached_tokens=0, completion_tokens=output)


def test_a_workers_speed_is_fitted_from_any_mixture() -> None:
    speed = Speed()
    for prompt, output in ((1_000, 10), (100, 400), (3_000, 100), (500, 500)) * 10:
        speed.fit(prompt, output, prompt / 4_000 + output / 500)
    assert 1 / speed.prompt_s == pytest.approx(4_000, rel=0.01)
    assert 1 / speed.output_s == pytest.approx(500, rel=0.01)


@pytest.mark.parametrize("mixture", [(1_000, 0), (0, 250), (800, 100), (1, 10_000)])
def test_one_mixture_alone_says_what_that_mixture_takes(mixture: tuple[int, int]) -> None:
    prompt, output = mixture
    speed = Speed()
    for _ in range(20):
        speed.fit(prompt, output, 2.0)
    assert speed.prompt_s >= 0 <= speed.output_s
    assert prompt * speed.prompt_s + output * speed.output_s == pytest.approx(2.0)


def test_a_worker_with_prompts_enough_shows_its_speed_though_slots_are_free() -> None:
    """It gets no more while prompts wait in its engine, so that its slots are never full."""
    fleet = Fleet(1)
    for computing in (False, True):
        for second in range(20):
            done = 4_000 * second
            beat = fleet._beat("w0", running=3, prefill_tokens_total=done, decode_tokens_total=done // 20)
            fleet.planner.heard(beat, fleet.now_ms, computing=computing)
            fleet.now_ms += 1_000
        assert fleet.planner.speed.known is computing
    assert 1 / fleet.planner.speed.prompt_s == pytest.approx(4_000)
    assert fleet.planner.speed.output_s == 0, "nothing is known of answers"


def test_one_long_prompt_weighs_as_many_short_ones() -> None:
    """The same tokens a second, in 100 requests or in one: the same throughput is needed."""
    needed = []
    for a_second, prompt in ((100.0, 80), (1.0, 8_000)):
        fleet = Fleet(1)
        fleet.learn()
        *_, last = fleet.offer(60, a_second, prompt, 1, took_ms=10)
        needed.append(last.needed["throughput"])
    assert needed[0] == pytest.approx(8_000 / 4_000 / 0.8, rel=0.15)  # and the one output token of each
    assert needed[1] == pytest.approx(8_000 / 4_000 / 0.8, rel=0.15)


def test_a_step_of_three_times_is_followed_at_once_and_by_doubling_at_most() -> None:
    fleet = Fleet(2)
    fleet.learn()
    for _ in fleet.offer(60, 4, 500, 50, took_ms=1_600):
        pass
    assert fleet.planner.plan.desired == 2
    seen = [plan.desired for plan in fleet.offer(60, 12, 500, 50, took_ms=1_600)]
    assert max(seen) == 4 == seen[-1]
    assert fleet.planner.plan.reason == "throughput"
    assert all(now <= 2 * before for before, now in itertools.pairwise(seen))


def test_more_than_twice_as_many_come_in_steps() -> None:
    fleet = Fleet(1)
    fleet.learn()
    plans = list(fleet.offer(90, 40, 500, 50))
    reached = [next(index for index, plan in enumerate(plans) if plan.desired >= count) for count in (2, 4, 8)]
    assert reached[1] - reached[0] >= STEP_MS / 1000
    assert reached[2] - reached[1] >= STEP_MS / 1000
    assert "stepping_up" in {plan.reason for plan in plans[reached[1] : reached[2]]}


def test_fewer_are_wanted_only_when_for_long_no_more_were_needed() -> None:
    fleet = Fleet(4)
    fleet.learn()
    for _ in fleet.offer(int(HOLD_MS / 1000), 12, 500, 50):
        pass
    assert fleet.planner.plan.desired == 4
    quiet = fleet.quiet(int((HOLD_MS + WINDOW_MS) / 1000) + 5)
    assert set(quiet[: int(HOLD_MS / 1000) - 5]) == {4}
    assert quiet[-1] == 1


def test_silence_means_hold() -> None:
    """A new owner, a bus that is away: what was, stays, whatever the figures say."""
    fleet = Fleet(3)
    assert fleet.plan(silent=True).desired == 3
    assert set(fleet.quiet(int(HOLD_MS / 1000) - 10)) == {3}
    assert fleet.planner.plan.reason == "holding"
    fleet.workers.clear()
    fleet.now_ms += 2 * HOLD_MS
    assert fleet.plan(silent=True).desired == 3
    assert fleet.plan(rolling_out=True).desired == 3


def test_none_while_nobody_asks_and_one_with_its_spare_for_the_first_request() -> None:
    fleet = Fleet(1, PoolLimits(replicas_min=0, replicas_spare=0))
    assert fleet.quiet(int(HOLD_MS / 1000) + 5)[-1] == 0
    fleet.workers.clear()
    assert (fleet.plan().desired, fleet.planner.plan.reason) == (0, "idle")
    fleet.planner.came(100, fleet.now_ms)
    assert (fleet.plan().desired, fleet.planner.plan.reason) == (1, "activation")


def test_what_was_refused_for_want_of_capacity_is_demand_and_counts_once() -> None:
    fleet = Fleet(1)
    fleet.learn()
    for _ in fleet.offer(30, 4, 500, 50):
        pass
    before = fleet.plan().needed["throughput"]
    for _ in range(50):
        for body in range(100):
            fleet.planner.refused(("tenant", body), 500, fleet.now_ms)
    after = fleet.plan().needed["throughput"]
    assert after == pytest.approx(before + 100 / 30 * (500 / 4_000 + 50 / 500) / 0.8, rel=0.1)


def test_what_waits_is_worked_off_in_half_a_minute() -> None:
    fleet = Fleet(1)
    fleet.learn()
    for _ in fleet.offer(10, 1, 400, 40):
        pass
    before = fleet.plan().needed["throughput"]
    cost = SimpleNamespace(input_tokens=4_000, output_tokens=4_000)
    fleet.waiting = [SimpleNamespace(state=State.QUEUED, cost=cost) for _ in range(90)]
    queued_s = 90 * (4_000 / 4_000 + 40 / 500)  # an answer is taken to be as long as answers are, not as they may be
    assert fleet.plan().needed["throughput"] == pytest.approx(before + queued_s / 30, rel=0.1)


def test_long_answers_of_few_tokens_a_second_need_slots() -> None:
    fleet = Fleet(1)
    *_, last = fleet.offer(60, 4, 10, 10, took_ms=20_000)
    assert last.needed["slots"] == pytest.approx(4 * 20 / 16, rel=0.1)
    assert last.reason == "slots"


def test_long_prompts_need_room_in_the_kv_cache() -> None:
    fleet = Fleet(1)
    *_, last = fleet.offer(60, 1, 30_000, 10, took_ms=9_000)
    assert last.needed["kv_cache"] == pytest.approx(30_005 * 9 / 90_000, rel=0.1)
    assert last.reason == "kv_cache"


def test_bounds_hold_and_are_the_reason() -> None:
    fleet = Fleet(1, PoolLimits(replicas_min=2, replicas_max=3, replicas_spare=1))
    assert (fleet.plan().desired, fleet.planner.plan.reason) == (2, "replicas_min")
    fleet.learn()
    for _ in fleet.offer(60, 40, 500, 50):
        pass
    assert (fleet.planner.plan.desired, fleet.planner.plan.reason) == (3, "replicas_max")


def test_a_worker_that_loads_is_counted_and_its_time_is_known_afterwards() -> None:
    fleet = Fleet(1)
    assert fleet.planner.wait_for_worker_ms(fleet.now_ms) == 0
    fleet.more(1, state="starting")
    fleet.planner.heard(fleet.workers[1].beat, fleet.now_ms)
    assert fleet.plan().loading == 1
    fleet.now_ms += 40_000
    fleet.planner.heard(Fleet._beat("w1"), fleet.now_ms)
    assert fleet.plan().warm_up_ms == 40_000
    assert fleet.planner.wait_for_worker_ms(fleet.now_ms) == 40_000
    fleet.more(1, state="starting")
    fleet.planner.heard(fleet.workers[2].beat, fleet.now_ms)
    fleet.now_ms += 30_000
    assert fleet.planner.wait_for_worker_ms(fleet.now_ms) == 10_000
