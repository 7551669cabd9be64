"""Broken cores, each with one rule left out: the search must find every one of them."""

import msgspec

from contracts.messages import AttemptEvent, ErrorData, Outcome
from contracts.relay import Effects, Relay
from scheduler import endings, events
from scheduler.core import Core
from scheduler.pool import Worker
from scheduler.request import Request
from worker.core import Gone, WorkerCore
from worker.events import Key


class RepeatingWorker(WorkerCore):
    """Forgets an attempt that has ended: a message that is delivered again starts it again."""

    def _remember(self, key: Key, gone: Gone) -> None:
        if gone == "never":
            super()._remember(key, gone)


class DeafWorker(WorkerCore):
    """Does not note a cancel that comes before its work, and yet says that it will not start it."""

    def _remember(self, key: Key, gone: Gone) -> None:
        if gone != "never":
            super()._remember(key, gone)


class FencelessRelay(Relay):
    """Goes on with the text of the next attempt when the one before is void."""

    def _void_below(self, attempt: int, error: ErrorData) -> Effects:
        started, self.started = self.started, False
        effects = super()._void_below(attempt, error)
        self.started = started
        return effects


class StubbornCore(Core):
    """Tries a stream again though its caller has had tokens."""

    def _decide(self, request: Request, event: AttemptEvent) -> None:
        if endings.is_void(event):
            event = msgspec.structs.replace(event, completion_tokens=0)
        super()._decide(request, event)


class ForgetfulCore(Core):
    """Acknowledges a request in REQUESTS before WORK has it."""

    def _dispatch_to(self, request: Request, worker: Worker) -> None:
        super()._dispatch_to(request, worker)
        if request.request_seq:
            self._do(events.AckRequest(request.request_seq))


class ImpatientCore(Core):
    """Acts on the loss of a worker before it knows that no other end was stored."""

    def _end(self, request: Request, outcome: Outcome, code: str, message: str) -> None:
        super()._end(request, outcome, code, message)
        if outcome == "lost":
            event = endings.proposed(request, request.attempt, outcome, code, message, version="v1", now_ms=self._now)
            self._decide(request, event)


class HastyCore(Core):
    """Withdraws an attempt at its worker before the loss is stored: the worker's cancelled may be stored first."""

    def _work_refused(self, event: events.WorkRefused) -> None:
        request = self.requests.get(event.request_id)
        if request is not None and self.awaits_work(_stored(event)):
            self._do(events.SendControl(request.worker, self._cancel_order(request)))
        super()._work_refused(event)


def _stored(event: events.WorkRefused) -> events.StoreWork:
    return events.StoreWork(event.request_id, event.attempt, "", "", 0, 0)
