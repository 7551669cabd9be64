"""The explorer's shells do on the streams what the real ones do, effect by effect.

Random walks through the explored world give cores in every kind of state and what is fed to them. Each time the
effects are performed twice over equal streams: by ``tests.explore.schedulers`` and ``workers``, and by the production
shells upon a simulated bus; what both did to the streams, sent and told their core must be the same, in order. Left
out of the model: QUARANTINE, and the question whether a dead worker had pulled its work (CONSUMER.INFO).
"""

import asyncio
import random
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from contracts import subjects, topology
from contracts.bus import BusError, Incoming, NotFound, Stored, Unconfirmed, WrongSequence
from contracts.messages.base import Epoch
from contracts.messages.control import ControlAnswer
from contracts.messages.frames import ReplyMessage
from scheduler import effects as real_effects
from scheduler.core import events
from scheduler.effects import Effects
from tests.explore import faults, schedulers
from tests.explore.parts import ENVELOPE, EVENT, ITEM, Parts, _core_event, cancelled_attempt, encode
from tests.explore.records import Op, Scenario
from tests.explore.search import SCENARIOS, first_world
from tests.explore.world import World

WALKS = 60
STEPS = 250
EACH = 4
"""Comparisons for each kind of input with its kinds of effects."""
ANSWER = encode(ControlAnswer(status="unknown", epoch=Epoch(1, 1)))

Trace = list[Op]


class Recording(World):
    """A world that notes what is done to its streams, sent, and told the cores."""

    __slots__ = ("trace",)
    trace: Trace

    def __setattr__(self, name: str, value: Any) -> None:
        before = getattr(self, name, None)
        object.__setattr__(self, name, value)
        if name in ("requests", "work", "attempts") and before is not None:
            self.trace.extend((name, "-", entry[0]) for entry in before if entry not in value)
            self.trace.extend((name, "+", *entry) for entry in value if entry not in before)

    def send(self, message: Op) -> None:
        match message:
            case ("control", slot, epoch, worker, order):
                self.trace.append(("order", worker, order))
                schedulers.answer_order(self, (slot, epoch, order), ANSWER)
            case ("controlled", _, _, rid, attempt, data):
                self.trace.append(("tell", "controlled", rid, attempt, data))
            case ("frame", _, rid, _, revision, data):
                self.trace.append(("frame", rid, revision, data))
            case (kind, _, rid, data):
                self.trace.append((kind, rid, data))

    def set_sched(self, slot: int, **changes: Any) -> None:
        known = self.scheds[slot].told
        self.trace.extend(("tell", *fact) for fact in changes.get("told", ()) if fact not in known)
        super().set_sched(slot, **changes)


def recording(world: World) -> Recording:
    made = Recording.__new__(Recording)
    object.__setattr__(made, "trace", [])
    for name in World.__slots__:
        object.__setattr__(made, name, getattr(world, name))
    return made


class Streams:
    """JetStream's calls upon a world's streams; ``refuse`` is raised once by whatever is called first."""

    def __init__(self, world: Recording, refuse: BusError | None) -> None:
        self.world = world
        self.refuse = refuse
        self.kept: list[str] = []

    def _refuse(self) -> None:
        refuse, self.refuse = self.refuse, None
        if refuse is not None:
            raise refuse

    async def store(
        self,
        subject: str,
        data: bytes,
        *,
        msg_id: str,
        expect_last: int | None = None,
        headers: dict[str, str] | None = None,
    ) -> Stored:
        self._refuse()
        world = self.world
        if subject.startswith("quarantine."):
            assert not world.trace, "what is quarantined is kept before it is removed"
            self.kept.append(msg_id)
            return Stored(1, False)
        if expect_last is None:
            item = ITEM.decode(data)
            rid = item.request.request_id
            assert subject == subjects.work("m", item.version, item.worker)
            assert msg_id == real_effects.work_id(item)
            return Stored(world.store_work(rid, item.attempt, item.worker, data), False)
        event = EVENT.decode(data)
        assert subject == subjects.attempt("m", event.request_id, event.attempt) and expect_last == 0
        assert (
            msg_id
            == f"{event.request_id}.{event.attempt}.{event.worker if event.reporter == 'worker' else 'scheduler'}"
        )
        before = len(world.attempts)
        world.store_end(event.request_id, event.attempt, data)
        if len(world.attempts) == before:
            refusal = WrongSequence(subject)
            refusal.found = await self.last(topology.ATTEMPTS, subject)
            raise refusal
        return Stored(len(world.attempts), False)

    async def get(self, stream: str, seq: int) -> Incoming | None:
        if stream == topology.REQUESTS:
            for known, _, _, data in self.world.requests:
                if known == seq:
                    envelope = msgspec.structs.replace(ENVELOPE.decode(data), body=msgspec.Raw(b"{}"))
                    return Incoming("", "", encode(envelope), b"", None, (seq, 0, 0))  # type: ignore[arg-type]
            return None
        found = next((data for known, _, data in self.world.work if known == seq), None)
        return None if found is None else Incoming("", "", found, b"", None, (seq, 0, 0))  # type: ignore[arg-type]

    async def delete(self, stream: str, seq: int) -> None:
        self._refuse()
        name = "requests" if stream == topology.REQUESTS else "work"
        setattr(self.world, name, tuple(entry for entry in getattr(self.world, name) if entry[0] != seq))

    async def last(self, stream: str, subject: str) -> Incoming | None:
        for rid, attempt, data in self.world.attempts:
            if subjects.attempt("m", rid, attempt) == subject:
                data = b"?" if (rid, attempt) in self.world.garbled else data
                return Incoming(subject, "", data, b"", None, (1, 0, 0))  # type: ignore[arg-type]
        return None

    async def api(self, call: str) -> dict[str, Any]:
        raise NotFound(call)


