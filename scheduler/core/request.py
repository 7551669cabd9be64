"""What the scheduler knows of one admitted request; its states and what leads to them are in ``transitions``."""

from array import array
from typing import Any

import msgspec

from contracts.messages.admission import AdmissionRequest
from contracts.messages.control import WITHDRAWN, Progress
from contracts.messages.request import Reply, RequestEnvelope
from contracts.messages.rollouts import Arm
from contracts.prefix import KEY_BYTES
from contracts.tokens import reserved
from scheduler.core.transitions import TRANSITIONS, WAITING, InvalidTransition, State, Trigger

HISTORY_MAX = 16


class Request:
    """One admitted request until its last end is stored."""

    __slots__ = (
        "adopted",
        "attempt",
        "cancel_reason",
        "cancel_sent_at_ms",
        "cancel_waiters",
        "charged",
        "cost",
        "dispatched_at_ms",
        "end_asked",
        "envelope",
        "failures",
        "given_back",
        "gone_since_ms",
        "history",
        "id",
        "joining",
        "prefix",
        "progress",
        "readers",
        "request_seq",
        "state",
        "suspect_tokens",
        "tenant",
        "unconfirmed",
        "was_in_flight",
        "withdrawn",
        "work_attempt",
        "work_seq",
        "worker",
    )

    def __init__(self, envelope: RequestEnvelope) -> None:
        self.envelope = envelope
        """Without a body; before REQUESTS stored it, with an empty reply."""
        self.id = envelope.request_id
        """``request_id`` of all messages about it."""
        self.tenant = envelope.tenant
        """Whose limits it counts against."""
        self.state = State.NEW
        self.cost = reserved(envelope)
        self.prefix = numbers_of(envelope.prefix_keys)
        """Keys of its prompt's blocks, as numbers."""
        self.adopted = False
        """Whether the present attempt was dispatched by an earlier owner."""
        self.attempt = 0
        """Number of the last attempt that was dispatched; 0 before the first."""
        self.failures = 0
        """Attempts that a living engine failed at, and that may be repeated."""
        self.given_back: dict[str, int] = {}
        """Worker that gave an attempt back -> number of loopback heartbeats then."""
        self.worker = ""
        self.request_seq = 0
        """Of its message in REQUESTS; 0: it has none there that is not acknowledged."""
        self.work_attempt = 0
        """Of its last message in WORK."""
        self.work_seq = 0
        """Of its last message in WORK; 0: there was none."""
        self.charged = 0.0
        """Tokens that its tenant's share in the fair queue was charged for the present attempt."""
        self.dispatched_at_ms = 0
        """Of the present attempt; 0 while none runs."""
        self.progress: Progress | None = None
        self.was_in_flight = False
        """Whether the worker of the present attempt said that it has it."""
        self.gone_since_ms = 0
        """Since when its worker or WORK does not have the present attempt any more, though no end of it is known."""
        self.suspect_tokens = 0
        """Of the present attempt, as in its WorkItem."""
        self.end_asked = False
        """Whether ATTEMPTS was asked for that end."""
        self.withdrawn = False
        """Whether who asked has been told that nothing had begun."""
        self.unconfirmed = False
        """Whether a reader left because its publish was not confirmed, and others stayed."""
        self.cancel_reason = ""
        self.cancel_sent_at_ms = 0
        self.cancel_waiters: list[object] = []
        """Handles of cancels that are answered when the end is stored."""
        self.readers: dict[str, str] | None = None
        """Stream -> its owner, of a request with an idempotency key: those that read it, who asked first included."""
        self.joining: list[Any] = []
        """Askings under its idempotency key that wait until it is stored."""
        self.history: list[tuple[int, State, int, Trigger]] = []
        """The last changes: time, state and attempt before, trigger."""

    @classmethod
    def admitted(
        cls, asked: AdmissionRequest, *, version: str, arm: Arm, now_ms: int, publish_within_ms: int, deadline_ms: int
    ) -> "Request":
        """One admitted now, of which REQUESTS holds nothing yet."""
        envelope = RequestEnvelope(  # Field by field: ``fields_of`` costs a sixth of an admission.
            request_id=asked.request_id,
            tenant=asked.tenant,
            key_id=asked.key_id,
            model=asked.model,
            endpoint=asked.endpoint,
            priority=asked.priority,
            stream=asked.stream,
            choices=asked.choices,
            prompt_tokens=asked.prompt_tokens,
            max_output_tokens=asked.max_output_tokens,
            stream_owner=asked.stream_owner,
            version=version,
            pinned=bool(asked.version),
            arm=arm,
            conversation=asked.conversation,
            idempotency=asked.idempotency,
            requested_model=asked.requested_model,
            choice_reason=asked.choice_reason,
            body_bytes=asked.body_bytes,
            body_hash=asked.body_hash,
            admitted_at_ms=now_ms,
            publish_within_ms=publish_within_ms,
            deadline_ms=deadline_ms,
            reply=Reply(subject="", stream=asked.request_id),
        )
        return cls(envelope)

    def stored(self, envelope: RequestEnvelope, seq: int) -> None:
        """REQUESTS holds it: take over what only the message knows. It cannot widen its own reservation."""
        self.request_seq = seq
        self.envelope = msgspec.structs.replace(
            self.envelope,
            reply=envelope.reply,
            tokenizer_fingerprint=envelope.tokenizer_fingerprint,
            client_request_id=envelope.client_request_id,
            traceparent=envelope.traceparent,
            body_digest=envelope.body_digest,
            prefix_caching=envelope.prefix_caching,
            cache_salt=envelope.cache_salt,
            prefix_keys=envelope.prefix_keys,
        )
        self.prefix = numbers_of(envelope.prefix_keys)

    @property
    def is_withdrawn(self) -> bool:
        """Whether its end leaves its idempotency key free: who asked has been told, or is told, to ask again."""
        return self.withdrawn or self.cancel_reason == WITHDRAWN

    @property
    def open_attempt(self) -> int:
        """Number under which the present attempt ends: 0 when nothing was ever dispatched."""
        if self.state in WAITING:
            return self.attempt + 1 if self.attempt else 0
        return self.attempt

    def advance(self, trigger: Trigger, now_ms: int) -> None:
        """The only way to another state; raises InvalidTransition when the table has no such change."""
        following = TRANSITIONS.get((self.state, trigger))
        if following is None:
            raise InvalidTransition(f"{trigger} does not follow: {self}")
        if trigger is not Trigger.ADMITTED:  # The beginning of every history that shows no other.
            self.history.append((now_ms, self.state, self.attempt, trigger))
            if len(self.history) > HISTORY_MAX:
                del self.history[0]
        self.state = following

    def __str__(self) -> str:
        changes = (f"{at_ms} {state}, attempt {attempt}: {trigger}" for at_ms, state, attempt, trigger in self.history)
        return f"request {self.id} is {self.state} after [{'; '.join(changes)}]"


def numbers_of(keys: bytes) -> "array[int]":
    """Keys of blocks as numbers, which are quicker to compare."""
    return array("Q", keys[: len(keys) // KEY_BYTES * KEY_BYTES])
