"""What became of a request, in plain words for those who support its caller; pure."""

from collections.abc import Sequence
from datetime import UTC, datetime

from contracts.messages import AttemptEvent
from ledger import money

_END = {
    "completed": "completed",
    "cancelled": "cancelled",
    "failed": "failed",
    "lost": "lost",
    "expired": "expired",
}


def explain(attempts: Sequence[AttemptEvent], amount_pico: int, currency: str) -> list[str]:
    """A line for the request, one or two for each attempt, and one for what is charged. ``attempts`` is not empty."""
    first, last = attempts[0], attempts[-1]
    lines = [
        f"Request {first.request_id} of tenant {first.tenant} (key {first.key_id}): {first.endpoint} with model "
        f"{first.model}, {first.priority}, {'streaming' if first.stream else 'not streaming'}.",
    ]
    if first.client_request_id:
        lines.append(f"The caller's own id is {first.client_request_id}.")
    if first.admitted_at_ms:
        lines.append(f"Admitted at {_instant(first.admitted_at_ms)}; {first.reserved_tokens} tokens reserved.")
    for number, event in enumerate(attempts):
        lines += _attempt(event, followed=number + 1 < len(attempts))
    if not last.attempt:
        lines.append("It was never dispatched to a worker.")
    elif last.outcome in ("failed", "lost"):
        lines.append(
            f"No attempt followed attempt {last.attempt}: "
            + (
                "tokens had been produced for a streaming caller, so a repetition would not have been safe."
                if last.stream and last.completion_tokens
                else "the request ended with an error."
                if not last.retryable
                else "the scheduler gave the request up, or has not decided yet."
            )
        )
    lines.append(_charge(attempts, amount_pico, currency))
    return lines


def _attempt(event: AttemptEvent, *, followed: bool) -> list[str]:
    if not event.attempt:
        how = f"Before any dispatch: {_END[event.outcome]} at {_instant(event.ended_at_ms)}"
        return [f"{how}{_because(event)}, as the {event.reporter} reports."]
    place = f"version {event.version or '?'} on worker {event.worker or 'not known'}"
    line = f"Attempt {event.attempt}: {place}"
    if event.dispatched_at_ms:
        line += f", dispatched {_after(event.admitted_at_ms, event.dispatched_at_ms)}"
    if event.first_token_at_ms:
        line += f", first token {_after(event.admitted_at_ms, event.first_token_at_ms)}"
    line += (
        f", {_END[event.outcome]} {_after(event.admitted_at_ms, event.ended_at_ms)} at {_instant(event.ended_at_ms)}"
    )
    if event.finish_reason:
        line += f" (finish reason {event.finish_reason})"
    lines = [f"{line}{_because(event)}, as the {event.reporter} reports."]
    tokens = (
        f"{event.prompt_tokens} prompt tokens ({event.cached_tokens} cached), {event.completion_tokens} completion "
        f"tokens ({event.reasoning_tokens} reasoning)"
    )
    billed = "billed" if event.billable else "not billed"
    death = " Its engine or worker died." if event.engine_death else ""
    again = " Another attempt followed." if followed else ""
    return [*lines, f"  {tokens}; {billed}.{death}{again}"]


def _because(event: AttemptEvent) -> str:
    parts = [part for part in (event.error_code, event.error_message) if part]
    return f" ({': '.join(parts)})" if parts else ""


def _charge(attempts: Sequence[AttemptEvent], amount_pico: int, currency: str) -> str:
    billed = [event for event in attempts if event.billable]
    if not billed:
        return "Nothing is billed."
    prompt = sum(event.prompt_tokens for event in billed)
    completion = sum(event.completion_tokens for event in billed)
    numbers = " and ".join(str(event.attempt) for event in billed)
    cost = f"{money.decimal(amount_pico)} {currency}" if currency else "no price holds for it"
    return f"Billed: {prompt} prompt and {completion} completion tokens of attempt {numbers}; {cost}."


def _after(from_ms: int, to_ms: int) -> str:
    return f"after {(to_ms - from_ms) / 1000:.3f} s" if from_ms and to_ms else "at an unknown time"


def _instant(at_ms: int) -> str:
    if not at_ms:
        return "an unknown time"
    return datetime.fromtimestamp(at_ms / 1000, UTC).strftime("%Y-%m-%d %H:%M:%S.") + f"{at_ms % 1000:03d} UTC"
