"""What a term finds of the terms before it, in REQUESTS, WORK and ATTEMPTS, and makes of it.

The shell reads ATTEMPTS, then WORK, then REQUESTS; when every worker knows the epoch WORK once more, for what the
owner before us stored while it did not know better. Until then nothing is dispatched and no waiting request ended.
How often a request was tried, and how often a worker or engine died of it, is counted again from all its stored ends.
One thing is lost: which of two requests in an engine that died was the suspect, so that its neighbour may count one
death too many.
"""

from contracts.messages.attempts import AttemptEvent
from contracts.messages.request import RequestEnvelope, WorkItem
from contracts.tokens import Cost
from scheduler.core import events as ev
from scheduler.core import outcomes
from scheduler.core.lifecycle import Lifecycle
from scheduler.core.request import WAITING, WITH_WORKER, Request, State
from scheduler.core.tombstones import Ended


class Takeover:
    """Rebuilds ``life`` from what the streams hold."""

    def __init__(self, life: Lifecycle) -> None:
        self._life = life
        self._voids: dict[str, dict[int, AttemptEvent]] = {}
        """The void ends that were read, by request and attempt."""

    def end_found(self, event: AttemptEvent, now_ms: int) -> None:
        """An event of ATTEMPTS, of a request known or not, before it is acted on."""
        life = self._life
        if life.recovering and outcomes.is_void(event):
            self._voids.setdefault(event.request_id, {})[event.attempt] = event
        if event.request_id in life.requests:
            return
        known = life.memory.ended(event.request_id)
        if known is None or known.event.attempt < event.attempt:
            life.memory.add_ended(event, known.error if known else None, now_ms)
        if known is None and life.recovering and event.outcome in ("completed", "cancelled"):
            used = Cost(event.prompt_tokens, event.completion_tokens)
            life.admission.quota(event.tenant, now_ms).replay(used, event.admitted_at_ms, now_ms)

    def work_found(self, item: WorkItem, seq: int, now_ms: int) -> None:
        """Adopt what is dispatched; after the takeover drop what no request needs."""
        life = self._life
        known = life.requests.get(item.request.request_id)
        if known is not None and known.attempt >= item.attempt:
            if known.work_seq != seq and known.state is not State.DISPATCHING:
                life.do(ev.DeleteWork(seq))
            return
        if not life.recovering:
            life.do(ev.DeleteWork(seq))  # Nobody needs it: ended here, or stored too late.
            return
        ended = life.memory.ended(item.request.request_id)
        if ended is not None and ended.event.attempt >= item.attempt:
            self._ended_found(item.request, ended, now_ms, work_seq=seq)
        elif known is None:
            self._adopt(self._enter(item.request, State.DISPATCHED, now_ms), item, seq)
        else:
            life.leave_queue(known)
            known.move(State.DISPATCHED, now_ms)
            self._adopt(known, item, seq)

    def request_found(self, event: ev.RequestStored, now_ms: int) -> None:
        """A message of REQUESTS that this term did not admit: an earlier owner's, a late one, or one that has ended."""
        life = self._life
        envelope = event.envelope
        ended = life.memory.ended(envelope.request_id)
        if ended is not None:
            self._ended_found(envelope, ended, now_ms, request_seq=event.seq)
            return
        request = self._enter(envelope, State.ADMITTED, now_ms)
        request.request_seq = event.seq
        if life.memory.cancelled(envelope.request_id):
            life.end_waiting(request, "cancelled", "cancelled", "The request was cancelled.")
        elif event.stored_at_ms > envelope.publish_by_ms:
            life.end_waiting(request, "expired", "deadline_exceeded", "The request reached the queue too late.")
        else:
            life.advance(request, "stored")
            life.enqueue(request)
            life.dispatch()

    def finish(self) -> None:
        """All has been read and every worker knows the epoch: from now on this term decides."""
        life = self._life
        life.recovering = False
        self._voids.clear()
        deferred, life.deferred = life.deferred, {}
        for request_id, (outcome, code, message) in deferred.items():
            request = life.requests.get(request_id)
            if request is not None and request.state in WAITING:
                life.end(request, outcome, code, message)
            elif request is not None and request.cancel_reason and request.state in WITH_WORKER:
                life.send_cancel(request)
        life.dispatch()

    def _enter(self, envelope: RequestEnvelope, state: State, now_ms: int) -> Request:
        """An open request of an earlier owner."""
        life = self._life
        request = Request(envelope, state)
        life.admission.adopt(request, now_ms, waits=state in WAITING)
        life.requests[request.id] = request
        life.memory.forget(request.id)
        life.hold(request)
        return request

    def _ended_found(
        self, envelope: RequestEnvelope, ended: Ended, now_ms: int, *, request_seq: int = 0, work_seq: int = 0
    ) -> None:
        """A message of a request whose last attempt has a stored end: drop it, or decide about the next attempt."""
        life = self._life
        if ended.error is not None or not outcomes.is_void(ended.event):
            if request_seq:
                life.do(ev.AckRequest(request_seq))
            if work_seq:
                life.do(ev.DeleteWork(work_seq))
            return
        request = self._enter(envelope, State.ENDING, now_ms)
        request.request_seq = request_seq
        request.work_seq = work_seq
        request.attempt = ended.event.attempt
        self._recount(request)
        life.decide(request, ended.event)
        life.dispatch()

    def _adopt(self, request: Request, item: WorkItem, seq: int) -> None:
        """Take over an attempt that an earlier owner dispatched."""
        life = self._life
        life.queue.set_weight(request.tenant, life.admission.tenant(request.tenant).weight)
        life.queue.adopt(request.tenant, request.cost.total)
        request.charged = request.cost.total
        if request.work_seq:
            life.do(ev.DeleteWork(request.work_seq))
        request.work_seq = seq
        request.dispatched_at_ms = item.dispatched_at_ms
        request.attempt = item.attempt
        self._recount(request)
        worker = life.pool.expect(item.worker, item.request.model, item.version)
        life.place_on(request, worker, item.attempt)
        request.adopted = True
        worker.adopted[request.id] = None
        if request.request_seq:
            life.do(ev.AckRequest(request.request_seq))
            request.request_seq = 0

    def _recount(self, request: Request) -> None:
        """Count the void attempts before the present one."""
        request.counted = request.deaths = 0
        for attempt, event in self._voids.get(request.id, {}).items():
            if attempt < request.attempt:
                outcomes.count(request, event)
