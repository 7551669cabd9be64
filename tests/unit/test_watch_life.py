"""The life of a request as steps: each once, in whatever order it is told of."""

import itertools
from typing import Any

import msgspec

from compose.watch.life import Life, Step
from contracts.messages.base import Epoch
from contracts.messages.control import Progress, WorkerHeartbeat
from contracts.messages.request import Reply, RequestEnvelope, WorkItem
from ledger.core import phases
from tests.unit.test_ledger_phases import AT, ID, LOST, delivery, event

ENVELOPE = RequestEnvelope(
    request_id=ID, tenant="acme", key_id="key_1", model="m", version="v1", endpoint="chat/completions",
    priority="interactive", stream=True, choices=1, prompt_tokens=100, max_output_tokens=50, admitted_at_ms=AT,
    publish_within_ms=1_000, deadline_ms=9_000, reply=Reply(subject="reply.v1._gw.g", stream=ID),
    stream_owner="_gw.g.1", body=msgspec.Raw(b'{"secret": "words"}'),
)  # fmt: skip


def item(attempt: int = 1, at_ms: int = AT + 30, worker: str = "w-1") -> WorkItem:
    return WorkItem(
        epoch=Epoch(1, 1), attempt=attempt, version="v1", worker=worker, dispatched_at_ms=at_ms, request=ENVELOPE
    )


def beat(tokens: int, attempt: int = 1, worker: str = "w-1") -> WorkerHeartbeat:
    mine = Progress(request_id=ID, attempt=attempt, prompt_tokens=100, completion_tokens=tokens)
    others = Progress(request_id=ID.replace("9", "8"), attempt=1, completion_tokens=7)
    return WorkerHeartbeat(worker=worker, model="m", version="v1", state="ready", in_flight=[others, mine])


def told(steps: Any) -> list[tuple[str, int, int | None, bool]]:
    return [(step.what, step.attempt, step.after_ms, step.seen) for step in steps]


def test_a_request_as_it_happens() -> None:
    life = Life()
    assert told(life.queued(ENVELOPE, AT + 2)) == [("admitted", 0, 0, False), ("queued", 0, 2, False)]
    assert told(life.dispatched(item())) == [("dispatched", 1, 30, False)]
    assert told(life.progressed(beat(0), AT + 400)) == [("prefill", 1, 400, True)]
    assert told(life.progressed(beat(3), AT + 900)) == [("first_token", 1, 900, True)]
    assert told(life.progressed(beat(9), AT + 1_400)) == [], "at most once a second"
    [decoding] = life.progressed(beat(13), AT + 1_900)
    assert decoding.facts == {"completion_tokens": 13, "tokens_per_s": 10.0} and decoding.seen
    assert told(life.attempt_ended(event(ended_at_ms=AT + 2_000))) == [("attempt_ended", 1, 2_000, False)]
    assert life.ended and told(life.progressed(beat(14), AT + 2_100)) == []
    end = event(ended_at_ms=AT + 2_000)
    times = phases.times([end], delivery(ended_ms=2_040.0, total_ms=2_050.0))
    assert told(life.finish(times, 0)) == [("relayed", 1, 2_012, False), ("ended", 1, 2_012, False)]


RETRIED = [
    ("admitted", 0, 0), ("queued", 0, 0), ("dispatched", 1, 30), ("attempt_ended", 1, 3_530), ("retry", 2, 3_530),
    ("dispatched", 2, 3_540), ("prefill", 2, 3_550), ("first_token", 2, 3_600), ("attempt_ended", 2, 4_100),
]  # fmt: skip


def test_afterwards_and_through_a_retry() -> None:
    first = event(**LOST, retryable=True)
    second = event(attempt=2, dispatched_at_ms=AT + 3_540, started_at_ms=AT + 3_550, first_token_at_ms=AT + 3_600,
                   ended_at_ms=AT + 4_100, worker="w-2")  # fmt: skip
    life = Life()
    steps = [*life.attempt_ended(first), *life.attempt_ended(second)]
    assert [(step.what, step.attempt, step.after_ms) for step in steps] == RETRIED
    assert not any(step.seen for step in steps) and life.ended
    waited = [step.facts["waited_ms"] for step in steps if step.what == "dispatched"]
    assert waited == [30, 10], "from its admission, and from the end before"


def test_whatever_is_told_twice_or_late_is_one_step() -> None:
    lost = event(**LOST, retryable=True)
    for order in itertools.permutations(range(4)):
        life = Life()
        tell = [
            lambda life=life: life.queued(ENVELOPE, AT + 2),
            lambda life=life: life.dispatched(item()),
            lambda life=life: life.attempt_ended(lost),
            lambda life=life: life.dispatched(item(2, AT + 3_600, "w-2")),
        ]
        steps: list[Step] = [step for number in order for step in tell[number]()]
        assert [step for number in order for step in tell[number]()] == []
        kinds = sorted((step.what, step.attempt) for step in steps)
        assert kinds == [
            ("admitted", 0), ("attempt_ended", 1), ("dispatched", 1), ("dispatched", 2), ("queued", 0), ("retry", 2),
        ]  # fmt: skip
        assert not life.ended, "its owner has yet to say"


def test_who_comes_late_is_told_no_first_token_that_is_none() -> None:
    life = Life()
    list(life.dispatched(item()))
    [step] = life.progressed(beat(500), AT + 9_000)
    assert (step.what, step.facts) == ("decoding", {"completion_tokens": 500})


def test_no_step_has_a_word_of_it() -> None:
    life = Life()
    steps = [*life.queued(ENVELOPE, AT), *life.dispatched(item()), *life.attempt_ended(event())]
    assert b"words" not in msgspec.json.encode(steps)
