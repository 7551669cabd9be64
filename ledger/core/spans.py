"""A finished request as the spans of one trace, after OpenTelemetry's GenAI conventions; pure.

Spans are made at the end, from what was stored: no process on a request's way pays for tracing, and what failed or was
slow is always kept, whatever share of the others is. Ids are made of the request's own, so that whoever makes a
request's spans, twice or in parts, makes the same tree.
"""

import hashlib
import uuid
from collections.abc import Sequence
from typing import NamedTuple

from contracts import traceparent
from contracts.messages.attempts import AttemptEvent
from contracts.messages.deliveries import Delivery

Value = str | int | float | bool | tuple[str, ...]

PROVIDER = "headrace"
"""gen_ai.provider.name"""
_OPERATIONS = {"completions": "text_completion", "embeddings": "embeddings"}
"""By endpoint, where it is not ``chat``."""
_RATIO_BITS = 56
"""Of a trace id that W3C has be random."""


class Span(NamedTuple):
    """Times are Unix ms, by the clock of the model's owner. ``parent``: 0 for a root."""

    name: str
    trace_id: int
    span_id: int
    parent: int
    start_ms: float
    end_ms: float
    attributes: dict[str, Value]
    error: str = ""
    """A code: the span failed."""
    links: tuple[int, ...] = ()
    """Spans of the same trace: the attempts before."""


def kept(attempts: Sequence[AttemptEvent], delivery: Delivery | None, *, sample: float, slow_ms: float) -> bool:
    """Whether a request is traced: its share is, its caller's trace is, it failed, was tried again, or was slow."""
    known: Delivery | AttemptEvent = delivery if delivery is not None else attempts[-1]
    parent = traceparent.parse(known.traceparent)
    if parent is not None and parent.sampled:
        return True
    number = _trace_id(known.request_id, parent) & ((1 << _RATIO_BITS) - 1)
    if parent is None and number < sample * (1 << _RATIO_BITS):
        return True
    if delivery is not None and (delivery.outcome == "failed" or delivery.total_ms >= slow_ms):
        return True
    last = attempts[-1] if attempts else None
    return last is not None and (
        last.attempt > 1
        or last.outcome not in ("completed", "cancelled")
        or last.ended_at_ms - last.admitted_at_ms >= slow_ms
    )


def spans(attempts: Sequence[AttemptEvent], delivery: Delivery | None, stored: tuple[int, int] | None) -> list[Span]:
    """Of one request, root first. ``attempts`` are in order; at least one of both is there.

    ``stored``: when the bus had stored its last end, and when the ledger had.
    """
    known: Delivery | AttemptEvent = delivery if delivery is not None else attempts[-1]
    made = _Maker(known.request_id, traceparent.parse(known.traceparent))
    last = attempts[-1] if attempts else None
    before_ms = delivery.upload_ms + delivery.edge_ms + delivery.admission_ms if delivery else 0.0
    admitted_ms = float(last.admitted_at_ms) if last and last.admitted_at_ms else 0.0
    start_ms = admitted_ms - before_ms if admitted_ms else float(uuid.UUID(known.request_id).int >> 80)
    ended_ms = float(last.ended_at_ms) if last else start_ms
    end_ms = max(start_ms + delivery.total_ms, ended_ms) if delivery else ended_ms
    error = _error(last, delivery)
    root = made.span(_name(known), 0, start_ms, end_ms, _attributes(last, delivery), error=error)
    if delivery is not None:
        asked_ms = start_ms + delivery.upload_ms + delivery.edge_ms
        made.span("edge", root, start_ms, asked_ms, {"headrace.upload_ms": delivery.upload_ms})
        if delivery.admission_ms:
            made.span("admission", root, asked_ms, asked_ms + delivery.admission_ms, {})
    since_ms, before = admitted_ms, 0
    for event in attempts:
        made.span(f"queue {event.attempt}", root, since_ms, event.dispatched_at_ms or event.ended_at_ms, {})
        if event.dispatched_at_ms:
            before = _attempt(made, event, root, before)
        since_ms = event.ended_at_ms
    if delivery is not None and delivery.ended_ms:
        relayed_ms = max(ended_ms, start_ms + delivery.ended_ms)
        made.span("relay", root, ended_ms, relayed_ms, {})
        made.span("caller", root, relayed_ms, end_ms, {"headrace.blocked_ms": delivery.blocked_ms})
    if stored is not None:
        made.span("ledger", root, stored[0], max(stored), {})
    return made.spans


