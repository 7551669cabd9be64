"""A request's life in the scheduler: its states, the transition table, and what is known of it."""

import enum

import msgspec

from contracts.messages.admission import AdmissionRequest
from contracts.messages.control import Progress
from contracts.messages.request import Reply, RequestEnvelope
from contracts.tokens import reserved


class State(enum.Enum):
    ADMITTED = "admitted"
    QUEUED = "queued"
    DISPATCHING = "dispatching"
    DISPATCHED = "dispatched"
    RUNNING = "running"
    ENDING = "ending"


class InvalidTransition(Exception):
    """An event that a request's state cannot have; carries the request's recent history."""


class Request:
    """One admitted request until its end is stored."""

    __slots__ = (
        "adopted",
        "attempt",
        "cancel_reason",
        "cancel_sent_at_ms",
        "cancel_waiters",
        "charged",
        "cost",
        "counted",
        "deaths",
        "dispatched_at_ms",
        "envelope",
        "history",
        "progress",
        "request_seq",
        "spared",
        "state",
        "was_held",
        "work_seq",
        "worker",
    )

    def __init__(self, envelope: RequestEnvelope, state: State) -> None:
        self.envelope = envelope
        """Without a body; before REQUESTS stored it, with an empty reply."""
        self.state = state
        self.cost = reserved(
            prompt_tokens=envelope.prompt_tokens,
            max_output_tokens=envelope.max_output_tokens,
            choices=envelope.choices,
        )
        self.adopted = False
        """Whether the present attempt was dispatched by an earlier owner."""
        self.attempt = 0
        """Number of the last attempt that was dispatched; 0 before the first."""
        self.counted = 0
        """Attempts that a worker held and that ended without a result."""
        self.deaths = 0
        """Attempts that ended by the death of their engine or worker; above 0 the request is a suspect."""
        self.worker = ""
        self.request_seq = 0
        self.work_seq = 0
        self.charged = 0.0
        self.dispatched_at_ms = 0
        self.progress: Progress | None = None
        self.was_held = False
        """Whether the worker of the present attempt said that it holds it."""
        self.spared = False
        """Whether the death of the present attempt's engine or worker is put down to a suspect beside it."""
        self.cancel_reason = ""
        self.cancel_sent_at_ms = 0
        self.cancel_waiters: list[object] = []
        self.history: list[str] = []

    @classmethod
    def admitted(cls, asked: AdmissionRequest, *, now_ms: int, publish_by_ms: int, deadline_at_ms: int) -> "Request":
        """One admitted now, of which REQUESTS holds nothing yet."""
        envelope = RequestEnvelope(
            request_id=asked.request_id,
            tenant=asked.tenant,
            key_id=asked.key_id,
            model=asked.model,
            endpoint=asked.endpoint,
            stream=asked.stream,
            prompt_tokens=asked.prompt_tokens,
            max_output_tokens=asked.max_output_tokens,
            choices=asked.choices,
            priority=asked.priority,
            admitted_at_ms=now_ms,
            publish_by_ms=publish_by_ms,
            deadline_at_ms=deadline_at_ms,
            reply=Reply(subject="", stream=asked.request_id),
            stream_owner=asked.stream_owner,
            version=asked.version,
        )
        return cls(envelope, State.ADMITTED)

    def stored(self, envelope: RequestEnvelope, seq: int) -> None:
        """REQUESTS holds it: take over what only the message knows. It cannot widen its own reservation."""
        self.request_seq = seq
        self.envelope = msgspec.structs.replace(
            self.envelope,
            reply=envelope.reply,
            tokenizer_fingerprint=envelope.tokenizer_fingerprint,
            client_request_id=envelope.client_request_id,
            body_object=envelope.body_object,
            prefix_caching=envelope.prefix_caching,
        )

    @property
    def id(self) -> str:
        return self.envelope.request_id

    @property
    def tenant(self) -> str:
        return self.envelope.tenant

    @property
    def open_attempt(self) -> int:
        """Number under which the present attempt ends: 0 when nothing was ever dispatched."""
        if self.state in (State.ADMITTED, State.QUEUED):
            return self.attempt + 1 if self.attempt else 0
        return self.attempt

    def move(self, state: State, now_ms: int) -> None:
        self.history.append(f"{now_ms} {self.state.value} -> {state.value} attempt {self.attempt}")
        del self.history[:-16]
        self.state = state


WITH_WORKER = (State.DISPATCHING, State.DISPATCHED, State.RUNNING)

WAITING = (State.ADMITTED, State.QUEUED)
"""States that count against queue limits."""

TRANSITIONS: dict[tuple[State, str], State] = {
    (State.ADMITTED, "stored"): State.QUEUED,
    (State.ADMITTED, "end"): State.ENDING,
    (State.QUEUED, "dispatch"): State.DISPATCHING,
    (State.QUEUED, "end"): State.ENDING,
    (State.DISPATCHING, "work_stored"): State.DISPATCHED,
    (State.DISPATCHING, "progress"): State.RUNNING,
    (State.DISPATCHING, "end"): State.ENDING,
    (State.DISPATCHED, "progress"): State.RUNNING,
    (State.DISPATCHED, "end"): State.ENDING,
    (State.RUNNING, "work_stored"): State.RUNNING,
    (State.RUNNING, "progress"): State.RUNNING,
    (State.RUNNING, "end"): State.ENDING,
    (State.ENDING, "work_stored"): State.ENDING,
    (State.DISPATCHING, "retry"): State.QUEUED,
    (State.DISPATCHED, "retry"): State.QUEUED,
    (State.RUNNING, "retry"): State.QUEUED,
    (State.ENDING, "retry"): State.QUEUED,
}
"""(state, what happened) -> next state. Any stored terminal event of the present attempt ends or retries."""
