"""What support reads of a request, after each kind of failure."""

import re
from typing import Any

import pytest

from contracts.messages.attempts import AttemptEvent
from contracts.messages.rollouts import RolloutEvent, RolloutNews
from ledger.core import explain

AT = 1_793_491_200_000


def event(**changes: Any) -> AttemptEvent:
    fields = {
        "request_id": "019f0000-0000-7000-8000-000000000000", "attempt": 1, "tenant": "acme", "key_id": "key_1",
        "model": "m", "version": "v1", "endpoint": "chat/completions", "priority": "interactive",
        "outcome": "completed", "reporter": "worker", "worker": "w-1", "stream": True, "prompt_tokens": 100,
        "cached_tokens": 60, "completion_tokens": 10, "billable": True, "reserved_tokens": 500, "admitted_at_ms": AT,
        "dispatched_at_ms": AT + 3, "first_token_at_ms": AT + 90, "ended_at_ms": AT + 500,
    }  # fmt: skip
    return AttemptEvent(**{**fields, **changes})


LOST = {
    "outcome": "lost", "reporter": "scheduler", "billable": False, "engine_death": True, "retryable": True,
    "first_token_at_ms": 0, "completion_tokens": 0, "ended_at_ms": AT + 4000,
}  # fmt: skip


def explained(*attempts: AttemptEvent) -> str:
    return "\n".join(explain.explain(attempts, 1_500_000, "USD"))


def test_a_completed_request() -> None:
    text = explained(event(finish_reason="stop", client_request_id="mine"))
    for part in (
        "Request 019f0000-0000-7000-8000-000000000000 of tenant acme (key key_1): chat/completions with model m",
        "The caller's own id is mine.",
        "Admitted at 2026-11-01 00:00:00.000 UTC; 500 tokens reserved.",
        "Attempt 1: version v1 on worker w-1, dispatched after 0.003 s, first token after 0.090 s, completed after "
        "0.500 s at 2026-11-01 00:00:00.500 UTC (finish reason stop), as the worker reports.",
        "100 prompt tokens (60 cached), 10 completion tokens (0 reasoning); billed.",
        "Billed: 100 prompt and 10 completion tokens of attempt 1; 0.0000015 USD.",
    ):
        assert part in text


def test_a_worker_that_died_before_the_first_token() -> None:
    text = explained(event(**LOST), event(attempt=2, worker="w-2", version="v2"))
    assert re.search(r"Attempt 1: .*worker w-1.* lost after 4.000 s.*as the scheduler reports", text)
    assert "not billed. Its worker died, stood still or was cut off. Another attempt followed." in text
    assert "Attempt 2: version v2 on worker w-2" in text
    assert "tokens of attempt 2;" in text
    assert "No attempt followed" not in text


def test_a_worker_that_died_after_tokens_were_sent() -> None:
    text = explained(event(**{**LOST, "completion_tokens": 26}))
    assert "at least 100 prompt tokens (60 cached), 26 completion tokens (0 reasoning), by its worker's last" in text
    assert "No attempt followed attempt 1: tokens had been produced for a streaming caller" in text
    assert "Nothing is billed." in text


FAILED = {
    "outcome": "failed", "billable": False, "retryable": True, "first_token_at_ms": 0, "completion_tokens": 0,
}  # fmt: skip


@pytest.mark.parametrize(
    ("first", "second", "why"),
    [
        (LOST, LOST, "the request ended 2 workers or engines and was quarantined."),
        (LOST, {**FAILED, "engine_death": True}, "the request ended 2 workers or engines and was quarantined."),
        (FAILED, FAILED, "it had been tried twice, which is the most."),
        (LOST, FAILED, "the scheduler gave the request up, or has not decided yet."),
        (LOST, {**FAILED, "retryable": False}, "the request ended with an error."),
        ({**LOST, "engine_death": False}, FAILED, "the scheduler gave the request up, or has not decided yet."),
    ],
)
def test_why_no_attempt_followed(first: dict[str, Any], second: dict[str, Any], why: str) -> None:
    assert f"No attempt followed attempt 2: {why}" in explained(event(**first), event(**second, attempt=2))


@pytest.mark.parametrize(
    ("changes", "part"),
    [
        ({"outcome": "failed", "error_code": "engine_error", "error_message": "it broke", "engine_death": True},
         "failed after 0.500 s at 2026-11-01 00:00:00.500 UTC (engine_error: it broke)"),
        ({"outcome": "cancelled", "attempt": 0, "worker": "", "billable": False, "reporter": "scheduler"},
         "Before any dispatch: cancelled after 0.500 s at 2026-11-01 00:00:00.500 UTC, as the scheduler reports."),
        ({"outcome": "expired", "attempt": 0, "worker": "", "billable": False, "reporter": "scheduler"},
         "It was never dispatched to a worker."),
        ({"outcome": "cancelled", "attempt": 2, "worker": "", "dispatched_at_ms": 0, "reporter": "scheduler"},
         "Before attempt 2 was dispatched: cancelled"),
        ({"outcome": "cancelled", "error_code": "cancelled", "error_message": "client_disconnected"},
         "cancelled after 0.500 s at 2026-11-01 00:00:00.500 UTC (client_disconnected: the caller hung up), as"),
        ({"outcome": "cancelled", "error_code": "cancelled", "error_message": "withdrawn"}, "UTC (withdrawn), as"),
        ({"first_token_at_ms": 0, "ended_at_ms": 0}, "completed at an unknown time at an unknown time"),
    ],
)  # fmt: skip
def test_other_ends(changes: dict[str, Any], part: str) -> None:
    assert part in explained(event(**changes))


def test_without_a_price_it_says_so() -> None:
    assert "no price holds for it" in "\n".join(explain.explain([event()], 0, ""))


def news(what: RolloutNews, at_ms: int, rollout: str = "1", reason: str = "") -> RolloutEvent:
    return RolloutEvent(id=rollout, model="m", news=what, stable="v1", to="v2", share=0.0, at_ms=at_ms, reason=reason)


def test_a_request_of_a_roll_out_tells_how_that_ended() -> None:
    told = [
        news("started", AT - 9_000, "0"),
        news("promoted", AT - 5_000, "0", "every step went well"),
        news("started", AT - 100),
        news("step", AT - 50),
        news("stopped", AT + 900, reason="v2 is worse than v1 by errors: e = 7,000"),
        news("started", AT + 5_000, "2"),
    ]
    text = "\n".join(explain.explain([event(arm="canary", version="v2")], 0, "", (), told))
    assert "A roll-out gave it to the new version: it went from v1 to v2." in text
    assert "That roll-out: stopped at" in text and "by errors: e = 7,000" in text
    assert "every step" not in text
    assert "roll-out" not in "\n".join(explain.explain([event()], 0, "", (), told))
    assert "It is a copy that a roll-out made" in explained(event(arm="shadow", billable=False))
