"""The workers of one model: what each can take, what it has in flight, and who is dead.

Silence is counted in loopback heartbeats: the scheduler's own, which travel through the bus to the same subscription
as those of the workers. While they do not arrive, nobody is lost. A worker that is heard and does not acknowledge the
owner's epoch, of which each heartbeat of its reminds it, is lost too: nothing could be dispatched meanwhile.

A worker that is alive and late, or whose engine makes no step, is *slow*: what runs there goes on, and nothing more is
placed there. It is given up, as if it were silent, when its event loop has stood still for much longer.

Which of those that can take a request gets it is ``placement``'s.
"""

from collections.abc import Callable, Hashable, Iterable, Iterator
from typing import NamedTuple

from contracts.messages.attempts import AttemptEvent
from contracts.messages.base import Epoch
from contracts.messages.control import CacheChange, Progress, WorkerHeartbeat, WorkerPulse
from scheduler.core.accused import BodyKey, body_key
from scheduler.core.placement import Placement, WorkerLoad
from scheduler.core.prompts import Expected, expected
from scheduler.core.request import Request, numbers_of
from scheduler.core.settings import Settings

EVICTED_MAX = 4096
"""Names of lost workers that are remembered: hours of the worst flapping. A guess."""


class TooLate(Exception):
    """A request could be placed now, and its first token would come after its deadline wherever that was."""


class Load(NamedTuple):
    """What a request asks of a worker, and what of it is reserved there."""

    choices: int
    tokens: int
    slots: int
    kv_tokens: int


def lane(request: Request, *, suspect: bool) -> Hashable:
    """Equal for requests of which a worker takes one only if it takes the other, but for up to twice the size."""
    envelope = request.envelope
    size = envelope.choices.bit_length(), request.cost.total.bit_length()
    return envelope.version, suspect, bool(request.given_back), size


class Worker:
    """One worker incarnation as the scheduler sees it."""

    __slots__ = (
        "acknowledged_at_beat",
        "adopted",
        "beat",
        "bodies",
        "cache_number",
        "heard_at_beat",
        "in_flight",
        "kv_limit",
        "kv_reserved",
        "load",
        "slots",
        "slots_reserved",
        "slow_since_ms",
        "slow_until_ms",
        "suspects",
        "work",
    )

    def __init__(self, beat: WorkerHeartbeat, heard_at_beat: int, load: WorkerLoad) -> None:
        self.beat = beat
        self.load = load
        self.heard_at_beat = heard_at_beat
        """Number of loopback heartbeats when it was last heard."""
        self.acknowledged_at_beat = heard_at_beat
        """The same when it last knew this owner's epoch, was too slow to say so, or was first heard."""
        self.slow_since_ms = 0
        """0 while it is not slow."""
        self.slow_until_ms = 0
        """When it last ceased to be slow; 0: it never was."""
        self.work: dict[str, Load] = {}
        """By request id: the attempts dispatched here."""
        self.slots = 0
        self.kv_limit = 0
        """What may be reserved: slots, and tokens in its KV cache."""
        self.slots_reserved = 0
        self.kv_reserved = 0
        self.cache_number = 0
        """Of its last CacheChange that was taken in; -1: one was missed, and it is to tell anew."""
        self.bodies: dict[str, BodyKey] = {}
        """By request id: the bodies of ``work``."""
        self.suspects: set[str] = set()
        """Request ids of the suspects among ``work`` that are not cleared: to them a death here is put down."""
        self.in_flight: set[str] = set()
        """Request ids that the worker itself said it has."""
        self.adopted: dict[str, None] = {}
        """Request ids of work that an earlier owner dispatched here, until the worker knows our epoch."""

    def reserve(self, request_id: str, load: Load) -> None:
        """Take up room, in place of what the request took up before."""
        self._unreserve(request_id)
        self.work[request_id] = load
        self.slots_reserved += load.slots
        self.kv_reserved += load.kv_tokens

    def release(self, request_id: str) -> None:
        """The attempt no longer runs here."""
        self._unreserve(request_id)
        self.work.pop(request_id, None)
        self.bodies.pop(request_id, None)
        self.suspects.discard(request_id)
        self.in_flight.discard(request_id)
        self.adopted.pop(request_id, None)

    def _unreserve(self, request_id: str) -> None:
        if (load := self.work.get(request_id)) is not None:
            self.slots_reserved -= load.slots
            self.kv_reserved -= load.kv_tokens


