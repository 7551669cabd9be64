"""The judge alone, fed with drawn requests of two versions: what a thousand roll-outs cost seconds for."""

import heapq
import math
import random
from collections.abc import Callable
from typing import Any, NamedTuple

from contracts.messages.attempts import AttemptEvent
from contracts.messages.rollouts import Arm
from scheduler.core.rollout.baseline import Baseline
from scheduler.core.rollout.judge import Judge, Verdict, Watched

Answer = Callable[[random.Random], dict[str, Any]]
"""Draws the fields of one attempt's event."""


def answers(
    *, errors: float = 0.0, ttft_ms: float = 200.0, pause_ms: float = 40.0, tokens: float = 150.0, endless: bool = False
) -> Answer:
    """Times and lengths are lognormal, with medians as given; the spread is that of public traces."""

    def draw(rng: random.Random) -> dict[str, Any]:
        if rng.random() < errors:
            return {"outcome": "failed", "error_code": "engine_error"}
        length = 2_000 if endless else min(2_000, 2 + int(tokens * rng.lognormvariate(0, 0.8)))
        return {
            "outcome": "completed",
            "finish_reason": "length" if length == 2_000 else "stop",
            "first_token_at_ms": 1_000 + int(ttft_ms * rng.lognormvariate(0, 0.5)),
            "pause_ms_max": int(pause_ms * rng.lognormvariate(0, 0.4)),
            "completion_tokens": length,
        }

    return draw


class Run(NamedTuple):
    """What became of one run."""

    verdict: Verdict | None
    canary: int
    """Requests of the new version until then."""
    promotable: int
    """The same until the step might have ended; -1: never."""


Lag = Callable[[float], float]
"""Milliseconds since the step began -> how long after its assignment a request's end is told."""


def at_once(_: float) -> float:
    """No lag."""
    return 0.0


LAGS: dict[str, Lag] = {
    "a minute": lambda _: 60_000.0,
    "a queue that grows": lambda at_ms: at_ms / 2,
    "nothing for a minute, then all at once": lambda at_ms: max(0.0, 60_000 - at_ms),
    "a stall in the middle": lambda at_ms: 20_000.0 if 10_000 < at_ms < 30_000 else 0.0,
}


def run(
    seed: int,
    share: float,
    requests: int,
    stable: Answer,
    canary: Answer,
    *,
    stable_lag: Lag = at_once,
    canary_lag: Lag = at_once,
    stable_leave: float = 0.0,
    to_the_end: bool = True,
) -> Run:
    """One step at ``share``, 40 requests a second; ends at a verdict, or when all ``requests`` have ended.

    ``stable_leave``: of the stable version's callers, who leave before it has begun with them.
    """
    rng = random.Random(seed)
    judge = Judge(Baseline(), stable="v1", to="v2")
    for number in range(200):
        judge.ended(_event(f"before-{number}", "v1", stable(rng)), 0)
    judge.begin_step(share)
    ends: list[tuple[float, int, AttemptEvent | None]] = []
    given, promotable = 0, -1
    for number in range(requests):
        at_ms = number * 25.0
        is_canary = rng.random() < share
        request_id = f"{seed}-{number}"
        arm: Arm = "canary" if is_canary else "stable"
        judge.watch(request_id, Watched(arm, request_id, shared=False, step=0, prompt_tokens=100, choices=1))
        given += is_canary
        lag_ms = (canary_lag if is_canary else stable_lag)(at_ms)
        event = _event(request_id, "v2" if is_canary else "v1", (canary if is_canary else stable)(rng))
        left = not is_canary and stable_leave and rng.random() < stable_leave
        heapq.heappush(ends, (at_ms + lag_ms, number, None if left else event))
        until_ms = at_ms if number + 1 < requests else math.inf
        while ends and ends[0][0] <= until_ms:
            _, number_ended, event_told = heapq.heappop(ends)
            _end(judge, f"{seed}-{number_ended}", event_told)
            if (verdict := judge.verdict()) is not None:
                return Run(verdict, given, promotable)
            is_its = event_told is not None and event_told.version == "v2"
            if promotable < 0 and is_its and given % 10 == 0 and not judge.missing():
                promotable = given
                if not to_the_end:
                    return Run(None, given, promotable)
    return Run(None, given, promotable)


def _end(judge: Judge, request_id: str, event: AttemptEvent | None) -> None:
    """What the judge hears of a request from its dispatch on, at once; of one whose caller left, nothing."""
    if event is not None:
        judge.dispatched(request_id, event.worker, 1_000)
        judge.ended(event, 2_000)
    judge.forget(request_id)


def _event(request_id: str, version: str, fields: dict[str, Any]) -> AttemptEvent:
    return AttemptEvent(
        request_id=request_id,
        attempt=1,
        tenant="t",
        key_id="k",
        model="m",
        version=version,
        endpoint="chat/completions",
        priority="interactive",
        reporter="worker",
        worker="c0" if version == "v2" else "s0",
        prompt_tokens=100,
        dispatched_at_ms=1_000,
        **fields,
    )
