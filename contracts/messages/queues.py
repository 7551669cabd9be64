"""A model's live queues, as its owner sees them."""

from collections.abc import Sequence
from typing import Annotated, ClassVar, Literal

import msgspec
from msgspec import Meta

from contracts.messages.base import FEW, MANY, SMALL, Epoch, Line, Message, Name, Priority, RequestId
from contracts.messages.control import RequestState, WorkerHeartbeat

REQUESTS_MAX = 200
"""Open requests in one answer."""


class QueueQuery(Message, frozen=True, kw_only=True):
    """Anyone -> scheduler, ``queues.v1.<model>``: the live queues, and some of the open requests if they are wanted."""

    BYTES_MAX: ClassVar[int | None] = SMALL

    requests: Annotated[int, Meta(ge=0, le=REQUESTS_MAX)] = 0
    """How many of the open requests to list, the oldest first."""
    request_id: RequestId = ""
    """Only this one of them."""


class OpenRequest(Message, frozen=True, kw_only=True, omit_defaults=False):
    """A request that was admitted and has not ended; nothing of its text."""

    request_id: RequestId
    tenant: Name
    key_id: Line
    version: Line
    priority: Priority
    state: RequestState
    attempt: int
    """0 before the first."""
    worker: Line
    """Of the present attempt; empty while it waits."""
    age_ms: int
    """Since it was admitted."""
    prompt_tokens: int
    max_output_tokens: int
    completion_tokens: int
    """As the worker's last heartbeat says."""


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


ReplicaTerm = Literal["throughput", "kv_cache", "slots", "running"]


class Replicas(Message, frozen=True, kw_only=True, omit_defaults=False):
    """How many workers a model should have, and why; the rule is in scheduler/core/replicas.py."""

    model: Name = ""
    desired: int = 0
    reason: Name = "unknown"
    """The bound that decides (a ReplicaTerm), ``replicas_min``, ``replicas_max``, ``activation`` (a first request, and
    nothing is measured yet), ``idle``, ``stepping_up`` (more are needed than twice as many), ``holding`` (fewer are,
    but not for long enough), or ``unknown``: the owner has just come.
    """
    needed: Annotated[dict[Name, float], FEW] = {}
    """Workers by each ReplicaTerm, without the spare ones."""
    ready: int = 0
    loading: int = 0
    leaving: int = 0
    warm_up_ms: int = 0
    """Until a worker that is started is ready, as last measured; 0: unknown."""

    @property
    def known(self) -> bool:
        return self.reason != "unknown"


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
    requests: Annotated[list[OpenRequest], MANY] = []
    """Of open ones, as many as were asked for."""
    replicas: Replicas = Replicas()


def merged(answers: Sequence[QueueAnswer]) -> QueueAnswer:
    """A model's, of those of its shards, the first of which names owner and epoch."""
    if len(answers) == 1:
        return answers[0]
    tenants: dict[str, TenantQueue] = {}
    for line in (line for answer in answers for line in answer.tenants):
        tenants[line.tenant] = _both(tenants[line.tenant], line) if line.tenant in tenants else line
    return msgspec.structs.replace(
        answers[0],
        waiting=sum(each.waiting for each in answers),
        running=sum(each.running for each in answers),
        reserved_tokens=sum(each.reserved_tokens for each in answers),
        workers=[beat for each in answers for beat in each.workers],
        tenants=[tenants[name] for name in sorted(tenants)],
        clocks=list({clock.process: clock for each in answers for clock in each.clocks}.values()),
        requests=sorted((it for each in answers for it in each.requests), key=lambda it: -it.age_ms),
        replicas=_all([each.replicas for each in answers]),
    )


def _both(one: TenantQueue, other: TenantQueue) -> TenantQueue:
    return TenantQueue(
        tenant=one.tenant,
        waiting=one.waiting + other.waiting,
        waiting_tokens=one.waiting_tokens + other.waiting_tokens,
        running=one.running + other.running,
        reserved_tokens=one.reserved_tokens + other.reserved_tokens,
        served_counter=one.served_counter + other.served_counter,
        oldest_wait_ms=max(one.oldest_wait_ms, other.oldest_wait_ms),
    )


def _all(shards: Sequence[Replicas]) -> Replicas:
    """The reason is that of the shard that needs the most; nothing is known while one of them knows nothing."""
    unknown = next((each for each in shards if not each.known), None)
    most = unknown or max(shards, key=lambda each: each.desired)
    bounds = {bound for each in shards for bound in each.needed}
    return msgspec.structs.replace(
        most,
        model=shards[0].model,
        desired=sum(each.desired for each in shards),
        needed={bound: sum(each.needed.get(bound, 0.0) for each in shards) for bound in sorted(bounds)},
        ready=sum(each.ready for each in shards),
        loading=sum(each.loading for each in shards),
        leaving=sum(each.leaving for each in shards),
        warm_up_ms=max(each.warm_up_ms for each in shards),
    )
