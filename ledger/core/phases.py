"""Where the time of a request went: its phases, and one sentence; pure.

What happened between admission and end is told by the attempts, by their owner's clock; what came before and after by
the gateway, by its own. Only spans are put together, never instants of two clocks.
"""

from collections.abc import Sequence
from typing import get_args

from contracts.messages.attempts import AttemptEvent
from contracts.messages.deliveries import Delivery
from contracts.messages.usage import Phase, PhaseName, RequestTimes

SHOWN_SHARE = 0.25
"""A phase below this share of the whole is no reason of its own, unless it is the longest."""

Spans = dict[PhaseName, float | None]


def times(attempts: Sequence[AttemptEvent], delivery: Delivery | None) -> RequestTimes:
    """Of one request; at least one of both is there. ``attempts`` are in order."""
    spans = _spans(attempts, delivery)
    last = attempts[-1] if attempts else None
    total = _total_ms(attempts, delivery)
    known: Delivery | AttemptEvent = delivery if delivery is not None else attempts[-1]
    return RequestTimes(
        request_id=known.request_id,
        tenant=known.tenant,
        model=last.model if last else known.model,
        version=last.version if last else known.version,
        outcome=_outcome(last, delivery),
        code=(delivery.code if delivery else "") or (last.error_code if last else ""),
        attempts=len([each for each in attempts if each.attempt]),
        prompt_tokens=(last.prompt_tokens if last else 0) or (delivery.prompt_tokens if delivery else 0),
        cached_tokens=last.cached_tokens if last else 0,
        completion_tokens=last.completion_tokens if last else 0,
        total_ms=round(total, 1),
        first_token_ms=_first_token_ms(last, delivery),
        phases=[Phase(name=name, ms=None if ms is None else round(ms, 1)) for name, ms in spans.items()],
        why=_why(spans, total, last, delivery),
    )


def _outcome(last: AttemptEvent | None, delivery: Delivery | None) -> str:
    """What its caller saw; without a gateway's word, how its last attempt ended."""
    if last is not None and (delivery is None or not delivery.saw_the_end):
        return last.outcome
    return delivery.outcome if delivery is not None else ""


def _first_token_ms(last: AttemptEvent | None, delivery: Delivery | None) -> float | None:
    if delivery is not None and delivery.saw_the_end:
        return round(delivery.first_chunk_ms, 1) or None
    if last is not None and last.first_token_at_ms:
        before = _before_ms(delivery) if delivery is not None else 0.0
        return round(before + max(0, last.first_token_at_ms - last.admitted_at_ms), 1)
    return None


def _total_ms(attempts: Sequence[AttemptEvent], delivery: Delivery | None) -> float:
    if delivery is None:
        return _served_ms(attempts)
    return delivery.total_ms if delivery.saw_the_end else _before_ms(delivery) + _served_ms(attempts)


def _before_ms(delivery: Delivery) -> float:
    """From its first byte to its admission."""
    return delivery.upload_ms + delivery.edge_ms + delivery.admission_ms


def _served_ms(attempts: Sequence[AttemptEvent]) -> float:
    """From admission to the last end."""
    if not attempts or not attempts[-1].admitted_at_ms:
        return 0.0
    return float(max(0, attempts[-1].ended_at_ms - attempts[-1].admitted_at_ms))


def _spans(attempts: Sequence[AttemptEvent], delivery: Delivery | None) -> Spans:
    """By phase, in order; None where nobody knows. ``retry`` is there only where there was one."""
    spans: Spans = {"edge": None, "admission": None}
    if delivery is not None:
        spans |= {"edge": delivery.edge_ms, "admission": delivery.admission_ms}
    spans |= _of_attempts(attempts)
    spans |= {"relay": None, "caller": None}
    if delivery is not None and delivery.saw_the_end:
        served = _before_ms(delivery) + _served_ms(attempts)
        spans["relay"] = max(0.0, delivery.ended_ms - served) if delivery.ended_ms else 0.0
        after = max(0.0, delivery.total_ms - delivery.ended_ms) if delivery.ended_ms else 0.0
        spans["caller"] = delivery.upload_ms + after
        if not attempts and not delivery.ended_ms:  # Never admitted: what is left is the gateway's own.
            spans["edge"] = max(0.0, delivery.total_ms - delivery.upload_ms - delivery.admission_ms)
    return spans