class WorkerPool:
    """All workers of a model.

    The rule for large requests: one that fits no worker though slots are free is passed by smaller ones for the
    starvation timeout; then the worker with the least reserved is reserved for it, and takes nothing else until it
    fits. So a large request waits, once it is its turn, at most that time plus the longest running generation, and
    blocks one worker only.
    """

    def __init__(self, *, epoch: Epoch, settings: Settings, kv_overbooking: float) -> None:
        self.workers: dict[str, Worker] = {}
        self.evicted: dict[str, int] = {}
        """Worker -> loopback heartbeat of its eviction; a name never comes back."""
        self.beats = 0
        """Loopback heartbeats so far."""
        self.placement = Placement()
        self.cache_gaps = 0
        """How often something of what workers tell of their caches was missed; for metrics."""
        self._kv_overbooking = kv_overbooking
        self._avoided: frozenset[str] = frozenset()
        self._usable: dict[str, list[Worker]] = {}
        """By version, as long as nothing has changed about that."""
        self._epoch = epoch
        self._settings = settings
        self._reserved_for: dict[str, str] = {}
        """Worker -> the large request that it is reserved for."""

    def overbook(self, factor: float) -> None:
        """Tokens reserved on a worker may reach its KV cache's capacity times this."""
        self._kv_overbooking = factor
        for worker in self.workers.values():
            worker.kv_limit = int(worker.beat.kv_tokens * factor)

    def avoid(self, workers: Iterable[str]) -> None:
        """These get nothing more: a roll-out found them bad."""
        self._avoided = frozenset(workers)
        self._usable.clear()

    def seen(self, beat: WorkerHeartbeat) -> tuple[Worker, list[Progress]]:
        """Take in a heartbeat; gives the worker and the progress of its attempts in flight."""
        worker = self.workers.get(beat.worker)
        if worker is None:
            worker = self.workers[beat.worker] = Worker(beat, self.beats, self.placement.join())
        before, worker.beat = worker.beat, beat
        if worker.slots != beat.slots or (before.state, before.epoch) != (beat.state, beat.epoch):
            self._usable.clear()
        worker.heard_at_beat = self.beats
        if beat.epoch >= self._epoch:
            worker.acknowledged_at_beat = self.beats
        if (worker.slots, before.kv_tokens) != (beat.slots, beat.kv_tokens):
            # Known by its work only until now, or its engine is a new one.
            worker.slots, worker.kv_limit = beat.slots, int(beat.kv_tokens * self._kv_overbooking)
            for request_id, load in worker.work.items():
                worker.reserve(request_id, self._load(worker, load.choices, load.tokens))
        worker.in_flight = {progress.request_id for progress in beat.in_flight}
        if beat.state not in ("ready", "draining"):
            self.placement.index.clear(worker.load.cache)  # Its engine is a new one, or will be.
        return worker, beat.in_flight

    def cache_changed(self, worker: Worker, change: CacheChange) -> bool:
        """Take in what it tells of its cache; False when something before it was missed."""
        index, cache = self.placement.index, worker.load.cache
        if change.anew:
            index.clear(cache)
        elif change.number != worker.cache_number + 1:
            self.cache_missed(worker)
            return False
        worker.cache_number = change.number
        for run in change.stored:
            index.use(cache, numbers_of(run.keys), worker.beat.kv_tokens, first=run.first)
        index.drop(cache, numbers_of(change.removed))
        return True

    def cache_missed(self, worker: Worker) -> None:
        """What it told is not whole: nothing of it is believed until it tells anew."""
        if worker.cache_number >= 0:
            self.cache_gaps += 1
            self.placement.index.clear(worker.load.cache)
        worker.cache_number = -1

    def pulsed(self, pulse: WorkerPulse, now_ms: int) -> None:
        """Take in a pulse; one of a process that has stood still for too long says nothing."""
        worker = self.workers.get(pulse.worker)
        if worker is None or pulse.lag_ms >= self._settings.given_up_ms:
            return
        worker.heard_at_beat = self.beats
        late = pulse.lag_ms > self._settings.slow_lag_ms
        if late:
            worker.acknowledged_at_beat = self.beats
        slow = late or pulse.engine_idle_ms > self._settings.slow_engine_ms
        if slow != bool(worker.slow_since_ms):
            worker.slow_since_ms, worker.slow_until_ms = (now_ms, 0) if slow else (0, now_ms)
            self._usable.clear()

    def all_slow_since_ms(self) -> int:
        """Since when every worker that is ready has been slow; 0 while one is not, or none is ready."""
        latest = 0
        for worker in self.workers.values():
            if worker.beat.state == "ready":
                if not worker.slow_since_ms:
                    return 0
                latest = max(latest, worker.slow_since_ms)
        return latest

    def expect(self, name: str, model: str, version: str) -> Worker:
        """A worker known only from its work (after a takeover): lost unless it is heard."""
        worker = self.workers.get(name)
        if worker is None:
            silent = WorkerHeartbeat(worker=name, model=model, version=version, state="starting")
            worker = self.workers[name] = Worker(silent, self.beats, self.placement.join())
        return worker

    def lost(self) -> Iterator[tuple[Worker, str]]:
        """Workers that were not heard for too long, or did not acknowledge the epoch for twice as long; and why."""
        limit = self._settings.lost_after_beats
        for worker in list(self.workers.values()):
            if self.beats - worker.heard_at_beat > limit:
                yield worker, "stood still for too long" if worker.slow_since_ms else "was not heard for too long"
            elif self.beats - worker.acknowledged_at_beat > 2 * limit:
                yield worker, "did not acknowledge its scheduler"

    def evict(self, worker: Worker) -> None:
        """The worker is lost, for good."""
        self.workers.pop(worker.beat.worker, None)
        self.placement.leave(worker.load)
        self._usable.clear()
        self._reserved_for.pop(worker.beat.worker, None)
        if len(self.evicted) >= EVICTED_MAX:
            del self.evicted[next(iter(self.evicted))]
        self.evicted[worker.beat.worker] = self.beats

    def usable(self, worker: Worker) -> bool:
        """Ready, not slow, not bad, and has acknowledged this owner's epoch; one that knows a higher one refuses us."""
        able = worker.beat.state == "ready" and not worker.slow_since_ms and worker.beat.epoch == self._epoch
        return able and worker.beat.worker not in self._avoided

    def unacknowledged(self) -> bool:
        """Whether some worker has not acknowledged the epoch; a takeover waits until it has, or is lost."""
        return any(worker.beat.epoch < self._epoch for worker in self.workers.values())

    def has_room(self, version: str = "") -> bool:
        """Whether some worker has a free slot and not prompts enough; one of that version, if one is named."""
        return any(
            worker.slots_reserved < worker.slots and not worker.load.prompts.enough for worker in self._able(version)
        )

    def expected(self, tokens: int, uncached: float, version: str, now_ms: int) -> Expected:
        """When one more prompt would have its first token; ``uncached``: share of all that is to be computed."""
        return expected(tokens, uncached, [worker.load.prompts for worker in self._able(version)], now_ms)

    def slots(self, version: str) -> int:
        """Of the version's workers that take work now."""
        return sum(w.beat.slots for w in self.workers.values() if w.beat.version == version and self.usable(w))

    def slots_in_use(self) -> int:
        """Of all versions."""
        return sum(worker.slots_reserved for worker in self.workers.values())

    def place(self, request: Request, now_ms: int, may_hold: Callable[[Worker], bool] | None = None) -> Worker | None:
        """The worker that takes the request now, of those that can and that ``may_hold`` it; or None.

        Raises TooLate when on none of them its first token would come by its deadline.
        """
        choices, tokens = request.envelope.choices, request.cost.total
        able = self._willing(request)
        if self._reserved_for:
            able = [w for w in able if self._reserved_for.get(w.beat.worker, request.id) == request.id]
        if may_hold is not None:
            able = [worker for worker in able if may_hold(worker)]
        fitting = [
            w
            for w in able
            if w.slots_reserved + choices <= w.slots
            and w.kv_reserved + tokens <= w.kv_limit
            and not w.load.prompts.enough
        ] or [
            w  # What exceeds a worker runs on it alone.
            for w in able
            if w.slots_reserved + min(choices, w.slots) <= w.slots
            and w.kv_reserved + min(tokens, w.kv_limit) <= w.kv_limit
            and not w.load.prompts.enough
        ]
        best = self.placement.choose(request, fitting)
        if best is None or self.placement.in_time(request, [best], now_ms):
            return best
        if not (in_time := self.placement.in_time(request, fitting, now_ms)):
            raise TooLate
        return self.placement.choose(request, in_time)

    def _willing(self, request: Request) -> list[Worker]:
        """Those that may run it. One that gave it back only when there is no other, and once it was heard since."""
        able = self._able(request.envelope.version)
        if not (given_back := request.given_back):
            return able
        others = [worker for worker in able if worker.beat.worker not in given_back]
        return others or [worker for worker in able if worker.heard_at_beat > given_back[worker.beat.worker]]

    def _able(self, version: str) -> list[Worker]:
        """The usable ones; of that version, if one is named."""
        able = self._usable.get(version)
        if able is None:
            able = [w for w in self.workers.values() if self.usable(w) and (not version or w.beat.version == version)]
            if able:  # Any caller may name a version that nobody has.
                self._usable[version] = able
        return able

    def assign(self, worker: Worker, request: Request, now_ms: int) -> None:
        """Take up room for the request's attempt."""
        worker.reserve(request.id, self._load(worker, request.envelope.choices, request.cost.total))
        worker.bodies[request.id] = body_key(request.envelope)
        if request.suspect_tokens:
            worker.suspects.add(request.id)
        self.placement.placed(request, worker.load, worker.beat.kv_tokens, now_ms)

    def release(self, request: Request, worker: Worker, event: AttemptEvent | None, now_ms: int) -> None:
        """The request's attempt no longer runs there; ``event``: how it ended, if that is known."""
        worker.release(request.id)
        self.placement.ended(request, worker.load, event, now_ms)

    def reserve_worker(self, request: Request, waited_ms: int) -> None:
        """A request that fits nobody now: after the starvation timeout a worker is reserved for it."""
        if waited_ms < self._settings.starvation_timeout_ms or request.id in self._reserved_for.values():
            return
        version = request.envelope.version
        free = [
            worker
            for worker in self.workers.values()
            if self.usable(worker)
            and (not version or worker.beat.version == version)
            and worker.beat.worker not in self._reserved_for
            and worker.slots_reserved < worker.beat.slots  # Else nothing fits, and it is only not this one's turn.
            and not worker.load.prompts.enough
        ]
        if free:
            chosen = min(free, key=lambda worker: worker.kv_reserved / max(1, worker.kv_limit))
            self._reserved_for[chosen.beat.worker] = request.id

    def free_worker(self, request_id: str) -> bool:
        """Whether a worker was reserved for the request; it is free for others now."""
        for name, reserved_for in list(self._reserved_for.items()):
            if reserved_for == request_id:
                del self._reserved_for[name]
                return True
        return False

    def _load(self, worker: Worker, choices: int, tokens: int) -> Load:
        """What the request takes up there; one that exceeds a worker runs on it alone."""
        return Load(choices, tokens, min(choices, worker.beat.slots), min(tokens, worker.kv_limit))
