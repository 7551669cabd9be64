"""What a worker decides: which pulled attempts start, when they stop, how each ends, and how much it takes.

Pure: events and the time come in, effects go out, to be performed in order. Not decided here: how frames
travel (`worker.frame_buffer`), how a terminal event is stored (`worker.attempt_store`), what follows a retryable
failure (the scheduler). No step is made per token: the engine writes an attempt's ``Counts``, and the core reads them
when it reports or ends the attempt.
"""

from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, Literal

import msgspec

from contracts.messages.attempts import AttemptEvent
from contracts.messages.base import Epoch, TokenCounts, fields_of
from contracts.messages.control import Announce, CancelAttempt, ControlAnswer, Evict, Progress, WorkerState
from contracts.messages.request import RequestEnvelope, WorkItem
from worker.core import outcomes
from worker.core.events import (
    AckWork,
    Answer,
    AttemptEnded,
    Beat,
    CloseStream,
    ControlAsked,
    DrainStarted,
    Effect,
    EngineLost,
    EngineSampled,
    EngineStarted,
    Event,
    EventDecided,
    GraceEnded,
    Joined,
    Key,
    LeaveWork,
    RebuildEngine,
    Rejoin,
    StartAttempt,
    StopAttempt,
    StoreEvent,
    WorkPulled,
)
from worker.core.outcomes import Ending, reserved_tokens
from worker.engines.base import Counts

Stage = Literal["waiting", "running", "stopping", "storing"]
Gone = Literal["never", "ended", "over"]
"""Of an attempt that is not held any more: never started, ended, or its end was the request's (ours was stored)."""

NEVER_SEEN: tuple[Gone, Epoch] = ("never", Epoch(-1, -1))
FOR_EVER = Epoch(2**63 - 1, 2**63 - 1)

SEEN_MAX = 100_000
"""Attempts remembered after they are gone: minutes of the fastest worker, while a repeated delivery of an
attempt that is gone needs a lost acknowledgement or a cancel that overtook it, seconds."""
ASKERS_MAX = 16
"""Cancels of one attempt that wait for an answer; who was dropped asks again."""


class BrokenLifecycle(Exception):
    """An event that the attempt's stage does not allow; the text tells what came before."""


class Held(msgspec.Struct, kw_only=True):
    """An attempt from its pull until its terminal event is decided."""

    item: WorkItem
    deliveries: list[int]
    stage: Stage = "waiting"
    counts: Counts
    ending: Ending | None = None
    event: AttemptEvent | None = None
    askers: list[Any]
    slots: int
    tokens: int
    seen_tokens: int = 0
    idle_samples: int = 0

    @property
    def key(self) -> Key:
        return self.item.request.request_id, self.item.attempt


