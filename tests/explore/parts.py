"""The production cores as automata: a state is a number, a step is (state, operation, now) -> (state, outputs).

Every step is made once: its result is remembered. States are kept pickled, and two that agree in
``canonical.form`` are one. Operations and outputs are tuples with encoded messages, as the bus carries them.
"""

import pickle
from collections.abc import Callable
from typing import Any

import msgspec

from contracts import subjects
from contracts.messages.admission import AdmissionRequest
from contracts.messages.attempts import AttemptEvent
from contracts.messages.base import Codec, Epoch
from contracts.messages.control import (
    CancelAttempt,
    CancelRequest,
    ControlAnswer,
    ControlRequest,
    StatusAnswer,
    StreamOwnerHeartbeat,
    WorkerHeartbeat,
    WorkerPulse,
)
from contracts.messages.frames import Frame, FramesAnswer
from contracts.messages.records import ModelRecord, TenantLimits, TenantRecord
from contracts.messages.request import RequestEnvelope, WorkItem
from contracts.streaming.relay import AskFrames, AskStatus, Finish, Forward, Relay, RelaySettings
from scheduler.core import events, views
from scheduler.core.core import Core
from scheduler.core.settings import Settings
from scheduler.effects import work_id
from tests.explore.canonical import form, near
from tests.explore.records import LOST_TICKS, TICK_MS, Op, Violation
from tests.support.token_ledger import TokenLedger
from worker.core import events as wev
from worker.core.core import WorkerCore
from worker.engines.base import Counts, EngineEvent, EngineFailure, EngineStarted

encode = msgspec.json.Encoder().encode
ADMISSION = Codec[AdmissionRequest](AdmissionRequest)
ENVELOPE = Codec[RequestEnvelope](RequestEnvelope)
ITEM = Codec[WorkItem](WorkItem)
EVENT = Codec[AttemptEvent](AttemptEvent)
CANCEL = Codec[CancelRequest](CancelRequest)
CONTROL = Codec[ControlRequest](ControlRequest)  # type: ignore[arg-type]
CONTROLLED = Codec[ControlAnswer](ControlAnswer)
BEAT = Codec[WorkerHeartbeat](WorkerHeartbeat)
PULSE = Codec[WorkerPulse](WorkerPulse)
STREAM_OWNER = Codec[StreamOwnerHeartbeat](StreamOwnerHeartbeat)
FRAME = Codec[Frame](Frame)
FRAMES = Codec[FramesAnswer](FramesAnswer)
STATUS = Codec[StatusAnswer](StatusAnswer)

TENANT = "t"
READER = subjects.gateway_stream_owner("g-1")
"""Stream owner of all that is asked here."""
MODEL = ModelRecord(name="m", stable="v1")
SETTINGS = Settings(
    publish_within_ms=3 * TICK_MS,
    expiry_margin_ms=TICK_MS,
    lost_after_beats=LOST_TICKS,
    slow_lag_ms=TICK_MS,
    slow_engine_ms=2 * TICK_MS,
    given_up_ms=6 * TICK_MS,
    cancel_repeat_ms=2 * TICK_MS,
    pickup_timeout_ms=5 * TICK_MS,
    readers_heard_ms=4 * TICK_MS,
    end_overdue_ms=2 * TICK_MS,
)
RELAY = RelaySettings(
    silence_ms=4 * TICK_MS,
    silence_ms_max=6 * TICK_MS,
    repair_again_ms=TICK_MS,
    repair_ms_max=5 * TICK_MS,
    status_again_ms=2 * TICK_MS,
    unreachable_ms_max=20 * TICK_MS,
    answer_ms_max=2 * TICK_MS,
    joined_status_ms=TICK_MS,
)
"""As in production in their proportions: silence is longer than a loss, a repair longer than a takeover."""


LIMITS = TenantLimits(rpm=6, input_tpm=6, output_tpm=12)
"""Enough for two requests; what one takes is refilled in 10 to 15 s."""


class Owner:
    """A scheduler's core, and the account that is kept of its token buckets where there are any."""

    def __init__(self, core: Core, ledger: TokenLedger | None) -> None:
        self.core = core
        self.ledger = ledger


class Box:
    """A worker's core and the counts that its engine writes."""

    def __init__(self, core: WorkerCore) -> None:
        self.core = core
        self.counts: dict[tuple[str, int], Counts] = {}


