"""How attempts end: the one terminal event, and what could not be used or must not run again."""

from typing import Literal

from contracts.messages.base import (
    Body,
    Line,
    Message,
    Name,
    Outcome,
    RequestFacts,
    Sealed,
    Subject,
    Text,
    Whole,
    fields_of,
)
from contracts.messages.frames import EndData
from contracts.messages.request import RequestEnvelope
from contracts.messages.rollouts import Arm

_GIVEN_BACK = frozenset(("shutting_down", "unavailable"))


class AttemptEvent(RequestFacts, frozen=True, kw_only=True):
    """The one terminal event of an attempt, in ATTEMPTS; also the ledger's row. Attempt 0: never dispatched.

    Ledger key: (request_id, attempt). Times are Unix ms, 0 when the thing never happened; all are of one clock, the
    owner's: what a worker adds are spans, counted from the dispatch.
    """

    attempt: int
    version: Name
    outcome: Outcome
    reporter: Literal["worker", "scheduler"]
    worker: Name = ""
    finish_reason: Name = ""
    error_code: Name = ""
    error_message: Text = ""
    """Names no prompt and no output."""
    withdrawn: bool = False
    """Who asked was told that nothing had begun, and to ask again: its idempotency key may name another request."""
    retryable: bool = False
    """A failed attempt that another worker may repeat."""
    engine_death: bool = False
    """The attempt ended because its engine or worker died."""
    accused: Whole = 0
    """To how many bodies that death is put down, this one among them; 0: to others, or to a copy of it. Counts with
    ``engine_death`` only."""
    body_hash: Line = ""
    """As in the request, where its body died with an engine or worker, now or before, as each attempt but the first may
    have; else empty."""
    billable: bool = False
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    reasoning_tokens: int = 0
    reserved_tokens: int = 0
    """What admission had reserved (contracts.tokens): all prompts, and the maximum output of all choices."""
    spent_input_tokens: int = 0
    """Prompt tokens that stay spent in the tenant's limits, and with them ``completion_tokens``: of what completed, of
    what its caller ended after it was dispatched, before its first token too, and of what its engine had begun when its
    deadline passed. 0: nothing is kept. What is billed is another question (``billable``)."""
    last_seq: int = -1
    """Number of the attempt's last frame, the closing one included."""
    admitted_at_ms: int = 0
    dispatched_at_ms: int = 0
    started_at_ms: int = 0
    """When its engine got it."""
    first_token_at_ms: int = 0
    ended_at_ms: int = 0
    pause_ms_max: int = 0
    """Longest time between two tokens of it, of whichever choices."""
    arm: Arm = ""
    """Which version a roll-out gave the request; ``shadow``: a copy, whose answer nobody sees nor pays for."""
    client_request_id: Line = ""
    traceparent: Line = ""
    """The caller's, as W3C has it; empty when it gave none."""

    @property
    def given_back(self) -> bool:
        """The worker would not run it, through no fault of the request: it drains, or has no engine, or another
        tokenizer.
        """
        return self.outcome == "failed" and self.retryable and self.error_code in _GIVEN_BACK

    @property
    def end(self) -> EndData:
        """What an ``end`` frame says of it."""
        return EndData(**fields_of(EndData, self))


class DeadLetter(Message, frozen=True, kw_only=True):
    """A message that could not be used, in DEAD_LETTERS: why, where it was, and what it was."""

    reason: Text
    subject: Subject
    stream_seq: int
    stored_at_ms: int
    original: Body | None = None
    """The message as text; None when it is not UTF-8."""
    original_base64: Body | None = None
    truncated: bool = False


class Quarantined(Message, frozen=True, kw_only=True):
    """A request that ended too many engines or workers, in QUARANTINE: why, when, itself, and its last end.

    ``request`` comes without its body. ``sealed_body`` is the body, sealed (contracts.sealed), where an operator gave
    the schedulers a public key; empty where not, and for one over a MiB.
    """

    reason: Text
    quarantined_at_ms: int
    request: RequestEnvelope
    last: AttemptEvent
    sealed_body: Sealed = b""
