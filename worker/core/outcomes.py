"""How an attempt ends, and what that reads like: the terminal event and the frame that closes the stream."""

from typing import Literal

import msgspec

from contracts.errors import TABLE
from contracts.messages.attempts import AttemptEvent
from contracts.messages.base import Outcome, RequestFacts, TokenCounts, fields_of
from contracts.messages.frames import EndData, ErrorData
from contracts.messages.request import RequestEnvelope, WorkItem
from contracts.tokens import reserved
from worker.engines.base import Counts, EngineFailure

ERROR_MESSAGE_MAX = 500
"""Characters of an engine's message that are kept."""


class Ending(msgspec.Struct, frozen=True, kw_only=True):
    """How an attempt ends; decided once."""

    outcome: Outcome
    code: str = ""
    message: str = ""
    param: str | None = None
    status: int = 0
    retry: Literal["never", "unsent", "always"] = "never"
    """``unsent``: only while a streaming caller has got no chunk."""
    engine_death: bool = False


SHUTTING_DOWN = Ending(outcome="failed", code="shutting_down", message="the worker is shutting down", retry="unsent")
NO_ENGINE = Ending(outcome="failed", code="unavailable", message="the worker's engine is down", retry="always")
STALLED = Ending(outcome="failed", code="engine_error", message="the generation makes no progress", retry="always")


def failed(failure: EngineFailure) -> Ending:
    """The ending of a generation that raised ``failure``."""
    return Ending(
        outcome="failed",
        code=failure.code if failure.code in TABLE else "engine_error",
        message=failure.message[:ERROR_MESSAGE_MAX],
        param=failure.param,
        status=failure.status,
        retry="always" if failure.retryable or failure.engine_death else "never",
        engine_death=failure.engine_death,
    )


def engine_lost(reason: str) -> Ending:
    """The ending of all that ran in an engine that died or hangs."""
    return failed(EngineFailure("engine_error", reason, retryable=True, engine_death=True))


def reserved_tokens(request: RequestEnvelope) -> int:
    """Tokens that admission reserved for the request: the most that it can occupy."""
    return reserved(request).total


def terminal_event(
    item: WorkItem,
    counts: Counts,
    ending: Ending,
    *,
    worker: str,
    frames: int,
    chunks: int,
    now_ms: int,
) -> AttemptEvent:
    """The attempt's row, after ``frames`` frames with ``chunks`` chunks among them.

    Billed is what completed, and what was cancelled after its first token. A retryable one gets no closing
    frame.
    """
    request = item.request
    unsent = not (request.stream and chunks)
    retryable = ending.retry == "always" or (ending.retry == "unsent" and unsent)
    cancelled = ending.outcome == "cancelled"
    return AttemptEvent(
        **fields_of(RequestFacts, request),
        **fields_of(TokenCounts, counts),
        attempt=item.attempt,
        version=item.version,
        outcome=ending.outcome,
        reporter="worker",
        worker=worker,
        finish_reason="" if ending.outcome == "failed" else counts.finish_reason,
        error_code=ending.code,
        error_message=ending.message,
        retryable=retryable,
        engine_death=ending.engine_death,
        billable=ending.outcome == "completed" or (cancelled and counts.completion_tokens > 0),
        reasoning_tokens=counts.reasoning_tokens,
        reserved_tokens=reserved_tokens(request),
        last_seq=frames - 1 if retryable else frames,
        admitted_at_ms=request.admitted_at_ms,
        dispatched_at_ms=item.dispatched_at_ms,
        first_token_at_ms=counts.first_token_at_ms,
        ended_at_ms=now_ms,
        client_request_id=request.client_request_id,
    )


def closing_data(ending: Ending, event: AttemptEvent) -> EndData | ErrorData:
    """What the frame that closes the stream says: the same as the stored event."""
    if ending.outcome == "failed":
        return ErrorData(code=ending.code, message=ending.message, param=ending.param, status=ending.status)
    return event.end
