"""Broken cores, each with one rule left out: the search must find every one of them."""

from collections.abc import Callable
from typing import Any

import msgspec

from contracts.messages.admission import AdmissionRequest
from contracts.messages.attempts import AttemptEvent
from contracts.messages.base import Outcome, RequestDemand
from contracts.messages.control import StatusAnswer
from contracts.messages.frames import ErrorData
from contracts.messages.request import WorkItem
from contracts.streaming.relay import Effects, Relay
from scheduler.core import events, outcomes
from scheduler.core.accused import Accused
from scheduler.core.core import Core
from scheduler.core.fair_queue import FairQueue, QueuedRequest
from scheduler.core.request import Request
from scheduler.core.takeover import Takeover
from scheduler.core.worker_pool import Worker
from worker.core.attempts import Tombstone
from worker.core.core import WorkerCore
from worker.core.events import Key


class RepeatingWorker(WorkerCore):
    """Forgets an attempt that has ended: a message that is delivered again starts it again."""

    def _bury(self, key: Key, tombstone: Tombstone) -> None:
        if tombstone == "never":
            super()._bury(key, tombstone)


class DeafWorker(WorkerCore):
    """Does not note a cancel that comes before its work, and yet says that it will not start it."""

    def _bury(self, key: Key, tombstone: Tombstone) -> None:
        if tombstone != "never":
            super()._bury(key, tombstone)


class FencelessRelay(Relay):
    """Goes on with the text of the next attempt when the one before is void."""

    def _void_below(self, attempt: int, error: ErrorData) -> Effects:
        started, self.started = self.started, False
        effects = super()._void_below(attempt, error)
        self.started = started
        return effects


class StubbornCore(Core):
    """Tries a stream again though its caller has had tokens."""

    def decide(self, request: Request, event: AttemptEvent) -> None:
        if outcomes.is_void(event):
            event = msgspec.structs.replace(event, completion_tokens=0)
        super().decide(request, event)


class ForgetfulCore(Core):
    """Acknowledges a request in REQUESTS before WORK has it."""

    def _dispatch_to(self, request: Request, worker: Worker) -> None:
        super()._dispatch_to(request, worker)
        if request.request_seq:
            self.do(events.AckRequest(request.request_seq))


class ImpatientCore(Core):
    """Acts on the loss of a worker before it knows that no other end was stored."""

    def propose_end(
        self, request: Request, outcome: Outcome, code: str, message: str, *, accused: int | None = None
    ) -> None:
        super().propose_end(request, outcome, code, message, accused=accused)
        if outcome == "lost":
            event = outcomes.proposed(
                request, request.attempt, outcome, code, message, version="v1", accused=accused, now_ms=self.now_ms
            )
            self.decide(request, event)


class AmnesiacCore(Core):
    """Does not count the deaths that were stored under an earlier owner."""

    def _recovered(self, event: events.Recovered) -> None:
        self.accused = Accused()
        super()._recovered(event)


class Forgiving(Accused):
    """Takes nobody for the only culprit."""

    def take(self, event: AttemptEvent, of: RequestDemand | AttemptEvent, now_ms: int) -> None:
        super().take(msgspec.structs.replace(event, accused=2 * event.accused), of, now_ms)


class ForgivingCore(Core):
    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.accused = Forgiving()


class TwiceRefundingCore(Core):
    """Gives what a request reserves back at a retry, and again at its end."""

    def _retry(self, request: Request) -> None:
        super()._retry(request)
        quota = self.admission.quota(request.tenant, self.now_ms)
        quota.input_bucket.take(-request.cost.input_tokens, self.now_ms)
        quota.output_bucket.take(-request.cost.output_tokens, self.now_ms)


class SilentRelay(Relay):
    """Does not believe the scheduler about an end that its worker did not tell."""

    def on_status(self, answer: StatusAnswer | None, now_ms: int) -> Effects:
        return super().on_status(answer and msgspec.structs.replace(answer, end=None), now_ms)


