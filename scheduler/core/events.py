"""What the scheduler's core takes in (past tense) and what it wants done (imperative)."""

from typing import Any

import msgspec

from contracts.messages.admission import AdmissionAnswer, AdmissionRequest
from contracts.messages.attempts import AttemptEvent
from contracts.messages.base import Epoch
from contracts.messages.control import (
    CacheChange,
    CancelAnswer,
    CancelRequest,
    ControlAnswer,
    ControlRequest,
    StatusAnswer,
    StreamOwnerHeartbeat,
    WorkerHeartbeat,
    WorkerPulse,
)
from contracts.messages.frames import Frame
from contracts.messages.records import ModelRecord, Spending, TenantRecord
from contracts.messages.request import RequestEnvelope, WorkItem
from contracts.messages.rollouts import RolloutEvent, RolloutPlan, RolloutProgress
from scheduler.core.quota_leases import Ask, Grant


class Event(msgspec.Struct, frozen=True):
    """Base of all events."""


class AdmissionAsked(Event, frozen=True):
    """``handle`` is the shell's; it comes back in the answer."""

    asked: AdmissionRequest
    handle: Any


class RequestStored(Event, frozen=True):
    """A message of REQUESTS, without its body; ``stored_at_ms`` is the bus server's time of storage."""

    envelope: RequestEnvelope
    seq: int
    stored_at_ms: int


class WorkFound(Event, frozen=True):
    """A message of WORK, without its body, read at a takeover or by the sweep."""

    item: WorkItem
    seq: int


class Recovered(Event, frozen=True):
    """The streams have been read; dispatch may begin once the workers know the epoch."""


class WorkStored(Event, frozen=True):
    """WORK holds the attempt under ``seq``."""

    request_id: str
    attempt: int
    seq: int


class WorkRefused(Event, frozen=True):
    """WORK did not confirm the attempt in time, or its body is gone; it may still be stored later."""

    request_id: str
    attempt: int
    body_missing: bool = False


class TerminalStored(Event, frozen=True):
    """ATTEMPTS holds this event, under ``seq``; it is the attempt's end whoever wrote it.

    ``in_order``: all ends before it have been told.
    """

    event: AttemptEvent
    seq: int = 0
    in_order: bool = False


class EndUnreadable(Event, frozen=True):
    """ATTEMPTS holds an end of this attempt that nobody here can read."""

    request_id: str
    attempt: int


class EndMissing(Event, frozen=True):
    """ATTEMPTS was asked (ReadEnd), and holds no end of this attempt."""

    request_id: str
    attempt: int


class WorkSwept(Event, frozen=True):
    """All of WORK was read, and fed: up to the sequence ``newest`` it holds ``found``, perhaps more after it."""

    found: frozenset[int]
    newest: int


class CancelAsked(Event, frozen=True):
    """``tenant`` is the asker's, from the subject."""

    tenant: str
    asked: CancelRequest
    handle: Any


class ControlAnswered(Event, frozen=True):
    """A worker's answer to CancelAttempt; None when it did not answer."""

    request_id: str
    attempt: int
    answer: ControlAnswer | None


class StatusAsked(Event, frozen=True):
    """``tenant`` is the asker's, from the subject."""

    tenant: str
    request_id: str
    handle: Any
    reader: str = ""
    stream_owner: str = ""
    void_below: int = 0


class PulseSeen(Event, frozen=True):
    """A pulse of a worker of this model."""

    pulse: WorkerPulse


class WorkerSeen(Event, frozen=True):
    """A heartbeat of a worker of this model."""

    beat: WorkerHeartbeat


class CacheChanged(Event, frozen=True):
    """What a worker of this model tells of its engine's cache."""

    change: CacheChange


class StreamOwnerSeen(Event, frozen=True):
    """A heartbeat of a stream owner; its name is the subject's."""

    beat: StreamOwnerHeartbeat


class LoopbackSeen(Event, frozen=True):
    """The scheduler's own heartbeat came back over the bus; when its wall clock said that it was sent."""

    sent_at_ms: int = 0


class TimePassed(Event, frozen=True):
    """Deadlines, expiries and repeats are looked at; about ten times a second."""


class TenantChanged(Event, frozen=True):
    """``record`` is None when the tenant was deleted."""

    name: str
    record: TenantRecord | None