class _Maker:
    def __init__(self, request_id: str, parent: traceparent.TraceParent | None) -> None:
        self._request_id = request_id
        self._trace_id = _trace_id(request_id, parent)
        self._remote = parent.span_id if parent else 0
        self.spans: list[Span] = []

    def span(
        self,
        name: str,
        parent: int,
        start_ms: float,
        end_ms: float,
        attributes: dict[str, Value],
        *,
        error: str = "",
        links: tuple[int, ...] = (),
    ) -> int:
        """Add one; gives its id."""
        key = f"{self._request_id} {name if parent else ''}"
        span_id = int.from_bytes(hashlib.blake2b(key.encode(), digest_size=8).digest(), "big") or 1
        of = parent or self._remote
        end_ms = max(start_ms, end_ms)
        self.spans.append(Span(name, self._trace_id, span_id, of, start_ms, end_ms, attributes, error, links))
        return span_id


def _trace_id(request_id: str, parent: traceparent.TraceParent | None) -> int:
    return parent.trace_id if parent is not None else uuid.UUID(request_id).int


def _attempt(made: _Maker, event: AttemptEvent, root: int, before: int) -> int:
    name = f"attempt {event.attempt}"
    facts: dict[str, Value] = {
        "headrace.attempt": event.attempt,
        "headrace.outcome": event.outcome,
        "headrace.worker": event.worker,
        "headrace.version": event.version,
        "headrace.reporter": event.reporter,
    }
    failed = event.outcome not in ("completed", "cancelled")
    error = (event.error_code or event.outcome) if failed else ""
    links = (before,) if before else ()
    start, ended = event.dispatched_at_ms, event.ended_at_ms
    span = made.span(name, root, start, ended, facts, error=error, links=links)
    number = event.attempt
    if event.started_at_ms:
        made.span(f"dispatch {number}", span, start, event.started_at_ms, {})
        cached: dict[str, Value] = {"gen_ai.usage.cache_read.input_tokens": event.cached_tokens}
        made.span(f"prefill {number}", span, event.started_at_ms, event.first_token_at_ms or ended, cached)
    if event.first_token_at_ms:
        tokens: dict[str, Value] = {"gen_ai.usage.output_tokens": event.completion_tokens}
        made.span(f"decode {number}", span, event.first_token_at_ms, ended, tokens)
    return span


def operation(endpoint: str) -> str:
    """gen_ai.operation.name"""
    return _OPERATIONS.get(endpoint, "chat")


def _name(known: Delivery | AttemptEvent) -> str:
    """``{operation} {model}``, as the conventions have it."""
    return f"{operation(known.endpoint)} {known.model}".strip()


def _attributes(last: AttemptEvent | None, delivery: Delivery | None) -> dict[str, Value]:
    known: Delivery | AttemptEvent = delivery if delivery is not None else last  # type: ignore[assignment]
    found: dict[str, Value] = {
        "gen_ai.operation.name": operation(known.endpoint),
        "gen_ai.provider.name": PROVIDER,
        "gen_ai.request.model": known.model,
        "headrace.request_id": known.request_id,
        "headrace.tenant": known.tenant,
    }
    if last is not None:
        found |= {
            "gen_ai.response.model": last.model,
            "gen_ai.usage.input_tokens": last.prompt_tokens,
            "gen_ai.usage.output_tokens": last.completion_tokens,
            "gen_ai.usage.cache_read.input_tokens": last.cached_tokens,
            "headrace.version": last.version,
            "headrace.priority": last.priority,
        }
        if last.finish_reason:
            found["gen_ai.response.finish_reasons"] = (last.finish_reason,)
    if delivery is not None:
        found["gen_ai.request.stream"] = delivery.stream
        if delivery.status:
            found["http.response.status_code"] = delivery.status
    if error := _error(last, delivery):
        found["error.type"] = error
    return found


def _error(last: AttemptEvent | None, delivery: Delivery | None) -> str:
    """The code with which its caller was left; empty when all was well, or it left itself."""
    if delivery is not None and delivery.saw_the_end:
        return (delivery.code or "failed") if delivery.outcome in ("failed", "refused") else ""
    if last is not None and last.outcome not in ("completed", "cancelled"):
        return last.error_code or last.outcome
    return ""
