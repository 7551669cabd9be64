"""What may go wrong, and what a caller may do: at any step, within the history's budget."""

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from tests.explore import gateway, schedulers, workers
from tests.explore.records import Action, Asked, Key, Message, Op

if TYPE_CHECKING:
    from tests.explore.world import World


HOUR_MS = 3_600_000


def faults(world: "World", before: "World | None") -> Iterator[Action]:
    """All that may go wrong now, and could not go wrong in ``before``, one step earlier, to the same end.

    What befalls a process or a message comes to the same before and after the steps of others, so it is tried
    right after a step that changed what it is about, and after every tick.
    """
    fresh = before is None or before.now != world.now
    slots = [slot for slot, s in enumerate(world.scheds) if before is None or fresh or s is not before.scheds[slot]]
    gate = before is None or fresh or world.gate is not before.gate
    if world.leaves and (gate or slots):
        for asked in world.gate.asked:
            if asked.ending is None and asked.phase != "idle" and world.gate.up == "up":
                yield "leave", asked.rid
    if not world.faults:
        return
    for message in dict.fromkeys(world.net):
        if before is not None and not fresh and message in before.net:
            continue
        yield "lose", message
        if message[0] not in ("admission", "status", "frames", "cancelled"):  # A late answer is nobody's: lost.
            yield "delay", message
            yield "double", message
    if not world.restored and (gate or slots):
        yield ("restore",)
    moved = before is None or fresh or world.work is not before.work
    yield from _of_schedulers(world, slots, moved=moved)
    yield from _of_workers(world, before if not fresh else None, moved=moved)
    if world.gate.up == "up" and any(asked.phase not in ("idle", "over") for asked in world.gate.asked):
        if gate:
            yield "crash", "g"
            yield "freeze", "g"
        for asked in world.gate.asked:
            if asked.phase == "storing" and (gate or slots):
                for how in ("never stored", "stored", "stored late"):
                    yield "submit unconfirmed" if asked.key else "publish unconfirmed", asked.rid, how
            if _is_unanswered(world, asked) and (gate or slots):
                yield "answer lost", asked.rid


def _is_unanswered(world: "World", asked: Asked) -> bool:
    """A service's first try, whose answer is under way or was just sent: it has read nothing yet."""
    first = asked.key and asked.ending is None and not asked.rid.endswith("+") and not asked.text
    return (
        bool(first) and asked.phase in ("asking", "storing", "stored") and not gateway.is_tried_again(world, asked.rid)
    )


def _of_schedulers(world: "World", slots: list[int], *, moved: bool) -> Iterator[Action]:
    """``slots``: of those that have changed. ``moved``: WORK has changed."""
    for slot, sched in enumerate(world.scheds):
        if sched.up != "up" or sched.state < 0:
            continue
        if sched.phase == "owner" and world.work and (moved or slot in slots):
            yield "sweep", slot
        if slot not in slots:
            continue
        yield "step clock", slot, 0 if world.walls[slot] else HOUR_MS
        yield "crash", sched.name
        yield "freeze", sched.name
        for effect in dict.fromkeys(sched.todo):
            if effect[0] == "work" and schedulers.item_of(world, slot, effect) and world.held(sched):
                for how in ("stored", "stored late"):
                    yield "work unconfirmed", slot, effect, how
                yield "work stored late", slot, effect
            elif effect[0] == "delete" and world.held(sched):
                yield "delete late", slot, effect
            elif effect[0] == "end" and world.held(sched):
                yield "end stored late", slot, effect
        if sched.tail < len(world.attempts):
            key = world.attempts[sched.tail][:2]
            if sched.phase == "owner":
                yield "miss end", slot, key
            if key not in world.garbled:
                yield "garble end", slot, key
        if any(request[0] in world.consumed for request in world.requests):
            yield "redeliver requests", slot


