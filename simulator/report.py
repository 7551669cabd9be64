"""What a simulated run was like: for its callers, for its tenants, for who pays for the workers."""

import array
from collections.abc import Callable
from pathlib import Path

import msgspec

from simulator.fleet import Caller, Fleet, Pool
from simulator.scenario import Scenario


class Spread(msgspec.Struct, frozen=True):
    """Of a time, in ms."""

    p50: float
    p95: float
    p99: float
    mean: float


class ModelReport(msgspec.Struct, frozen=True, kw_only=True):
    """One model's part; the last of a report is all of them."""

    model: str
    requests: int
    ended: dict[str, int]
    """By how they ended: an outcome, or the code of a refusal that was the last."""
    refusals: dict[str, int]
    """Every one, those asked again after, too."""
    ttft_ms: Spread
    tpot_ms: Spread
    e2e_ms: Spread
    good: int
    """Completed within the service level."""
    goodput_per_s: float
    output_tokens_per_s: float
    hit_rate: float
    """Of prompt tokens: those that a cache had."""
    fairness: float
    """Jain's index of tenants' served over asked tokens: 1 is equal."""
    balance: float
    """The busiest worker's tokens over the mean one's, of those that were there all the time; 0: none was."""
    preemptions: int
    lost_workers: int
    worker_hours: float
    cost: float
    cost_per_million_tokens: float
    """Of prompt and output tokens that were served."""


class Slice(msgspec.Struct, frozen=True):
    """A part of the run, by when requests were made."""

    at_s: float
    asked_per_s: float
    good_per_s: float
    bad_per_s: float
    """Refused for good, failed, lost or expired."""
    ttft_p50_ms: float
    ttft_p95_ms: float


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """A run."""

    seed: int
    checked: dict[str, int]
    """How often the rules were looked at, and held: requests that ended once, admissions within the limits, tenants and
    workers that had nothing left at the end."""
    simulated_s: float
    models: list[ModelReport]
    total: ModelReport
    replicas: dict[str, list[tuple[float, int, int]]]
    """By model: second, workers that there were, workers that there should be."""
    series: list[Slice]
    """SLICES parts of equal length, over all models."""


SLICES = 120


class _Account:
    """Of one model, or of all."""

    def __init__(self, scenario: Scenario) -> None:
        self._level = scenario.service_level
        self.requests = 0
        self.ended: dict[str, int] = {}
        self.ttft = array.array("f")
        self.tpot = array.array("f")
        self.e2e = array.array("f")
        self.good = 0
        self.prompt = self.cached = self.output = 0
        self.tenants: dict[int, list[int]] = {}

    def take(self, caller: Caller, now_ms: float) -> bool:
        """Count it; whether it was good."""
        self.requests += 1
        self.ended[caller.outcome] = self.ended.get(caller.outcome, 0) + 1
        size = caller.prompt + caller.output
        tenant = self.tenants.setdefault(caller.conversation.tenant, [0, 0])
        tenant[0] += size
        if caller.outcome != "completed" or caller.job is None:
            return False
        tenant[1] += size
        ttft = caller.first_ms - caller.due_ms
        tpot = (now_ms - caller.first_ms) / max(1, caller.output - 1)
        self.ttft.append(ttft)
        self.tpot.append(tpot)
        self.e2e.append(now_ms - caller.due_ms)
        self.prompt += caller.prompt
        self.cached += max(0, caller.job.cached)
        self.output += caller.output
        good = ttft <= self._level.ttft_ms and tpot <= self._level.tpot_ms
        self.good += good
        return good

    def merge(self, other: "_Account") -> None:
        """Count what the other one counted, too."""
        self.requests += other.requests
        for outcome, count in other.ended.items():
            self.ended[outcome] = self.ended.get(outcome, 0) + count
        for own, others in ((self.ttft, other.ttft), (self.tpot, other.tpot), (self.e2e, other.e2e)):
            own.extend(others)
        self.good += other.good
        self.prompt += other.prompt
        self.cached += other.cached
        self.output += other.output
        for tenant, (asked, served) in other.tenants.items():
            both = self.tenants.setdefault(tenant, [0, 0])
            both[0] += asked
            both[1] += served

    def report(self, name: str, pools: list[Pool], span_s: float) -> ModelReport:
        machines = [machine for pool in pools for machine in (*pool.machines.values(), *pool.gone)]
        end_ms = pools[0].fleet.now_ms
        hours = cost = 0.0
        for pool in pools:
            own = _worker_hours(pool, span_s)
            hours += own
            cost += own * pool.model.worker.cost_per_hour
        shares = [served / asked for asked, served in self.tenants.values() if asked]
        squares = sum(share * share for share in shares)
        refusals: dict[str, int] = {}
        for pool in pools:
            for code, count in pool.refusals.items():
                refusals[code] = refusals.get(code, 0) + count
        served = self.prompt + self.output
        return ModelReport(
            model=name,
            requests=self.requests,
            ended=dict(sorted(self.ended.items())),
            refusals=dict(sorted(refusals.items())),
            ttft_ms=_spread(self.ttft),
            tpot_ms=_spread(self.tpot),
            e2e_ms=_spread(self.e2e),
            good=self.good,
            goodput_per_s=round(self.good / span_s, 3),
            output_tokens_per_s=round(self.output / span_s, 1),
            hit_rate=round(self.cached / self.prompt, 4) if self.prompt else 0.0,
            fairness=round(sum(shares) ** 2 / (len(shares) * squares), 4) if squares else 0.0,
            balance=_balance(pools, end_ms),
            preemptions=sum(machine.preemptions for machine in machines),
            lost_workers=sum(pool.core.lost_workers for pool in pools),
            worker_hours=round(hours, 3),
            cost=round(cost, 4),
            cost_per_million_tokens=round(cost / served * 1e6, 4) if served else 0.0,
        )


