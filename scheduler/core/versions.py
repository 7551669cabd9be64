"""Which version serves a request, for its life, and what a running roll-out is told of it.

A version is given at admission: the pinned one, the roll-out's, else the stable one. What has not been dispatched yet
goes to the stable one after all when its version is stopped, or has no worker any more; from the first dispatch on a
request keeps its version, over retries and over owners. Which share a new version gets, and whether it is good, is the
roll-out's (``rollout``).
"""

import hashlib
import uuid
from collections.abc import Hashable
from typing import Protocol

import msgspec

from contracts.messages.admission import AdmissionRequest
from contracts.messages.attempts import AttemptEvent
from contracts.messages.base import Outcome
from contracts.messages.control import Progress
from contracts.messages.request import Reply
from contracts.messages.rollouts import OVER, SHADOW_TENANT, Arm, RolloutPlan, RolloutProgress
from scheduler.core import events
from scheduler.core.fair_queue import FairQueue
from scheduler.core.request import Request
from scheduler.core.rollout.baseline import Baseline, values
from scheduler.core.rollout.rollout import Rollout
from scheduler.core.settings import Settings
from scheduler.core.transitions import WAITING, State
from scheduler.core.worker_pool import WorkerPool

COPY_DEADLINE_MS = 30_000
"""A copy that cannot run by then is not worth it: nobody waits for it."""


class Life(Protocol):
    """What is decided about here: the open requests of one model (``lifecycle``)."""

    requests: dict[str, Request]
    pool: WorkerPool
    queue: FairQueue
    settings: Settings
    now_ms: int
    recovering: bool

    def do(self, effect: events.Effect) -> None:
        """Add an effect of the present step."""

    def lane(self, request: Request) -> Hashable:
        """Where it waits among those that are placed alike."""

    def end_waiting(self, request: Request, outcome: Outcome, code: str, message: str) -> None:
        """End a request that waits."""


