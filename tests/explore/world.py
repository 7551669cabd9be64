"""The world around the cores: streams that keep, a bus that carries, processes that perform; and what may happen next.

A world is never changed once it is made: ``after`` gives the next one. The streams keep what the real ones keep:
ATTEMPTS takes the first event of an attempt, WORK and REQUESTS take a message id once and lose what is
acknowledged. Time goes on by ticks of half a second, and only when nothing else is left to do: that something
takes longer than that is a fault (a delay, a frozen process). An engine gives one token per tick.
"""

from collections.abc import Iterator
from itertools import islice
from typing import Any

import msgspec

from contracts.messages.control import StreamOwnerHeartbeat
from tests.explore import faults, forms, gateway, schedulers, workers
from tests.explore.canonical import near
from tests.explore.parts import EVENT, ITEM, SETTINGS, Parts, encode
from tests.explore.records import (
    BASE_MS,
    LATE_TICKS,
    STOPPED_TICKS,
    TICK_MS,
    Action,
    Asked,
    Gateway,
    Key,
    Message,
    Op,
    Scenario,
    Sched,
    Violation,
    Worker,
)

DEATHS_MAX = 3
"""Engines or workers that a request may end; two when an engine died of it alone for the second time."""
FIRST_EPOCH = 10
OLD_EPOCH = 4
"""Of the lease in the backup."""
STREAM_OWNER_BEAT = encode(StreamOwnerHeartbeat(stream_owner=gateway.STREAM_OWNER))