class ModelChanged(Event, frozen=True):
    """The registry has another entry for this model."""

    record: ModelRecord


class BudgetSeen(Event, frozen=True):
    """The ledger's word: tokens billed to the tenant in a UTC month, by the ends up to ``covers_seq`` at least."""

    tenant: str
    month: str
    tokens: int
    covers_seq: int = 0


class SpendingSeen(Event, frozen=True):
    """What the owner of a model has told; None: the entry is gone. Of our own model: the owner before us."""

    model: str
    tenant: str
    spending: Spending | None


class SpendingUntold(Event, frozen=True):
    """The bus did not take what was to be told of the tenant."""

    tenant: str


class LeaseExchanged(Event, frozen=True):
    """What came of ExchangeLease; None: nobody knows."""

    tenant: str
    grant: Grant | None


class RolloutChanged(Event, frozen=True):
    """What the operator wants of the model's roll-out; None: there is none. ``progress``: an earlier owner's."""

    plan: RolloutPlan | None
    progress: RolloutProgress | None = None


class Effect(msgspec.Struct, frozen=True):
    """Base of all effects."""


class AnswerAdmission(Effect, frozen=True):
    """Admitted or refused."""

    handle: Any
    answer: AdmissionAnswer


class AnswerCancel(Effect, frozen=True):
    """Durable, or to be asked again."""

    handle: Any
    answer: CancelAnswer


class AnswerStatus(Effect, frozen=True):
    """What the asker may know of the request."""

    handle: Any
    answer: StatusAnswer


class AckRequest(Effect, frozen=True):
    """Remove the message from REQUESTS."""

    seq: int


class StoreWork(Effect, frozen=True):
    """Publish the attempt to WORK; the body is in REQUESTS under ``request_seq`` or in WORK under ``work_seq``."""

    request_id: str
    attempt: int
    worker: str
    version: str
    request_seq: int
    work_seq: int


class DeleteWork(Effect, frozen=True):
    """Remove the message from WORK."""

    seq: int


class DeleteBody(Effect, frozen=True):
    """The request is over: remove its body from BODIES."""

    request_id: str
    tenant: str


class Quarantine(Effect, frozen=True):
    """Move a request that ends engines to QUARANTINE, then remove its messages and body; 0: it has none there."""

    envelope: RequestEnvelope
    last: AttemptEvent
    reason: str
    request_seq: int
    work_seq: int


class StoreTerminal(Effect, frozen=True):
    """Store the event unless the attempt has one already; the core learns the winner by TerminalStored."""

    event: AttemptEvent


class ReadEnd(Effect, frozen=True):
    """Look whether ATTEMPTS holds an end of this attempt; TerminalStored, EndUnreadable or EndMissing follows."""

    request_id: str
    attempt: int


class SendControl(Effect, frozen=True):
    """An order to a worker; for CancelAttempt the answer comes back as ControlAnswered."""

    worker: str
    order: ControlRequest


class RiseAbove(Effect, frozen=True):
    """A worker knows an epoch above ours and refuses us: end the term, the next one's epoch must be greater."""

    epoch: Epoch


class TellSpending(Effect, frozen=True):
    """Let other owners, and the next one, know what is spent and reserved here; SpendingUntold when that fails."""

    tenant: str
    spending: Spending


class ExchangeLease(Effect, frozen=True):
    """Change what is leased of a tenant's limits, which all shards share; LeaseExchanged follows."""

    tenant: str
    ask: Ask


class SendFrame(Effect, frozen=True):
    """A frame of the scheduler's own to a stream owner."""

    subject: str
    frame: Frame


class KeepRollout(Effect, frozen=True):
    """Write how far the roll-out is, for the next owner and for people; a later one replaces it."""

    progress: RolloutProgress


class TellRollout(Effect, frozen=True):
    """Tell everybody what became of the roll-out."""

    event: RolloutEvent


class SetStable(Effect, frozen=True):
    """Make the version the model's stable one; ModelChanged follows."""

    version: str


class StoreCopy(Effect, frozen=True):
    """Store a copy of a request in REQUESTS, for the new version; the body is under ``request_seq``."""

    envelope: RequestEnvelope
    request_seq: int
