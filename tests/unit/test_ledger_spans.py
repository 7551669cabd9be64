"""A request's spans: one tree whatever happened, and which requests are traced."""

import uuid
from typing import Any

import msgspec
import pytest

from contracts import ids
from contracts.messages.attempts import AttemptEvent
from contracts.messages.deliveries import Delivery
from ledger.core.spans import Span, kept, spans
from ledger.core.traces import PENDING_MAX, RETRY_MS, WAIT_MS, Traces
from tests.unit.test_ledger_phases import AT, ID, LOST, SUBMITTED, delivery, event

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


def retried() -> list[AttemptEvent]:
    later = {"dispatched_at_ms": 3_630, "started_at_ms": 3_640, "first_token_at_ms": 3_700, "ended_at_ms": 4_200}
    return [event(**LOST), event(attempt=2, **{name: AT + ms for name, ms in later.items()})]


def tree(found: list[Span]) -> dict[str, str]:
    """Span -> parent, by name; fails unless all hang together."""
    names = {span.span_id: span.name for span in found}
    assert len(names) == len(found) and len({span.trace_id for span in found}) == 1
    return {span.name: names[span.parent] for span in found[1:]}


def test_a_retried_request_is_one_tree_with_the_lost_attempt_in_it() -> None:
    found = spans(retried(), delivery(ended_ms=4_240.0, total_ms=4_300.0), (AT + 4_205, AT + 4_400))
    root = found[0]
    assert (root.name, root.trace_id, root.parent) == ("chat m", uuid.UUID(ID).int, 0)
    assert (root.start_ms, root.end_ms) == (AT - 28, AT - 28 + 4_300)
    assert tree(found) == {
        "edge": "chat m", "admission": "chat m", "queue 1": "chat m", "attempt 1": "chat m", "queue 2": "chat m",
        "attempt 2": "chat m", "dispatch 2": "attempt 2", "prefill 2": "attempt 2", "decode 2": "attempt 2",
        "relay": "chat m", "caller": "chat m", "ledger": "chat m",
    }  # fmt: skip
    by_name = {span.name: span for span in found}
    lost, second = by_name["attempt 1"], by_name["attempt 2"]
    assert (lost.error, second.error, root.error) == ("lost", "", "")
    assert second.links == (lost.span_id,) and lost.links == ()
    assert by_name["queue 2"].start_ms == lost.end_ms and by_name["queue 2"].end_ms == second.start_ms
    assert all(span.start_ms <= span.end_ms for span in found)
    assert found == spans(retried(), delivery(ended_ms=4_240.0, total_ms=4_300.0), (AT + 4_205, AT + 4_400))


def test_names_and_attributes_are_those_of_the_genai_conventions() -> None:
    root = spans([event(finish_reason="stop", endpoint="completions")], delivery(endpoint="completions"), None)[0]
    wanted = {
        "gen_ai.operation.name": "text_completion", "gen_ai.request.model": "m", "gen_ai.usage.input_tokens": 100,
        "gen_ai.usage.output_tokens": 11, "gen_ai.usage.cache_read.input_tokens": 60,
        "gen_ai.response.finish_reasons": ("stop",), "http.response.status_code": 200,
    }  # fmt: skip
    assert wanted.items() <= root.attributes.items()
    failed = spans([event(outcome="failed", error_code="engine_error")], None, None)[0]
    assert failed.attributes["error.type"] == failed.error == "engine_error"


def test_a_caller_s_trace_is_gone_on_with() -> None:
    found = spans([event(traceparent=PARENT)], delivery(traceparent=PARENT), None)
    assert (found[0].trace_id, found[0].parent) == (0x0AF7651916CD43DD8448EB211C80319C, 0xB7AD6B7169203331)
    assert all(span.trace_id == found[0].trace_id for span in found)


def test_a_refusal_and_a_service_s_request_have_what_is_known() -> None:
    refused = spans([], delivery(outcome="refused", code="overloaded", status=529, ended_ms=0.0), None)
    assert set(tree(refused)) == {"edge", "admission"} and refused[0].error == "overloaded"
    assert set(tree(spans([event()], None, None))) == {"queue 1", "attempt 1", "dispatch 1", "prefill 1", "decode 1"}


