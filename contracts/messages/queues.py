"""A model's live queues, as its owner sees them."""

from contracts.messages.base import Epoch, Message
from contracts.messages.control import WorkerHeartbeat


class TenantQueue(Message, frozen=True, kw_only=True, omit_defaults=False):
    """One tenant's line of a model's live queue."""

    tenant: str
    waiting: int
    waiting_tokens: int
    running: int
    reserved_tokens: int
    served_counter: float
    """Virtual token counter: weighted tokens served."""
    oldest_wait_ms: int


class ClockSkew(Message, frozen=True, kw_only=True, omit_defaults=False):
    """How far a process's wall clock is ahead (negative: behind) of the owner's, which counts from the bus's."""

    process: str
    ahead_ms: int


class QueueAnswer(Message, frozen=True, kw_only=True, omit_defaults=False):
    """A model's live queues, as its owner sees them."""

    model: str
    owner: str
    epoch: Epoch
    waiting: int
    running: int
    reserved_tokens: int
    workers: list[WorkerHeartbeat]
    tenants: list[TenantQueue]
    clocks: list[ClockSkew] = []
    """Processes whose clocks are a second or more apart from the owner's."""
