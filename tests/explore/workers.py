"""The worker's shell as worker.service, generations, instance, frame_buffer and attempt_store have it.

The engine gives two tokens."""

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import msgspec

from contracts.messages.control import WorkerPulse
from contracts.messages.frames import AcceptedData, Frame, FramesAnswer
from tests.explore import schedulers
from tests.explore.parts import CONTROLLED, ITEM, encode
from tests.explore.records import TICK_MS, Action, Kept, Key, Message, Op, Run, Violation, Worker

if TYPE_CHECKING:
    from tests.explore.world import World

TOKENS = 2
GRACE_MS = TICK_MS
LAST_MS = 2 * TICK_MS
"""After the grace time, for the last events and acknowledgements."""


def start(world: "World", slot: int, number: int) -> Worker:
    """A worker process at its start, with its engine ready."""
    name = f"w{slot}-{number}"
    state = world.parts.new_worker()
    state, _ = world.parts.worker.step(state, ("joined", name), world.now)
    state, _ = world.parts.worker.step(state, ("engine",), world.now)
    return Worker(slot, number, name, state)


def actions(world: "World") -> Iterator[Action]:
    for slot, worker in enumerate(world.workers):
        if worker.up != "up":
            continue
        if worker.beat:
            yield "beat", slot
        if not worker.name:
            yield "rejoin", slot
            continue
        for effect in worker.todo:
            yield ("ack work" if effect[0] == "ack" else "work", slot, effect)
        for run in worker.runs:
            if run.stopping:
                yield "stopped", slot, run.key
            elif run.due and not worker.stalled:
                yield "engine", slot, run.key
        if world.parts.worker.facts[worker.state][0] > 0:
            for seq, name, _ in world.work:
                if name == worker.name and seq not in worker.delivered:
                    yield "pull", slot, seq
                    break


def feed(world: "World", slot: int, op: Op) -> None:
    worker = world.workers[slot]
    state, outputs = world.parts.worker.step(worker.state, op, world.now)
    world.set_worker(slot, state=state)
    for output in outputs:
        _perform(world, slot, output)


def _perform(world: "World", slot: int, output: Op) -> None:
    worker = world.workers[slot]
    match output:
        case ("start", key):
            if key in worker.started:
                raise Violation("a worker starts an attempt once", f"{worker.name} {key}")
            runs = (*worker.runs, Run(key))
            world.set_worker(slot, runs=runs, started=worker.started | {key})
            _frame(world, slot, key, "accepted", encode(AcceptedData(version="v1")))
        case ("stop", key):
            runs = tuple([run._replace(stopping=True) if run.key == key else run for run in worker.runs])
            world.set_worker(slot, runs=runs)
        case ("store", _, _):
            world.set_worker(slot, todo=(*worker.todo, output))
        case ("close", key, kind, data):
            if kind:
                _frame(world, slot, key, kind, data)
            kept = tuple([k._replace(ended=True) if k.key == key else k for k in world.workers[slot].kept])
            world.set_worker(slot, kept=kept)
        case ("ack", seq):
            world.set_worker(slot, todo=(*worker.todo, ("ack", seq)))
        case ("answer", asker, data):
            key = schedulers.answer_order(world, asker, data)
            if key is not None and CONTROLLED.decode(data).status == "unknown" and worker.name:
                world.set_worker(slot, denied=worker.denied | {(key, asker[1])})
        case ("beat",):
            world.set_worker(slot, beat=True)
        case ("rebuild",):
            world.set_worker(slot, rebuild=True)
        case ("rejoin",):
            world.set_worker(slot, name="", runs=(), kept=(), delivered=frozenset(), todo=())


def _frame(world: "World", slot: int, key: Key, kind: str, data: bytes = b"") -> None:
    """Send a frame, and keep it."""
    worker = world.workers[slot]
    kept = next((k for k in worker.kept if k.key == key), Kept(key))
    fields = {"data": msgspec.Raw(data)} if data else {}
    frame = encode(Frame(stream=key[0], attempt=key[1], seq=len(kept.frames), kind=kind, **fields))  # type: ignore[arg-type]
    now_kept = kept._replace(frames=(*kept.frames, frame), chunks=kept.chunks + (kind == "chunk"))
    world.set_worker(slot, kept=(*(k for k in worker.kept if k.key != key), now_kept))
    world.send(("frame", worker.name, key[0], worker.name, 0, frame))


def receive(world: "World", message: Message) -> None:
    slot = next(w.slot for w in world.workers if w.name == message[3])
    match message:
        case ("control", sched, epoch, _, order):
            feed(world, slot, ("control", (sched, epoch, order), order))
        case ("frames?", _, rid, name, attempt, from_seq, *of):
            kept = next((k for k in world.workers[slot].kept if k.key == (*(of or [rid]), attempt)), None)
            answer = FramesAnswer(known=False)
            if kept is not None:
                decode = msgspec.json.Decoder(Frame).decode
                answer = FramesAnswer(known=True, frames=[decode(frame) for frame in kept.frames[from_seq:]])
            world.send(("frames", "", rid, name, attempt, encode(answer)))