@pytest.mark.parametrize(
    ("changes", "told", "is_kept"),
    [
        ({}, {}, False),
        ({"traceparent": PARENT}, {"traceparent": PARENT}, True),
        ({"traceparent": PARENT[:-1] + "0"}, {"traceparent": PARENT[:-1] + "0"}, False),
        ({}, {"total_ms": 30_000.0}, True),
        ({"ended_at_ms": AT + 30_000}, {}, True),
        ({"attempt": 2}, {}, True),
        ({"outcome": "lost"}, {}, True),
        ({"outcome": "cancelled"}, {"outcome": "cancelled"}, False),
        ({}, {"outcome": "failed"}, True),
        ({}, {"outcome": "refused"}, False),
    ],
)
def test_what_failed_or_was_slow_is_kept_whatever_the_share(
    changes: dict[str, Any], told: dict[str, Any], is_kept: bool
) -> None:
    assert kept([event(**changes)], delivery(**told), sample=0.0, slow_ms=30_000) == is_kept
    assert kept([event(**changes)], delivery(**told), sample=1.0, slow_ms=30_000) or "traceparent" in told


def test_the_share_is_kept_and_the_same_by_every_ledger() -> None:
    made = [Delivery(request_id=ids.request_id(), tenant="t", outcome="completed") for _ in range(4_000)]
    taken = [kept([], each, sample=0.25, slow_ms=30_000) for each in made]
    assert 850 < sum(taken) < 1_150
    assert taken == [kept([], each, sample=0.25, slow_ms=30_000) for each in made]


def names(found: list[Span]) -> list[str]:
    return [span.name for span in found]


def test_parts_come_in_any_order_and_are_joined() -> None:
    first, second = retried()
    for order in ((0, 1, 2), (2, 1, 0), (1, 2, 0)):
        traces = Traces(sample=1.0, slow_ms=30_000)
        parts = [
            lambda traces: traces.attempt(first, AT, 0),
            lambda traces: traces.attempt(second, AT, 0),
            lambda traces: traces.delivery(delivery(attempt=2, ended_ms=4_240.0), 0),
        ]
        for number in order[:2]:
            parts[number](traces)
            assert traces.take(1) == []
        parts[order[2]](traces)
        assert {"attempt 1", "attempt 2", "relay"} <= set(names(traces.take(2)))
        assert traces.take(10**9) == []


def test_of_a_submit_over_the_bus_the_tree_waits_for_its_last_attempt() -> None:
    traces = Traces(sample=1.0, slow_ms=30_000)
    first, second = retried()
    traces.delivery(delivery(**SUBMITTED), 0)
    assert traces.take(WAIT_MS) == []
    traces.attempt(msgspec.structs.replace(first, retryable=True), AT, WAIT_MS)
    assert traces.take(2 * WAIT_MS) == []
    traces.attempt(second, AT, 2 * WAIT_MS)
    found = traces.take(2 * WAIT_MS)
    assert {"edge", "admission", "attempt 1", "attempt 2"} <= set(names(found)) and "relay" not in names(found)
    assert found[0].end_ms == second.ended_at_ms and not found[0].error
    assert "http.response.status_code" not in found[0].attributes
    traces.delivery(delivery(**SUBMITTED), 0)
    assert traces.take(RETRY_MS) == [] and traces.take(RETRY_MS * 2) == [], "nobody knows what became of it"


def test_what_never_comes_is_not_waited_for_for_ever() -> None:
    traces = Traces(sample=1.0, slow_ms=30_000)
    traces.attempt(event(), AT, 0)
    assert traces.take(WAIT_MS - 1) == [] and "attempt 1" in names(traces.take(WAIT_MS))
    traces.attempt(event(**LOST, retryable=True), AT, 0)
    assert traces.take(WAIT_MS) == [] and "attempt 1" in names(traces.take(RETRY_MS))
    for _ in range(PENDING_MAX + 10):
        traces.attempt(event(request_id=ids.request_id()), AT, 0)
    assert len(traces.take(1)) and len(traces._pending) == PENDING_MAX