class Versions:
    """Of one model during one term; ``stable`` is the registry's."""

    def __init__(self, life: Life, stable: str) -> None:
        self._life = life
        self.stable = stable
        self.rollout: Rollout | None = None
        self._baseline = Baseline()
        self._backlog = 0
        """Requests that wait for the new version, about."""

    @property
    def rolled_out(self) -> str:
        """The new version of an open roll-out; empty without one."""
        return "" if self.rollout is None or self.rollout.over else self.rollout.plan.to

    @property
    def released(self) -> frozenset[str]:
        """Workers that were the new version's until the roll-out was over."""
        return frozenset(self.rollout.released or ()) if self.rollout is not None else frozenset()

    # -- what the operator and the registry say ----------------------------------------------------------

    @property
    def is_rolling_out(self) -> bool:
        """Whether two versions share the requests."""
        return self.rollout is not None and not self.rollout.over

    def rollout_changed(self, plan: RolloutPlan | None, progress: RolloutProgress | None) -> None:
        """There is another plan, or the same with another wish; None: there is none any more."""
        if plan is None:
            self.rollout = None
        elif self.rollout is not None and self.rollout.plan.id == plan.id:
            self.rollout.change(plan, self._life.now_ms)
        else:
            self.rollout = Rollout(
                plan,
                progress if progress is not None and progress.id == plan.id else None,
                baseline=self._baseline,
                stable=self.stable,
                now_ms=self._life.now_ms,
                do=self._life.do,
            )
            for request in self._life.requests.values():
                self.taken_in(request)
        self._send_home()

    def stable_changed(self, stable: str) -> None:
        """The registry names the stable version."""
        if self.rollout is not None:
            self.rollout.stable_is(stable, self._life.now_ms)
        if stable != self.stable:
            self.stable = stable
            self._baseline = Baseline()
        self._send_home()

    # -- what happens to requests ------------------------------------------------------------------------

    def assign(self, asked: AdmissionRequest) -> tuple[str, Arm]:
        """The version of a new request, and how the roll-out counts it."""
        if asked.version:
            return asked.version, ""
        if self.rollout is None:
            return self.stable, ""
        version, arm = self.rollout.assign(asked, has_room=self._has_room(self.rollout.plan.to))
        return version or self.stable, arm

    def admitted(self, request: Request) -> None:
        """It has what ``assign`` said."""
        if self.rollout is not None and request.envelope.arm:
            self.rollout.watch(request.envelope, request.envelope.arm)
            self._backlog += request.envelope.version == self.rollout.plan.to

    def taken_in(self, request: Request) -> None:
        """An earlier owner admitted it."""
        if self.rollout is not None and request.envelope.arm and request.id not in self.rollout.judge.open:
            self.rollout.watch(request.envelope, request.envelope.arm)
        if request.state in WAITING and self._is_astray(request):
            self._send(request)

    def dispatched(self, request: Request) -> None:
        """An attempt of it begins."""
        if self.rollout is not None:
            self.rollout.judge.dispatched(request.id, request.worker, self._life.now_ms)

    def progressed(self, progress: Progress) -> None:
        """Its worker told of it."""
        if self.rollout is not None:
            self.rollout.judge.progressed(progress.request_id, progress.completion_tokens, self._life.now_ms)

    def ended(self, event: AttemptEvent) -> None:
        """The present attempt of an open request has its end."""
        if self.rollout is not None and not self.rollout.over:
            self.rollout.judge.ended(event, self._life.now_ms)
            self.look()
        elif event.version == self.stable and event.outcome == "completed":
            self._baseline.add(values(event))

    def forget(self, request_id: str) -> None:
        """It is settled."""
        if self.rollout is not None:
            self.rollout.judge.forget(request_id)

    def keep(self, request: Request, version: str) -> None:
        """It ran on ``version`` under an earlier owner, whatever its message in REQUESTS says."""
        if version and request.envelope.version != version:
            request.envelope = msgspec.structs.replace(request.envelope, version=version)

    # -- what time brings --------------------------------------------------------------------------------

    def look(self) -> None:
        """Act on what the judge has found."""
        if (rollout := self.rollout) is None or rollout.over:
            return
        rollout.look(self._life.now_ms)
        self._life.pool.avoid(rollout.judge.bad_workers)
        if rollout.phase in OVER:
            self._send_home()

    def pass_time(self) -> None:
        """Steps go on, and who waits for a version that has no worker is sent home."""
        if self.rollout is None or self._life.recovering:
            return  # Which workers there are is not known before the takeover is complete.
        pool, to = self._life.pool, self.rollout.plan.to
        if self.rollout.over:
            self.rollout.release([name for name, worker in pool.workers.items() if worker.beat.version == to])
            return
        self._backlog = sum(
            request.envelope.version == to and request.state in WAITING for request in self._life.requests.values()
        )
        self.rollout.pass_time(
            self._life.now_ms, has_worker=pool.slots(to) > 0, has_capacity=pool.slots(to) >= pool.slots_in_use()
        )
        self.look()
        if self.rollout.over or not pool.slots(to):
            self._send_home()

    def _has_room(self, version: str) -> bool:
        """Whether it could take one more soon: its queue is shorter than a batch."""
        return self._backlog < self._life.pool.slots(version)

    # -- back to the stable version ----------------------------------------------------------------------

    def _send_home(self) -> None:
        for request in [each for each in self._life.requests.values() if each.state in WAITING]:
            if self._is_astray(request):
                self._send(request)

    def _is_astray(self, request: Request) -> bool:
        """Whether it waits for a version that will not, or cannot, take it, and has never been dispatched."""
        version = request.envelope.version
        if request.attempt or request.envelope.pinned or version in ("", self.stable):
            return False
        rollout = self.rollout
        if rollout is not None and not rollout.over and version == rollout.plan.to:
            return not self._life.pool.slots(version)
        return bool(request.envelope.arm) or not self._life.pool.slots(version)

    def _send(self, request: Request) -> None:
        life = self._life
        if request.envelope.arm == "shadow":
            life.end_waiting(request, "cancelled", "cancelled", "The roll-out that the copy was for is over.")
            return
        request.envelope = msgspec.structs.replace(request.envelope, version=self.stable)
        if self.rollout is not None:
            self.rollout.judge.forget(request.id)
        if request.state is State.QUEUED:
            life.pool.free_worker(request.id)
            life.queue.move(request.id, life.lane(request))

    # -- copies ------------------------------------------------------------------------------------------

    def copy(self, request: Request) -> None:
        """The request is stored: where the roll-out wants one, the new version gets a copy, in a free slot of its own.

        A large body, which lies elsewhere, is not copied. The copy's tenant is nobody's, so that no caller pays for it
        or waits behind it.
        """
        envelope = request.envelope
        if self.rollout is None or envelope.arm != "stable" or not self.rollout.copies(envelope):
            return
        self._backlog += 1
        identifier = _copy_id(envelope.request_id)
        copied = msgspec.structs.replace(
            envelope,
            request_id=identifier,
            tenant=SHADOW_TENANT,
            key_id="",
            priority="batch",
            version=self.rollout.plan.to,
            arm="shadow",
            stream_owner="",
            idempotency=None,
            client_request_id="",
            reply=Reply(subject="", stream=identifier),
            admitted_at_ms=self._life.now_ms,
            publish_within_ms=self._life.settings.publish_within_ms,
            deadline_ms=COPY_DEADLINE_MS,
        )
        self._life.do(events.StoreCopy(copied, request.request_seq))


def _copy_id(request_id: str) -> str:
    """A UUIDv7 of the same time, the same for every owner."""
    original = uuid.UUID(request_id)
    drawn = int.from_bytes(hashlib.blake2b(original.bytes, digest_size=8, person=b"copy").digest(), "big")
    mixed = (original.int & ~((1 << 62) - 1)) | (drawn & ((1 << 62) - 1))
    return str(uuid.UUID(int=mixed))