def _of_workers(world: "World", before: "World | None", *, moved: bool) -> Iterator[Action]:
    for slot, worker in enumerate(world.workers):
        if worker.up != "up":
            continue
        changed = before is None or worker is not before.workers[slot]
        if (
            worker.name
            and (worker.runs or worker.todo)
            and (changed or before is None or _terms(world) != _terms(before))
        ):
            yield "delay beat", slot
        if worker.name and (changed or moved) and any(item[0] in worker.delivered for item in world.work):
            yield "redeliver work", slot
        if not changed:
            continue
        if world.slow:
            yield "late", slot
            if worker.runs and not worker.stalled:
                yield "engine stands still", slot
        yield "crash", f"w{slot}"
        yield "freeze", f"w{slot}"
        if worker.name and not worker.draining:
            yield "drain", slot
        for effect in worker.todo:
            if effect[0] == "store":
                yield "event stored late", slot, effect
            elif effect[0] == "ack":
                yield "lose ack", slot, effect
        for run in worker.runs:
            if not run.stopping:
                yield "engine dies", slot, run.key
                yield "engine refuses", slot, run.key


def _terms(world: "World") -> list[int]:
    return [sched.epoch for sched in world.scheds]


_HARM = {
    "engine dies": 1,
    "work unconfirmed": 1,
    **dict.fromkeys(("engine refuses", "garble end", "publish unconfirmed"), 2),
}


def _harm(name: str, arguments: tuple[object, ...]) -> int:
    """What it may cost: 0 no request, 1 the attempts of one worker, 2 the requests themselves."""
    if name in ("crash", "freeze"):
        return {"s": 0, "w": 1, "g": 2}[str(arguments[0])[0]]
    if name == "submit unconfirmed":  # After its last try a client gives up.
        return 2 if str(arguments[0]).endswith("+") else 0
    return _HARM.get(name, 0)


def _fault(name: str, step: Callable[..., None]) -> Callable[..., None]:
    def counted(world: "World", *arguments: object) -> None:
        world.faults -= 1
        world.harm = min(2, max(world.harm, 1) if name == "drain" else world.harm + _harm(name, arguments))
        step(world, *arguments)

    return counted


def _leave(world: "World", rid: str) -> None:
    world.leaves -= 1
    world.harm = 2
    gateway.leave(world, rid)


def _crash(world: "World", name: str) -> None:
    """All that only the process knew is gone; it starts anew at the next tick (a gateway: without its streams)."""
    if name == "g":
        for asked in world.gate.asked:
            if asked.ending is None:
                gateway.end(world, asked.rid, "gone")
            gateway.update(world, asked.rid, phase="over", cancel="", questions=())
        world.gate = world.gate._replace(up="down")
    elif name[0] == "w":
        world.set_worker(
            int(name[1:]),
            **{"name": "", "up": "down", "since": world.now, "runs": (), "kept": (), "delivered": frozenset()},
            **{
                "todo": (),
                "beat": False,
                "rebuild": False,
                "draining": 0,
                "stalled": 0,
                "started": frozenset(),
                "denied": frozenset(),
            },
        )
    else:
        schedulers.depose(world, int(name[1:]))
        world.set_sched(int(name[1:]), up="down")


def _drain(world: "World", slot: int) -> None:
    """It is told to end: nothing new starts, what runs has a grace time; then it starts anew."""
    world.set_worker(slot, draining=world.now)
    workers.feed(world, slot, ("drain",))


def _freeze(world: "World", name: str) -> None:
    if name == "g":
        world.gate = world.gate._replace(up="frozen", since=world.now)
    elif name[0] == "w":
        world.set_worker(int(name[1:]), up="frozen", since=world.now)
    else:
        world.set_sched(int(name[1:]), up="frozen", since=world.now)


def _late(world: "World", slot: int) -> None:
    """Its event loop stands still."""
    world.set_worker(slot, up="late", since=world.now)


def _engine_stands_still(world: "World", slot: int) -> None:
    world.set_worker(slot, stalled=world.now)


def _lose(world: "World", message: Message) -> None:
    world.take_off(message)


def _delay(world: "World", message: Message) -> None:
    world.take_off(message)
    world.late = (*world.late, (world.now, message))


def _double(world: "World", message: Message) -> None:
    world.late = (*world.late, (world.now, message))


def _answer_lost(world: "World", rid: str) -> None:
    """The client is cut off from its gateway's answer, and asks again under its key."""
    gateway.try_again(world, rid, "unheard")


def _publish_unconfirmed(world: "World", rid: str, how: str) -> None:
    data = gateway.envelope_of(world, rid)
    if how == "stored":
        world.store_request(rid, data)
    elif how == "stored late":
        world.late = (*world.late, (world.now, ("store request", rid, data)))
    gateway.unconfirmed(world, rid)


