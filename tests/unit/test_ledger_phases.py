"""Where the time of a request went, after each kind of life; the phases add up to what its caller waited."""

from typing import Any

import pytest

from contracts.messages.attempts import AttemptEvent
from contracts.messages.deliveries import Delivery
from contracts.messages.usage import RequestTimes
from ledger.core import phases

AT = 1_793_491_200_000
ID = "019f0000-0000-7000-8000-000000000000"


def event(**changes: Any) -> AttemptEvent:
    fields = {
        "request_id": ID, "attempt": 1, "tenant": "acme", "key_id": "key_1", "model": "m", "version": "v1",
        "endpoint": "chat/completions", "priority": "interactive", "outcome": "completed", "reporter": "worker",
        "worker": "w-1", "stream": True, "prompt_tokens": 100, "cached_tokens": 60, "completion_tokens": 11,
        "admitted_at_ms": AT, "dispatched_at_ms": AT + 30, "started_at_ms": AT + 40, "first_token_at_ms": AT + 100,
        "ended_at_ms": AT + 600,
    }  # fmt: skip
    return AttemptEvent(**{**fields, **changes})


def delivery(**changes: Any) -> Delivery:
    fields = {
        "request_id": ID, "tenant": "acme", "model": "m", "outcome": "completed", "status": 200, "stream": True,
        "prompt_tokens": 100, "upload_ms": 20.0, "edge_ms": 5.0, "admission_ms": 3.0, "first_chunk_ms": 130.0,
        "ended_ms": 640.0, "total_ms": 700.0,
    }  # fmt: skip
    return Delivery(**{**fields, **changes})


def spans(times: RequestTimes) -> dict[str, float | None]:
    return {phase.name: phase.ms for phase in times.phases}


def test_each_phase_of_a_plain_request() -> None:
    times = phases.times([event()], delivery())
    assert spans(times) == {
        "edge": 5, "admission": 3, "queue": 30, "dispatch": 10, "prefill": 60, "decode": 500, "relay": 12, "caller": 80,
    }  # fmt: skip
    assert sum(phase.ms or 0 for phase in times.phases) == times.total_ms == 700
    assert times.first_token_ms == 130
    assert times.why == "It took 0.700 s: 0.500 s (71%) generating 11 tokens, 50.0 ms each."


def test_without_a_gateway_s_word_its_phases_are_unknown_and_not_zero() -> None:
    times = phases.times([event()], None)
    assert [name for name, ms in spans(times).items() if ms is None] == ["edge", "admission", "relay", "caller"]
    assert (times.total_ms, times.first_token_ms) == (600, 100)


SUBMITTED = {
    "outcome": "submitted",
    "status": 0,
    "upload_ms": 0.0,
    "first_chunk_ms": 0.0,
    "ended_ms": 0.0,
    "total_ms": 9.0,
}


def test_of_a_submit_over_the_bus_the_gateway_knows_the_edge_and_the_attempts_the_rest() -> None:
    times = phases.times([event(outcome="failed", error_code="engine_error")], delivery(**SUBMITTED))
    assert spans(times) == {
        "edge": 5, "admission": 3, "queue": 30, "dispatch": 10, "prefill": 60, "decode": 500,
        "relay": None, "caller": None,
    }  # fmt: skip
    assert (times.outcome, times.code, times.total_ms, times.first_token_ms) == ("failed", "engine_error", 608, 108)
    assert times.why.startswith("It took 0.608 s and failed (engine_error): ")
    running = phases.times([], delivery(**SUBMITTED))
    assert (running.outcome, running.total_ms, spans(running)["queue"]) == ("submitted", 8, None)


LOST = {
    "outcome": "lost", "reporter": "scheduler", "first_token_at_ms": 0, "started_at_ms": 0, "completion_tokens": 0,
    "ended_at_ms": AT + 3_530,
}  # fmt: skip