def _worker_hours(pool: Pool, span_s: float) -> float:
    """Of all that were there, loading ones too."""
    seconds, before_s, count = 0.0, 0.0, 0
    for at_s, workers, _ in pool.replicas:
        seconds += count * (at_s - before_s)
        before_s, count = at_s, workers
    return (seconds + count * max(0.0, span_s - before_s)) / 3600


def _balance(pools: list[Pool], end_ms: float) -> float:
    worst = 0.0
    for pool in pools:
        begin_ms = min((it.began_ms for it in (*pool.machines.values(), *pool.gone)), default=end_ms)
        done = [
            machine.prompt_tokens + machine.output_tokens
            for machine in pool.machines.values()
            if machine.began_ms == begin_ms
        ]
        if done and sum(done):
            worst = max(worst, max(done) * len(done) / sum(done))
    return round(worst, 4)


def _spread(values: "array.array[float]") -> Spread:
    if not values:
        return Spread(0.0, 0.0, 0.0, 0.0)
    line = sorted(values)
    p50, p95, p99 = (round(line[min(len(line) - 1, int(len(line) * share))], 1) for share in (0.5, 0.95, 0.99))
    return Spread(p50, p95, p99, round(sum(line) / len(line), 1))


def simulate(scenario: Scenario, folder: Path, progress: Callable[[int], None] = lambda _: None) -> Report:
    """The whole run; the same scenario gives the same report. Raises BadScenario and OSError (a trace).

    Raises AssertionError when a rule of the service is broken: that is a bug in it.
    """
    accounts = {model.name: _Account(scenario) for model in scenario.models}

    def observe(pool: Pool, caller: Caller, now_ms: float) -> None:
        good = accounts[pool.model.name].take(caller, now_ms)
        completed = caller.outcome == "completed"
        made.append((caller.due_ms - begin_ms) / 1000)
        waited.append(caller.first_ms - caller.due_ms if completed else -1.0)
        goods.append(good)
        last[0] = now_ms

    last = [0.0]
    made, waited, goods = array.array("f"), array.array("f"), array.array("b")
    fleet = Fleet(scenario, folder, observe)
    begin_ms = fleet.now_ms
    fleet.run(progress)
    total = _Account(scenario)
    for account in accounts.values():
        total.merge(account)
    assert total.requests == fleet.asked, "every request ends once"
    span_s = max(1e-3, (last[0] - begin_ms) / 1000)
    return Report(
        seed=scenario.seed,
        checked={"requests": total.requests, **fleet.checked},
        simulated_s=round(span_s, 3),
        models=[accounts[pool.model.name].report(pool.model.name, [pool], span_s) for pool in fleet.pools],
        total=total.report("all", fleet.pools, span_s),
        replicas={pool.model.name: pool.replicas for pool in fleet.pools},
        series=_series(made, waited, goods, span_s),
    )


def _series(
    made: "array.array[float]", waited: "array.array[float]", goods: "array.array[int]", span_s: float
) -> list[Slice]:
    length_s = span_s / SLICES
    asked, good, bad = [0] * SLICES, [0] * SLICES, [0] * SLICES
    ttfts: list[list[float]] = [[] for _ in range(SLICES)]
    for at_s, ttft, is_good in zip(made, waited, goods, strict=True):
        index = min(SLICES - 1, max(0, int(at_s / length_s)))
        asked[index] += 1
        good[index] += is_good
        bad[index] += ttft < 0
        if ttft >= 0:
            ttfts[index].append(ttft)
    found = []
    for index in range(SLICES):
        line = sorted(ttfts[index])
        p50, p95 = (line[int(len(line) * share)] if line else 0.0 for share in (0.5, 0.95))
        asked_per_s, good_per_s, bad_per_s = (round(count[index] / length_s, 3) for count in (asked, good, bad))
        at_s = round(index * length_s, 3)
        found.append(Slice(at_s, asked_per_s, good_per_s, bad_per_s, round(p50, 1), round(p95, 1)))
    return found