def _work_unconfirmed(world: "World", slot: int, effect: Op, how: str) -> None:
    """The store times out, though the item is stored, or will be."""
    item = schedulers.item_of(world, slot, effect)
    assert item is not None
    _, rid, attempt, worker, *_ = effect
    schedulers.remove(world, slot, "todo", effect)
    if how == "stored":
        world.store_work(rid, attempt, worker, item)
    else:
        world.late = (*world.late, (world.now, ("store work", rid, attempt, worker, item)))
    schedulers.feed(world, slot, ("work_refused", rid, attempt, False))


def _work_stored_late(world: "World", slot: int, effect: Op) -> None:
    """A copy is on its way; the task tries again, if its process lives."""
    item = schedulers.item_of(world, slot, effect)
    world.late = (*world.late, (world.now, ("store work", *effect[1:4], item)))


def _delete_late(world: "World", slot: int, effect: Op) -> None:
    """The order to delete is held up on the way."""
    schedulers.remove(world, slot, "todo", effect)
    world.late = (*world.late, (world.now, ("delete work", effect[1])))


def _end_stored_late(world: "World", slot: int, effect: Op) -> None:
    """A copy is on its way; the task tries again."""
    world.late = (*world.late, (world.now, ("store end", *effect[1:])))


def _event_stored_late(world: "World", slot: int, effect: Op) -> None:
    _, key, data = effect
    world.late = (*world.late, (world.now, ("store end", *key, data)))


def _engine_dies(world: "World", slot: int, key: Key) -> None:
    workers.end_run(world, slot, key, "death")


def _engine_refuses(world: "World", slot: int, key: Key) -> None:
    workers.end_run(world, slot, key, "refusal")


def _miss_end(world: "World", slot: int, key: Key) -> None:
    """The owner is not told of what was stored."""
    world.set_sched(slot, tail=world.scheds[slot].tail + 1)


def _garble_end(world: "World", slot: int, key: Key) -> None:
    """What was stored cannot be read."""
    world.garbled |= {key}


def _step_clock(world: "World", slot: int, off_ms: int) -> None:
    """Somebody sets the wall clock of a scheduler's host."""
    world.walls = tuple([off_ms if n == slot else off for n, off in enumerate(world.walls)])


def _restore(world: "World") -> None:
    """What was admitted or asked for until now may be lost."""
    if any(asked.phase not in ("idle", "asking") for asked in world.gate.asked):
        world.harm = 2
    world.restore()


def _redeliver_work(world: "World", slot: int) -> None:
    """After a reconnect the consumer is made anew: all that is not acknowledged comes again."""
    world.set_worker(slot, delivered=frozenset())


def _redeliver_requests(world: "World", slot: int) -> None:
    world.consumed = frozenset()


def _delay_beat(world: "World", slot: int) -> None:
    """A heartbeat of now that arrives later."""
    worker = world.workers[slot]
    data = world.parts.worker.facts[worker.state][3]
    for number, sched in enumerate(world.scheds):
        if sched.state >= 0:
            world.late = (*world.late, (world.now, ("beat", number, sched.epoch, worker.name, data)))


_FAULTS: dict[str, Callable[..., None]] = {
    "crash": _crash,
    "freeze": _freeze,
    "late": _late,
    "engine stands still": _engine_stands_still,
    "drain": _drain,
    "lose": _lose,
    "delay": _delay,
    "double": _double,
    "publish unconfirmed": _publish_unconfirmed,
    "submit unconfirmed": _publish_unconfirmed,
    "answer lost": _answer_lost,
    "work unconfirmed": _work_unconfirmed,
    "work stored late": _work_stored_late,
    "delete late": _delete_late,
    "end stored late": _end_stored_late,
    "event stored late": _event_stored_late,
    "lose ack": workers.remove,
    "engine dies": _engine_dies,
    "engine refuses": _engine_refuses,
    "redeliver work": _redeliver_work,
    "redeliver requests": _redeliver_requests,
    "delay beat": _delay_beat,
    "miss end": _miss_end,
    "garble end": _garble_end,
    "restore": _restore,
    "step clock": _step_clock,
    "sweep": schedulers.sweep,
}

STEPS = {"leave": _leave, **{name: _fault(name, step) for name, step in _FAULTS.items()}}