class SimulatedBus:
    """What the shells use of contracts.bus.Bus."""

    connected = True
    user = "worker"

    def __init__(self, world: Recording, refuse: BusError | None = None) -> None:
        self.jetstream = Streams(world, refuse)
        self._trace = world.trace

    def send(self, subject: str, data: bytes) -> None:
        message = msgspec.json.decode(data, type=ReplyMessage)
        for frame in message.frames:
            self._trace.append(("frame", frame.stream, message.epoch.revision if message.epoch else 0, encode(frame)))

    async def publish(self, subject: str, data: bytes) -> None:
        self.send(subject, data)

    async def request(self, subject: str, data: bytes, *, timeout_s: float) -> bytes:
        self._trace.append(("order", "-".join(subject.split(".")[-2:]), data))
        return ANSWER


class Lease:
    def __init__(self, held: bool) -> None:
        self.held = held


class Asker:
    """Whom a scheduler's answer goes to."""

    def __init__(self, kind: str, rid: str, trace: Trace) -> None:
        self._as = kind, rid
        self._trace = trace

    def respond(self, data: bytes) -> None:
        self._trace.append((*self._as, data))


ANSWERS = {events.AnswerAdmission: "admission", events.AnswerCancel: "cancelled", events.AnswerStatus: "status"}


def told(event: events.Event) -> Op:
    match event:
        case events.WorkStored(rid, attempt, seq):
            return "tell", "work_stored", rid, attempt, seq
        case events.WorkRefused(rid, attempt, missing):
            return "tell", "work_refused", rid, attempt, missing
        case events.TerminalStored(end):
            return "tell", "ended", encode(end)
        case events.EndUnreadable(rid, attempt):
            return "tell", "unreadable", rid, attempt
        case events.EndMissing(rid, attempt):
            return "tell", "end_missing", rid, attempt
        case events.ControlAnswered(rid, attempt, answer):
            return "tell", "controlled", rid, attempt, encode(answer)
    raise TypeError(event)


def flat(op: Op) -> Iterator[Op]:
    if op[0] == "all":
        for inner in op[1:]:
            yield from flat(inner)
    else:
        yield op


def stepped(world: World, slot: int, op: Op) -> tuple[Any, list[events.Effect]]:
    """A production core as it stands in ``slot``, after ``op``, and what it wants done."""
    automaton = world.parts.core
    core = automaton._unpack(automaton._blobs[world.scheds[slot].state]).core
    return core, [effect for inner in flat(op) for effect in core.step(_core_event(inner), world.now)]


async def by_production(
    world: World, slot: int, op: Op, *, held: bool, refuse: type[BusError] | None, shell: type[Effects]
) -> list[Trace]:
    """What each effect comes to when the production shell performs it."""
    core, wanted = stepped(world, slot, op)
    made = recording(world)
    traces = []
    for effect in wanted:
        if isinstance(effect, events.RiseAbove):
            continue  # The lease's affair, and the explorer's own model of it.
        made.trace.clear()
        bus = SimulatedBus(made, refuse("refused") if refuse else None)
        broken: list[Exception] = []
        effects = shell(
            bus,  # type: ignore[arg-type]
            Lease(held),  # type: ignore[arg-type]
            core,
            feed=lambda event: made.trace.append(told(event)),
            fail=broken.append,
            cache_bytes=0,
        )
        if (kind := ANSWERS.get(type(effect))) is not None:
            handle = Asker(kind, effect.handle, made.trace)  # type: ignore[attr-defined]
            effect = msgspec.structs.replace(effect, handle=handle)
        effects.perform(effect)
        await asyncio.gather(*effects._tasks)
        assert not broken, broken
        traces.append(list(made.trace))
    return traces