class World:
    """One state of everything."""

    __slots__ = (
        "_actions",
        "_following",
        "attempts",
        "consumed",
        "faults",
        "garbled",
        "gate",
        "harm",
        "late",
        "lease",
        "leaves",
        "net",
        "now",
        "parts",
        "poison",
        "requests",
        "restored",
        "risen",
        "scheds",
        "seq",
        "slow",
        "stored_ids",
        "walls",
        "work",
        "workers",
    )

    def __init__(self, parts: Parts, scenario: Scenario) -> None:
        self._actions: list[Action] = []
        self._following: World | None = None
        self.parts = parts
        self.now = BASE_MS
        self.faults = scenario.faults
        """How many may still happen."""
        self.leaves = scenario.leaves
        self.poison = scenario.poison
        self.slow = scenario.slow
        self.harm = 0
        """What the faults so far may cost: 0 no request, 1 attempts of one worker, 2 anything."""
        self.lease = (FIRST_EPOCH - 1, BASE_MS)
        """(epoch, last renewal)"""
        self.risen = 0
        """Highest epoch that an owner was told to rise above."""
        self.restored = False
        """Whether the streams and the lease are those of a backup from before the history."""
        self.scheds: tuple[Sched, ...] = (Sched("s0"), Sched("s1"))
        self.workers: tuple[Worker, ...] = ()
        self.gate = Gateway(asked=tuple(gateway.new_requests(scenario)))
        self.requests: tuple[tuple[int, int, str, bytes], ...] = ()
        """REQUESTS: (sequence, stored at, request id, envelope)."""
        self.consumed: frozenset[int] = frozenset()
        """What the one consumer of REQUESTS has delivered; whoever creates it anew gets all again."""
        self.work: tuple[tuple[int, str, bytes], ...] = ()
        """WORK: (sequence, worker, item)."""
        self.attempts: tuple[tuple[str, int, bytes], ...] = ()
        """ATTEMPTS, in the order of storage."""
        self.garbled: frozenset[Key] = frozenset()
        """Attempts whose stored end no scheduler can read."""
        self.stored_ids: tuple[tuple[str, int], ...] = ()
        """Message ids that WORK and REQUESTS have taken, with their sequences."""
        self.walls: tuple[int, ...] = (0, 0)
        """How far the schedulers' wall clocks are off, in ms."""
        self.seq = 0
        self.net: tuple[Message, ...] = ()
        """On the way now."""
        self.late: tuple[tuple[int, Message], ...] = ()
        """Held up since a time; arrives after the next tick at the earliest."""

    def clone(self) -> "World":
        other = World.__new__(World)
        for name in World.__slots__:
            setattr(other, name, getattr(self, name))
        other._actions = []
        other._following = None
        return other

    # Parts of the state -----------------------------------------------------------------------------------

    def set_sched(self, slot: int, **changes: Any) -> None:
        scheds = list(self.scheds)
        scheds[slot] = scheds[slot]._replace(**changes)
        self.scheds = tuple(scheds)

    def set_worker(self, slot: int, **changes: Any) -> None:
        made = list(self.workers)
        made[slot] = made[slot]._replace(**changes)
        self.workers = tuple(made)

    def held(self, sched: Sched) -> bool:
        """Whether the scheduler's own clock says that the lease is its own."""
        return sched.epoch == self.lease[0] and self.now - self.lease[1] < TICK_MS

    def clock(self, slot: int) -> int:
        """The time as the scheduler has it."""
        return self.parts.clock(self.now, self.walls[slot])

    def send(self, message: Message) -> None:
        if message not in self.net or message[0] == "frame":
            self.net = (*self.net, message)

    def owner(self) -> Sched | None:
        return next((s for s in self.scheds if s.up == "up" and s.phase == "owner" and self.held(s)), None)

    # The streams ------------------------------------------------------------------------------------------

    def store_request(self, rid: str, data: bytes) -> None:
        if self._take_id(rid) is None:
            self.requests = (*self.requests, (self.seq, self.now, rid, data))

    def store_work(self, rid: str, attempt: int, worker: str, data: bytes) -> int:
        """The sequence under which WORK holds the item, or held it when the message id came twice."""
        item = ITEM.decode(data)
        seq = self._take_id(self.parts.work_id(item))
        if seq is not None:
            return seq
        self._check_dispatch(rid, attempt, item.request.stream)
        self.work = (*self.work, (self.seq, worker, data))
        return self.seq

    def _take_id(self, message_id: str) -> int | None:
        for known, seq in self.stored_ids:
            if known == message_id:
                return seq
        self.seq += 1
        self.stored_ids = (*self.stored_ids, (message_id, self.seq))
        return None

    def _check_dispatch(self, rid: str, attempt: int, stream: bool) -> None:
        for number, event in self.ends_of(rid):
            if number >= attempt:
                continue
            void = event.outcome == "lost" or (event.outcome == "failed" and event.retryable)
            if not void:
                raise Violation("nothing follows an end", f"{rid} attempt {attempt} after {event.outcome} of {number}")
            if stream and event.completion_tokens:
                raise Violation("no retry after tokens", f"{rid} attempt {attempt} after a token of {number}")
        text = [msgspec.json.decode(data) for data in gateway.find(self, rid).text]
        if any(stream and shown < attempt for shown, *_ in text):
            raise Violation("no retry of what was seen", f"{rid} attempt {attempt} after {text}")
        other, ended = _other_try(rid), {number for number, _ in self.ends_of(_other_try(rid))}
        runs = {number for known, number in map(_attempt_of, self.work) if known == other} - ended
        done = [event for _, event in self.ends_of(other) if event.outcome == "completed"]
        # What a restore forgets is run again by whoever asks again.
        if (runs or done) and not self.restored and attempt not in {number for number, _ in self.ends_of(rid)}:
            raise Violation("a key is run once", f"{rid} attempt {attempt} beside {other}")
        if attempt > 1 and not self.restored and all(number != attempt - 1 for number, _ in self.ends_of(rid)):
            raise Violation("an attempt ends before the next", f"{rid} attempt {attempt}")

    def store_end(self, rid: str, attempt: int, data: bytes) -> bool:
        """Whether ``data`` is the attempt's stored end; the first one is."""
        for known_rid, known, stored in self.attempts:
            if (known_rid, known) == (rid, attempt):
                ours, theirs = EVENT.decode(data), EVENT.decode(stored)
                return (ours.reporter, ours.worker, ours.outcome) == (theirs.reporter, theirs.worker, theirs.outcome)
        self.attempts = (*self.attempts, (rid, attempt, data))
        # After a restore numbers are given anew: an acknowledgement may hit another message than was meant.
        if b"did not reach its worker" in data and not self.restored:
            raise Violation("what is dispatched reaches its worker", f"{rid} attempt {attempt}")
        if not self.harm and (b"for too long" in data or b"did not acknowledge" in data):
            late = next((w for w in self.workers if w.up == "late" and w.name.encode() in data), None)
            if late is not None and self.now - late.since < SETTINGS.given_up_ms:
                raise Violation("who is late is not dead", f"{rid} attempt {attempt} at {late.name}")
        if b"body is gone" in data and not self.restored:
            raise Violation("a body is kept until the end", f"{rid} attempt {attempt}")
        bills = sum(event.billable for of in (rid, _other_try(rid)) for _, event in self.ends_of(of))
        if bills > 1 and not self.restored:  # A restore undoes the loss that kept a frozen worker from its end.
            raise Violation("at most one billable attempt", f"{rid} attempt {attempt}")
        if self._excess_of_deaths([event for _, event in self.ends_of(rid)]) > 0:
            raise Violation("a request ends three engines at most", f"{rid} attempt {attempt}")
        return True

    def end_fact(self, rid: str, attempt: int) -> Op | None:
        """What a scheduler reads of an attempt's stored end; None: there is none."""
        if (rid, attempt) in self.garbled:
            return ("unreadable", rid, attempt)
        return next(
            (("ended", data) for known, number, data in self.attempts if (known, number) == (rid, attempt)), None
        )

    def restore(self) -> None:
        """The bus comes back with what a backup from before the history holds: nothing, and an older lease."""
        self.restored = True
        self.requests = self.work = self.attempts = self.stored_ids = ()
        self.consumed = frozenset()
        self.garbled = frozenset()
        self.seq = 0
        self.lease = (OLD_EPOCH, self.now - TICK_MS)
        for worker in self.workers:
            self.set_worker(worker.slot, delivered=frozenset())

    def ends_of(self, rid: str) -> Iterator[tuple[int, Any]]:
        for known, number, data in self.attempts:
            if known == rid:
                yield number, EVENT.decode(data)

    # What may happen --------------------------------------------------------------------------------------

    def actions(self) -> list[Action]:
        """What may happen next without a fault, in the order in which the fault-free continuation takes it.

        When one of them is ``eager`` it is the only one (the reduction of tests.explore.search).
        """
        if not self._actions:
            self._actions = self._possible()
        return self._actions

    def following(self) -> "World":
        """The world after the first of ``actions``."""
        if self._following is None:
            self._following = self.after(self.actions()[0])
        return self._following

    def _possible(self) -> list[Action]:
        blocking: list[Action] = []
        for slot, sched in enumerate(self.scheds):
            if schedulers.is_deposed(self, sched):
                return [*islice(self._of_deposed(slot), 1), ("depose", slot)]
        for action in self._doable():
            if self._is_eager(action):
                return [action]
            blocking.append(action)
        held_up = [("arrive", *entry) for entry in self.late if entry[0] < self.now and self._arrives(entry[1])]
        waking: list[Action] = [("thaw", name) for name, up, _ in self._processes() if up in ("frozen", "late")]
        waking += [("engine goes on", worker.slot) for worker in self.workers if worker.stalled]
        overdue = (
            any(self._overdue(entry[0]) for entry in self.late)
            or any(
                self._overdue(since, LATE_TICKS if up == "late" else STOPPED_TICKS)
                for _, up, since in self._processes()
                if up in ("frozen", "late")
            )
            or any(worker.stalled and self._overdue(worker.stalled, LATE_TICKS) for worker in self.workers)
        )
        if blocking or overdue:
            return [*blocking, *held_up, *waking]
        return [("tick",), *held_up, *waking]

    def _overdue(self, since: int, ticks: int = STOPPED_TICKS) -> bool:
        return self.now - since >= ticks * TICK_MS

    def _processes(self) -> Iterator[tuple[str, str, int]]:
        for sched in self.scheds:
            yield sched.name, sched.up, sched.since
        for worker in self.workers:
            yield f"w{worker.slot}", worker.up, worker.since
        yield "g", self.gate.up, self.gate.since

    def _doable(self) -> Iterator[Action]:
        yield from self._deliveries()
        yield from schedulers.actions(self)
        yield from workers.actions(self)
        yield from gateway.actions(self)

    def _of_deposed(self, slot: int) -> Iterator[Action]:
        """What it still does, one after the other, and it may stop anywhere."""
        for action in self._doable():
            kind, slot_of = action[1][:2] if action[0] == "deliver" else action[:2]
            if slot_of == slot and (kind in schedulers.STEPS or kind in schedulers.RECEIVED):
                yield action

    def _deliveries(self) -> Iterator[Action]:
        heads = set()
        for message in self.net:
            if message[0] in ("frame", "control"):  # In order, from one sender to one receiver.
                channel = message[:4] if message[0] == "control" else message[:3]
                if channel in heads:
                    continue
                heads.add(channel)
            if self.receiver_up(message):
                yield "deliver", message

    def _is_eager(self, action: Action) -> bool:
        """Whether the order of this step among the others makes no difference."""
        match action:
            case ("beat", _) | ("go on reading", _) | ("go on requests", _):
                return True
            case ("ack request", _, (_, seq)):
                return seq in self.consumed and self._is_owned()
            case ("ack work", slot, (_, seq)):
                return seq in self.workers[slot].delivered and self._is_owned()
            case ("deliver", ("admission" | "status" | "frames" | "cancelled", *_)):
                return True
            case ("deliver", ("frame", _, rid, *_)):
                return len({m[1] for m in self.net if m[0] == "frame" and m[2] == rid}) == 1
        return False

    def _is_owned(self) -> bool:
        """Nobody takes over or is about to."""
        settled = all(sched.phase in ("standby", "owner") for sched in self.scheds)
        return settled and self.now - self.lease[1] < TICK_MS

    def receiver_up(self, message: Message) -> bool:
        match message[0]:
            case kind if kind in schedulers.RECEIVED:
                return self.scheds[message[1]].up == "up"
            case "control" | "frames?":
                return any(w.name == message[3] and w.up == "up" for w in self.workers)
        return self.gate.up == "up"

    def _arrives(self, message: Message) -> bool:
        return message[0].startswith(("store ", "delete ")) or self.receiver_up(message)

    def exists(self, message: Message) -> bool:
        """Whether somebody still listens for it."""
        match message[0]:
            case kind if kind in schedulers.RECEIVED:
                return self.scheds[message[1]].epoch == message[2] and self.scheds[message[1]].state >= 0
            case "control" | "frames?":
                return any(w.name == message[3] for w in self.workers)
            case "admission" | "status" | "frames" | "frame":
                return self.gate.up != "down" and any(
                    a.rid == message[2] and (a.listens or message[0] == "admission") for a in self.gate.asked
                )
            case "cancelled":
                return self.gate.up != "down"
        return True

    # Steps ------------------------------------------------------------------------------------------------

    def after(self, action: Action) -> "World":
        """The world after ``action``; raises Violation."""
        world = self.clone()
        match action:
            case ("tick",):
                world._pass_time()
            case ("deliver", message):
                world.take_off(message)
                world.receive(message)
            case ("arrive", since, message):
                late = list(world.late)
                late.remove((since, message))
                world.late = tuple(late)
                world.receive(message)
            case ("thaw", name):
                world._thaw(name)
            case ("engine goes on", slot):
                world.set_worker(slot, stalled=0)
            case _:
                if action[0] in schedulers.STEPS:
                    schedulers.STEPS[action[0]](world, *action[1:])
                elif action[0] in workers.STEPS:
                    workers.STEPS[action[0]](world, *action[1:])
                elif action[0] in faults.STEPS:
                    faults.STEPS[action[0]](world, *action[1:])
                else:
                    gateway.STEPS[action[0]](world, *action[1:])
        world.forget_unheard()
        return world

    def take_off(self, message: Message) -> None:
        net = list(self.net)
        net.remove(message)
        self.net = tuple(net)

    def forget_unheard(self) -> None:
        if self.net:
            self.net = tuple([message for message in self.net if self.exists(message)])
        if self.late:
            self.late = tuple([entry for entry in self.late if self.exists(entry[1])])

    def receive(self, message: Message) -> None:
        match message[0]:
            case kind if kind in schedulers.RECEIVED:
                schedulers.receive(self, message)
            case "control" | "frames?":
                workers.receive(self, message)
            case "store work":
                self.store_work(*message[1:])
            case "store end":
                self.store_end(*message[1:])
            case "delete work":
                self.work = tuple([item for item in self.work if item[0] != message[1]])
            case "store request":
                self.store_request(*message[1:])
            case _:
                gateway.receive(self, message)

    def _thaw(self, name: str) -> None:
        if name == "g":
            self.gate = self.gate._replace(up="up")
        elif name[0] == "w":
            self.set_worker(int(name[1:]), up="up")
        else:
            schedulers.thaw(self, int(name[1:]))

    def _pass_time(self) -> None:
        """Half a second: everything that a process does by its clock."""
        self.now += TICK_MS
        schedulers.renew(self)
        workers.pass_time(self)
        if any(w.up == "late" and self.now - w.since >= SETTINGS.given_up_ms for w in self.workers):
            self.harm = max(self.harm, 1)
        pulsing = [w for w in self.workers if self.slow and w.up in ("up", "late") and w.name]
        beats: list[Op] = [workers.pulse(self, worker) for worker in pulsing]
        beats += [
            ("beat", worker.name, self.parts.worker.facts[worker.state][3])
            for worker in self.workers
            if worker.up == "up" and worker.name
        ]
        if self.gate.up == "up":
            beats.append(("stream_owner", gateway.STREAM_OWNER, STREAM_OWNER_BEAT))
        schedulers.pass_time(self, beats)
        if self.gate.up == "up":
            gateway.pass_time(self)

    # Looks ------------------------------------------------------------------------------------------------

    def fingerprint(self) -> int:
        """Equal for worlds that behave alike."""
        now, mark = self.now, self.parts.mark
        return hash(
            (
                *[mark(s, now, forms.sched_form) for s in self.scheds],
                *[mark(w, now, forms.worker_form) for w in self.workers],
                *[mark(a, now, forms.asked_form) for a in self.gate.asked],
                self.gate.up,
                near(self.gate.since, now) if self.gate.up == "frozen" else 0,
                mark(self.requests, now, forms.requests_form),
                self.consumed,
                mark(self.work, now, forms.flat_form),
                mark(self.attempts, now, forms.flat_form),
                self.garbled,
                tuple([self.clock(slot) - now for slot in range(len(self.scheds))]),
                self.restored,
                self.risen,
                frozenset(self.stored_ids),
                mark(self.net, now, forms.net_form),
                mark(self.late, now, forms.late_form),
                (self.lease[0], near(self.lease[1], now)),
                self.leaves,
                self.harm,
            )
        )

    def is_settled(self) -> bool:
        """Nothing is open any more, but for what the sweep of WORK is to find."""
        owner = self.owner()
        return (
            owner is not None
            and not self.net
            and not self.late
            and all(up == "up" or (up == "down" and name == "g") for name, up, _ in self._processes())
            and all(a.phase == "over" and not a.cancel for a in self.gate.asked)
            and not self.requests
            and self.parts.core.facts[owner.state][0] == 0
            and all(w.name and not w.beat and not w.todo and not w.rebuild and not w.draining for w in self.workers)
            and all(not self.parts.worker.facts[w.state][2] and not w.runs and not w.stalled for w in self.workers)
        )

    def is_quiet(self) -> bool:
        return not self.work and self.is_settled()

    def check_quiet(self) -> None:
        """Nothing has leaked, and every caller that is still there has its ending."""
        owner = self.owner()
        assert owner is not None
        if self.parts.core.facts[owner.state][1]:
            raise Violation("nothing leaks", f"the scheduler counts {self.parts.core.facts[owner.state][1]} of nothing")
        for worker in self.workers:
            credit, slots, _, _ = self.parts.worker.facts[worker.state]
            if credit != slots:
                raise Violation("nothing leaks", f"{worker.name} has {credit} of {slots} slots")
        for asked in self.gate.asked:
            if asked.ending is None:
                raise Violation("every request ends", f"{asked.rid} has no ending")
            if gateway.is_tried_again(self, asked.rid):
                continue
            of = asked.reads or asked.rid
            ends = [event for number, event in self.ends_of(of) if (of, number) not in self.garbled]
            if asked.ending[0] != "left" and any(event.billable and event.outcome == "cancelled" for event in ends):
                raise Violation("nobody pays for our failures", f"{asked.rid} ends with {asked.ending}")
            if self._excess_of_deaths(ends) == 0:
                # With two faults its word may be lost, and only the last outcome be known.
                told = asked.ending[1] in ("request_quarantined", "cancelled") or not self.faults
                if asked.ending[0] == "fail" and not told:
                    raise Violation("the last death quarantines", f"{asked.rid} ends with {asked.ending}")
            elif asked.ending == ("refused", "rate_limit_exceeded") and self.parts.limits.concurrency:
                if ends:
                    raise Violation("a refusal leaves nothing", f"{asked.rid} has {ends}")
            elif not self._has_completed(asked) and not self._may_fail(asked, ends):
                raise Violation("no request fails in vain", f"{asked.rid} ends with {asked.ending}")
            stored = any(message_id == asked.rid for message_id, _ in self.stored_ids)
            if stored and not any(self.ends_of(asked.rid)):
                raise Violation("what was stored is not forgotten", f"{asked.rid} has no stored end")

    def _excess_of_deaths(self, ends: list[Any]) -> int:
        """Deaths beyond those after which a request is quarantined; 0: the last one was enough."""
        alone = sum(event.engine_death and event.outcome == "failed" for event in ends) if self.poison else 0
        return max(sum(event.engine_death for event in ends) - DEATHS_MAX, alone - (DEATHS_MAX - 1))

    def _has_completed(self, asked: Asked) -> bool:
        return asked.ending is not None and asked.ending[0] == "finish" and b'"completed"' in asked.ending[1]

    def _may_fail(self, asked: Asked, ends: list[Any]) -> bool:
        """Whether the faults so far, or the request itself, excuse an error.

        What a worker stored as completed and did not live to tell is told all the same, unless part of the answer
        was lost, too.
        """
        if self.poison or self.harm > 1 or asked.version:
            return True
        if asked.ending == ("fail", "unavailable") and not asked.text and any(self.ends_of(_other_try(asked.rid))):
            return True  # Told to ask again, for both tries were admitted, by owners that knew of one each.
        if asked.reads and self.lease[0] > FIRST_EPOCH and any(event.withdrawn for event in ends):
            return True  # It joined its first try, which the owner before was withdrawing.
        completed = [event.attempt for event in ends if event.outcome == "completed"]
        if completed and asked.stream:
            chunks = [msgspec.json.decode(data) for data in asked.text]
            return self.harm > 0 and [attempt for attempt, *_ in chunks] != completed * workers.TOKENS
        if completed:
            return self.harm > 0 and not self.faults
        produced = asked.text or any(event.completion_tokens for event in ends)
        return self.harm > 0 and asked.stream and bool(produced)


def _other_try(rid: str) -> str:
    """The request that may have been begun under the same idempotency key."""
    return rid[:-1] if rid.endswith("+") else rid + "+"


def _attempt_of(item: tuple[int, str, bytes]) -> tuple[str, int]:
    found = ITEM.decode(item[2])
    return found.request.request_id, found.attempt
