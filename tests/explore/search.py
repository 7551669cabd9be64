"""The search: all histories with no fault, then with one, then with two; within that, short ones first.

A history is what happens in one world (tests.explore.world). Worlds that behave alike are visited once, by a hash
of their canonical form. From every one of them a continuation without another fault is followed until nothing is
open; so a request that is forgotten, and whatever leaks, shows at the first world from which it is so.

Reduction: while a step is possible whose order among the other possible steps makes no difference, it alone is
taken, and faults are tried beside it. Such steps are acknowledgements in REQUESTS and WORK while nobody takes over
and nothing is to be delivered again (then nobody reads there what they remove), a heartbeat at once (it tells what
was so before; later ones tell more), the steps of a takeover that only set marks, an answer that reaches the gateway,
and a frame for a relay that no other sender has a frame for. A deposed owner that wakes does what it still does in
one go, at any step. Time passes only when no step is left: what takes longer than half a second is a fault.

A fault is tried only where it may differ from the same one a step earlier (tests.explore.faults).

A service's request has an idempotency key and a second try, when its first got no answer or was not confirmed.

Not in it: more than one model, requests with several choices.
"""

import gc
import os
import time
from array import array
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from itertools import groupby
from multiprocessing import get_context
from typing import NamedTuple

import msgspec

from contracts.messages.records import TenantLimits
from tests.explore import workers
from tests.explore.describe import describe
from tests.explore.faults import faults
from tests.explore.parts import LIMITS, Parts
from tests.explore.records import Action, Scenario, Violation
from tests.explore.world import World

CONTINUATION_MAX = 600
"""Steps within which everything must be over when nothing more goes wrong."""

SCENARIOS = (
    Scenario("one stream", (True,)),
    Scenario("one answer", (False,)),
    Scenario("poison", (True,), leaves=0, poison=True),
    Scenario("two requests", (True, False)),
    Scenario("rate limits", (True,), leaves=0, limited=True),
    Scenario("nobody's version", (False, False), leaves=0, pinned=1),
    Scenario("one at a time", (True, False), concurrency=1),
    Scenario("a service's stream", (True,), keyed=True),
    Scenario("slow workers", (True,), leaves=0, slow=True),
)


class Found(Exception):
    """A rule is broken: ``steps`` is the shortest history that the search knows."""

    def __init__(self, violation: Violation, steps: list[str]) -> None:
        super().__init__(f"{violation}\n" + "\n".join(steps))
        self.violation = violation
        self.steps = steps


class Node(NamedTuple):
    """A world that was found, and the number of its history."""

    number: int
    world: World
    before: World | None
    """The world one step earlier; None at the start."""


class Blow(NamedTuple):
    """What was found by ``action``, a fault, in ``world``; kept so because there are many."""

    number: int
    world: World
    action: Action


class Level(msgspec.Struct):
    """What was searched of one scenario with so many faults."""

    scenario: str
    faults: int
    states: int = 0
    depth: int = 0
    complete: bool = False
    struck: int = 0
    """Depth up to which the last fault has been tried everywhere, with one continuation."""
    worlds: int = 0
    """Seen up to here, those on the way to the end included."""

    def __str__(self) -> str:
        how = "complete" if self.complete else "stopped by its bound"
        return (
            f"{self.scenario}, {self.faults} faults or leaves: {self.states} states, depth {self.depth} "
            f"(last fault tried to {self.struck}), {how}; {self.worlds} in all"
        )


