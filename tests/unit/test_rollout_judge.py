"""The judge of a roll-out: numbers checked by quadrature, what counts as bad, how often, and for whom."""

import math
import random
from typing import Any

import pytest

from contracts.messages.attempts import AttemptEvent
from contracts.messages.rollouts import Arm, Criterion, RolloutProgress
from scheduler.core.rollout import evidence
from scheduler.core.rollout.baseline import Baseline
from scheduler.core.rollout.judge import LOG_STOP, REQUESTS_MIN, UNITS_MAX, Judge, Watched
from tests.support.judge_runs import LAGS, Answer, Lag, answers, at_once, run


def quadrature(canary: int, events: int, low: float, high: float, theta0: float) -> float:
    """The e-value by its definition, in the middle of 100,000 steps."""
    step = (high - low) / 100_000
    middles = (low + (number + 0.5) * step for number in range(100_000))
    mean = sum(t**canary * (1 - t) ** (events - canary) for t in middles) / 100_000
    return float(mean / (theta0**canary * (1 - theta0) ** (events - canary)))


def test_e_values_are_those_of_their_definition() -> None:
    assert math.exp(evidence.log_against(5, 9, 0.0732)) == pytest.approx(552.2467, abs=1e-3)
    assert math.exp(evidence.log_for(5, 9, 0.0732)) == pytest.approx(0.174415, abs=1e-6)
    for canary, events, theta0 in ((0, 0, 0.1), (0, 5, 0.3), (3, 40, 0.0732), (30, 40, 0.5), (1, 1, 0.6)):
        against, speaking_for = evidence.log_against(canary, events, theta0), evidence.log_for(canary, events, theta0)
        assert math.exp(against) == pytest.approx(quadrature(canary, events, theta0, 1, theta0), rel=1e-6)
        assert math.exp(speaking_for) == pytest.approx(quadrature(canary, events, 0, theta0, theta0), rel=1e-6)


@pytest.mark.parametrize(("canary", "events"), [(0, 20_000), (20_000, 20_000), (10_000, 20_000), (150, 3_000)])
def test_no_number_of_events_is_too_large(canary: int, events: int) -> None:
    for theta0 in (0.015, 0.0732, 0.6):
        assert math.isfinite(evidence.log_against(canary, events, theta0))
        assert math.isfinite(evidence.log_for(canary, events, theta0))


def test_the_tolerated_share_of_events() -> None:
    assert evidence.tolerated(0.05, 1.5) == pytest.approx(0.075 / 1.025)
    assert evidence.tolerated(0.5, 1.0) == 0.5


class Bench:
    """A judge at work: requests of either version, one after the other."""

    def __init__(self, share: float = 0.05, *, shared: bool = False) -> None:
        self.judge = Judge(Baseline(), stable="v1", to="v2")
        self.shared = shared
        self.number = 0
        self.rng = random.Random(4)
        for number in range(200):
            self.judge.ended(self.event(f"b{number}", "stable", first_token_at_ms=1_100 + number), 0)
        self.judge.begin_step(share)

    def event(self, request_id: str, arm: str, **fields: Any) -> AttemptEvent:
        given: dict[str, Any] = {
            "outcome": "completed",
            "prompt_tokens": 100,
            "finish_reason": "stop",
            "first_token_at_ms": 1_150,
            "completion_tokens": 100 if request_id[0] != "b" else 50 + int(request_id[1:]),
            "pause_ms_max": 40 if request_id[0] != "b" else int(request_id[1:]),
            "worker": "c0" if arm == "canary" else "s0",
        } | fields
        return AttemptEvent(
            request_id=request_id,
            attempt=1,
            tenant="t",
            key_id="k",
            model="m",
            version="v2" if arm == "canary" else "v1",
            endpoint="chat/completions",
            priority="interactive",
            reporter="worker",
            dispatched_at_ms=1_000,
            **given,
        )

    def begin(self, arm: Arm = "canary", unit: str = "", worker: str = "c0") -> str:
        self.number += 1
        request_id = f"r{self.number}"
        watched = Watched(
            arm, unit or request_id, shared=self.shared, step=len(self.judge.steps) - 1, prompt_tokens=100, choices=1
        )
        self.judge.watch(request_id, watched)
        self.judge.dispatched(request_id, worker, 1_000)
        return request_id

    def end(self, arm: Arm = "canary", unit: str = "", at_ms: int = 2_000, **fields: Any) -> None:
        request_id = self.begin(arm, unit, str(fields.get("worker", "c0")))
        self.judge.ended(self.event(request_id, arm, **fields), at_ms)
        self.judge.forget(request_id)

    def bad(self, criterion: Criterion) -> tuple[int, int]:
        """Of the canary, and of both."""
        step = self.judge.steps[-1]
        return step.bad_canary[criterion], step.bad[criterion]