class Automaton:
    """One kind of core. ``facts`` is what the world wants to know of a state without stepping it."""

    def __init__(
        self,
        name: str,
        apply: Callable[[Any, Op, int], list[Op]],
        facts: Callable[[Any], Any],
        pack: Callable[[Any], bytes] = pickle.dumps,
        unpack: Callable[[bytes], Any] = pickle.loads,
    ) -> None:
        self._name = name
        self._apply = apply
        self._facts = facts
        self._pack = pack
        self._unpack = unpack
        self._numbers: dict[tuple[int, tuple[int, ...], tuple[int, ...]], int] = {}
        self._shapes: dict[tuple[Any, ...], int] = {}
        self._forms: list[tuple[int, tuple[int, ...], tuple[int, ...]]] = []
        self._blobs: list[bytes] = []
        self._steps: dict[tuple[int, Op, int], tuple[int, tuple[Op, ...]]] = {}
        self.facts: list[Any] = []

    def add(self, core: Any) -> int:
        shape, times, full_at = form(core)
        key = (self._shapes.setdefault(shape, len(self._shapes)), times, full_at)
        number = self._numbers.get(key)
        if number is None:
            number = self._numbers[key] = len(self._blobs)
            self._forms.append(key)
            self._blobs.append(self._pack(core))
            self.facts.append(self._facts(core))
        return number

    def step(self, state: int, op: Op, now: int) -> tuple[int, tuple[Op, ...]]:
        key = (state, op, now)
        known = self._steps.get(key)
        if known is None:
            core = self._unpack(self._blobs[state])
            try:
                outputs = self._apply(core, op, now)
            except Violation:
                raise
            except Exception as error:
                raise Violation("the core breaks", f"{self._name} at {op[:3]}: {error!r}") from error
            known = self._steps[key] = (self.add(core), tuple(outputs))
        return known

    def form(self, state: int, now: int) -> tuple[Any, ...]:
        """Equal for states that behave alike from ``now`` on."""
        if state < 0:
            return ()
        shape, times, full_at = self._forms[state]
        return (shape, *[near(instant, now) for instant in times], *[max(0, near(at, now)) for at in full_at])

    def __len__(self) -> int:
        return len(self._blobs)


def steady_clock(now: int, wall_is_off: int) -> int:
    """As production has it: the bus's time at the beginning of the term, and what has passed since."""
    return now


class Parts:
    """The three automata; mutants take the place of the production cores."""

    def __init__(
        self,
        *,
        core: type[Core] = Core,
        worker: type[WorkerCore] = WorkerCore,
        relay: type[Relay] = Relay,
        work_id: Callable[[WorkItem], str] = work_id,
        clock: Callable[[int, int], int] = steady_clock,
    ) -> None:
        self.clock = clock
        """What a scheduler takes for the time, from the time and how far its wall clock is off."""
        self.work_id = work_id
        self.limits = TenantLimits()
        self._core = core
        self._worker = worker
        self._relay = relay
        self.core = Automaton("scheduler", _step_core, _core_facts, _pack_core, _unpack_core)
        self.worker = Automaton("worker", _step_worker, _worker_facts)
        self.relay = Automaton("relay", _step_relay, lambda relay: (relay.finished, relay.void_below))
        self._marks: dict[tuple[Any, int], int] = {}

    def mark(self, value: Any, now: int, shape: Callable[[Any, int, "Parts"], Any]) -> int:
        """A hash of a record's form at ``now``, worked out once."""
        key = (value, now)
        known = self._marks.get(key)
        if known is None:
            known = self._marks[key] = hash(shape(value, now, self))
        return known

    def new_core(self, revision: int, owner: str, now: int) -> int:
        core = self._core(model="m", owner=owner, epoch=Epoch(1, revision), record=MODEL, settings=SETTINGS, now_ms=now)
        made = Owner(core, TokenLedger() if self.limits is LIMITS else None)
        _take_in(made, events.TenantChanged(TENANT, TenantRecord(name=TENANT, limits=self.limits)), now)
        return self.core.add(made)

    def new_worker(self) -> int:
        return self.worker.add(Box(self._worker()))

    def new_relay(self, *, stream: bool, now: int, joined: bool = False) -> int:
        return self.relay.add(self._relay(stream=stream, now_ms=now, settings=RELAY, joined=joined))


# The scheduler ---------------------------------------------------------------------------------------------


def _core_facts(owner: Owner) -> tuple[int, ...]:
    """(requests, what is reserved or counted though nothing is open, whether workers must still acknowledge)."""
    core = owner.core
    pool = core.pool.workers.values()
    leaks = (
        core.admission.reserved_tokens
        + core.admission.waiting
        + len(core.queue)
        + sum(worker.slots_reserved + worker.kv_reserved for worker in pool)
        + sum(quota.open for quota in core.admission.quotas.values())
        + sum(share.running + share.waiting for share in core.queue.shares.values())
        + len(core.stream_owners)
        + len(core.keys)
        + len(core.cancelling)
        + len(core.deferred)
    )
    return len(core.requests), leaks, core.pool.unacknowledged()


