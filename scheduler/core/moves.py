"""Which worker is told to serve another version: those of a version that is left, one after another. Pure.

Workers go with the model's stable version. One that was started for a version by name keeps it; but one that served the
new version of a roll-out goes with the stable one, too, once that is over. It looks at what is, not at what happened:
whatever was lost on the way, and whoever owns the model, is set right at the next look.
"""

from collections.abc import Iterator
from typing import Protocol

from contracts.messages.base import Epoch
from contracts.messages.control import SwitchVersion
from scheduler.core import events
from scheduler.core.request import Request
from scheduler.core.transitions import WAITING
from scheduler.core.versions import Versions
from scheduler.core.worker_pool import Worker, WorkerPool

LOOK_MS = 1_000
"""Between two looks, and two orders: an order that is repeated is one."""
AGAIN_MS = 600_000
"""A worker that refused the version is told again after it; while nobody serves that, so is any other. Each try costs a
drain and a load. A guess."""


class Life(Protocol):
    """What is decided about here: the workers and open requests of one model (``lifecycle``)."""

    epoch: Epoch
    requests: dict[str, Request]
    pool: WorkerPool
    versions: Versions
    now_ms: int
    recovering: bool

    def do(self, effect: events.Effect) -> None:
        """Add an effect of the present step."""


class Moves:
    """Of one model during one term."""

    def __init__(self, life: Life) -> None:
        self._life = life
        self._look_at_ms = 0
        self._again_at_ms = 0

    def pass_time(self) -> None:
        """One more worker may be told to go."""
        life = self._life
        if life.recovering or life.now_ms < self._look_at_ms:
            return
        self._look_at_ms = life.now_ms + LOOK_MS
        for worker in life.pool.workers.values():
            if worker.beat.pinned and worker.beat.version == life.versions.stable and self._is_ours(worker):
                self._order(worker)  # It is where it belongs, and goes with the others from now on.
        if self._under_way():
            return
        leaving = sorted(self._astray(), key=lambda worker: (self._has_refused(worker), worker.beat.worker))
        if not leaving:
            return
        served = life.pool.slots(life.versions.stable) > 0
        doubtful = self._has_refused(leaving[0] if served else leaving[-1])
        if doubtful and life.now_ms < self._again_at_ms:
            return
        self._again_at_ms = life.now_ms + AGAIN_MS
        self._order(leaving[0])

    def _order(self, worker: Worker) -> None:
        order = SwitchVersion(epoch=self._life.epoch, version=self._life.versions.stable)
        self._life.do(events.SendControl(worker.beat.worker, order))

    def _is_ours(self, worker: Worker) -> bool:
        """Whether nobody asked by name for the version that it serves, or does so no more."""
        return not worker.beat.pinned or worker.beat.worker in self._life.versions.released

    def _has_refused(self, worker: Worker) -> bool:
        return worker.beat.reason.startswith(f"{self._life.versions.stable} refused")

    def _under_way(self) -> bool:
        """Whether a worker is on its way: it drains, or does not serve yet."""
        return any(
            self._is_ours(worker) and worker.beat.state in ("draining", "starting")
            for worker in self._life.pool.workers.values()
        )

    def _astray(self) -> Iterator[Worker]:
        """Workers that serve a version which is left, and may go."""
        life, versions = self._life, self._life.versions
        for worker in life.pool.workers.values():
            version = worker.beat.version
            if version in (versions.stable, versions.rolled_out) or not self._is_ours(worker):
                continue
            if life.pool.usable(worker) and not self._is_needed(worker):
                yield worker

    def _is_needed(self, worker: Worker) -> bool:
        """Whether it is the last one of its version, and requests of that are open; pins alone keep no worker."""
        pool, version = self._life.pool, worker.beat.version
        if any(pool.usable(it) and it is not worker and it.beat.version == version for it in pool.workers.values()):
            return False
        return any(
            request.envelope.version == version and not (request.envelope.pinned and request.state in WAITING)
            for request in self._life.requests.values()
        )