FAILED: dict[str, Any] = {
    "outcome": "failed",
    "error_code": "engine_error",
    "completion_tokens": 0,
    "first_token_at_ms": 0,
}


@pytest.mark.parametrize(
    ("fields", "criterion"),
    [
        (FAILED, "errors"),
        ({"outcome": "lost", "engine_death": True}, "errors"),
        ({"first_token_at_ms": 1_400}, "first_token"),
        ({"pause_ms_max": 300}, "pauses"),
        ({"completion_tokens": 400}, "length"),
        ({"finish_reason": "length"}, "length"),
        ({"completion_tokens": 0, "first_token_at_ms": 0}, "empty"),
        ({"completion_tokens": 1}, "empty"),
    ],
)
def test_what_is_bad(fields: dict[str, Any], criterion: Criterion) -> None:
    bench = Bench()
    for _ in range(2):
        bench.end()  # Its caches are cold.
    bench.end(**fields)
    step = bench.judge.steps[-1]
    assert {found for found, number in step.bad_canary.items() if number} == {criterion}


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"outcome": "cancelled", "completion_tokens": 0},
        {"outcome": "expired", "error_code": "deadline_exceeded"},
        {"outcome": "failed", "error_code": "invalid_request"},
        {"outcome": "failed", "error_code": "context_length_exceeded"},
        {"outcome": "failed", "error_code": "unavailable", "retryable": True},
        {"outcome": "lost", "error_code": "worker_lost"},
    ],
)
def test_what_says_nothing_of_a_version(fields: dict[str, Any]) -> None:
    bench = Bench()
    for _ in range(3):
        bench.end(**fields)
    assert not any(bench.judge.steps[-1].bad.values())


def test_the_first_requests_of_a_new_worker_may_be_late() -> None:
    bench = Bench()
    for _ in range(4):
        bench.end(first_token_at_ms=9_000)
    assert bench.bad("first_token") == (2, 2)


def test_where_stables_answers_end_by_the_limit_that_says_nothing_of_a_version() -> None:
    """The new version's come first where the stable one has a queue: ten of them would stop it."""
    bench = Bench()
    for number in range(200):
        bench.judge.ended(bench.event(f"b{number}", "stable", finish_reason="length"), 0)
    for _ in range(20):
        bench.end(finish_reason="length")
    assert bench.bad("length") == (0, 0)


def test_prompts_are_compared_with_those_of_their_size() -> None:
    bench = Bench()
    for number in range(40):
        bench.judge.ended(bench.event(f"b{number}", "stable", prompt_tokens=3_000, first_token_at_ms=4_000), 0)
    bench.end()
    bench.end()
    bench.end(first_token_at_ms=3_900, prompt_tokens=3_000)
    assert bench.bad("first_token") == (0, 0)
    bench.end(first_token_at_ms=3_900, prompt_tokens=3_000, cached_tokens=2_900)
    assert bench.bad("first_token") == (1, 1)


def test_a_hang_counts_when_the_limit_is_crossed_and_once() -> None:
    bench = Bench()
    request_id = bench.begin()
    bench.judge.pass_time(2_600)
    assert bench.bad("first_token") == (0, 0), "the news of a first token may be on its way"
    for now_ms in (2_900, 3_000, 60_000):
        bench.judge.pass_time(now_ms)
    assert bench.bad("first_token") == (1, 1)
    bench.judge.progressed(request_id, 1, 60_000)
    bench.judge.pass_time(61_400)
    assert bench.bad("pauses") == (0, 0)
    bench.judge.pass_time(61_900)
    assert bench.bad("pauses") == (1, 1)
    bench.judge.progressed(request_id, 1_000, 61_900)
    bench.judge.progressed(request_id, 2_000, 61_900)
    assert bench.bad("length") == (1, 1)
    late = bench.event(request_id, "canary", first_token_at_ms=61_000, pause_ms_max=900, completion_tokens=3_000)
    bench.judge.ended(late, 70_000)
    assert [bench.bad(criterion) for criterion in ("first_token", "pauses", "length")] == [(1, 1)] * 3