def _of_attempts(attempts: Sequence[AttemptEvent]) -> Spans:
    spans: dict[PhaseName, float | None] = {"queue": 0.0, "dispatch": 0.0, "prefill": 0.0, "decode": 0.0}
    if not attempts:
        return dict.fromkeys(spans)
    vain = queue = 0.0
    since = attempts[0].admitted_at_ms
    for event in attempts:
        queue += _span(since, event.dispatched_at_ms or event.ended_at_ms)
        since = event.ended_at_ms
    for event in attempts[:-1]:
        vain += _span(event.dispatched_at_ms, event.ended_at_ms)
    last = attempts[-1]
    spans["queue"] = queue
    if last.dispatched_at_ms:
        begun = last.started_at_ms or (last.dispatched_at_ms if last.first_token_at_ms else last.ended_at_ms)
        prefilled = last.first_token_at_ms or (last.ended_at_ms if last.started_at_ms else begun)
        spans["dispatch"] = _span(last.dispatched_at_ms, begun)
        spans["prefill"] = _span(begun, prefilled)
        spans["decode"] = _span(prefilled, last.ended_at_ms)
    return spans | ({"retry": vain} if len(attempts) > 1 else {})


def _span(from_ms: int, to_ms: int) -> float:
    return float(max(0, to_ms - from_ms)) if from_ms and to_ms else 0.0


def _why(spans: Spans, total_ms: float, last: AttemptEvent | None, delivery: Delivery | None) -> str:
    """One sentence: what took longest, and what that means."""
    known = sorted(((ms, name) for name, ms in spans.items() if ms), reverse=True)
    ended = _ended(last, delivery)
    if not known or total_ms <= 0:
        return f"It took no time that anybody measured{ended}."
    reasons = [
        f"{ms / 1000:.3f} s ({ms / total_ms:.0%}) {_REASONS[name]}{_detail(name, ms, last, delivery)}"
        for ms, name in known
        if (ms, name) == known[0] or ms >= SHOWN_SHARE * total_ms
    ]
    return f"It took {total_ms / 1000:.3f} s{ended}: {', and '.join(reasons)}{_slow_reader(spans, delivery)}."


_REASONS: dict[PhaseName, str] = {
    "edge": "checking it and counting its tokens at the gateway",
    "admission": "until the scheduler answered whether it may run",
    "queue": "waiting for a worker with room and for its turn",
    "dispatch": "until its worker began",
    "prefill": "reading the prompt",
    "decode": "generating",
    "retry": "in attempts that gave nothing, before another one followed",
    "relay": "for its frames on their way to the gateway",
    "caller": "waiting for its caller to send or to read",
}
assert set(_REASONS) == set(get_args(PhaseName))  # noqa: S101 (a new phase needs its words)


def _detail(name: PhaseName, ms: float, last: AttemptEvent | None, delivery: Delivery | None) -> str:
    if name == "prefill" and last is not None and last.prompt_tokens:
        return f" ({last.prompt_tokens - last.cached_tokens} of {last.prompt_tokens} tokens were not cached)"
    if name == "decode" and last is not None and last.completion_tokens > last.choices:
        each = ms / max(1.0, last.completion_tokens / max(1, last.choices) - 1)
        return f" {last.completion_tokens} tokens, {each:.1f} ms each"
    if name == "edge" and delivery is not None and delivery.prompt_tokens:
        return f" ({delivery.prompt_tokens} tokens)"
    return ""


def _slow_reader(spans: Spans, delivery: Delivery | None) -> str:
    """Said beside: what a caller does not read while its answer is generated delays nothing but itself."""
    if delivery is None or delivery.blocked_ms < SHOWN_SHARE * delivery.total_ms:
        return ""
    return f"; writing waited {delivery.blocked_ms / 1000:.3f} s for its caller to read"


def _ended(last: AttemptEvent | None, delivery: Delivery | None) -> str:
    outcome = _outcome(last, delivery)
    if outcome == "completed":
        return ""
    code = (delivery.code if delivery else "") or (last.error_code if last else "")
    return (
        f" and was {outcome}"
        if outcome in ("refused", "cancelled", "lost")
        else f" and {outcome}" + (f" ({code})" if code else "")
    )
