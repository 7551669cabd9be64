"""How an attempt ends: the event that the scheduler proposes, what may follow it, and what the caller is told.

Decided from stored events and the request alone, so that a later owner comes to the same.
"""

import msgspec

from contracts.messages.attempts import AttemptEvent
from contracts.messages.base import Outcome, RequestFacts, TokenCounts, fields_of
from contracts.messages.control import SERVICE_FAULTS
from contracts.messages.frames import EndData, ErrorData
from contracts.tokens import Cost
from scheduler.core.accused import Body
from scheduler.core.request import Request

FAILURES_MAX = 2
"""Attempts that a living engine failed at."""
DISPATCHES_MAX = 8
"""Attempts in all, those that ended through no fault of the request included: bounds a ping-pong of lost workers. A
guess."""


def is_void(event: AttemptEvent) -> bool:
    """The attempt gave nothing that counts: it may be repeated while the caller has seen no token."""
    return event.outcome == "lost" or (event.outcome == "failed" and event.retryable)


def used(event: AttemptEvent, cached_share: float = 1.0) -> Cost:
    """What the attempt used of its reservation: what was done for a caller who got it, or ended it itself.

    ``cached_share``: what a cached prompt token counts.
    """
    spent = event.spent_input_tokens
    saved = int(min(event.cached_tokens, spent) * (1 - cached_share))
    return Cost(spent - saved, event.completion_tokens if spent else 0)


def served(event: AttemptEvent) -> int:
    """Tokens that the fair queue charges for the attempt: what it used, less cached input."""
    total = used(event).total
    return total - event.cached_tokens if total else 0


def may_retry(request: Request, body: Body, event: AttemptEvent) -> bool:
    """Whether another attempt follows the void ``event``: no stream has had a token, and the bounds are not reached."""
    return (
        not (request.envelope.stream and event.completion_tokens > 0)
        and request.envelope.arm != "shadow"
        and not body.condemned
        and request.failures < FAILURES_MAX
        and request.attempt < DISPATCHES_MAX
    )


def may_have_been_seen(request: Request, event: AttemptEvent) -> bool:
    """Whether the caller may have had text that the void ``event`` does not count: its worker told of none in time."""
    return request.envelope.stream and event.outcome == "lost"


def count(request: Request, event: AttemptEvent, beats: int) -> None:
    """Count the void ``event``; ``beats``: loopback heartbeats so far.

    An attempt that no worker ever had does not count, nor one that its worker gave back; deaths are counted by body
    (``accused``).
    """
    if event.given_back:
        request.given_back[event.worker] = beats
    elif event.reporter == "worker" and not event.engine_death:
        request.failures += 1


def proposed(
    request: Request,
    number: int,
    outcome: Outcome,
    code: str,
    message: str,
    *,
    version: str,
    accused: int | None = None,
    now_ms: int,
) -> AttemptEvent:
    """The terminal event of attempt ``number`` as the scheduler would have it.

    ``accused``: its worker died, and that is put down to so many (AttemptEvent.accused).
    """
    envelope = request.envelope
    lost = outcome == "lost"
    left = outcome == "cancelled" and request.dispatched_at_ms and request.cancel_reason not in SERVICE_FAULTS
    return AttemptEvent(
        **fields_of(RequestFacts, envelope),
        **(fields_of(TokenCounts, request.progress) if request.progress else {}),
        attempt=number,
        version=version,
        outcome=outcome,
        reporter="scheduler",
        worker=request.worker if lost else "",
        error_code=code,
        error_message=message,
        withdrawn=request.is_withdrawn,
        retryable=lost,
        engine_death=accused is not None and request.was_in_flight,
        accused=accused or 0,
        body_hash=envelope.body_hash if accused else "",
        reserved_tokens=request.cost.total,
        spent_input_tokens=envelope.prompt_tokens if left else 0,
        admitted_at_ms=envelope.admitted_at_ms,
        dispatched_at_ms=request.dispatched_at_ms if number else 0,
        ended_at_ms=now_ms,
        arm=envelope.arm,
        client_request_id=envelope.client_request_id,
        traceparent=envelope.traceparent,
    )


def unreadable(request: Request | None, request_id: str, number: int, model: str) -> AttemptEvent:
    """What is taken for the stored end of attempt ``number`` when nobody can read it: failed for good.

    Where another attempt follows all the same, it counts as a death: three engines must not die for a request.
    """
    code, message = "internal_error", "How the attempt ended cannot be read."
    if request is not None:
        version = request.envelope.version
        event = proposed(request, number, "failed", code, message, version=version, accused=1, now_ms=0)
        return msgspec.structs.replace(event, engine_death=True)
    return AttemptEvent(
        request_id=request_id,
        attempt=number,
        tenant="",  # So that nobody is told of it.
        key_id="",
        model=model,
        version="",
        endpoint="chat/completions",
        priority="interactive",
        outcome="failed",
        reporter="scheduler",
        error_code=code,
        error_message=message,
        engine_death=True,
        accused=1,
    )


def quarantined(request_id: str, body: Body) -> str:
    """What the caller of a quarantined request is told; and who repeats it."""
    return f"Request {request_id}: its body ended {body.deaths} workers or engines and is not tried again; change it."


def end_data(event: AttemptEvent) -> EndData | None:
    """What the worker's ``end`` frame says of the attempt that ended with ``event``; None when it sends none."""
    if event.reporter != "worker" or event.outcome not in ("completed", "cancelled"):
        return None
    return event.end


def final_error(request: Request, body: Body, event: AttemptEvent) -> ErrorData | None:
    """What the caller is told when ``event`` is the request's last; None when it finished."""
    if event.outcome == "completed" or (event.outcome == "cancelled" and event.reporter == "worker"):
        return None
    if event.outcome == "cancelled":
        return ErrorData(code="cancelled", message=event.error_message)
    if event.outcome == "expired":
        return ErrorData(code="deadline_exceeded", message=event.error_message)
    if body.condemned:
        return ErrorData(code="request_quarantined", message=quarantined(request.id, body))
    if event.outcome == "lost":
        return ErrorData(
            code="worker_lost", message=f"The worker of request {request.id}, attempt {event.attempt}, was lost."
        )
    message = event.error_message or "The attempt failed."
    return ErrorData(
        code=event.error_code or "engine_error", message=f"{message} (request {request.id}, attempt {event.attempt})"
    )
