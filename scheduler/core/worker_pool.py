"""The workers of one model: what each can take, what it holds, and who is dead.

Silence is counted in the observer's own ticks, which travel through the bus to the same subscription as the
heartbeats: while those do not arrive, nobody is lost (DESIGN.md section 7).
"""

from collections.abc import Iterator
from typing import NamedTuple

from contracts.messages.base import Epoch
from contracts.messages.control import Progress, WorkerHeartbeat


class Load(NamedTuple):
    """What a request asks of a worker, and what of it is reserved there."""

    choices: int
    tokens: int
    slots: int
    kv_tokens: int


class Worker:
    """One worker incarnation as the scheduler sees it."""

    __slots__ = ("adopted", "beat", "blamed", "held", "kv_reserved", "last_tick", "slots_reserved", "suspects", "work")

    def __init__(self, beat: WorkerHeartbeat, tick: int) -> None:
        self.beat = beat
        self.last_tick = tick
        self.work: dict[str, Load] = {}
        """By request id: the attempts dispatched here."""
        self.slots_reserved = 0
        self.kv_reserved = 0
        self.suspects: set[str] = set()
        """Suspect requests placed here that have no first token yet."""
        self.blamed: set[str] = set()
        """Suspects under which the last engine here died."""
        self.held: set[str] = set()
        """Request ids that the worker itself said it holds."""
        self.adopted: dict[str, None] = {}
        """Request ids of work that an earlier owner dispatched here, until the worker knows our epoch."""

    def reserve(self, request_id: str, load: Load) -> None:
        """Take up room, in place of what the request took up before."""
        self._unreserve(request_id)
        self.work[request_id] = load
        self.slots_reserved += load.slots
        self.kv_reserved += load.kv_tokens

    def blames_another(self, request_id: str) -> bool:
        """Whether a death here is put down to a suspect other than this request."""
        return bool((self.suspects | self.blamed) - {request_id}) and request_id not in self.suspects

    def release(self, request_id: str, *, died: bool = False) -> None:
        if died and request_id in self.suspects:
            self.blamed.add(request_id)
        self._unreserve(request_id)
        self.work.pop(request_id, None)
        self.suspects.discard(request_id)
        self.held.discard(request_id)

    def _unreserve(self, request_id: str) -> None:
        if (load := self.work.get(request_id)) is not None:
            self.slots_reserved -= load.slots
            self.kv_reserved -= load.kv_tokens


