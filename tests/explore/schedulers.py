"""The scheduler's shell as scheduler.term, recovery and effects have it: takeover, lease, effects as tasks.

Without the lease it answers nobody, stores, deletes and acknowledges nothing, and asks REQUESTS for nothing more (one
consumer serves all owners: what a deposed one takes, the owner never sees). A takeover does not wait for a message
that has left REQUESTS meanwhile.
"""

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from tests.explore.parts import cancelled_attempt
from tests.explore.records import TICK_MS, Action, Key, Message, Op, Sched, Violation, Worker

if TYPE_CHECKING:
    from tests.explore.world import World

HEARD_TICKS = 1
"""After the streams were read: time in which every live worker is heard."""
SERVING = ("open", "second", "owner")
"""Phases in which a term renews its lease and answers admissions, cancels and statuses."""

RECEIVED = frozenset(("ask", "cancel", "status?", "controlled", "beat"))
"""Messages to a scheduler: (kind, slot, epoch, ...)."""


def actions(world: "World") -> Iterator[Action]:
    for slot, sched in enumerate(world.scheds):
        if sched.up != "up":
            continue
        if sched.phase == "standby":
            if world.now - world.lease[1] >= TICK_MS:
                yield "acquire", slot
            continue
        for effect in dict.fromkeys(sched.todo):
            yield ("ack request" if effect[0] == "ack" else "do"), slot, effect
        for fact in dict.fromkeys(sched.told):
            yield "tell", slot, fact
        if sched.phase != "reading" and sched.tail < len(world.attempts):
            yield "tail", slot
        request = next((r for r in world.requests if r[0] not in world.consumed), None)
        if request and sched.phase not in ("reading", "ends") and world.held(sched):  # Else it asks for none.
            yield "consume", slot, request[0]
        if _may_go_on(world, sched):
            yield f"go on {sched.phase}", slot


def is_deposed(world: "World", sched: Sched) -> bool:
    """A term that is over, and does not know it yet."""
    return sched.up == "up" and sched.phase in SERVING and not world.held(sched)


def _may_go_on(world: "World", sched: Sched) -> bool:
    match sched.phase:
        case "reading":
            return True
        case "ends":
            return sched.tail >= sched.mark
        case "requests":
            return all(r[0] > sched.newest or r[0] in world.consumed for r in world.requests)
        case "open":
            heard = world.now - sched.opened >= HEARD_TICKS * TICK_MS
            return heard and not world.parts.core.facts[sched.state][2]
        case "second":
            return sched.tail >= sched.mark
    return False


def feed(world: "World", slot: int, op: Op) -> None:
    """Step the core and start its effects."""
    sched = world.scheds[slot]
    state, outputs = world.parts.core.step(sched.state, op, world.clock(slot))
    todo = list(sched.todo)
    for output in outputs:
        match output:
            case ("admission" | "status" as kind, rid, data):
                world.send((kind, "", rid, data))
            case ("cancelled", rid, data):
                world.send(("cancelled", "", rid, data))
            case ("control", worker, data):
                world.send(("control", slot, sched.epoch, worker, data))
            case ("rise", epoch):
                if world.held(sched):
                    world.risen = max(world.risen, epoch)
                    world.lease = (world.lease[0], world.now - TICK_MS)  # The term ends.
            case ("work", rid, attempt, name, *_) if any(w.name == name and _is_slow(world, w) for w in world.workers):
                raise Violation("nothing new goes to who is slow", f"{rid} attempt {attempt} to {name}")
            case ("frame", rid, data):
                world.send(("frame", f"{sched.name}.{sched.epoch}", rid, "", sched.epoch, data))
            case _:
                todo.append(output)
    world.set_sched(slot, state=state, todo=tuple(todo))


def _is_slow(world: "World", worker: Worker) -> bool:
    """For so long that every owner that serves has been told."""
    late = worker.up == "late" and world.now - worker.since > 2 * TICK_MS
    return late or (bool(worker.stalled and worker.runs) and world.now - worker.stalled > 3 * TICK_MS)