def _pack_core(owner: Owner) -> bytes:
    """Without what all cores have in common, and without histories: half of the bytes, a third of the time."""
    core = owner.core
    for request in core.requests.values():
        request.history.clear()
    handlers, core._handlers = core._handlers, {}
    core.settings = core.admission.record = None  # type: ignore[assignment]
    packed = pickle.dumps(owner, 5)
    core._handlers, core.settings, core.admission.record = handlers, SETTINGS, MODEL
    return packed


def _unpack_core(packed: bytes) -> Owner:
    owner: Owner = pickle.loads(packed)  # noqa: S301 (our own, of this process)
    owner.core._handlers = owner.core._table()
    owner.core.settings, owner.core.admission.record = SETTINGS, MODEL
    return owner


def _core_event(op: Op) -> events.Event:
    match op:
        case ("ask", data):
            return events.AdmissionAsked(ADMISSION.decode(data), ADMISSION.decode(data).request_id)
        case ("request", seq, stored_at, data):
            return events.RequestStored(ENVELOPE.decode(data), seq, stored_at)
        case ("found", seq, data):
            return events.WorkFound(ITEM.decode(data), seq)
        case ("recovered",):
            return events.Recovered()
        case ("work_stored", rid, attempt, seq):
            return events.WorkStored(rid, attempt, seq)
        case ("work_refused", rid, attempt, missing):
            return events.WorkRefused(rid, attempt, missing)
        case ("ended", data):
            return events.TerminalStored(EVENT.decode(data))
        case ("unreadable", rid, attempt):
            return events.EndUnreadable(rid, attempt)
        case ("end_missing", rid, attempt):
            return events.EndMissing(rid, attempt)
        case ("swept", found, newest):
            return events.WorkSwept(found, newest)
        case ("cancel", rid, data):
            return events.CancelAsked(TENANT, CANCEL.decode(data), rid)
        case ("controlled", rid, attempt, data):
            return events.ControlAnswered(rid, attempt, CONTROLLED.decode(data))
        case ("status", rid, void_below):
            return events.StatusAsked(TENANT, rid, rid, void_below=void_below)
        case ("status", rid, void_below, of):
            return events.StatusAsked(TENANT, of, rid, void_below=void_below, reader=rid, stream_owner=READER)
        case ("beat", _, data):
            return events.WorkerSeen(BEAT.decode(data))
        case ("pulse", _, data):
            return events.PulseSeen(PULSE.decode(data))
        case ("stream_owner", _, data):
            return events.StreamOwnerSeen(STREAM_OWNER.decode(data))
        case ("tick",):
            return events.LoopbackSeen()
        case ("time",):
            return events.TimePassed()
    raise TypeError(op)


def _step_core(owner: Owner, op: Op, now: int) -> list[Op]:
    if op[0] == "all":
        return [output for inner in op[1:] for output in _step_core(owner, inner, now)]
    if op[0] != "item":
        return [_core_output(effect) for effect in _take_in(owner, _core_event(op), now)]
    effect = events.StoreWork(**dict(zip(events.StoreWork.__struct_fields__, op[1:], strict=True)))
    request = owner.core.awaits_work(effect)  # What the shell asks before it stores an attempt.
    if request is None:
        return []
    item = WorkItem(
        epoch=owner.core.epoch,
        attempt=effect.attempt,
        version=effect.version,
        worker=effect.worker,
        dispatched_at_ms=request.dispatched_at_ms,
        suspect_tokens=request.suspect_tokens,
        request=msgspec.structs.replace(request.envelope, body=msgspec.Raw(b"{}")),
    )
    return [("item", encode(item))]


def _take_in(owner: Owner, event: events.Event, now: int) -> list[events.Effect]:
    effects = owner.core.step(event, now)
    views.check_invariants(owner.core)
    if owner.ledger is not None:
        try:
            owner.ledger.observe(event, effects, owner.core, now)
        except AssertionError as error:
            raise Violation("token buckets hold what the rules say", str(error)) from error
    return effects


def _core_output(effect: events.Effect) -> Op:
    match effect:
        case events.AnswerAdmission(handle, answer):
            return "admission", handle, encode(answer)
        case events.AnswerCancel(handle, answer):
            return "cancelled", handle, encode(answer)
        case events.AnswerStatus(handle, answer):
            return "status", handle, encode(answer)
        case events.AckRequest(seq):
            return "ack", seq
        case events.DeleteWork(seq):
            return "delete", seq
        case events.StoreWork():
            return "work", *msgspec.structs.astuple(effect)
        case events.Quarantine():
            return "quarantine", effect.request_seq, effect.work_seq
        case events.StoreTerminal(event):
            return "end", event.request_id, event.attempt, encode(event)
        case events.ReadEnd(rid, attempt):
            return "read_end", rid, attempt
        case events.SendControl(worker, order):
            return "control", worker, encode(order)
        case events.RiseAbove(epoch):
            return "rise", epoch.revision
        case events.SendFrame(_, frame):
            return "frame", frame.stream, encode(frame)
    raise TypeError(effect)


