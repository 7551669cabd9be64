"""What a request reserves is one number, whoever says it: admission, the worker, and both writers of events."""

import pytest

from contracts.messages.base import Epoch
from contracts.messages.request import Reply, RequestEnvelope, WorkItem
from contracts.tokens import reserved
from scheduler.core import outcomes as scheduler_outcomes
from scheduler.core.request import Request
from worker.core import outcomes as worker_outcomes
from worker.engines.base import Counts, EngineFailure

CASES = [
    pytest.param(10, 20, 1, 30, id="one answer"),
    pytest.param(10, 20, 3, 70, id="three choices share one prompt"),
    pytest.param(50_000, 16, 100, 51_600, id="a hundred prompts of 500 tokens"),
    pytest.param(50_000, 16, 200, 53_200, id="a hundred prompts with two choices each"),
    pytest.param(700, 0, 1, 700, id="embeddings"),
]


def envelope(prompt: int, output: int, choices: int) -> RequestEnvelope:
    return RequestEnvelope(
        request_id="r",
        tenant="t",
        key_id="k",
        model="m",
        endpoint="completions",
        stream=False,
        prompt_tokens=prompt,
        max_output_tokens=output,
        choices=choices,
        priority="interactive",
        admitted_at_ms=0,
        publish_within_ms=1000,
        deadline_ms=60_000,
        reply=Reply(subject="reply.v1._gw.g", stream="r"),
    )


@pytest.mark.parametrize(("prompt", "output", "choices", "tokens"), CASES)
def test_prompts_count_once_and_output_for_each_choice(prompt: int, output: int, choices: int, tokens: int) -> None:
    cost = reserved(envelope(prompt, output, choices))
    assert (cost.input_tokens, cost.total) == (prompt, tokens)


@pytest.mark.parametrize(("prompt", "output", "choices", "tokens"), CASES)
def test_both_writers_of_events_name_the_same_reservation(prompt: int, output: int, choices: int, tokens: int) -> None:
    request = envelope(prompt, output, choices)
    item = WorkItem(epoch=Epoch(1, 1), attempt=1, version="v1", worker="w", dispatched_at_ms=0, request=request)
    ours = worker_outcomes.terminal_event(
        item,
        Counts(),
        worker_outcomes.SHUTTING_DOWN,
        worker="w",
        frames=0,
        chunks=0,
        pulled_at_ms=0,
        started_at_ms=0,
        now_ms=1,
    )
    theirs = scheduler_outcomes.proposed(
        Request(request), 1, "expired", "deadline_exceeded", "late", version="v1", now_ms=1
    )
    assert ours.reserved_tokens == theirs.reserved_tokens == tokens


@pytest.mark.parametrize(
    ("outcome", "kept"),
    [
        (worker_outcomes.COMPLETED, True),
        (worker_outcomes.cancelled("client_disconnected"), True),
        (worker_outcomes.cancelled("slow_reader"), True),
        (worker_outcomes.cancelled("gateway_lost"), False),
        (worker_outcomes.failed(EngineFailure("invalid_request", "no such thing")), True),
        (worker_outcomes.failed(EngineFailure("engine_error", "broken")), False),
        (worker_outcomes.engine_lost("dead"), False),
        (worker_outcomes.SHUTTING_DOWN, False),
        (worker_outcomes.NO_ENGINE, False),
        (worker_outcomes.STALLED, False),
    ],
)
def test_d01_limits_keep_the_prompt_of_what_its_caller_ended(
    outcome: worker_outcomes.AttemptOutcome, kept: bool
) -> None:
    """Before any token, so that nothing is billed but what completed."""
    item = WorkItem(
        epoch=Epoch(1, 1), attempt=1, version="v1", worker="w", dispatched_at_ms=5, request=envelope(700, 20, 1)
    )
    event = worker_outcomes.terminal_event(
        item, Counts(), outcome, worker="w", frames=0, chunks=0, pulled_at_ms=0, started_at_ms=0, now_ms=1
    )
    assert event.spent_input_tokens == (700 if kept else 0)
    assert scheduler_outcomes.used(event).input_tokens == event.spent_input_tokens
    assert event.billable == (outcome is worker_outcomes.COMPLETED)
