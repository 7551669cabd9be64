"""The live view: pools, workers and queues of every model, as their owners told them last. Pure.

Made by gateways for who asks them, and by ``headrace top``. Token rates are over the last seconds. What nobody tells is
null, never 0.
"""

from collections import deque
from typing import Literal

import msgspec

from contracts.messages.control import WorkerHeartbeat, WorkerState
from contracts.messages.queues import ClockSkew, QueueAnswer, TenantQueue

RATE_S = 5.0
"""Token rates are means over so long: long enough to be steady with heartbeats each half second."""
RATE_S_MIN = 0.9


class LiveWorker(msgspec.Struct, kw_only=True):
    """A worker, as its last heartbeat says."""

    worker: str
    state: WorkerState
    reason: str
    """What it waits for, what failed, or why it takes nothing."""
    slots: int
    """Sequences that its engine runs at once."""
    running: int
    waiting: int
    kv_tokens: int
    """Capacity of the KV cache in tokens."""
    kv_tokens_used: int
    prompt_tokens_per_s: float | None
    """Computed ones; cached ones are left out. Null until it was seen for a second."""
    output_tokens_per_s: float | None


class LivePool(msgspec.Struct, kw_only=True):
    """The workers of one version; sums are of those that are ready."""

    version: str
    ready: int
    desired: int | None
    """Workers that there should be; null where nobody knows, and while several versions share the requests."""
    slots: int
    running: int
    waiting: int
    kv_tokens: int
    kv_tokens_used: int
    prompt_tokens_per_s: float | None
    output_tokens_per_s: float | None
    workers: list[LiveWorker]


class LiveModel(msgspec.Struct, kw_only=True):
    """A model; all but its names is null or empty where its owner does not answer, and ``error`` says so."""

    model: str
    stable: str
    """The version that is served unless a roll-out, a pin or an alias says otherwise."""
    error: str
    owner: str | None
    waiting: int | None
    running: int | None
    reserved_tokens: int | None
    oldest_wait_ms: int | None
    pools: list[LivePool]
    tenants: list[TenantQueue]
    clocks: list[ClockSkew]
    """Processes whose clocks are a second or more apart from the owner's."""


class LiveView(msgspec.Struct, kw_only=True):
    """Everything that runs now, as one gateway was told."""

    at_ms: int
    """Unix ms."""
    gateway: str
    bus: Literal["connected", "disconnected"]
    models: list[LiveModel]


class Rates:
    """Tokens a second of each worker, from the totals in its heartbeats. Pure."""

    def __init__(self) -> None:
        self._samples: dict[str, deque[tuple[float, int, int]]] = {}

    def take(self, workers: list[WorkerHeartbeat], at_s: float) -> None:
        """What the workers of one model said; those that are silent for RATE_S are forgotten."""
        for beat in workers:
            samples = self._samples.setdefault(beat.worker, deque())
            totals = (beat.prefill_tokens_total, beat.decode_tokens_total)
            if samples and any(now < before for now, before in zip(totals, samples[-1][1:], strict=True)):
                samples.clear()  # its engine began anew
            samples.append((at_s, *totals))
        for worker, samples in list(self._samples.items()):
            while len(samples) > 1 and at_s - samples[0][0] > RATE_S:
                samples.popleft()
            if at_s - samples[-1][0] > RATE_S:
                del self._samples[worker]

    def of(self, worker: str) -> tuple[float | None, float | None]:
        """Of prompts, of output."""
        samples = self._samples.get(worker)
        if not samples or (span_s := samples[-1][0] - samples[0][0]) < RATE_S_MIN:
            return None, None
        first, last = samples[0], samples[-1]
        return round((last[1] - first[1]) / span_s, 1), round((last[2] - first[2]) / span_s, 1)


def live_model(name: str, stable: str, told: QueueAnswer | str | None, rates: Rates | None) -> LiveModel:
    """A model whose owner has ``told`` how it stands, or why it says nothing."""
    if not isinstance(told, QueueAnswer):
        error = told or "its owner has not been asked yet"
        return LiveModel(
            model=name,
            stable=stable,
            error=error,
            owner=None,
            waiting=None,
            running=None,
            reserved_tokens=None,
            oldest_wait_ms=None,
            pools=[],
            tenants=[],
            clocks=[],
        )
    desired = told.replicas.desired if told.replicas.known else None
    by_version: dict[str, list[LiveWorker]] = {stable: []}
    for beat in sorted(told.workers, key=lambda beat: beat.worker):
        by_version.setdefault(beat.version, []).append(_worker(beat, rates))
    return LiveModel(
        model=name,
        stable=stable,
        error="",
        owner=told.owner,
        waiting=told.waiting,
        running=told.running,
        reserved_tokens=told.reserved_tokens,
        oldest_wait_ms=max((each.oldest_wait_ms for each in told.tenants), default=0),
        pools=[
            _pool(version, workers, desired if len(by_version) == 1 else None)
            for version, workers in by_version.items()
        ],
        tenants=told.tenants,
        clocks=told.clocks,
    )


def _worker(beat: WorkerHeartbeat, rates: Rates | None) -> LiveWorker:
    prompt, output = (None, None) if rates is None else rates.of(beat.worker)
    return LiveWorker(
        worker=beat.worker,
        state=beat.state,
        reason=beat.reason,
        slots=beat.slots,
        running=beat.running,
        waiting=beat.waiting,
        kv_tokens=beat.kv_tokens,
        kv_tokens_used=beat.kv_tokens_used,
        prompt_tokens_per_s=prompt,
        output_tokens_per_s=output,
    )


def _pool(version: str, workers: list[LiveWorker], desired: int | None) -> LivePool:
    ready = [worker for worker in workers if worker.state == "ready"]
    return LivePool(
        version=version,
        ready=len(ready),
        desired=desired,
        slots=sum(worker.slots for worker in ready),
        running=sum(worker.running for worker in workers),
        waiting=sum(worker.waiting for worker in workers),
        kv_tokens=sum(worker.kv_tokens for worker in ready),
        kv_tokens_used=sum(worker.kv_tokens_used for worker in ready),
        prompt_tokens_per_s=_sum([worker.prompt_tokens_per_s for worker in workers]),
        output_tokens_per_s=_sum([worker.output_tokens_per_s for worker in workers]),
        workers=workers,
    )


def _sum(rates: list[float | None]) -> float | None:
    """Of those that are known; null when none is."""
    known = [rate for rate in rates if rate is not None]
    return round(sum(known), 1) if known else None