def test_attempts_in_vain_are_a_phase_of_their_own() -> None:
    second = event(
        attempt=2, dispatched_at_ms=AT + 3_630, started_at_ms=AT + 3_640, first_token_at_ms=AT + 3_700,
        ended_at_ms=AT + 4_200,
    )  # fmt: skip
    times = phases.times([event(**LOST), second], delivery(ended_ms=4_240.0, total_ms=4_300.0))
    assert spans(times) == {
        "edge": 5, "admission": 3, "queue": 130, "dispatch": 10, "prefill": 60, "decode": 500, "retry": 3_500,
        "relay": 12, "caller": 80,
    }  # fmt: skip
    assert sum(phase.ms or 0 for phase in times.phases) == times.total_ms == 4_300
    assert times.attempts == 2
    assert "3.500 s (81%) in attempts that gave nothing, before another one followed" in times.why


@pytest.mark.parametrize(
    ("attempts", "seen", "why"),
    [
        (
            [event(dispatched_at_ms=AT + 5_000, started_at_ms=AT + 5_010, first_token_at_ms=AT + 5_060,
                   ended_at_ms=AT + 5_100)],
            delivery(ended_ms=5_130.0, total_ms=5_131.0),
            "It took 5.131 s: 5.000 s (97%) waiting for a worker with room and for its turn.",
        ),
        (
            [event(prompt_tokens=9_000, cached_tokens=1_000, first_token_at_ms=AT + 2_040, ended_at_ms=AT + 2_100)],
            delivery(ended_ms=2_130.0, total_ms=2_131.0),
            "It took 2.131 s: 2.000 s (94%) reading the prompt (8000 of 9000 tokens were not cached).",
        ),
        (
            [event()],
            delivery(upload_ms=9_000.0, ended_ms=9_630.0, total_ms=9_640.0),
            "It took 9.640 s: 9.010 s (93%) waiting for its caller to send or to read.",
        ),
        (
            [event()],
            delivery(blocked_ms=400.0),
            "It took 0.700 s: 0.500 s (71%) generating 11 tokens, 50.0 ms each;"
            " writing waited 0.400 s for its caller to read.",
        ),
        (
            [event()],
            delivery(ended_ms=3_640.0, total_ms=3_641.0),
            "It took 3.641 s: 3.012 s (83%) for its frames on their way to the gateway.",
        ),
        (
            [event(attempt=0, outcome="expired", dispatched_at_ms=0, started_at_ms=0, first_token_at_ms=0, worker="",
                   error_code="deadline_exceeded", ended_at_ms=AT + 900)],
            delivery(outcome="failed", code="deadline_exceeded", ended_ms=930.0, total_ms=931.0, first_chunk_ms=0.0),
            "It took 0.931 s and failed (deadline_exceeded):"
            " 0.900 s (97%) waiting for a worker with room and for its turn.",
        ),
        (
            [],
            delivery(outcome="refused", code="rate_limit_exceeded", upload_ms=1.0, ended_ms=0.0, total_ms=9.0,
                     first_chunk_ms=0.0),
            "It took 0.009 s and was refused: 0.005 s (56%) checking it and counting its tokens at the gateway"
            " (100 tokens),"
            " and 0.003 s (33%) until the scheduler answered whether it may run.",
        ),
    ],
    ids=["queue", "prefill", "upload", "slow reader", "relay", "expired", "refused"],
)  # fmt: skip
def test_one_sentence_says_what_took_long(attempts: list[AttemptEvent], seen: Delivery, why: str) -> None:
    assert phases.times(attempts, seen).why == why


def test_clocks_that_disagree_make_no_negative_time() -> None:
    back = event(dispatched_at_ms=AT - 50, started_at_ms=AT - 60, first_token_at_ms=AT - 70, ended_at_ms=AT - 80)
    times = phases.times([back], delivery(total_ms=0.0, ended_ms=0.1))
    assert all(phase.ms is not None and phase.ms >= 0 for phase in times.phases)