class Pool:
    """All workers of a model. ``patience_ms``: how long a request that fits nobody may be passed by smaller ones.

    The rule for large requests: one that fits no worker though slots are free is passed by smaller ones for
    ``patience_ms``; then it claims the worker with the least reserved, which takes nothing else until it fits. So a
    large request waits, once it is its turn, at most its patience plus the longest running generation, and blocks one
    worker only.
    """

    def __init__(self, *, epoch: Epoch, lost_ticks: int, kv_overbooking: float, patience_ms: int) -> None:
        self.workers: dict[str, Worker] = {}
        self.evicted: dict[str, int] = {}
        """Worker -> tick of its eviction; a name never comes back."""
        self.tick = 0
        self.kv_overbooking = kv_overbooking
        self._epoch = epoch
        self._lost_ticks = lost_ticks
        self._patience_ms = patience_ms
        self._claims: dict[str, str] = {}
        """Worker -> the large request that it is kept for."""

    def seen(self, beat: WorkerHeartbeat) -> tuple[Worker, list[Progress]]:
        """Take in a heartbeat; gives the worker and the progress of attempts that it says it holds."""
        worker = self.workers.get(beat.worker)
        if worker is None:
            worker = self.workers[beat.worker] = Worker(beat, self.tick)
        size = worker.beat.slots, worker.beat.kv_tokens
        worker.beat = beat
        worker.last_tick = self.tick
        if size != (beat.slots, beat.kv_tokens):  # Known by its work only until now, or its engine is a new one.
            for request_id, load in worker.work.items():
                worker.reserve(request_id, self.load(worker, load.choices, load.tokens))
        worker.held = {progress.request_id for progress in beat.in_flight}
        return worker, beat.in_flight

    def expect(self, name: str, model: str, version: str) -> Worker:
        """A worker known only from its work (after a takeover): lost unless it is heard."""
        worker = self.workers.get(name)
        if worker is None:
            silent = WorkerHeartbeat(worker=name, model=model, version=version, state="starting")
            worker = self.workers[name] = Worker(silent, self.tick)
        return worker

    def silent(self) -> Iterator[Worker]:
        """Workers that were not heard for ``lost_ticks`` of our own ticks."""
        for worker in list(self.workers.values()):
            if self.tick - worker.last_tick > self._lost_ticks:
                yield worker

    def evict(self, worker: Worker) -> None:
        self.workers.pop(worker.beat.worker, None)
        self._claims.pop(worker.beat.worker, None)
        if len(self.evicted) > 4096:
            del self.evicted[next(iter(self.evicted))]
        self.evicted[worker.beat.worker] = self.tick

    def usable(self, worker: Worker) -> bool:
        """Ready, and has acknowledged this owner's epoch."""
        return worker.beat.state == "ready" and worker.beat.epoch >= self._epoch

    def unacknowledged(self) -> bool:
        """Whether some live worker has not acknowledged the epoch; nothing is dispatched meanwhile."""
        return any(worker.beat.epoch < self._epoch for worker in self.workers.values())

    def has_room(self) -> bool:
        return any(self.usable(w) and w.slots_reserved < w.beat.slots for w in self.workers.values())

    def place(self, key: str, *, choices: int, tokens: int, version: str, suspect: bool) -> Worker | None:
        """The least loaded worker that can take the request now, or None."""
        best: Worker | None = None
        best_load = 0.0
        for worker in self.workers.values():
            if not self.usable(worker) or (version and worker.beat.version != version):
                continue
            if self._claims.get(worker.beat.worker, key) != key:
                continue
            if suspect and worker.suspects:
                continue
            wanted = self.load(worker, choices, tokens)
            if worker.slots_reserved + wanted.slots > worker.beat.slots:
                continue
            if worker.kv_reserved + wanted.kv_tokens > self._kv_limit(worker):
                continue
            load = max(
                worker.slots_reserved / max(1, worker.beat.slots),
                worker.kv_reserved / max(1, self._kv_limit(worker)),
            )
            if best is None or load < best_load:
                best, best_load = worker, load
        return best

    def assign(self, worker: Worker, request_id: str, *, choices: int, tokens: int, suspect: bool) -> None:
        """Reserve room for the request's attempt."""
        worker.blamed.clear()
        worker.reserve(request_id, self.load(worker, choices, tokens))
        if suspect:
            worker.suspects.add(request_id)

    def load(self, worker: Worker, choices: int, tokens: int) -> Load:
        """What the request takes up there; one that exceeds a worker runs on it alone."""
        return Load(choices, tokens, min(choices, worker.beat.slots), min(tokens, self._kv_limit(worker)))

    def claim(self, key: str, *, version: str, waited_ms: int) -> None:
        """A request that fits nobody now: after its patience a worker is kept for it."""
        if waited_ms < self._patience_ms or key in self._claims.values():
            return
        free = [
            worker
            for worker in self.workers.values()
            if self.usable(worker)
            and (not version or worker.beat.version == version)
            and worker.beat.worker not in self._claims
            and worker.slots_reserved < worker.beat.slots  # Else nothing fits, and it is only not this one's turn.
        ]
        if free:
            chosen = min(free, key=lambda worker: worker.kv_reserved / max(1, self._kv_limit(worker)))
            self._claims[chosen.beat.worker] = key

    def drop_claim(self, key: str) -> bool:
        """Whether a worker was kept for the request; it is free for others now."""
        for name, claimed in list(self._claims.items()):
            if claimed == key:
                del self._claims[name]
                return True
        return False

    def _kv_limit(self, worker: Worker) -> int:
        return int(worker.beat.kv_tokens * self.kv_overbooking)
