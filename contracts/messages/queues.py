"""A model's live queues, as its owner sees them."""

from typing import Annotated

from contracts.messages.base import MANY, Epoch, Message, Name
from contracts.messages.control import WorkerHeartbeat


class TenantQueue(Message, frozen=True, kw_only=True, omit_defaults=False):
    """One tenant's line of a model's live queue."""

    tenant: Name
    waiting: int
    waiting_tokens: int
    running: int
    reserved_tokens: int
    served_counter: float
    """Virtual token counter: weighted tokens served."""
    oldest_wait_ms: int


class ClockSkew(Message, frozen=True, kw_only=True, omit_defaults=False):
    """How far a process's wall clock is ahead (negative: behind) of the owner's, which counts from the bus's."""

    process: Name
    ahead_ms: int


class QueueAnswer(Message, frozen=True, kw_only=True, omit_defaults=False):
    """A model's live queues, as its owner sees them."""

    model: Name
    owner: Name
    epoch: Epoch
    waiting: int
    running: int
    reserved_tokens: int
    workers: Annotated[list[WorkerHeartbeat], MANY]
    tenants: Annotated[list[TenantQueue], MANY]
    clocks: Annotated[list[ClockSkew], MANY] = []
    """Processes whose clocks are a second or more apart from the owner's."""
