"""What a term finds of the terms before it, in REQUESTS, WORK and ATTEMPTS, and makes of it.

The shell reads ATTEMPTS, then WORK, then REQUESTS; when every worker knows the epoch WORK once more, for what the
owner before us stored while it did not know better. Until then nothing is dispatched and no waiting request ended.
How often a request was tried, and how often a worker or engine died of its body, is counted again from stored ends.
"""

from contracts.messages.attempts import AttemptEvent
from contracts.messages.request import RequestEnvelope, WorkItem
from scheduler.core import events, outcomes
from scheduler.core.lifecycle import Lifecycle
from scheduler.core.request import Request
from scheduler.core.tombstones import Tombstone
from scheduler.core.transitions import WAITING, State, Trigger


class Takeover:
    """Rebuilds ``life`` from what the streams hold."""

    def __init__(self, life: Lifecycle) -> None:
        self._life = life
        self._voids: dict[str, dict[int, AttemptEvent]] = {}
        """The void ends that were read, by request and attempt; and those that nobody can read."""

    def end_found(self, event: AttemptEvent) -> None:
        """An event of ATTEMPTS, of a request known or not, before it is acted on."""
        life = self._life
        known = life.requests.get(event.request_id)
        if life.recovering and (outcomes.is_void(event) or event.engine_death):
            self._voids.setdefault(event.request_id, {})[event.attempt] = event
            if known is not None and event.attempt < known.attempt:
                self._recount(known, known.attempt)
        if known is not None:
            return
        tombstone = life.tombstones.ended(event.request_id)
        if tombstone is None or tombstone.event.attempt < event.attempt:
            life.tombstones.add_ended(event, tombstone.error if tombstone else None, life.now_ms)
            life.key_ended(event)
            used = outcomes.used(event, life.admission.record.limits.cached_input_share)
            if life.recovering and used.total:
                life.admission.quota(event.tenant, life.now_ms).replay(used, event.admitted_at_ms, life.now_ms)

    def work_found(self, item: WorkItem, seq: int) -> None:
        """Adopt what is dispatched; after the takeover drop what no request needs."""
        life = self._life
        known = life.requests.get(item.request.request_id)
        if known is not None and known.attempt >= item.attempt:
            if known.state in WAITING and known.work_seq and known.work_attempt <= item.attempt:
                # Its body was found in an earlier attempt's message, which the owner before us may yet delete.
                known.work_seq, seq = seq, known.work_seq
                known.work_attempt = item.attempt
            if known.work_seq != seq and known.state is not State.DISPATCHING:
                life.do(events.DeleteWork(seq))
            return
        if not life.recovering:
            life.do(events.DeleteWork(seq))  # Nobody needs it: ended here, or stored too late.
            life.count_mended("work")
            return
        ended = life.tombstones.ended(item.request.request_id)
        if ended is not None and ended.event.attempt >= item.attempt:
            self._ended_found(item.request, ended, work=(seq, item.attempt))
        else:
            request = known or life.take_in(item.request)
            self._recount(request, item.attempt)
            life.adopt(request, item, seq)

    def request_found(self, event: events.RequestStored) -> None:
        """A message of REQUESTS that this term did not admit: an earlier owner's, a late one, or one that has ended."""
        life = self._life
        envelope = event.envelope
        ended = life.tombstones.ended(envelope.request_id)
        if ended is not None:
            self._ended_found(envelope, ended, request_seq=event.seq)
            return
        request = life.take_in(envelope)
        request.request_seq = event.seq
        life.admit_again(request)
        request.withdrawn = True  # Unless it is queued, for it was given up before it was stored.
        if not life.is_named(request):
            # Two owners admitted one each, and neither knew of the other's.
            life.end_waiting(request, "failed", "unavailable", "Its idempotency key names an earlier try: ask again.")
        elif life.tombstones.cancelled(envelope.request_id):
            life.end_waiting(request, "cancelled", "cancelled", "The request was cancelled.")
        elif (late_ms := event.stored_at_ms - envelope.publish_by_ms) > 0:
            late = f"The request was stored {late_ms} ms after its reservation had expired, by the bus's clock."
            life.end_waiting(request, "expired", "deadline_exceeded", late)
        else:
            request.withdrawn = False
            life.queue_up(request)

    def finish(self) -> None:
        """All has been read and every worker knows the epoch: from now on this term decides."""
        self._voids.clear()
        self._life.open()

    def _ended_found(
        self, envelope: RequestEnvelope, ended: Tombstone, *, request_seq: int = 0, work: tuple[int, int] = (0, 0)
    ) -> None:
        """A message of a request whose last attempt has a stored end: drop it, or decide about the next attempt.

        ``work``: (sequence, attempt) of one in WORK.
        """
        life = self._life
        if ended.error is not None or not outcomes.is_void(ended.event):
            if request_seq:
                life.do(events.AckRequest(request_seq))
            if work[0]:
                life.do(events.DeleteWork(work[0]))
            life.delete_body(envelope)
            return
        request = life.take_in(envelope)
        request.request_seq = request_seq
        request.work_seq, request.work_attempt = work
        request.attempt = ended.event.attempt
        life.versions.keep(request, ended.event.version)
        request.advance(Trigger.ENDED_BEFORE, life.now_ms)
        self._recount(request, request.attempt)
        life.decide(request, ended.event)
        life.dispatch()

    def _recount(self, request: Request, attempt: int) -> None:
        """Count the void attempts before ``attempt``, the present one."""
        request.failures = 0
        for number, event in self._voids.get(request.id, {}).items():
            if number < attempt:
                self._life.accused.take(event, request.envelope, self._life.now_ms)  # One that names no body.
                outcomes.count(request, event, self._life.pool.beats)
