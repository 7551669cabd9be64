"""Outcomes of attempts, and how they read: the terminal event, and the frame that closes the stream.

Which outcome an attempt has is decided in `core`; what follows a retryable one is the scheduler's to say.
"""

from typing import Literal

import msgspec

from contracts.errors import TABLE
from contracts.messages.attempts import AttemptEvent
from contracts.messages.base import Outcome, RequestFacts, TokenCounts, fields_of
from contracts.messages.control import SERVICE_FAULTS, WITHDRAWN
from contracts.messages.frames import EndData, ErrorData
from contracts.messages.request import RequestEnvelope, WorkItem
from contracts.tokens import reserved
from worker.engines.base import Counts, EngineFailure

TOKENIZER_MISMATCH = "tokenizer mismatch"
ERROR_MESSAGE_MAX = 500
"""Characters of an engine's message that are kept."""


class AttemptOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """How an attempt ends, decided once. ``code``: of contracts.errors.TABLE; ``status``: the engine's, of HTTP."""

    kind: Outcome
    code: str = ""
    message: str = ""
    param: str | None = None
    status: int = 0
    retry: Literal["never", "unsent", "always"] = "never"
    """``unsent``: only while a streaming caller has got no chunk."""
    engine_death: bool = False
    billable: bool = True
    """Whether the caller pays for what was generated, where the kind of the outcome is paid for at all."""

    @property
    def by_caller(self) -> bool:
        """Whether its end is the caller's own doing: it got what it asked for, left, or asked for what cannot be."""
        return self.billable and (self.kind == "completed" or TABLE[self.code].status < 500)


COMPLETED = AttemptOutcome(kind="completed")
SHUTTING_DOWN = AttemptOutcome(
    kind="failed", code="shutting_down", message="the worker is shutting down", retry="unsent"
)
NO_ENGINE = AttemptOutcome(kind="failed", code="unavailable", message="the worker's engine is down", retry="always")
STALLED = AttemptOutcome(kind="failed", code="engine_error", message="the generation makes no progress", retry="always")
LATE = AttemptOutcome(kind="expired", code="deadline_exceeded", message="No first token within the deadline.")


def cancelled(reason: str) -> AttemptOutcome:
    """Stopped by the scheduler's order."""
    billable = reason not in SERVICE_FAULTS
    return AttemptOutcome(kind="cancelled", code="cancelled", message=reason, billable=billable)


def other_tokenizer(theirs: str, ours: str) -> AttemptOutcome:
    """The prompt was counted by another tokenizer than this worker's; both by their fingerprints."""
    return AttemptOutcome(
        kind="failed",
        code="unavailable",
        message=f"{TOKENIZER_MISMATCH}: counted by {theirs[:16]}, served by {ours[:16]}",
        retry="always",
    )


def failed(failure: EngineFailure) -> AttemptOutcome:
    """The generation raised ``failure``."""
    return AttemptOutcome(
        kind="failed",
        code=failure.code if failure.code in TABLE else "engine_error",
        message=failure.message[:ERROR_MESSAGE_MAX],
        param=failure.param,
        status=failure.status,
        retry="always" if failure.retryable or failure.engine_death else "never",
        engine_death=failure.engine_death,
    )


def engine_lost(reason: str) -> AttemptOutcome:
    """Of all that ran in an engine that died or hangs."""
    return failed(EngineFailure("engine_error", reason, retryable=True, engine_death=True))


def reserved_tokens(request: RequestEnvelope) -> int:
    """Tokens that admission reserved for the request: the most that it can occupy."""
    return reserved(request).total


def terminal_event(
    item: WorkItem,
    counts: Counts,
    outcome: AttemptOutcome,
    *,
    worker: str,
    frames: int,
    chunks: int,
    pulled_at_ms: int,
    started_at_ms: int,
    now_ms: int,
    accused: int = 0,
) -> AttemptEvent:
    """The attempt's row, after ``frames`` frames with ``chunks`` chunks among them.

    Billed is what completed, and what its caller cancelled after the first token. A retryable one gets no closing
    frame. Its times are the dispatch's, by the owner's clock, and what has passed since the pull by ours: what lies
    between the two, milliseconds, counts to neither.
    """
    request = item.request
    late = outcome.kind == "expired" and started_at_ms > 0
    base_ms = item.dispatched_at_ms - pulled_at_ms
    unsent = not (request.stream and chunks)
    retryable = outcome.retry == "always" or (outcome.retry == "unsent" and unsent)
    paid_for = outcome.kind == "completed" or (outcome.kind == "cancelled" and counts.completion_tokens > 0)
    return AttemptEvent(
        **fields_of(RequestFacts, request),
        **fields_of(TokenCounts, counts),
        attempt=item.attempt,
        version=item.version,
        outcome=outcome.kind,
        reporter="worker",
        worker=worker,
        finish_reason="" if outcome.kind == "failed" else counts.finish_reason,
        error_code=outcome.code,
        error_message=outcome.message,
        withdrawn=outcome.kind == "cancelled" and outcome.message == WITHDRAWN,
        retryable=retryable,
        engine_death=outcome.engine_death,
        accused=accused if outcome.engine_death else 0,
        body_hash=request.body_hash if outcome.engine_death or item.suspect_tokens or item.attempt > 1 else "",
        billable=paid_for and outcome.billable and request.arm != "shadow",
        reasoning_tokens=counts.reasoning_tokens,
        reserved_tokens=reserved_tokens(request),
        spent_input_tokens=request.prompt_tokens if (outcome.by_caller or late) and not retryable else 0,
        last_seq=frames - 1 if retryable else frames,
        admitted_at_ms=request.admitted_at_ms,
        dispatched_at_ms=item.dispatched_at_ms,
        started_at_ms=started_at_ms and base_ms + started_at_ms,
        first_token_at_ms=counts.first_token_at_ms and base_ms + counts.first_token_at_ms,
        ended_at_ms=base_ms + now_ms,
        pause_ms_max=counts.pause_ms_max,
        arm=request.arm,
        client_request_id=request.client_request_id,
        traceparent=request.traceparent,
    )


def closing_data(outcome: AttemptOutcome, event: AttemptEvent) -> EndData | ErrorData:
    """What the frame that closes the stream says: the same as the stored event."""
    if outcome.kind in ("failed", "expired"):
        return ErrorData(code=outcome.code, message=outcome.message, param=outcome.param, status=outcome.status)
    return event.end
