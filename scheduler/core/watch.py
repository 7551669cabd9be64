"""Who is there: what a worker's or a stream owner's signs of life say, and what of their work is lost."""

from contracts import subjects
from contracts.accusations import Exposed, put_down_to
from contracts.messages.control import Announce, CancelAttempt, Evict, Progress
from scheduler.core import events
from scheduler.core.accused import body_key
from scheduler.core.lifecycle import UNHEARD, Lifecycle
from scheduler.core.transitions import WITH_WORKER, State, Trigger
from scheduler.core.worker_pool import Worker


class Watch(Lifecycle):
    """One model's workers and stream owners, as they are heard."""

    def _worker_seen(self, event: events.WorkerSeen) -> None:
        beat = event.beat
        self.clocks.heard(beat.worker, beat.sent_at_ms, self.now_ms)
        if beat.epoch > self.epoch:
            self.do(events.RiseAbove(beat.epoch))
        if beat.worker in self.pool.evicted:
            self.do(events.SendControl(beat.worker, Evict(epoch=self.epoch)))
            return
        worker, in_flight = self.pool.seen(beat)
        self.replicas.heard(beat, self.now_ms, computing=worker.load.prompts.enough)
        if beat.epoch < self.epoch:
            self.do(events.SendControl(beat.worker, Announce(epoch=self.epoch)))
        elif beat.cache_number != max(0, worker.cache_number):
            self.pool.cache_missed(worker)
            self._ask_cache(worker)
        for progress in in_flight:
            request = self.requests.get(progress.request_id)
            if request is None and self.tombstones.cancelled(progress.request_id):
                self._cancel_unknown(beat.worker, progress)
            if request is None or request.attempt != progress.attempt or request.worker != beat.worker:
                continue
            request.was_in_flight = True
            request.progress = progress
            if self.versions.rollout is not None:
                self.versions.progressed(progress)
            if worker.suspects and progress.completion_tokens >= request.suspect_tokens:
                worker.suspects.discard(request.id)
            if progress.completion_tokens > 0 and request.state in (State.DISPATCHING, State.DISPATCHED):
                self.pool.placement.prefilled(request, worker.load, self.now_ms)
                request.advance(Trigger.GENERATING, self.now_ms)
        if beat.epoch >= self.epoch:
            self._drop_unstarted(worker)
        self.dispatch()

    def _cache_changed(self, event: events.CacheChanged) -> None:
        worker = self.pool.workers.get(event.change.worker)
        if worker is not None and not self.pool.cache_changed(worker, event.change):
            self._ask_cache(worker)

    def _ask_cache(self, worker: Worker) -> None:
        """Something that it told was missed; a heartbeat asks again where this is lost, too."""
        self.do(events.SendControl(worker.beat.worker, Announce(epoch=self.epoch)))

    def _pulse_seen(self, event: events.PulseSeen) -> None:
        self.pool.pulsed(event.pulse, self.now_ms)
        self.dispatch()

    def _cancel_unknown(self, worker: str, progress: Progress) -> None:
        """A cancelled attempt of which the streams know nothing, after a restore of the bus: nobody pays for it."""
        attempt, reason = progress.attempt, "worker_lost"
        order = CancelAttempt(epoch=self.epoch, request_id=progress.request_id, attempt=attempt, reason=reason)
        self.do(events.SendControl(worker, order))

    def _drop_unstarted(self, worker: Worker) -> None:
        """A worker that knows this epoch starts no work of an earlier one: what it does not have by now is void."""
        for request_id in worker.adopted:
            request = self.requests.get(request_id)
            started = request_id in worker.in_flight
            if request is not None and not started and request.adopted and request.state in WITH_WORKER:
                self.propose_end(request, "lost", "worker_lost", "The attempt of an earlier owner was not started.")
        worker.adopted.clear()

    def _stream_owner_seen(self, event: events.StreamOwnerSeen) -> None:
        if event.beat.lag_ms < self.settings.given_up_ms:
            self.stream_owners.heard(event.beat.stream_owner, self.pool.beats)
        self.clocks.heard(event.beat.stream_owner, event.beat.sent_at_ms, self.now_ms)
        if event.beat.leaving:
            self._stream_owner_lost(event.beat.stream_owner)

    def _stream_owner_lost(self, owner: str) -> None:
        for request_id in self.stream_owners.leave(owner):
            request = self.requests[request_id]
            for reader in [reader for reader, its in (request.readers or {}).items() if its == owner]:
                self.left_by(request, reader)
            if not request.readers:
                self.cancel(request, _owner_lost(owner))

    def _loopback_seen(self, event: events.LoopbackSeen) -> None:
        self.pool.beats += 1
        self.clocks.heard(self.owner, event.sent_at_ms, self.now_ms)
        for worker, why in self.pool.lost():
            self._worker_lost(worker, why)
        for owner in self.stream_owners.silent(self.pool.beats, self.settings.lost_after_beats):
            self._stream_owner_lost(owner)
        self.dispatch()

    def _worker_lost(self, worker: Worker, why: str) -> None:
        self.pool.evict(worker)
        if missed := bool(worker.work) or worker.beat.state != "draining":
            self.lost_workers += 1
        order = Evict(epoch=self.epoch, reason=why if missed else "")
        self.do(events.SendControl(worker.beat.worker, order))
        held = [request for request in map(self.requests.__getitem__, worker.work) if request.state in WITH_WORKER]
        held.sort(key=lambda request: not request.was_in_flight)  # Of several copies one that surely ran.
        accused = put_down_to({it.id: Exposed(body_key(it.envelope), suspect=it.id in worker.suspects) for it in held})
        for request in held:
            message = f"Worker {worker.beat.worker} {why}."
            self.propose_end(request, "lost", "worker_lost", message, accused=accused[request.id])

    def _hear_no_more(self) -> None:
        """Who joined a request under an earlier owner has said so by now, or is gone."""
        while self.unheard and (request_id := next(iter(self.unheard))) and self.unheard[request_id] <= self.now_ms:
            del self.unheard[request_id]
            if (request := self.requests.get(request_id)) is not None and self.left_by(request, UNHEARD):
                self.cancel(request, _owner_lost(request.envelope.stream_owner))

    def _withdraw_lost_work(self) -> None:
        """What a usable worker should have pulled long ago did not reach it."""
        overdue_ms = self.now_ms - self.settings.pickup_timeout_ms
        for worker in self.pool.workers.values():
            if not self.pool.usable(worker):
                continue
            for request_id in [each for each in worker.work if each not in worker.in_flight]:
                request = self.requests[request_id]
                waited = max(request.dispatched_at_ms, worker.slow_until_ms) <= overdue_ms
                if waited and not request.was_in_flight and request.state is State.DISPATCHED:
                    self.propose_end(request, "lost", "worker_lost", "The attempt did not reach its worker.")

    def _look_for_missed_ends(self) -> None:
        """What a worker had in flight and has no longer is over, whether its end was told here or not."""
        for worker in self.pool.workers.values():
            for request_id in worker.work:
                request = self.requests[request_id]
                if request_id in worker.in_flight:
                    if request.gone_since_ms:
                        request.gone_since_ms, request.end_asked = 0, False
                    continue
                if request.was_in_flight and request.state in WITH_WORKER and not request.gone_since_ms:
                    request.gone_since_ms = self.now_ms
                overdue = request.gone_since_ms and self.now_ms - request.gone_since_ms >= self.settings.end_overdue_ms
                if overdue and request.state in WITH_WORKER:
                    request.gone_since_ms = self.now_ms  # To ask again when no answer comes.
                    request.end_asked = True
                    self.do(events.ReadEnd(request.id, request.attempt))


def _owner_lost(owner: str) -> str:
    """Reason of a cancel because its stream owner is lost: a gateway is the service's own."""
    return "gateway_lost" if subjects.is_gateway(owner) else "stream_owner_lost"
