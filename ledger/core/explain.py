"""What became of a request, in plain words for those who support its caller; pure."""

from collections.abc import Sequence
from datetime import UTC, datetime

from contracts.messages.attempts import AttemptEvent
from contracts.messages.deliveries import Delivery
from contracts.messages.rollouts import RolloutEvent
from ledger.core import money

_WHY_CANCELLED = {
    "client_disconnected": "the caller hung up",
    "client_cancelled": "the caller cancelled it",
    "slow_reader": "the caller read too slowly",
    "publish_unconfirmed": "its gateway could not make sure that it was stored",
    "relay_failed": "its gateway could not get the whole answer",
    "worker_lost": "its gateway was told that the worker was lost",
    "shutdown": "its gateway was shut down",
    "operator_cancelled": "an operator cancelled it",
    "gateway_lost": "its gateway was lost",
    "stream_owner_lost": "the service that asked for it was lost",
}


def explain(
    attempts: Sequence[AttemptEvent],
    amount_pico: int,
    currency: str,
    others: Sequence[str] = (),
    rollouts: Sequence[RolloutEvent] = (),
) -> list[str]:
    """A line for the request, one or two for each attempt, and one for what is charged. ``attempts`` is not empty.

    ``others``: request ids to which the caller gave the same id before. ``rollouts``: what became of the model's.
    """
    first, last = attempts[0], attempts[-1]
    lines = [
        f"Request {first.request_id} of tenant {first.tenant} (key {first.key_id}): {first.endpoint} with model "
        f"{first.model}, {first.priority}, {'streaming' if first.stream else 'not streaming'}."
    ]
    if first.choice_reason:
        asked = f"The caller asked for {first.requested_model}. " if first.requested_model != first.model else ""
        lines.append(f"{asked}Model {first.model} answers: {first.choice_reason}.")
    if first.client_request_id:
        lines.append(f"The caller's own id is {first.client_request_id}.")
    if others:
        lines.append(f"The caller gave that id before, too: {', '.join(others)}.")
    if first.admitted_at_ms:
        admitted = f"Admitted at {_instant(first.admitted_at_ms)}; {first.reserved_tokens} tokens reserved."
        lines.append(f"{admitted} Times count from then.")
    lines += rolled_out(first, rollouts)
    for number, event in enumerate(attempts):
        lines += _attempt(event, followed=number + 1 < len(attempts))
    if not last.attempt:
        lines.append("It was never dispatched to a worker.")
    elif last.outcome in ("failed", "lost"):
        lines.append(f"No attempt followed attempt {last.attempt}: {_why_no_more(attempts)}.")
    lines.append(_charge(attempts, amount_pico, currency))
    return lines


_ARMS = {
    "stable": "A roll-out left it to the stable version",
    "canary": "A roll-out gave it to the new version",
    "shadow": "It is a copy that a roll-out made for the new version; nobody saw the answer",
}


def rolled_out(first: AttemptEvent, rollouts: Sequence[RolloutEvent]) -> list[str]:
    """Which side of a roll-out the request was on, and how that ended, with the numbers."""
    if not first.arm:
        return []
    begun = [each for each in rollouts if each.news == "started" and each.at_ms <= first.admitted_at_ms]
    if not begun:
        return [f"{_ARMS[first.arm]}."]
    lines = [f"{_ARMS[first.arm]}: it went from {begun[-1].stable} to {begun[-1].to}."]
    for each in rollouts:
        if each.id == begun[-1].id and each.news in ("stopped", "aborted", "promoted", "bad_worker"):
            lines.append(f"That roll-out: {each.news.replace('_', ' ')} at {_instant(each.at_ms)}: {each.reason}")
    return lines


def without_attempts(delivery: Delivery) -> list[str]:
    """Of a request that no attempt followed, as its gateway saw it."""
    line = (
        f"Request {delivery.request_id} of tenant {delivery.tenant} (key {delivery.key_id}): {delivery.endpoint} with "
        f"model {delivery.model or '?'}, {delivery.outcome} "
        + (f"with status {delivery.status}" if delivery.status else "over the bus")
    )
    lines = [f"{line} ({delivery.code})." if delivery.code else f"{line}."]
    if delivery.client_request_id:
        lines.append(f"The caller's own id is {delivery.client_request_id}.")
    if not delivery.saw_the_end:
        return [*lines, "It has not ended, as far as the ledger knows."]
    return [*lines, "The ledger holds no attempt of it. Nothing is billed."]


def _why_no_more(attempts: Sequence[AttemptEvent]) -> str:
    last = attempts[-1]
    deaths = sum(event.engine_death for event in attempts)
    if last.engine_death and deaths > 1:
        return f"the request ended {deaths} workers or engines and was quarantined"
    if last.stream and last.completion_tokens:
        return "tokens had been produced for a streaming caller, so a repetition would not have been safe"
    if not last.retryable:
        return "the request ended with an error"
    if sum(event.outcome == "failed" and not (event.engine_death or event.given_back) for event in attempts) > 1:
        return "it had been tried twice, which is the most"
    return "the scheduler gave the request up, or has not decided yet"


def _attempt(event: AttemptEvent, *, followed: bool) -> list[str]:
    end = f"{event.outcome} {_after(event.admitted_at_ms, event.ended_at_ms)} at {_instant(event.ended_at_ms)}"
    end += f"{_because(event)}, as the {event.reporter} reports."
    if not event.attempt:
        return [f"Before any dispatch: {end}"]
    if not event.worker and not event.dispatched_at_ms:
        return [f"Before attempt {event.attempt} was dispatched: {end}"]
    place = f"worker {event.worker}" if event.worker else "no worker yet"
    line = f"Attempt {event.attempt}: version {event.version or '?'} on {place}"
    if event.dispatched_at_ms:
        line += f", dispatched {_after(event.admitted_at_ms, event.dispatched_at_ms)}"
    if event.first_token_at_ms:
        line += f", first token {_after(event.admitted_at_ms, event.first_token_at_ms)}"
    billed = "billed" if event.billable else "not billed"
    again = " Another attempt followed." if followed else ""
    return [f"{line}, {end}", f"  {_tokens(event)}; {billed}.{_death(event)}{again}"]


def _because(event: AttemptEvent) -> str:
    if event.finish_reason and event.outcome == "completed":
        return f" (finish reason {event.finish_reason})"
    if event.outcome == "cancelled":
        known = (f"{code}: {words}" for code, words in _WHY_CANCELLED.items() if code in event.error_message)
        why = next(known, event.error_message)
        return f" ({why})" if why else ""
    parts = [part for part in (event.error_code, event.error_message) if part]
    return f" ({': '.join(parts)})" if parts else ""


def _tokens(event: AttemptEvent) -> str:
    tokens = (
        f"{event.prompt_tokens} prompt tokens ({event.cached_tokens} cached), {event.completion_tokens} completion "
        f"tokens ({event.reasoning_tokens} reasoning)"
    )
    if event.reporter == "worker":
        return tokens
    if not event.prompt_tokens:
        return "no tokens known from its worker's heartbeats"
    return f"at least {tokens}, by its worker's last heartbeat"


def _death(event: AttemptEvent) -> str:
    if not event.engine_death:
        return ""
    return " Its worker died, stood still or was cut off." if event.outcome == "lost" else " Its engine died or hung."


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
