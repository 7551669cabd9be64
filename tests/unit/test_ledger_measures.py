"""What is measured of a request under the names of OpenTelemetry's GenAI conventions."""

from collections.abc import Iterable
from typing import Any

import pytest

from ledger.core import measures
from ledger.core.measures import DURATION, TPOT, TTFT, USAGE, Measure
from tests.unit.test_ledger_phases import SUBMITTED, delivery, event

OF = {
    "gen_ai.operation.name": "chat", "gen_ai.provider.name": "headrace", "gen_ai.request.model": "m",
    "headrace.version": "v1", "headrace.workload": "short",
}  # fmt: skip


def by_name(found: Iterable[Measure]) -> dict[str, list[tuple[float, dict[str, str]]]]:
    made: dict[str, list[tuple[float, dict[str, str]]]] = {}
    for each in found:
        made.setdefault(each.name, []).append((each.value, each.attributes))
    return made


def test_a_completed_stream() -> None:
    assert by_name(measures.of_delivery(delivery(version="v1"))) == {DURATION: [(0.7, OF)], TTFT: [(0.13, OF)]}
    of = OF | {"headrace.priority": "interactive"}
    assert by_name(measures.of_attempt(event(billable=True))) == {
        TPOT: [(0.05, of)],
        USAGE: [(100, of | {"gen_ai.token.type": "input"}), (11, of | {"gen_ai.token.type": "output"})],
    }


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"outcome": "failed", "code": "worker_lost"}, "worker_lost"),
        ({"outcome": "refused", "code": "overloaded", "first_chunk_ms": 0.0}, "overloaded"),
        ({"outcome": "cancelled"}, "cancelled"),
    ],
)
def test_what_ended_in_an_error_says_which_and_has_no_first_token(changes: dict[str, Any], error: str) -> None:
    found = by_name(measures.of_delivery(delivery(version="v1", **changes)))
    assert found == {DURATION: [(0.7, OF | {"error.type": error})]}


def test_tokens_are_those_that_are_billed_and_times_those_of_what_was_completed() -> None:
    assert by_name(measures.of_attempt(event(outcome="cancelled", billable=True))).keys() == {USAGE}
    assert not list(measures.of_attempt(event(outcome="lost")))
    assert by_name(measures.of_attempt(event(completion_tokens=1))) == {}, "there is none after the first"
    (per_token, _), *_ = by_name(measures.of_attempt(event(choices=2, completion_tokens=22)))[TPOT]
    assert per_token == 0.05, "of each choice"
    assert not list(measures.of_delivery(delivery(**SUBMITTED)))


def test_a_prompt_is_long_or_short_and_an_endpoint_an_operation() -> None:
    [(_, of)] = by_name(measures.of_delivery(delivery(prompt_tokens=5_000, endpoint="embeddings", stream=False)))[
        DURATION
    ]
    assert (of["headrace.workload"], of["gen_ai.operation.name"]) == ("long", "embeddings")