class HastyCore(Core):
    """Withdraws an attempt at its worker before the loss is stored: the worker's cancelled may be stored first."""

    def _work_refused(self, event: events.WorkRefused) -> None:
        request = self.requests.get(event.request_id)
        if request is not None and self.awaits_work(_stored(event)):
            self.do(events.SendControl(request.worker, self._cancel_order(request)))
        super()._work_refused(event)


class BillingWorker(WorkerCore):
    """Takes every cancel for its caller's."""

    def _cancel(self, key: Key, asker: Any, reason: str) -> None:
        super()._cancel(key, asker, "client_cancelled")


class HurriedCore(Core):
    """Tries a lost stream again without a word of what its caller has seen."""

    def clear(self, request: Request, event: AttemptEvent) -> None:
        super().clear(request, event)
        self.cleared(request)


class HumbleCore(Core):
    """Stays below the epoch of workers that an owner of before a restore has met."""

    def _worker_seen(self, event: events.WorkerSeen) -> None:
        super()._worker_seen(event)
        self.effects = [effect for effect in self.effects if not isinstance(effect, events.RiseAbove)]


class SingleFileQueue(FairQueue):
    """Looks no further than at the first that fits nowhere."""

    def scan(self, now_ms: int, take: Callable[[QueuedRequest], bool]) -> int:
        fits = True

        def take_first(entry: QueuedRequest) -> bool:
            nonlocal fits
            fits = fits and take(entry)
            return fits

        return super().scan(now_ms, take_first)


class SingleFileCore(Core):
    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.queue = self.admission._queue = SingleFileQueue(ageing_ms=self.settings.ageing_ms)


class ClingingTakeover(Takeover):
    """Keeps the first copy of a request that it finds in WORK, and deletes the others."""

    def work_found(self, item: WorkItem, seq: int) -> None:
        known = self._life.requests.get(item.request.request_id)
        if known is not None:
            known.work_attempt = 99
        super().work_found(item, seq)


class ClingingCore(Core):
    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        self._takeover = ClingingTakeover(self)


class TrustingCore(Core):
    """Believes that it is told of every end."""

    def _look_for_missed_ends(self) -> None:
        pass


class CountingCore(Core):
    """Takes what a worker gave back for an attempt."""

    def decide(self, request: Request, event: AttemptEvent) -> None:
        request.failures += event.given_back
        super().decide(request, event)


def wall_clock(now: int, wall_is_off: int) -> int:
    """Whoever sets the host's clock sets the scheduler's."""
    return now + wall_is_off


def work_id_without_epoch(item: WorkItem) -> str:
    """A deposed owner's dispatch of the same attempt to the same worker passes for the owner's."""
    return f"{item.request.request_id}.{item.attempt}.{item.worker}"


class KeylessCore(Core):
    """Does not look at idempotency keys when it admits."""

    def _joined(self, asked: AdmissionRequest) -> str:
        return ""


class UnnamedCore(Core):
    """Does not learn the keys of an earlier owner's requests."""

    def is_named(self, request: Request) -> bool:
        return self.recovering or super().is_named(request)


class ForgettingCore(Core):
    """Lets a key name another request as soon as its own has ended: who got no answer runs it again."""

    def key_ended(self, event: AttemptEvent) -> None:
        super().key_ended(msgspec.structs.replace(event, withdrawn=True))


class SelfishCore(Core):
    """Ends a request for all its readers when the first of them leaves."""

    def left_by(self, request: Request, reader: str) -> bool:
        super().left_by(request, reader)
        return True


def _stored(event: events.WorkRefused) -> events.StoreWork:
    return events.StoreWork(event.request_id, event.attempt, "", "", 0, 0)


class PulselessCore(Core):
    """Goes by heartbeats alone: whose event loop stands still is taken for dead."""

    def _pulse_seen(self, event: events.PulseSeen) -> None:
        pass


class HeedlessCore(Core):
    """Knows that a worker is alive, and not that it is slow: gives it more, and waits for it to take that."""

    def _pulse_seen(self, event: events.PulseSeen) -> None:
        super()._pulse_seen(event)
        for worker in self.pool.workers.values():
            worker.slow_since_ms = 0
        self.pool._usable.clear()
        self.dispatch()

    def _withdraw_lost_work(self) -> None:
        pass