def hear(world: "World", slot: int, *beats: Op) -> None:
    """Heartbeats arrive; of those that wait for a frozen process only the last of each sender counts."""
    sched = world.scheds[slot]
    if sched.state < 0 or sched.up == "down":
        return
    if sched.up == "frozen":
        senders = {beat[1] for beat in beats}
        world.set_sched(slot, beats=(*(b for b in sched.beats if b[1] not in senders), *beats))
    else:
        feed(world, slot, ("all", *beats))


def receive(world: "World", message: Message) -> None:
    if message[0] in ("ask", "cancel", "status?") and not world.held(world.scheds[message[1]]):
        return
    match message:
        case ("ask", slot, _, _, data):
            feed(world, slot, ("ask", data))
        case ("cancel", slot, _, rid, data):
            feed(world, slot, ("cancel", rid, data))
        case ("status?", slot, _, rid, void_below, *of):
            feed(world, slot, ("status", rid, void_below, *of))
        case ("controlled", slot, _, rid, attempt, data):
            feed(world, slot, ("controlled", rid, attempt, data))
        case ("beat", slot, _, name, data):
            feed(world, slot, ("beat", name, data))


def ask_all(world: "World", kind: str, rid: str, *data: Any) -> None:
    """A question to whoever serves the model now."""
    for slot, sched in enumerate(world.scheds):
        if sched.up != "down" and sched.phase in SERVING:
            world.send((kind, slot, sched.epoch, rid, *data))


def answer_order(world: "World", asker: Op, answer: bytes) -> Key | None:
    """A worker answers the order of ``asker`` (slot, epoch, order); gives the attempt that it cancels."""
    slot, epoch, order = asker
    if (key := cancelled_attempt(order)) is not None:
        world.send(("controlled", slot, epoch, *key, answer))
    return key


# Steps -----------------------------------------------------------------------------------------------------


def _acquire(world: "World", slot: int) -> None:
    """The lease is free: a term begins by hearing heartbeats and reading WORK."""
    sched = world.scheds[slot]
    world.lease = (max(world.lease[0], world.risen) + 1, world.now)
    world.set_sched(
        slot,
        phase="reading",
        state=world.parts.new_core(world.lease[0], sched.name, world.clock(slot)),
        epoch=world.lease[0],
        opened=world.now,
        tail=0,
        newest=max((request[0] for request in world.requests), default=0),
        snapshot=world.work,
        todo=(),
        told=(),
        beats=(),
    )


def _go_on(world: "World", slot: int) -> None:
    match world.scheds[slot].phase:
        case "reading":
            world.set_sched(slot, phase="ends", mark=len(world.attempts))
        case "ends":
            feed(world, slot, ("all", *(("found", seq, item) for seq, _, item in world.scheds[slot].snapshot)))
            world.consumed = frozenset()
            world.set_sched(slot, phase="requests", snapshot=(), opened=world.now)
        case "requests":
            world.set_sched(slot, phase="open", opened=world.now)
        case "open":
            feed(world, slot, ("all", *_work_found(world)))
            world.set_sched(slot, phase="second", mark=len(world.attempts))
        case "second":
            world.set_sched(slot, phase="owner")
            feed(world, slot, ("recovered",))


def sweep(world: "World", slot: int) -> None:
    """Compare the core with all of WORK."""
    found = frozenset(seq for seq, _, _ in world.work)
    feed(world, slot, ("all", *_work_found(world), ("swept", found, world.seq)))


def _work_found(world: "World") -> Iterator[Op]:
    for seq, _, item in world.work:
        yield "found", seq, item


def depose(world: "World", slot: int) -> None:
    """The term ends: its tasks with it."""
    world.set_sched(slot, phase="standby", state=-1, epoch=0, todo=(), told=(), beats=(), snapshot=())


def thaw(world: "World", slot: int) -> None:
    beats = world.scheds[slot].beats
    world.set_sched(slot, up="up", beats=())
    feed(world, slot, ("all", *beats))


