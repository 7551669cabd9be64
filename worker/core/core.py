"""What a worker decides: which pulled attempts start, when they stop, how each ends, and how much it takes.

Pure: events and the time come in, effects go out, to be performed in order. Not decided here: how frames travel
(`worker.frame_buffer`), how a terminal event is stored (`worker.attempt_store`), what follows a retryable failure (the
scheduler). No step is made per token: the engine writes an attempt's ``Counts``, and the core reads them when it
reports or ends the attempt.
"""

from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any, Literal

from contracts.accusations import Exposed, put_down_to
from contracts.messages.base import Epoch
from contracts.messages.control import (
    Announce,
    CancelAttempt,
    ControlAnswer,
    Evict,
    Hold,
    Progress,
    SwitchVersion,
    WorkerState,
)
from contracts.messages.request import RequestEnvelope
from worker.core import events, outcomes
from worker.core.attempts import FOR_EVER, Attempts, InFlight, Occupancy, Stage, Tombstone
from worker.core.events import Effect, Event, Key
from worker.core.outcomes import AttemptOutcome
from worker.core.stalls import StallWatch
from worker.engines.base import EngineEvent, EngineLost, EngineRefused, EngineSampled, EngineStarted

ASKERS_MAX = 16
"""Cancels of one attempt that wait for an answer; who was dropped asks again."""


class BrokenLifecycle(Exception):
    """An event that the attempt's stage does not allow; the text tells what came before."""


