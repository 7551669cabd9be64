"""The search: all histories with no fault, then with one, then with two; within that, short ones first.

A history is what happens in one world (tests.explore.world). Worlds that behave alike are visited once, by a hash
of their canonical form. From every one of them a continuation without another fault is followed until nothing is
open; so a request that is forgotten, and whatever leaks, shows at the first world from which it is so.

Reduction: while a step is possible that touches nothing which another possible step reads or writes, it is taken
first, and only faults are tried beside it. Such steps are a scheduler's acknowledgement in REQUESTS and a worker's
in WORK (only a takeover and a redelivery look there, and those begin with a fault, tried beside it), a heartbeat
(only makes known what was so before), an answer that reaches the gateway, and a frame for a relay that no other
sender has a frame for. Time passes only when no step is left (a delay is a fault).
"""

import time
from array import array
from collections.abc import Iterable, Iterator
from itertools import groupby

import msgspec

from tests.explore import workers
from tests.explore.describe import describe
from tests.explore.faults import faults
from tests.explore.gateway import new
from tests.explore.parts import Parts
from tests.explore.records import Action, Scenario, Violation
from tests.explore.world import World

CONTINUATION_MAX = 600
"""Steps within which everything must be over when nothing more goes wrong."""

SCENARIOS = (
    Scenario("one stream", (True,)),
    Scenario("one answer", (False,)),
    Scenario("two requests", (True, False)),
)


class Found(Exception):
    """A rule is broken: ``steps`` is the shortest history that the search knows."""

    def __init__(self, violation: Violation, steps: list[str]) -> None:
        super().__init__(f"{violation}\n" + "\n".join(steps))
        self.violation = violation
        self.steps = steps


class Level(msgspec.Struct):
    """What was searched of one scenario with so many faults."""

    scenario: str
    faults: int
    states: int = 0
    depth: int = 0
    complete: bool = False

    def __str__(self) -> str:
        how = "complete" if self.complete else "stopped by the time"
        return f"{self.scenario}, {self.faults} faults: {self.states} states, depth {self.depth}, {how}"


class Search:
    """One scenario."""

    def __init__(self, parts: Parts, scenario: Scenario) -> None:
        self._scenario = scenario
        self._visited: set[int] = set()
        self._good: set[int] = set()
        """Worlds from which everything is known to come to its end."""
        self._parents = array("q")
        self._actions = array("q")
        self._numbers: dict[Action, int] = {}
        self.first = first_world(parts, scenario)

    def run(self, until: float) -> Iterator[Level]:
        """Level by level until the monotonic time ``until``. Raises Found."""
        before: list[list[tuple[int, World]]] = []
        for count in range(self._scenario.faults + self._scenario.leaves + 1):
            level = Level(self._scenario.name, count)
            before = self._explore(level, before, until)
            yield level
            if not level.complete:
                return

    def _explore(
        self, level: Level, before: list[list[tuple[int, World]]], until: float
    ) -> list[list[tuple[int, World]]]:
        found: list[list[tuple[int, World]]] = []
        frontier = [] if before else [(self._note(-1, ("start",)), self.first)]
        while frontier or len(found) <= len(before):
            level.depth = len(found)
            seeds = before[len(found) - 1] if 0 < len(found) <= len(before) else []
            for number, world in seeds:
                for action in faults(world):
                    self._add(number, world, action, frontier)
                if time.monotonic() > until:
                    return found
            found.append(frontier)
            level.states += len(frontier)
            following: list[tuple[int, World]] = []
            for number, world in frontier:
                for action in world.actions():
                    self._add(number, world, action, following)
                if time.monotonic() > until:
                    return found
            frontier = following
        level.complete = True
        return found

    def _add(self, parent: int, world: World, action: Action, to: list[tuple[int, World]]) -> None:
        try:
            after = world.after(action)
        except Violation as violation:
            raise Found(violation, self._history(parent, action)) from None
        mark = after.fingerprint()
        if mark in self._visited:
            return
        self._visited.add(mark)
        number = self._note(parent, action)
        self._follow(number, after, mark)
        if not after.is_quiet():
            to.append((number, after))

    def _follow(self, number: int, world: World, mark: int) -> None:
        """Without another fault everything comes to its end."""
        steps: list[Action] = []
        marks: list[int] = []
        try:
            while mark not in self._good:
                marks.append(mark)
                if world.is_quiet():
                    self._check_quiet(world)
                    break
                possible = world.actions()
                if not possible or len(steps) > CONTINUATION_MAX:
                    raise Violation("everything comes to its end", "it goes on for ever" if possible else "it is stuck")
                steps.append(possible[0])
                world = world.after(possible[0])
                mark = world.fingerprint()
        except Violation as violation:
            shown = [*self._history(number), "  then, without another fault:", *shorten(map(describe, steps))]
            raise Found(violation, shown) from None
        self._good.update(marks)

    def _check_quiet(self, world: World) -> None:
        world.check_quiet()
        spared = (world.faults, world.leaves) == (self._scenario.faults, self._scenario.leaves)
        if spared and any(asked.ending is None or asked.ending[0] != "finish" for asked in world.gate.asked):
            raise Violation("without a fault all finish", str([asked.ending for asked in world.gate.asked]))

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
    world = World(parts, Scenario("", ()))
    world.faults, world.leaves = scenario.faults, scenario.leaves
    world.workers = tuple([workers.start(world, slot, 0) for slot in range(2)])
    while not world.is_quiet():
        world = world.after(world.actions()[0])
    world = world.after(("tick",))
    while world.actions() != [("tick",)]:
        world = world.after(world.actions()[0])
    world.gate = world.gate._replace(asked=tuple([new(f"r{n}", s) for n, s in enumerate(scenario.streams)]))
    return world


def explore(parts: Parts, seconds: float, scenarios: tuple[Scenario, ...] = SCENARIOS) -> Iterator[Level]:
    """Search the scenarios, each for its share of the time that is left. Raises Found."""
    end = time.monotonic() + seconds
    for number, scenario in enumerate(scenarios):
        now = time.monotonic()
        yield from Search(parts, scenario).run(now + (end - now) / (len(scenarios) - number))
