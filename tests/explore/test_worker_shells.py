"""The worker's shell in the explorer does what ``worker.service`` does, effect by effect (see test_shells).

Left out of the model: bodies in the object store, and what the metrics count.
"""

import asyncio
import random
from types import SimpleNamespace
from typing import Any

import pytest

from contracts import topology
from contracts.bus import BusError, Unconfirmed
from contracts.messages.records import Manifest
from tests.explore import faults, workers
from tests.explore.parts import Parts, _worker_output, cancelled_attempt
from tests.explore.records import Op
from tests.explore.search import SCENARIOS, first_world
from tests.explore.test_shells import Recording, SimulatedBus, Streams, Trace, recording
from tests.explore.world import World
from worker import attempt_store
from worker.config import WorkerConfig
from worker.core import events
from worker.instance import Instance
from worker.service import Worker

WALKS = 60
STEPS = 250
EACH = 4

Sample = tuple[World, int, Op]


class Noting(Recording):
    """Notes also what becomes of a worker's generations and of its name."""

    def set_worker(self, slot: int, **changes: Any) -> None:
        known = self.workers[slot]
        for run in changes.get("runs", ()) if changes.get("name") != "" else ():
            before = next((each for each in known.runs if each.key == run.key), None)
            if before is None:
                self.trace.append(("start", run.key))
            elif run.stopping and not before.stopping:
                self.trace.append(("stop", run.key))
        if changes.get("beat"):
            self.trace.append(("beat",))
        if changes.get("rebuild"):
            self.trace.append(("rebuild",))
        if changes.get("name") == "":
            self.trace.append(("rejoin",))
        self.trace.extend(fact for fact in changes.get("todo", ()) if fact[0] == "decided" and fact not in known.todo)
        super().set_worker(slot, **changes)


def noting(world: World) -> Noting:
    made = Noting.__new__(Noting)
    object.__setattr__(made, "trace", [])
    for name in World.__slots__:
        object.__setattr__(made, name, getattr(world, name))
    return made


def by_model(world: World, slot: int, op: Op) -> list[Trace]:
    made = noting(world)
    state, outputs = made.parts.worker.step(made.workers[slot].state, op, made.now)
    made.set_worker(slot, state=state)
    traces = []
    for output in outputs:
        made.trace.clear()
        before = made.workers[slot].todo
        workers._perform(made, slot, output)
        for effect in made.workers[slot].todo[len(before) :]:
            workers._work(made, slot, effect)
        traces.append(list(made.trace))
    return traces


def stepped(world: World, slot: int, op: Op) -> list[events.Effect]:
    """What a production core as it stands in ``slot`` wants done after ``op``."""
    automaton = world.parts.worker
    box = automaton._unpack(automaton._blobs[world.workers[slot].state])
    wanted: list[events.Effect] = []
    with pytest.MonkeyPatch.context() as patch:

        def note(box: Any, effect: events.Effect) -> Op:
            wanted.append(effect)
            return _worker_output(box, effect)

        patch.setattr("tests.explore.parts._worker_output", note)
        automaton._apply(box, op, world.now)
    return wanted


class Engine:
    async def generate(self, *_: object) -> None:
        await asyncio.Event().wait()


class Delivery:
    """A message of WORK."""

    def __init__(self, streams: Streams, seq: int) -> None:
        self.stream_seq = seq
        self._streams = streams

    async def ack(self) -> bool:
        await self._streams.delete(topology.WORK, self.stream_seq)
        return True


class Asker:
    def __init__(self, asker: Op, trace: Trace) -> None:
        self._order = asker[2]
        self._trace = trace

    def respond(self, data: bytes) -> None:
        if (key := cancelled_attempt(self._order)) is not None:
            self._trace.append(("tell", "controlled", *key, data))


MANIFEST = Manifest(name="m", version="v1", engine="simulated", context=4096, default_output_tokens=4)


class WatchedWorker(Worker):
    """The production shell, of which only the edges are watched: core, engine, name."""

    def __init__(self, bus: SimulatedBus, tasks: asyncio.TaskGroup, name: str, trace: Trace) -> None:
        super().__init__(bus, WorkerConfig(model="m"), MANIFEST, Engine)  # type: ignore[arg-type]
        self.trace = trace
        self._tasks = tasks
        self._supervisor.engine = Engine()  # type: ignore[assignment]
        self._supervisor.replace = lambda: trace.append(("rebuild",))  # type: ignore[method-assign]
        self._heartbeats.notify = lambda: trace.append(("beat",))  # type: ignore[method-assign]
        start = self._generations.start

        def started(effect: events.StartAttempt, *rest: Any) -> None:
            trace.append(("start", effect.key))
            start(effect, *rest)

        self._generations.start = started  # type: ignore[method-assign, assignment]
        self._generations.stop = lambda key: trace.append(("stop", key))  # type: ignore[method-assign]
        self._instance = Instance(
            bus,  # type: ignore[arg-type]
            tasks,
            model="m",
            version="v1",
            on_work=self._on_work,
            on_control=self._on_control,
            credit=lambda: 0,
        )
        self._instance.name = name
        self._instance.spawn(self._instance.buffer.run())

    def _step(self, event: Any) -> None:
        if isinstance(event, events.EventStored):
            self.trace.append(("decided", event.key, event.won))

    def _leave(self) -> None:
        self.trace.append(("rejoin",))

    async def _rejoin(self) -> None:
        pass