class Search:
    """One scenario."""

    def __init__(self, parts: Parts, scenario: Scenario, worlds_max: int | None = None) -> None:
        self._worlds_max = worlds_max
        self._scenario = scenario
        self._last = scenario.faults + scenario.leaves
        self._visited: set[int] = set()
        self._good: set[int] = set()
        """Worlds from which everything is known to come to its end."""
        self._parents = array("q")
        self._actions = array("q")
        self._numbers: dict[Action, int] = {}
        self.first = first_world(parts, scenario)

    def run(self, until: float, most: int | None = None) -> Iterator[Level]:
        """Level by level, with at most ``most`` faults and leaves, until the monotonic time ``until``. Raises Found."""
        before: list[list[Node]] = []
        try:
            for count in range((self._last if most is None else most) + 1):
                level = Level(self._scenario.name, count)
                known = len(self._visited)
                before = self._explore(level, before, until)
                level.states = len(self._visited) - known
                level.worlds = len(self._good)
                yield level
                if not level.complete:
                    return
        finally:
            gc.unfreeze()

    def _explore(self, level: Level, before: list[list[Node]], until: float) -> list[list[Node]]:
        """First every further fault with one continuation each, then all that may happen after it, by depth."""
        found: list[list[Node]] = []
        struck = self._strike(level, before, until)
        frontier = [] if before else [Node(self._note(-1, ("start",)), self.first, None)]
        while frontier or len(found) < len(struck):
            if self._is_over(until):
                return found
            if len(found) < len(struck):
                frontier += [Node(blow.number, blow.world.after(blow.action), None) for blow in struck[len(found)]]
                struck[len(found)] = []
            level.depth = len(found)
            found.append(frontier if level.faults < self._last else [])
            following: list[Node] = []
            for number, world, _ in frontier:
                for action in world.actions():
                    after = self._add(number, world, action)
                    if after is not None:
                        following.append(after)
                if self._is_over(until):
                    return found
            frontier = following
            gc.freeze()  # What is kept is not looked at again: a third of the time.
        level.complete = True
        return found

    def _strike(self, level: Level, before: list[list[Node]], until: float) -> list[list[Blow]]:
        """One more fault at every world that was found, by depth."""
        struck: list[list[Blow]] = [[] for _ in range(len(before) + 1)]
        for depth, nodes in enumerate(before):
            for number, world, earlier in nodes:
                for action in faults(world, earlier):
                    if not self._wanted(action):
                        continue
                    after = self._add(number, world, action)
                    if after is not None:
                        struck[depth + 1].append(Blow(after.number, world, action))
                if self._is_over(until):
                    return struck
            level.struck = depth
        return struck

    def _is_over(self, until: float) -> bool:
        return time.monotonic() > until or (self._worlds_max is not None and len(self._visited) >= self._worlds_max)

    def _wanted(self, fault: Action) -> bool:
        only = self._scenario.only
        return not only or fault[0] in only or " ".join(map(str, fault[:2])) in only

    def _add(self, parent: int, world: World, action: Action) -> Node | None:
        """The world after ``action``, unless it is known or all is over; raises Found."""
        try:
            after = world.following() if action is world.actions()[0] else world.after(action)
        except Violation as violation:
            raise Found(violation, self._history(parent, action)) from None
        mark = after.fingerprint()
        if mark in self._visited:
            return None
        self._visited.add(mark)
        number = self._note(parent, action)
        self._follow(number, after, mark)
        return None if after.is_quiet() else Node(number, after, world)

    def _follow(self, number: int, world: World, mark: int) -> None:
        """Without another fault everything comes to its end."""
        steps: list[Action] = []
        marks: list[int] = []
        try:
            while mark not in self._good:
                marks.append(mark)
                if world.is_quiet():
                    world.check_quiet()
                    break
                possible = world.actions()
                if not possible or len(steps) > CONTINUATION_MAX:
                    raise Violation("everything comes to its end", "it goes on for ever" if possible else "it is stuck")
                # The first one is wanted again; a chain of them would fill the memory.
                world = world.after(possible[0]) if steps else world.following()
                steps.append(possible[0])
                mark = world.fingerprint()
        except Violation as violation:
            shown = [*self._history(number), "  then, without another fault:", *shorten(map(describe, steps))]
            raise Found(violation, shown) from None
        self._good.update(marks)

    def _note(self, parent: int, action: Action) -> int:
        self._parents.append(parent)
        self._actions.append(self._numbers.setdefault(action, len(self._numbers)))
        return len(self._parents) - 1

    def _history(self, number: int, *last: Action) -> list[str]:
        actions = list(self._numbers)
        path: list[Action] = []
        while number > 0:
            path.append(actions[self._actions[number]])
            number = self._parents[number]
        return [describe(action) for action in (*reversed(path), *last)]


def shorten(lines: Iterable[str]) -> Iterator[str]:
    """Equal lines that follow each other as one."""
    for line, group in groupby(lines):
        count = len(list(group))
        yield line if count == 1 else f"{line} ({count} times)"


def first_world(parts: Parts, scenario: Scenario) -> World:
    """Both workers are ready and s0 owns the model; nobody has asked yet."""
    parts.limits = LIMITS if scenario.limited else TenantLimits(concurrency=scenario.concurrency)
    world = World(parts, scenario._replace(streams=()))
    world.workers = tuple([workers.start(world, slot, 0) for slot in range(2)])
    while not world.is_quiet():
        world = world.after(world.actions()[0])
    world = world.after(("tick",))
    while world.actions() != [("tick",)]:
        world = world.after(world.actions()[0])
    world.gate = world.gate._replace(asked=World(parts, scenario).gate.asked)
    return world


def explore(
    seconds: float, scenarios: Sequence[Scenario] = SCENARIOS, most: int | None = None, worlds_max: int | None = None
) -> Iterator[Level]:
    """Search the scenarios within ``seconds``, as many at once as there are processors. Raises Found.

    ``most`` bounds the faults and leaves below what the scenarios allow. With ``worlds_max``, of each scenario, and
    one PYTHONHASHSEED the same worlds are seen each time.
    """
    processes = min(len(scenarios), os.cpu_count() or 1)
    share = seconds * processes / len(scenarios)
    with ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool:
        searches = [pool.submit(_search, scenario, share, most, worlds_max) for scenario in scenarios]
        for search in as_completed(searches):
            levels, found = search.result()
            yield from levels
            if found is not None:
                pool.shutdown(wait=False, cancel_futures=True)
                raise Found(*found)


def _search(
    scenario: Scenario, seconds: float, most: int | None, worlds_max: int | None
) -> tuple[list[Level], tuple[Violation, list[str]] | None]:
    levels: list[Level] = []
    try:
        levels.extend(Search(Parts(), scenario, worlds_max).run(time.monotonic() + seconds, most))
    except Found as found:
        return levels, (found.violation, found.steps)
    return levels, None