class WorkerCore:
    """One worker process over all its names. ``stall_samples``: looks without progress that make a stall."""

    def __init__(
        self,
        *,
        version: str = "",
        pinned: bool = False,
        tokenizer_fingerprint: str = "",
        kv_overbooking: float = 1.0,
        stall_samples: int = 60,
        occupancy: Occupancy | None = None,
    ) -> None:
        self.worker = ""
        self.state: WorkerState = "starting"
        self.reason = ""
        """Why it is not ready; of one that is ready, why it did not switch."""
        self.held = False
        """An operator lets it take nothing."""
        self.pinned = pinned
        """It was started for its version by name, and has had no order to serve one."""
        self._version = version
        self._wanted = version
        """The version that it was told last."""
        self._previous = ""
        """The one to go back to when the present one cannot be loaded; empty once that has served."""
        self._fallback = ""
        """What ``_previous`` becomes with the next load."""
        self._switching = False
        """What is in flight may end, then the wanted version is loaded."""
        self._drain_known = False
        self.epoch = Epoch()
        self.attempts = Attempts(kv_overbooking, occupancy)
        self._fingerprint = tokenizer_fingerprint
        self._stalls = StallWatch(stall_samples)
        self._now_ms = 0
        self._history: deque[tuple[str, Key | None]] = deque(maxlen=64)
        self._effects: list[Effect] = []

    def credit(self) -> int:
        """Attempts that may be pulled now; none while one waits here: what is in WORK can be taken back."""
        if self.state != "ready" or self.held or self.attempts.waiting or not self.worker:
            return 0
        return self.attempts.free_slots

    @property
    def shown(self) -> tuple[WorkerState, str]:
        """State and reason, as others are told."""
        return (
            ("held", "an operator lets it take nothing")
            if self.held and self.state == "ready"
            else (self.state, self.reason)
        )

    @property
    def engine_idle_samples(self) -> int:
        """Looks in a row at which the engine had made no step, though it has work."""
        return self._stalls.engine_idle_samples

    def progress(self) -> list[Progress]:
        """Of all in flight, for the heartbeat. Chunks wait meanwhile: ``fields_of`` would take ten times as long."""
        return [
            Progress(
                request_id=attempt.item.request.request_id,
                attempt=attempt.item.attempt,
                prompt_tokens=attempt.counts.prompt_tokens,
                cached_tokens=attempt.counts.cached_tokens,
                completion_tokens=attempt.counts.completion_tokens,
            )
            for attempt in self.attempts
        ]

    def step(self, event: Event | EngineEvent, now_ms: int) -> list[Effect]:
        """What to do about ``event``. ``now_ms``: monotonic, and of it only spans are told."""
        self._now_ms = now_ms
        self._history.append((type(event).__name__, getattr(event, "key", None)))
        match event:
            case events.WorkPulled():
                self._pulled(event)
            case events.AttemptEnded():
                self._ended(event)
            case events.EventStored():
                self._stored(event)
            case events.ControlAsked():
                self._asked(event)
            case EngineSampled():
                self._sampled(event)
            case events.RoomFreed():
                pass  # What waits may start now.
            case EngineStarted():
                self._engine_started(event)
            case EngineLost():
                self._engine_lost(event.reason)
            case EngineRefused():
                self._engine_refused(event.reason)
            case events.VersionFetched():
                self._fetched(event.version)
            case events.DrainKnown():
                self._drain_known = True
            case events.VersionRefused():
                self._version_refused(event.version, event.reason)
            case events.DrainStarted():
                self._drain()
            case events.GraceEnded():
                self._end_each(self.attempts, outcomes.SHUTTING_DOWN)
            case events.Joined():
                self.worker = event.worker
                self._effects.append(events.SendHeartbeat())
            case _:
                raise BrokenLifecycle(f"no such event: {event!r}")
        if self._switching and self._drain_known and not len(self.attempts):
            self._load(self._wanted, previous=self._fallback)
        while self.state == "ready" and (attempt := self.attempts.start_next()):
            attempt.started_at_ms = self._now_ms
            self._effects.append(events.StartAttempt(key=attempt.key, item=attempt.item, counts=attempt.counts))
        effects, self._effects = self._effects, []
        return effects

    def _pulled(self, event: events.WorkPulled) -> None:
        item, key = event.item, (event.item.request.request_id, event.item.attempt)
        if attempt := self.attempts.get(key):  # delivered again, or stored twice
            if event.delivery not in attempt.deliveries:
                attempt.deliveries.append(event.delivery)
            return
        # A lower epoch gets no event: the new owner may have given the same attempt to another worker.
        tombstone, until = self.attempts.tombstone(key)
        if item.epoch < self.epoch or item.epoch <= until:
            self._give_up(event.delivery, settled=tombstone == "settled")
            return
        self.epoch = item.epoch
        attempt = self.attempts.add(item, event.delivery, self._now_ms)
        if refusal := self._refusal(item.request):
            self._end(attempt, refusal)

    def _refusal(self, request: RequestEnvelope) -> AttemptOutcome | None:
        """Why an attempt cannot start here, though it may elsewhere."""
        if self.state == "draining" or self.held:
            return outcomes.SHUTTING_DOWN
        if self.state != "ready":
            return outcomes.NO_ENGINE
        theirs = request.tokenizer_fingerprint
        if theirs and self._fingerprint and theirs != self._fingerprint:
            return outcomes.other_tokenizer(theirs, self._fingerprint)
        return None

    def _end(self, attempt: InFlight, outcome: AttemptOutcome) -> None:
        """Decide how an attempt ends; the first decision holds."""
        match attempt.stage:
            case "waiting":
                self._store(attempt, outcome, frames=0, chunks=0)
            case "running":
                attempt.stage, attempt.outcome = "stopping", outcome
                self._effects.append(events.StopAttempt(key=attempt.key))
            case "stopping" | "storing":
                pass

    def _end_each(self, attempts: Iterable[InFlight], outcome: AttemptOutcome) -> None:
        for attempt in attempts:
            self._end(attempt, outcome)

    def _ended(self, event: events.AttemptEnded) -> None:
        attempt = self._expect(event.key, "running", "stopping")
        failure = event.failure
        engine_died = failure is not None and failure.engine_death and attempt.stage == "running"
        outcome = attempt.outcome or (outcomes.failed(failure) if failure else outcomes.COMPLETED)
        if engine_died:
            self._accuse()
        self._store(attempt, outcome, frames=event.frames, chunks=event.chunks)
        if failure and engine_died:  # a stopped one may tell of an engine that was replaced since
            self._end_with_engine(failure.message)

    def _store(self, attempt: InFlight, outcome: AttemptOutcome, *, frames: int, chunks: int) -> None:
        self.attempts.leave_engine(attempt)
        attempt.outcome = outcome
        attempt.event = outcomes.terminal_event(
            attempt.item,
            attempt.counts,
            outcome,
            worker=self.worker,
            frames=frames,
            chunks=chunks,
            pulled_at_ms=attempt.pulled_at_ms,
            started_at_ms=attempt.started_at_ms,
            now_ms=self._now_ms,
            accused=attempt.accused,
        )
        self._effects.append(events.StoreEvent(key=attempt.key, event=attempt.event))

    def _stored(self, event: events.EventStored) -> None:
        attempt = self._expect(event.key, "storing")
        last = None
        if event.won and attempt.outcome and attempt.event and not attempt.event.retryable:
            last = outcomes.closing_data(attempt.outcome, attempt.event)
        settled = last is not None
        self._effects.append(events.CloseStream(item=attempt.item, last=last))
        for delivery in attempt.deliveries:
            self._give_up(delivery, settled=settled)
        self._answer_all(attempt, "ended")
        self._remove(attempt, "settled" if settled else "finished")
        self._effects.append(events.SendHeartbeat())

    def _give_up(self, delivery: int, *, settled: bool) -> None:
        """Acknowledge the work of a settled request; what may be tried again keeps its body in WORK."""
        self._effects.append(events.AckWork(delivery=delivery) if settled else events.LeaveWork(delivery=delivery))

    def _remove(self, attempt: InFlight, tombstone: Tombstone) -> None:
        self.attempts.remove(attempt)
        self._bury(attempt.key, tombstone)

    def _bury(self, key: Key, tombstone: Tombstone) -> None:
        """An attempt that never started may be given by a later owner, who does not know that it was withdrawn."""
        self.attempts.bury(key, tombstone, self.epoch if tombstone == "never" else FOR_EVER)

    def _expect(self, key: Key, *stages: Stage) -> InFlight:
        attempt = self.attempts.get(key)
        if attempt is None or attempt.stage not in stages:
            stage = attempt.stage if attempt else "not in flight"
            raise BrokenLifecycle(f"{key} is {stage}, expected {stages}; before: {list(self._history)}")
        return attempt

    def _asked(self, event: events.ControlAsked) -> None:
        request = event.request
        if request.epoch < self.epoch:
            self._answer(event.asker, "stale")
            return
        self.epoch = request.epoch
        match request:
            case Announce():
                self._answer(event.asker, "ok")
                self._effects += [events.TellCache(), events.SendHeartbeat()]
            case CancelAttempt():
                self._cancel((request.request_id, request.attempt), event.asker, request.reason)
            case Evict():
                self._answer(event.asker, "ok")
                self._leave()
            case SwitchVersion():
                self._answer(event.asker, "ok")
                self._switch(request.version)
            case Hold():
                self._answer(event.asker, "ok")
                self._hold(request.held)

    def _cancel(self, key: Key, asker: Any, reason: str) -> None:
        if attempt := self.attempts.get(key):
            attempt.askers = [*attempt.askers[1 - ASKERS_MAX :], asker]
            self._end(attempt, outcomes.cancelled(reason))
        elif self.attempts.tombstone(key)[0] != "never":
            self._answer(asker, "ended")
        else:
            self._bury(key, "never")
            self._answer(asker, "unknown")

    def _leave(self) -> None:
        self.worker = ""
        self._effects.append(events.Rejoin())
        for attempt in self.attempts:
            self._answer_all(attempt, "unknown")
            self._remove(attempt, "never" if attempt.stage == "waiting" else "finished")

    def _answer(self, asker: Any, status: Literal["ok", "stale", "ended", "unknown"]) -> None:
        self._effects.append(events.AnswerControl(asker=asker, answer=ControlAnswer(status=status, epoch=self.epoch)))

    def _answer_all(self, attempt: InFlight, status: Literal["ended", "unknown"]) -> None:
        for asker in attempt.askers:
            self._answer(asker, status)
        attempt.askers = []

    def _switch(self, version: str) -> None:
        """Repeated orders are one. One for the version that is served calls off another that is not loaded yet."""
        if self.pinned:
            self.pinned = False
            self._effects.append(events.SendHeartbeat())
        if version == self._wanted or self.state == "draining":
            return
        self._wanted = version
        if version != self._version:
            self._effects.append(events.FetchVersion(version=version))

    def _fetched(self, version: str) -> None:
        """The files are here: what runs may end, what waits goes elsewhere."""
        if version != self._wanted or version == self._version or self.state == "draining":
            return
        self._fallback = self._version if self.state in ("ready", "engine_down") else ""
        self.state, self.reason, self._switching = "draining", f"switching to {version}", True
        self._drain_known = False
        self._end_each(self.attempts.not_started(), outcomes.SHUTTING_DOWN)
        self._effects.append(events.SendHeartbeat())

    def _load(self, version: str, *, previous: str) -> None:
        self.state, self.worker, self._switching = "starting", "", False
        self._version = self._wanted = version
        self._previous = previous
        self._effects.append(events.LoadVersion(version=version))

    def _version_refused(self, version: str, reason: str) -> None:
        if version == self._wanted and self.state != "draining":
            self._wanted = self._version
            self.reason = f"{version} refused: {reason}"
            self._effects.append(events.SendHeartbeat())

    def _engine_refused(self, reason: str) -> None:
        """The version before serves on; where there is none, the engine is tried again."""
        if self.state == "draining":
            return
        if self._previous:
            self.reason = f"{self._version} refused: {reason}"
            self._load(self._previous, previous="")
        else:
            self.state, self.reason = "failed", reason
        self._effects.append(events.SendHeartbeat())

    def _hold(self, held: bool) -> None:
        self.held = held
        if held:
            self._end_each(self.attempts.not_started(), outcomes.SHUTTING_DOWN)
        self._effects.append(events.SendHeartbeat())

    def _drain(self) -> None:
        self.state, self._switching = "draining", False
        self._end_each(self.attempts.not_started(), outcomes.SHUTTING_DOWN)
        self._effects.append(events.SendHeartbeat())

    def _engine_started(self, event: EngineStarted) -> None:
        self.attempts.slots, self.attempts.kv_tokens = event.slots, event.kv_tokens
        self._stalls.restart()
        if event.tokenizer_fingerprint is not None:
            self._fingerprint = event.tokenizer_fingerprint
        if self.state != "draining":
            if self.state == "failed" or self._previous:
                self.reason = ""
            self.state, self._previous = "ready", ""
        self._effects.append(events.SendHeartbeat())

    def _accuse(self) -> None:
        """The engine has died: put it down to those that it ran."""
        running = {it.key: it for it in self.attempts if it.stage == "running"}
        exposed = {
            key: Exposed(
                body=(it.item.request.tenant, it.item.request.body_hash or it.item.request.request_id),
                suspect=it.counts.completion_tokens < it.item.suspect_tokens,
            )
            for key, it in running.items()
        }
        for key, accused in put_down_to(exposed).items():
            running[key].accused = accused

    def _engine_lost(self, reason: str) -> None:
        self._accuse()
        self._end_with_engine(reason)

    def _end_with_engine(self, reason: str) -> None:
        """All that runs ends with the engine; what only waits goes back unharmed."""
        if self.state not in ("ready", "draining"):
            return
        self._end_each(self.attempts.not_started(), outcomes.NO_ENGINE)
        self._end_each(self.attempts, outcomes.engine_lost(reason))
        if self.state == "ready":
            self.state = "engine_down"
            self._effects.append(events.RebuildEngine(reason=reason))
        self._effects.append(events.SendHeartbeat())

    def _sampled(self, event: EngineSampled) -> None:
        running = [attempt for attempt in self.attempts if attempt.stage == "running"]
        stalled, engine_stalled = self._stalls.sample(event.stats, running)
        if engine_stalled:
            self._engine_lost("the engine makes no progress")
            return
        for attempt in stalled:
            self._end(attempt, outcomes.STALLED)
        self._end_each((it for it in self.attempts if it.is_late(self._now_ms)), outcomes.LATE)

    def violations(self) -> Iterator[str]:
        """Rules that do not hold now; tests look after every step."""
        yield from self.attempts.violations()
        waiting = self.attempts.waiting
        if self.state != "ready" and (waiting or self.credit()):
            yield f"a worker that is {self.state} waits for work"
        if self.state == "ready" and waiting and self.attempts.engine_idle:
            yield "an idle engine leaves work waiting"