def test_a_retry_that_succeeds_on_the_other_version_hides_no_failure() -> None:
    bench = Bench()
    request_id = bench.begin()
    bench.judge.ended(bench.event(request_id, "canary", **FAILED, retryable=True), 2_000)
    bench.judge.dispatched(request_id, "s0", 3_000)
    bench.judge.ended(bench.event(request_id, "stable"), 4_000)
    assert bench.bad("errors") == (1, 1)


def test_a_unit_is_bad_once_in_the_whole_roll_out() -> None:
    bench = Bench(shared=True)
    for _ in range(5):
        bench.end(unit="conversation", **FAILED)
    bench.judge.begin_step(0.25)
    bench.end(unit="conversation", **FAILED)
    bench.end(unit="another", **FAILED)
    assert [step.bad_canary["errors"] for step in bench.judge.steps] == [1, 1]


def test_what_is_remembered_of_units_is_bounded() -> None:
    bench = Bench()
    for number in range(UNITS_MAX + 100):
        bench.end("stable", unit=f"u{number}", **FAILED)
    assert len(bench.judge.kept_units()) == 4 * UNITS_MAX


def test_an_engines_death_is_one_incident_however_many_it_ran() -> None:
    bench = Bench()
    running = [bench.begin() for _ in range(32)]
    for request_id in running:
        bench.judge.ended(bench.event(request_id, "canary", outcome="failed", engine_death=True), 2_000)
    assert bench.bad("errors") == (1, 1)
    assert bench.judge.verdict() is None
    bench.end(outcome="lost", engine_death=True, at_ms=60_000)
    assert bench.bad("errors") == (2, 2)


@pytest.mark.parametrize("workers", [2, 4])
def test_one_bad_worker_is_not_a_bad_version(workers: int) -> None:
    bench = Bench()
    told = []
    for number in range(400):
        worker = f"c{number % workers}"
        bench.end("canary", worker=worker, **(FAILED if worker == "c1" else {}))
        for _ in range(19):
            bench.end("stable", worker="s0")
        if (verdict := bench.judge.verdict()) is not None:
            told.append(verdict)
    assert [verdict.worker for verdict in told] == ["c1"]
    assert "c1" in told[0].reason
    assert "replace it" in told[0].reason
    assert bench.bad("errors") == (0, 0), "what it did counts for nothing"


@pytest.mark.parametrize("workers", [2, 4])
def test_a_bad_version_is_no_bad_worker(workers: int) -> None:
    bench = Bench()
    for _ in range(100):
        worker = f"c{bench.rng.randrange(workers)}"
        bench.end("canary", worker=worker, **(FAILED if bench.rng.random() < 0.3 else {}))
        for _ in range(19):
            bench.end("stable", worker="s0")
        if (verdict := bench.judge.verdict()) is not None and not verdict.worker:
            break
    assert verdict is not None
    assert verdict.worker == ""
    assert "v2 is worse than v1 by errors" in verdict.reason


def test_the_only_worker_stands_for_its_version() -> None:
    bench = Bench()
    for _ in range(30):
        bench.end("canary", **FAILED)
        bench.end("stable", worker="s0")
    verdict = bench.judge.verdict()
    assert verdict is not None
    assert verdict.worker == ""


def test_labels_are_compared_with_the_units_that_were_judged() -> None:
    bench = Bench()
    for _ in range(30):
        bench.end("canary", **FAILED)
    assert bench.judge.verdict() is None, "of the stable version nothing is known yet"
    for _ in range(60):
        bench.end("stable", worker="s0")
    bench.judge.pass_time(3_000)
    assert bench.judge.verdict() is not None, "now it is, with no bad event more"


def test_without_requests_nothing_is_known() -> None:
    judge = Bench().judge
    assert judge.verdict() is None
    assert "more requests" in judge.missing()
    assert f"{REQUESTS_MIN} requests of v2" in judge.missing()
    assert "errors (e' = 1, 20 is needed)" in judge.missing()