async def by_production(
    world: World, slot: int, op: Op, refuse: type[BusError] | None, shell: type[WatchedWorker]
) -> list[Trace]:
    made = recording(world)
    traces = []
    known = world.workers[slot]
    for effect in stepped(world, slot, op):
        made.trace.clear()
        bus = SimulatedBus(made, refuse("refused") if refuse and isinstance(effect, events.StoreEvent) else None)
        bus.session = SimpleNamespace(max_payload=1 << 20)  # type: ignore[attr-defined]
        async with asyncio.TaskGroup() as tasks:
            worker = shell(bus, tasks, known.name, made.trace)
            if (item := getattr(effect, "item", None)) is not None:
                key = (item.request.request_id, item.attempt)
                frames = worker._instance.buffer.open(item.request, item.attempt)
                frames.next_seq = next((len(kept.frames) for kept in known.kept if kept.key == key), 0)
            if (seq := getattr(effect, "delivery", None)) is not None:
                worker._deliveries[seq] = Delivery(bus.jetstream, seq)  # type: ignore[assignment]
            if isinstance(effect, events.AnswerControl):
                asker = Asker(effect.asker, made.trace)
                effect = events.AnswerControl(asker=asker, answer=effect.answer)
            worker._perform(effect)
            for _ in range(30):
                await asyncio.sleep(0)
            for task in list(tasks._tasks):
                task.cancel()
        traces.append(list(made.trace))
    return traces


def samples(seed: int) -> list[Sample]:
    """Inputs of workers along random walks, by the kinds of effects that they cause."""
    found: dict[tuple[str, ...], list[Sample]] = {}
    feed = workers.feed

    def note(world: World, slot: int, op: Op) -> None:
        before = world.clone()
        feed(world, slot, op)
        _, outputs = world.parts.worker.step(before.workers[slot].state, op, before.now)
        kinds = tuple(output[0] for output in outputs)
        if kinds and len(found.setdefault(kinds, [])) < EACH:
            found[kinds].append((before, slot, op))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(workers, "feed", note)
        choose = random.Random(seed)
        parts = Parts()
        for number in range(WALKS):
            world = first_world(parts, SCENARIOS[number % len(SCENARIOS)])
            for _ in range(STEPS):
                wrong = list(faults.faults(world, None)) if choose.random() < 0.04 else []
                world = world.after(choose.choice(wrong or world.actions()))
    return [sample for each in found.values() for sample in each]


@pytest.fixture(scope="module")
def inputs() -> list[Sample]:
    return samples(7)


async def differences(inputs: list[Sample], shell: type[WatchedWorker] = WatchedWorker) -> list[str]:
    """Where the explorer's shell and ``shell`` part."""
    parted = []
    for refuse in (None, Unconfirmed, BusError):
        for world, slot, op in inputs:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(attempt_store, "RETRY_S", 0.0)
                real = await by_production(world, slot, op, refuse, shell)
            model = by_model(world, slot, op)
            if real != model:
                parted.append(f"{refuse} {op[:2]}:\n  real  {real}\n  model {model}")
    return parted


async def test_every_effect_of_the_worker_is_done_as_the_model_does_it(inputs: list[Sample]) -> None:
    seen = {type(effect) for world, slot, op in inputs for effect in stepped(world, slot, op)}
    of_versions = {events.FetchVersion, events.LoadVersion}  # The model's workers have one version.
    assert seen == set(events.Effect.__subclasses__()) - of_versions, (
        "an effect that no walk needs, or the model does not know"
    )
    assert not (parted := await differences(inputs)), "\n".join(parted[:3])


class Greedy(WatchedWorker):
    """Acknowledges also what may be tried again."""

    def _perform(self, effect: events.Effect) -> None:
        if isinstance(effect, events.LeaveWork):
            effect = events.AckWork(delivery=effect.delivery)
        super()._perform(effect)


async def test_a_shell_that_does_otherwise_is_found(inputs: list[Sample]) -> None:
    assert await differences(inputs, Greedy)