# The worker ------------------------------------------------------------------------------------------------


def _worker_facts(box: Box) -> tuple[Any, ...]:
    """(credit, slots, attempts in flight, heartbeat)."""
    core = box.core
    beat = WorkerHeartbeat(
        worker=core.worker,
        model="m",
        version="v1",
        state=core.state,
        epoch=core.epoch,
        slots=core.attempts.slots,
        kv_tokens=core.attempts.kv_tokens,
        in_flight=core.progress(),
    )
    return core.credit(), core.attempts.slots, len(core.attempts), encode(beat)


_FAILURES = {
    "": None,
    "death": EngineFailure("engine_error", "died", retryable=True, engine_death=True),
    "refusal": EngineFailure("invalid_request", "no"),
}


def _step_worker(box: Box, op: Op, now: int) -> list[Op]:
    match op:
        case ("token", key):
            counts = box.counts[key]
            counts.prompt_tokens = 1
            counts.completion_tokens += 1
            return []
        case ("joined", name):
            event: wev.Event | EngineEvent = wev.Joined(worker=name)
        case ("engine",):
            event = EngineStarted(slots=1, kv_tokens=1000)
        case ("drain",):
            event = wev.DrainStarted()
        case ("grace is over",):
            event = wev.GraceEnded()
        case ("pulled", seq, data):
            event = wev.WorkPulled(item=ITEM.decode(data), delivery=seq)
        case ("control", asker, data):
            event = wev.ControlAsked(request=CONTROL.decode(data), asker=asker)
        case ("ended", key, frames, chunks, failure):
            event = wev.AttemptEnded(key=key, frames=frames, chunks=chunks, failure=_FAILURES[failure])
        case ("decided", key, won):
            event = wev.EventStored(key=key, won=won)
        case _:
            raise TypeError(op)
    outputs = [_worker_output(box, effect) for effect in box.core.step(event, now)]
    if problems := list(box.core.violations()):
        raise AssertionError(problems)
    return outputs


def _worker_output(box: Box, effect: wev.Effect) -> Op:
    match effect:
        case wev.StartAttempt():
            box.counts[effect.key] = effect.counts
            return "start", effect.key
        case wev.StopAttempt():
            return "stop", effect.key
        case wev.StoreEvent():
            box.counts.pop(effect.key, None)
            return "store", effect.key, encode(effect.event)
        case wev.CloseStream():
            key = (effect.item.request.request_id, effect.item.attempt)
            kind = "" if effect.last is None else "end" if type(effect.last).__name__ == "EndData" else "error"
            return "close", key, kind, encode(effect.last) if kind else b""
        case wev.AckWork():
            return "ack", effect.delivery
        case wev.LeaveWork():
            return "leave", effect.delivery
        case wev.AnswerControl():
            return "answer", effect.asker, encode(effect.answer)
        case wev.SendHeartbeat():
            return ("beat",)
        case wev.TellCache():
            return ("tell cache",)
        case wev.RebuildEngine():
            return ("rebuild",)
        case wev.Rejoin():
            box.counts.clear()
            return ("rejoin",)
    raise TypeError(effect)


def cancelled_attempt(order: bytes) -> tuple[str, int] | None:
    """The attempt that an encoded order cancels."""
    decoded = CONTROL.decode(order)
    return (decoded.request_id, decoded.attempt) if isinstance(decoded, CancelAttempt) else None


# The relay -------------------------------------------------------------------------------------------------


def _step_relay(relay: Relay, op: Op, now: int) -> list[Op]:
    match op:
        case ("frame", worker, revision, data):
            effects = relay.on_frame(worker, FRAME.decode(data), now, Epoch(1, revision) if revision else Epoch())
        case ("frames", worker, attempt, data):
            effects = relay.on_frames_answer(worker, attempt, FRAMES.decode(data) if data else None, now)
        case ("status", data):
            effects = relay.on_status(STATUS.decode(data) if data else None, now)
        case ("tick",):
            effects = relay.on_tick(now)
        case _:
            raise TypeError(op)
    outputs: list[Op] = []
    for effect in effects:
        if isinstance(effect, Forward):
            outputs.append(("forward", bytes(effect.data)))
        elif isinstance(effect, Finish):
            outputs.append(("finish", encode(effect.end)))
        elif isinstance(effect, AskFrames):
            outputs.append(("frames?", effect.worker, effect.attempt, effect.from_seq))
        elif isinstance(effect, AskStatus):
            outputs.append(("status?",))
        else:
            outputs.append(("fail", effect.error.code))
    return outputs