def test_steps_add_their_evidence() -> None:
    bench = Bench()
    for _ in range(4):
        bench.end("canary", **FAILED)
    before = bench.judge.log_against("errors")
    bench.judge.begin_step(0.25)
    assert bench.judge.log_against("errors") == before
    for _ in range(4):
        bench.end("canary", **FAILED)
    alone = bench.judge.steps[1].log_against("errors", 1.5)
    assert bench.judge.log_against("errors") == pytest.approx(before + alone)


def test_a_new_owner_goes_on_where_the_last_one_was() -> None:
    bench = Bench(shared=True)
    for number in range(9):
        bench.end("canary", unit=f"u{number}", **FAILED)
        bench.end("stable")

    kept = RolloutProgress(
        id="1",
        model="m",
        stable="v1",
        to="v2",
        phase="live",
        evidence=[step.message() for step in bench.judge.steps],
        thresholds=bench.judge.baseline.thresholds,
        units=bench.judge.kept_units(),
    )
    after = Bench(shared=True)
    after.judge = Judge(Baseline(), stable="v1", to="v2")
    after.judge.restore(kept)
    assert after.judge.measures() == bench.judge.measures()
    after.end("canary", unit="u3", **FAILED)
    assert after.judge.measures() == bench.judge.measures(), "a unit that was counted before"
    after.end("canary", first_token_at_ms=9_000, unit="late", worker="c1")
    after.end("canary", first_token_at_ms=9_000, unit="later", worker="c1")
    after.end("canary", first_token_at_ms=9_000, unit="latest", worker="c1")
    assert after.bad("first_token") == (1, 1), "by the percentile that the last one had"


GOOD = answers(errors=0.01)


@pytest.mark.parametrize("share", [0.01, 0.05, 0.5])
def test_a_good_version_is_not_stopped(share: float) -> None:
    """The long form is ``tests/bench``'s: 1,000 runs at each share."""
    assert not [seed for seed in range(10) if run(seed, share, 1_000, GOOD, GOOD).verdict]


@pytest.mark.parametrize("share", [0.01, 0.05, 0.5])
@pytest.mark.parametrize("lag", LAGS.values(), ids=LAGS)
@pytest.mark.parametrize("late", ["stable", "canary"])
def test_a_good_version_is_not_stopped_when_one_side_is_heard_of_late(share: float, lag: Lag, late: str) -> None:
    """A queue of the stable version, say: the new one's bad requests are known before any of the stable one's are."""
    stable_lag, canary_lag = (lag, at_once) if late == "stable" else (at_once, lag)
    requests = round(max(1_000, 40 / share))
    runs = [run(seed, share, requests, GOOD, GOOD, stable_lag=stable_lag, canary_lag=canary_lag) for seed in range(2)]
    assert not [made.verdict for made in runs if made.verdict]


def test_a_good_version_is_not_stopped_where_the_stable_ones_callers_leave_its_queue() -> None:
    """Of the answers the share is larger then than of the requests."""
    runs = [run(seed, 0.2, 8_000, GOOD, GOOD, stable_leave=0.7) for seed in range(3)]
    assert not [made.verdict for made in runs if made.verdict]


def test_a_version_that_is_heard_of_late_is_not_good_before() -> None:
    runs = [run(seed, 0.05, 2_000, GOOD, GOOD, canary_lag=lambda at_ms: 10**9) for seed in range(3)]
    assert {made.promotable for made in runs} == {-1}


@pytest.mark.parametrize(
    ("bad", "criterion", "most"),
    [
        (answers(errors=0.2), "errors", 40),
        (answers(errors=0.01, ttft_ms=600), "first_token", 40),
        (answers(errors=0.01, endless=True), "length", 40),
    ],
)
def test_a_gross_version_is_stopped_soon(bad: Answer, criterion: str, most: int) -> None:
    runs = [run(seed, 0.05, 4_000, GOOD, bad) for seed in range(9)]
    assert all(made.verdict is not None and f"by {criterion}" in made.verdict.reason for made in runs)
    assert sorted(made.canary for made in runs)[4] <= most


def test_the_limit_is_that_of_all_criteria_together() -> None:
    assert math.exp(LOG_STOP) == pytest.approx(5 / 0.001)