def _tail(world: "World", slot: int) -> None:
    sched = world.scheds[slot]
    rid, attempt, _ = world.attempts[sched.tail]
    world.set_sched(slot, tail=sched.tail + 1)
    fact = world.end_fact(rid, attempt)
    assert fact is not None
    feed(world, slot, fact)


def _consume(world: "World", slot: int, seq: int) -> None:
    world.consumed |= {seq}
    _, stored_at, _, data = next(request for request in world.requests if request[0] == seq)
    feed(world, slot, ("request", seq, stored_at, data))


def _tell(world: "World", slot: int, fact: Op) -> None:
    remove(world, slot, "told", fact)
    feed(world, slot, fact)


def remove(world: "World", slot: int, where: str, what: Op) -> None:
    left = list(getattr(world.scheds[slot], where))
    left.remove(what)
    world.set_sched(slot, **{where: tuple(left)})


def _do(world: "World", slot: int, effect: Op) -> None:
    """Perform an effect; a deposed owner stores nothing."""
    remove(world, slot, "todo", effect)
    sched = world.scheds[slot]
    match effect:
        case ("ack", seq):
            _ack(world, sched, seq)
        case ("delete", seq):
            _delete(world, sched, seq)
        case ("quarantine", request_seq, work_seq):
            _ack(world, sched, request_seq)
            _delete(world, sched, work_seq)
        case ("end", rid, attempt, data):
            if world.held(sched):
                world.store_end(rid, attempt, data)
                _tell_end(world, slot, rid, attempt)
        case ("read_end", rid, attempt):
            _tell_end(world, slot, rid, attempt)
        case ("work", rid, attempt, worker, _, request_seq, work_seq):
            if (item := item_of(world, slot, effect)) is None or not world.held(sched):
                return
            if not request_seq and all(known[0] != work_seq for known in world.work):
                feed(world, slot, ("work_refused", rid, attempt, True))
                return
            seq = world.store_work(rid, attempt, worker, item)
            world.set_sched(slot, told=(*world.scheds[slot].told, ("work_stored", rid, attempt, seq)))


def _tell_end(world: "World", slot: int, rid: str, attempt: int) -> None:
    """What ATTEMPTS answers about an attempt is on its way to the core."""
    fact = world.end_fact(rid, attempt) or ("end_missing", rid, attempt)
    world.set_sched(slot, told=(*world.scheds[slot].told, fact))


def _ack(world: "World", sched: Sched, seq: int) -> None:
    if world.held(sched):
        world.requests = tuple([request for request in world.requests if request[0] != seq])


def _delete(world: "World", sched: Sched, seq: int) -> None:
    if world.held(sched):
        world.work = tuple([item for item in world.work if item[0] != seq])


def item_of(world: "World", slot: int, effect: Op) -> bytes | None:
    """The item that an effect stores, when it is still wanted."""
    _, outputs = world.parts.core.step(world.scheds[slot].state, ("item", *effect[1:]), world.clock(slot))
    return outputs[0][1] if outputs else None


def renew(world: "World") -> None:
    for slot, sched in enumerate(world.scheds):
        if sched.up == "down":
            world.set_sched(slot, up="up")
        elif sched.up == "up" and sched.phase in SERVING and sched.epoch == world.lease[0]:
            world.lease = (world.lease[0], world.now)


def pass_time(world: "World", beats: list[Op]) -> None:
    """Heartbeats arrive, loopback heartbeats after them; once all is settled the sweep looks at WORK."""
    settled = world.is_settled()
    for slot, sched in enumerate(world.scheds):
        if sched.up != "up" or sched.state < 0 or sched.phase not in SERVING:
            hear(world, slot, *beats)
            continue
        feed(world, slot, ("all", *beats, ("tick",), ("time",)))
        if settled and sched.phase == "owner":
            sweep(world, slot)


STEPS: dict[str, Callable[..., None]] = {
    "acquire": _acquire,
    **{f"go on {phase}": _go_on for phase in ("reading", "ends", "requests", "open", "second")},
    "depose": depose,
    "tail": _tail,
    "consume": _consume,
    "tell": _tell,
    "do": _do,
    "ack request": _do,
}