# Steps -----------------------------------------------------------------------------------------------------


def _pull(world: "World", slot: int, seq: int) -> None:
    world.set_worker(slot, delivered=world.workers[slot].delivered | {seq})
    data = next(data for known, _, data in world.work if known == seq)
    feed(world, slot, ("pulled", seq, data))
    item = ITEM.decode(data)
    key = (item.request.request_id, item.attempt)
    worker = world.workers[slot]
    denied = any(known == key and item.epoch.revision <= epoch for known, epoch in worker.denied)
    if denied and any(run.key == key for run in worker.runs):
        raise Violation("a confirmed cancel holds", f"{worker.name} starts {key}")


def _engine(world: "World", slot: int, key: Key) -> None:
    """One engine step: a token, and with the last one the end."""
    worker = world.workers[slot]
    run = next(run for run in worker.runs if run.key == key)
    steps = run.steps + 1
    if world.poison:
        end_run(world, slot, key, "death")
    elif steps <= TOKENS:
        feed(world, slot, ("token", key))
        if _streams(world, key):
            _frame(world, slot, key, "chunk", encode([key[1], worker.name, steps]))
        elif steps == TOKENS:
            _frame(world, slot, key, "chunk", encode([key[1], worker.name, "all"]))
        runs = world.workers[slot].runs
        world.set_worker(slot, runs=tuple([Run(key, steps) if r.key == key else r for r in runs]))
    else:
        end_run(world, slot, key, "")


def _streams(world: "World", key: Key) -> bool:
    return next(asked.stream for asked in world.gate.asked if asked.rid == key[0])


def end_run(world: "World", slot: int, key: Key, failure: str) -> None:
    """The generation is over."""
    worker = world.workers[slot]
    kept = next(k for k in worker.kept if k.key == key)
    world.set_worker(slot, runs=tuple([r for r in worker.runs if r.key != key]))
    feed(world, slot, ("ended", key, len(kept.frames), kept.chunks, failure))


def _stopped(world: "World", slot: int, key: Key) -> None:
    end_run(world, slot, key, "")


def _work(world: "World", slot: int, effect: Op) -> None:
    remove(world, slot, effect)
    match effect:
        case ("store", key, data):
            won = world.store_end(key[0], key[1], data)
            world.set_worker(slot, todo=(*world.workers[slot].todo, ("decided", key, won)))
        case ("decided", _, _):
            feed(world, slot, effect)
        case ("ack", seq):
            world.work = tuple([item for item in world.work if item[0] != seq])


def remove(world: "World", slot: int, effect: Op) -> None:
    left = list(world.workers[slot].todo)
    left.remove(effect)
    world.set_worker(slot, todo=tuple(left))


def _beat(world: "World", slot: int) -> None:
    world.set_worker(slot, beat=False)
    worker = world.workers[slot]
    if worker.name:
        for sched in range(len(world.scheds)):
            schedulers.hear(world, sched, ("beat", worker.name, world.parts.worker.facts[worker.state][3]))


def pulse(world: "World", worker: Worker) -> Op:
    """What its thread tells, whatever its event loop and its engine do."""
    lag_ms = world.now - worker.since if worker.up == "late" else 0
    idle_ms = world.now - worker.stalled if worker.stalled and worker.runs else 0
    return "pulse", worker.name, encode(WorkerPulse(worker=worker.name, lag_ms=lag_ms, engine_idle_ms=idle_ms))


def _rejoin(world: "World", slot: int) -> None:
    worker = world.workers[slot]
    name = f"w{slot}-{worker.number + 1}"
    world.set_worker(slot, number=worker.number + 1, name=name, started=frozenset(), denied=frozenset())
    feed(world, slot, ("joined", name))


def pass_time(world: "World") -> None:
    for slot, worker in enumerate(world.workers):
        empty = not worker.todo and not world.parts.worker.facts[worker.state][2]
        drained = worker.up == "up" and worker.draining and (empty or world.now - worker.draining > GRACE_MS + LAST_MS)
        if worker.up == "down" or drained:
            made = list(world.workers)
            made[slot] = start(world, slot, worker.number + 1)
            world.workers = tuple(made)
        elif worker.up == "up":
            world.set_worker(slot, runs=tuple([run._replace(due=True) for run in worker.runs]))
            if worker.rebuild:
                world.set_worker(slot, rebuild=False)
                feed(world, slot, ("engine",))
            if worker.draining and world.now - worker.draining >= GRACE_MS:
                feed(world, slot, ("grace is over",))


STEPS: dict[str, Callable[..., None]] = {
    "pull": _pull,
    "engine": _engine,
    "stopped": _stopped,
    "work": _work,
    "ack work": _work,
    "beat": _beat,
    "rejoin": _rejoin,
}
