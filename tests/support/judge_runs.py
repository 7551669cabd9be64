"""The judge alone, fed with drawn requests of two versions: what a thousand roll-outs cost seconds for."""

import random
from collections.abc import Callable
from typing import Any, NamedTuple

from contracts.messages.attempts import AttemptEvent
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


def run(seed: int, share: float, requests: int, stable: Answer, canary: Answer, *, to_the_end: bool = True) -> Run:
    """One step at ``share``; ends at a verdict, or after ``requests``."""
    rng = random.Random(seed)
    judge = Judge(Baseline(), stable="v1", to="v2")
    for number in range(200):
        judge.ended(_event(f"before-{number}", "v1", stable(rng)), 0)
    judge.begin_step(share)
    given, promotable = 0, -1
    for number in range(requests):
        is_canary = rng.random() < share
        request_id = f"{seed}-{number}"
        watched = Watched(
            "canary" if is_canary else "stable", request_id, shared=False, step=0, prompt_tokens=100, choices=1
        )
        given += is_canary
        judge.watch(request_id, watched)
        judge.dispatched(request_id, "c0" if is_canary else "s0", 1_000)
        event = _event(request_id, "v2" if is_canary else "v1", (canary if is_canary else stable)(rng))
        judge.ended(event, 2_000)
        judge.forget(request_id)
        if (verdict := judge.verdict()) is not None:
            return Run(verdict, given, promotable)
        if promotable < 0 and is_canary and given % 10 == 0 and not judge.missing():
            promotable = given
            if not to_the_end:
                break
    return Run(None, given, promotable)


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