def by_model(world: World, slot: int, op: Op, *, held: bool, refused: bool) -> list[Trace]:
    """The same by the explorer's shell."""
    made = recording(world)
    epoch = made.scheds[slot].epoch
    object.__setattr__(made, "lease", (epoch if held else epoch + 1, made.now))
    made.set_sched(slot, todo=())
    schedulers.feed(made, slot, op)
    traces = [[token] for token in made.trace if token[:2] != ("tell", "controlled")]
    for trace in traces:  # A worker's answer belongs to its order.
        if trace[0][0] == "order" and (key := cancelled_attempt(trace[0][2])) is not None:
            trace.append(("tell", "controlled", *key, ANSWER))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(schedulers, "feed", lambda _, __, fact: made.trace.append(("tell", *fact)))
        for effect in made.scheds[slot].todo:
            made.trace.clear()
            if refused and held and effect[0] == "work" and schedulers.item_of(made, slot, effect):
                faults._work_unconfirmed(made, slot, effect, "stored late")
            else:
                schedulers._do(made, slot, effect)
            traces.append(list(made.trace))
    return traces


Sample = tuple[World, int, Op]


def samples(seed: int) -> dict[tuple[str, ...], list[Sample]]:
    """Inputs of schedulers along random walks, by the kinds of effects that they cause."""
    found: dict[tuple[str, ...], list[Sample]] = {}
    feed = schedulers.feed

    def note(world: World, slot: int, op: Op) -> None:
        before = world.clone()
        feed(world, slot, op)
        _, outputs = world.parts.core.step(before.scheds[slot].state, op, before.now)
        kinds = tuple(sorted({output[0] for output in outputs}))
        if kinds and len(found.setdefault(kinds, [])) < EACH:
            found[kinds].append((before, slot, op))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(schedulers, "feed", note)
        choose = random.Random(seed)
        parts = Parts()
        for number in range(WALKS):
            scenario: Scenario = SCENARIOS[number % len(SCENARIOS)]
            world = first_world(parts, scenario)
            for _ in range(STEPS):
                wrong = list(faults.faults(world, None)) if choose.random() < 0.04 else []
                wrong = [fault for fault in wrong if fault[0] != "restore"]  # The lease is not the effects' to model.
                world = world.after(choose.choice(wrong or world.actions()))
            if (owner := world.owner()) is not None:  # Nobody asks for a status while frames come.
                for asked in world.gate.asked:
                    schedulers.feed(world.clone(), world.scheds.index(owner), ("status", asked.rid, 1))
    return found


@pytest.fixture(scope="module")
def inputs() -> list[Sample]:
    return [sample for each in samples(7).values() for sample in each]


async def differences(inputs: list[Sample], shell: type[Effects] = Effects) -> list[str]:
    """Where the explorer's shell and ``shell`` part."""
    parted = []
    for refuse in (None, Unconfirmed, BusError):
        for held in (True, False):
            for world, slot, op in inputs:
                with pytest.MonkeyPatch.context() as patch:
                    patch.setattr(real_effects, "AGAIN_S", 0.0)
                    real = await by_production(world, slot, op, held=held, refuse=refuse, shell=shell)
                model = by_model(world, slot, op, held=held, refused=refuse is not None)
                if sorted(map(repr, real)) != sorted(map(repr, model)):
                    parted.append(f"{refuse} held={held} {op[:2]}:\n  real  {real}\n  model {model}")
    return parted


OF_ROLLOUTS = {events.KeepRollout, events.TellRollout, events.SetStable, events.StoreCopy}
"""No walk has a roll-out: tests/bus/test_rollout.py has."""


async def test_every_effect_of_the_scheduler_is_done_as_the_model_does_it(inputs: list[Sample]) -> None:
    seen = {type(effect) for world, slot, op in inputs for effect in stepped(world, slot, op)[1]}
    unseen = {events.RiseAbove, events.DeleteBody, events.TellSpending, events.ExchangeLease}
    assert seen | unseen | OF_ROLLOUTS == set(events.Effect.__subclasses__()), (
        "an effect that no walk needs, or the model does not know"
    )
    assert not (parted := await differences(inputs)), "\n".join(parted[:3])


class Hasty(Effects):
    """Stores whatever the lease says."""

    async def _store_terminal(self, event: Any) -> None:
        self._lease = Lease(True)  # type: ignore[assignment]
        await super()._store_terminal(event)


class Silent(Effects):
    """Tells nobody that WORK did not confirm."""

    async def _store_work(self, effect: events.StoreWork) -> None:
        feed = self._feed
        self._feed = lambda event: None if isinstance(event, events.WorkRefused) else feed(event)
        await super()._store_work(effect)


class Early(Effects):
    """Acknowledges a request before WORK has its attempt."""

    async def _store_work(self, effect: events.StoreWork) -> None:
        self._ack_request(effect.request_seq)
        await super()._store_work(effect)


@pytest.mark.parametrize("shell", [Hasty, Silent, Early])
async def test_a_shell_that_does_otherwise_is_found(inputs: list[Sample], shell: type[Effects]) -> None:
    assert await differences(inputs, shell)