class WorkerCore:
    """One worker process over all its names. ``stall_samples``: looks without progress that make a stall."""

    def __init__(
        self,
        *,
        tokenizer_fingerprint: str = "",
        kv_overbooking: float = 1.0,
        stall_samples: int = 60,
    ) -> None:
        self.worker = ""
        self.state: WorkerState = "starting"
        self.epoch = Epoch()
        self.slots = 0
        self.kv_tokens = 0
        self._fingerprint = tokenizer_fingerprint
        self._kv_overbooking = kv_overbooking
        self._stall_samples = stall_samples
        self._held: dict[Key, Held] = {}
        self._seen: dict[Key, tuple[Gone, Epoch]] = {}
        """Attempts that are gone, oldest first, and whether they have a terminal event."""
        self._waiting: deque[Key] = deque()
        self._slots_held = 0
        self._slots_active = 0
        self._tokens_active = 0
        self._engine_totals = (0, 0)
        self._idle_samples = 0
        self._history: deque[tuple[str, Key | None]] = deque(maxlen=64)
        self._effects: list[Effect] = []

    # What the shell reads ----------------------------------------------------------------------------------

    @property
    def held(self) -> int:
        return len(self._held)

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    def credit(self) -> int:
        """Attempts that may be pulled now; none while one waits here: what is in WORK can be taken back."""
        if self.state != "ready" or self._waiting or not self.worker:
            return 0
        return max(0, self.slots - self._slots_held)

    def progress(self) -> list[Progress]:
        """All that is held, for the heartbeat."""
        return [
            Progress(request_id=request_id, attempt=attempt, **fields_of(TokenCounts, held.counts))
            for (request_id, attempt), held in self._held.items()
        ]

    # Steps -------------------------------------------------------------------------------------------------

    def step(self, event: Event, now_ms: int) -> list[Effect]:
        """What to do about ``event``. ``now_ms``: Unix ms, only written into terminal events."""
        self._history.append((type(event).__name__, getattr(event, "key", None)))
        match event:
            case WorkPulled():
                self._pulled(event, now_ms)
            case AttemptEnded():
                self._ended(event, now_ms)
            case EventDecided():
                self._decided(event)
            case ControlAsked():
                self._asked(event, now_ms)
            case EngineSampled():
                self._sampled(event, now_ms)
            case EngineStarted():
                self._engine_started(event)
            case EngineLost():
                self._engine_lost(event.reason, now_ms)
            case DrainStarted():
                self._drain(now_ms)
            case GraceEnded():
                self._end_all(outcomes.SHUTTING_DOWN, now_ms)
            case Joined():
                self.worker = event.worker
                self._effects.append(Beat())
            case _:
                raise BrokenLifecycle(f"no such event: {event!r}")
        self._start_waiting()
        effects, self._effects = self._effects, []
        return effects

    def _pulled(self, event: WorkPulled, now_ms: int) -> None:
        item, key = event.item, (event.item.request.request_id, event.item.attempt)
        if held := self._held.get(key):  # delivered again, or stored twice
            if event.delivery not in held.deliveries:
                held.deliveries.append(event.delivery)
            return
        # A lower epoch gets no event: the new owner may have given the same attempt to another worker.
        gone, until = self._seen.get(key, NEVER_SEEN)
        if item.epoch < self.epoch or item.epoch <= until:
            self._give_up(event.delivery, over=gone == "over")
            return
        self._seen.pop(key, None)
        self.epoch = item.epoch
        held = Held(
            item=item,
            deliveries=[event.delivery],
            counts=Counts(),
            askers=[],
            slots=max(1, min(item.request.choices, self.slots)),
            tokens=reserved_tokens(item.request),
        )
        self._held[key] = held
        self._slots_held += held.slots
        self._waiting.append(key)
        if refusal := self._refusal(item.request):
            self._end(key, refusal, now_ms)

    def _refusal(self, request: RequestEnvelope) -> Ending | None:
        """Why an attempt cannot start here, though it may elsewhere."""
        if self.state == "draining":
            return outcomes.SHUTTING_DOWN
        if self.state != "ready":
            return outcomes.NO_ENGINE
        theirs = request.tokenizer_fingerprint
        if theirs and self._fingerprint and theirs != self._fingerprint:
            return Ending(
                outcome="failed",
                code="unavailable",
                message=f"tokenizer mismatch: counted by {theirs[:16]}, served by {self._fingerprint[:16]}",
                retry="always",
            )
        return None

    def _start_waiting(self) -> None:
        """In order, while slots and KV tokens are free; an idle engine takes one of any size."""
        while self.state == "ready" and self._waiting:
            held = self._held[self._waiting[0]]
            room = self.kv_tokens * self._kv_overbooking
            if self._slots_active and (
                self._slots_active + held.slots > self.slots or self._tokens_active + held.tokens > room
            ):
                return
            self._waiting.popleft()
            held.stage = "running"
            self._slots_active += held.slots
            self._tokens_active += held.tokens
            self._effects.append(StartAttempt(key=held.key, item=held.item, counts=held.counts))

    # The lifecycle of an attempt ---------------------------------------------------------------------------

    def _end(self, key: Key, ending: Ending, now_ms: int) -> None:
        """Decide how an attempt ends; the first decision holds."""
        held = self._held[key]
        _ON_END[held.stage](self, held, ending, now_ms)

    def _end_waiting(self, held: Held, ending: Ending, now_ms: int) -> None:
        self._waiting.remove(held.key)
        self._store(held, ending, frames=0, chunks=0, now_ms=now_ms)

    def _end_running(self, held: Held, ending: Ending, _now_ms: int) -> None:
        held.ending = ending
        held.stage = "stopping"
        self._effects.append(StopAttempt(key=held.key))

    def _is_ending(self, _held: Held, _ending: Ending, _now_ms: int) -> None:
        """The decision is made already."""

    def _end_all(self, ending: Ending, now_ms: int) -> None:
        for key in list(self._held):
            self._end(key, ending, now_ms)

    def _ended(self, event: AttemptEnded, now_ms: int) -> None:
        held = self._expect(event.key, "running", "stopping")
        failure = event.failure
        engine_died = failure is not None and failure.engine_death and held.stage == "running"
        ending = held.ending or (outcomes.failed(failure) if failure else Ending(outcome="completed"))
        self._slots_active -= held.slots
        self._tokens_active -= held.tokens
        self._store(held, ending, frames=event.frames, chunks=event.chunks, now_ms=now_ms)
        if failure and engine_died:  # a stopped one may tell of an engine that was replaced since
            self._engine_lost(failure.message, now_ms)

    def _store(self, held: Held, ending: Ending, *, frames: int, chunks: int, now_ms: int) -> None:
        held.ending = ending
        held.stage = "storing"
        held.event = outcomes.terminal_event(
            held.item,
            held.counts,
            ending,
            worker=self.worker,
            frames=frames,
            chunks=chunks,
            now_ms=now_ms,
        )
        self._effects.append(StoreEvent(key=held.key, event=held.event))

    def _decided(self, event: EventDecided) -> None:
        held = self._expect(event.key, "storing")
        last = None
        if event.won and held.ending and held.event and not held.event.retryable:
            last = outcomes.closing_data(held.ending, held.event)
        self._effects.append(CloseStream(item=held.item, last=last))
        for delivery in held.deliveries:
            self._give_up(delivery, over=last is not None)
        self._answer_all(held, "ended")
        self._drop(held, "over" if last is not None else "ended")
        self._effects.append(Beat())

    def _give_up(self, delivery: int, *, over: bool) -> None:
        """Acknowledge the work of a request that is over; what may be tried again keeps its body in WORK."""
        self._effects.append(AckWork(delivery=delivery) if over else LeaveWork(delivery=delivery))

    def _drop(self, held: Held, gone: Gone) -> None:
        del self._held[held.key]
        self._slots_held -= held.slots
        self._remember(held.key, gone)

    def _remember(self, key: Key, gone: Gone) -> None:
        """An attempt that never started may be given by a later owner, who does not know that it was withdrawn."""
        self._seen.pop(key, None)
        self._seen[key] = (gone, self.epoch if gone == "never" else FOR_EVER)
        if len(self._seen) > SEEN_MAX:
            del self._seen[next(iter(self._seen))]

    def _expect(self, key: Key, *stages: Stage) -> Held:
        held = self._held.get(key)
        if held is None or held.stage not in stages:
            stage = held.stage if held else "not held"
            raise BrokenLifecycle(f"{key} is {stage}, expected {stages}; before: {list(self._history)}")
        return held

    # Orders ------------------------------------------------------------------------------------------------

    def _asked(self, event: ControlAsked, now_ms: int) -> None:
        request = event.request
        if request.epoch < self.epoch:
            self._answer(event.asker, "stale")
            return
        self.epoch = request.epoch
        match request:
            case Announce():
                self._answer(event.asker, "ok")
                self._effects.append(Beat())
            case CancelAttempt():
                self._cancel((request.request_id, request.attempt), event.asker, request.reason, now_ms)
            case Evict():
                self._answer(event.asker, "ok")
                self._leave()

    def _cancel(self, key: Key, asker: Any, reason: str, now_ms: int) -> None:
        if held := self._held.get(key):
            held.askers = [*held.askers[1 - ASKERS_MAX :], asker]
            self._end(key, Ending(outcome="cancelled", code="cancelled", message=reason), now_ms)
        elif self._seen.get(key, NEVER_SEEN)[0] != "never":
            self._answer(asker, "ended")
        else:
            self._remember(key, "never")
            self._answer(asker, "unknown")

    def _leave(self) -> None:
        self.worker = ""
        self._effects.append(Rejoin())
        self._waiting.clear()
        self._slots_active = self._tokens_active = 0
        for held in list(self._held.values()):
            self._answer_all(held, "unknown")
            self._drop(held, "never" if held.stage == "waiting" else "ended")

    def _answer(self, asker: Any, status: Literal["ok", "stale", "ended", "unknown"]) -> None:
        self._effects.append(Answer(asker=asker, answer=ControlAnswer(status=status, epoch=self.epoch)))

    def _answer_all(self, held: Held, status: Literal["ended", "unknown"]) -> None:
        for asker in held.askers:
            self._answer(asker, status)
        held.askers = []

    def _drain(self, now_ms: int) -> None:
        self.state = "draining"
        for key in list(self._waiting):
            self._end(key, outcomes.SHUTTING_DOWN, now_ms)
        self._effects.append(Beat())

    # The engine --------------------------------------------------------------------------------------------

    def _engine_started(self, event: EngineStarted) -> None:
        self.slots, self.kv_tokens = event.slots, event.kv_tokens
        self._engine_totals, self._idle_samples = (0, 0), 0
        if self.state != "draining":
            self.state = "ready"
        self._effects.append(Beat())

    def _engine_lost(self, reason: str, now_ms: int) -> None:
        """All that runs ends with the engine; what only waits goes back unharmed."""
        if self.state not in ("ready", "draining"):
            return
        for key in list(self._waiting):
            self._end(key, outcomes.NO_ENGINE, now_ms)
        self._end_all(outcomes.engine_lost(reason), now_ms)
        if self.state == "ready":
            self.state = "engine_down"
            self._effects.append(RebuildEngine(reason=reason))
        self._effects.append(Beat())

    def _sampled(self, event: EngineSampled, now_ms: int) -> None:
        """Progress is an own token or, before the first one, any prefill (its own cannot be told)."""
        totals = (event.prefill_tokens_total, event.decode_tokens_total)
        prefilled = totals[0] != self._engine_totals[0]
        moved = totals != self._engine_totals
        self._engine_totals = totals
        running = [held for held in self._held.values() if held.stage == "running"]
        for held in running:
            tokens = held.counts.completion_tokens
            idle = tokens == held.seen_tokens and not (tokens == 0 and prefilled)
            held.seen_tokens = tokens
            held.idle_samples = held.idle_samples + 1 if idle else 0
        self._idle_samples = self._idle_samples + 1 if running and not moved else 0
        stalled = [held for held in running if held.idle_samples >= self._stall_samples]
        if len(stalled) == len(running) and self._idle_samples >= self._stall_samples:
            self._engine_lost("the engine makes no progress", now_ms)
            return
        for held in stalled:
            self._end(held.key, outcomes.STALLED, now_ms)

    # Checks ------------------------------------------------------------------------------------------------

    def violations(self) -> Iterator[str]:
        """Rules that do not hold now; tests look after every step."""
        active = [held for held in self._held.values() if held.stage in ("running", "stopping")]
        if self._slots_active != sum(held.slots for held in active):
            yield "active slots are miscounted"
        if self._tokens_active != sum(held.tokens for held in active):
            yield "active tokens are miscounted"
        if self._slots_held != sum(held.slots for held in self._held.values()):
            yield "held slots are miscounted"
        if set(self._waiting) != {key for key, held in self._held.items() if held.stage == "waiting"}:
            yield "the line and the stages differ"
        if self._held.keys() & self._seen.keys():
            yield "an attempt is held and gone"
        if len(active) > 1 and self._slots_active > self.slots:
            yield "more runs than there are slots"
        if len(active) > 1 and self._tokens_active > self.kv_tokens * self._kv_overbooking:
            yield "more runs than the KV cache holds"
        if self.state != "ready" and (self._waiting or self.credit()):
            yield f"a worker that is {self.state} waits for work"
        if self.state == "ready" and self._waiting and not active:
            yield "an idle engine leaves work waiting"
        for held in self._held.values():
            if (held.stage in ("stopping", "storing")) != (held.ending is not None):
                yield f"{held.key} is {held.stage} with the ending {held.ending}"


_ON_END: dict[Stage, Callable[[WorkerCore, Held, Ending, int], None]] = {
    "waiting": WorkerCore._end_waiting,
    "running": WorkerCore._end_running,
    "stopping": WorkerCore._is_ending,
    "storing": WorkerCore._is_ending,
}
