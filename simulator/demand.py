"""Who asks what, and when: arrivals, lengths, tenants, conversations, or a recorded trace. The seed decides all."""

import bisect
import heapq
import itertools
import math
import random
from collections.abc import Iterator
from hashlib import blake2b
from pathlib import Path
from typing import NamedTuple

import msgspec

from simulator.machine import BLOCK
from simulator.scenario import BadScenario, Demand, Model
from simulator.traces import BLOCK_TOKENS, Lengths, seeded


class Turn(NamedTuple):
    """What one request of a conversation adds to its prompt, and the length of its answer."""

    prompt: int
    output: int


class Conversation:
    """One caller's requests, one after the other; each prompt holds all before it."""

    __slots__ = ("batch", "blocks", "demand", "held", "number", "tenant", "turn", "turns")

    def __init__(
        self, demand: Demand, number: int, tenant: int, turns: list[Turn], blocks: list[int], held: int, *, batch: bool
    ) -> None:
        self.demand = demand
        self.number = number
        """Of its first block: those of two conversations are different ones."""
        self.tenant = tenant
        self.turns = turns
        self.turn = 0
        self.blocks = blocks
        """Of what is asked so far: chained, so that equal numbers are equal prompts."""
        self.held = held
        """Tokens that the next prompt begins with."""
        self.batch = batch

    def ask(self) -> tuple[int, int, list[int]]:
        """Prompt and output tokens of the present turn, and the prompt's whole blocks."""
        turn, longest = self.turns[self.turn], self.demand.longest
        prompt = min(longest, self.held + turn.prompt)
        whole = max(0, prompt - 1) // BLOCK
        known = len(self.blocks)
        self.blocks.extend(range(self.number + known, self.number + whole))
        return prompt, min(longest, turn.output), self.blocks[:whole]

    def answered(self) -> bool:
        """The turn is over; whether there is another."""
        turn = self.turns[self.turn]
        self.held += turn.prompt + turn.output
        self.turn += 1
        return self.turn < len(self.turns)


class Arrivals:
    """Instants in seconds at which conversations begin."""

    def __init__(self, demand: Demand, source: random.Random) -> None:
        self._demand = demand
        self._source = source
        self._at_s = 0.0
        self._bursting = False
        self._phase_ends_s = 0.0

    def __next__(self) -> float:
        demand = self._demand
        if demand.arrivals in ("poisson", "gamma") and not demand.steps:
            self._at_s += self._gap(demand.rate)
            return self._at_s
        # Thinning (Lewis and Shedler): ask at the highest rate, keep as many as the present one has.
        highest = demand.rate * self._most()
        while True:
            self._at_s += self._gap(highest)
            if self._source.random() * highest <= demand.rate * self._factor(self._at_s):
                return self._at_s

    def _gap(self, rate: float) -> float:
        shape = self._demand.burstiness if self._demand.arrivals == "gamma" else 1.0
        return self._source.gammavariate(shape, 1 / (rate * shape))

    def _most(self) -> float:
        demand = self._demand
        most = max((factor for _, factor in demand.steps), default=1.0)
        if demand.arrivals == "daily":
            most *= 1 + demand.day_swing
        elif demand.arrivals == "mmpp":
            most *= demand.burst_factor / self._mmpp_mean()
        return max(1.0, most)

    def _mmpp_mean(self) -> float:
        """So that the rate is the mean one."""
        return 1 + self._demand.burst_share * (self._demand.burst_factor - 1)

    def _factor(self, at_s: float) -> float:
        demand = self._demand
        factor = 1.0
        for begins_s, times in demand.steps:
            if at_s >= begins_s:
                factor = times
        if demand.arrivals == "daily":
            return factor * (1 - demand.day_swing * math.cos(2 * math.pi * at_s / demand.day_s))
        if demand.arrivals == "mmpp":
            while at_s >= self._phase_ends_s:
                self._bursting = not self._bursting
                mean = demand.burst_s if self._bursting else demand.burst_s * (1 / demand.burst_share - 1)
                self._phase_ends_s += self._source.expovariate(1 / mean)
            return factor * (demand.burst_factor if self._bursting else 1.0) / self._mmpp_mean()
        return factor


Beginning = tuple[float, Conversation]
"""When, in seconds, and which."""


def conversations(model: Model, seed: int, folder: Path) -> Iterator[Beginning]:
    """For ever, in the order in which they begin; of a trace, all that it holds. Raises BadScenario."""
    names = [model.name, *(f"{model.name} {number}" for number in range(1, len(model.demands)))]
    kinds = (_conversations(name, demand, seed, folder) for name, demand in zip(names, model.demands, strict=True))
    return heapq.merge(*kinds, key=lambda beginning: beginning[0])


def _conversations(model: str, demand: Demand, seed: int, folder: Path) -> Iterator[Beginning]:
    source = seeded(f"demand {seed} {model}")
    tenants = _Tenants(demand, source)
    if demand.trace:
        yield from _trace(folder / demand.trace, demand, tenants, model)
        return
    arrivals, lengths = Arrivals(demand, source), demand.drawn()
    for number in itertools.count():
        at_s = next(arrivals)
        tenant = tenants.draw()
        turns = [_turn(lengths, source) for _ in range(demand.turns)]
        batch = source.random() < demand.batch_share
        system, held = _system(model, tenant, demand, source)
        yield at_s, Conversation(demand, block(model, number), tenant, turns, system, held, batch=batch)


def _turn(lengths: Lengths, source: random.Random) -> Turn:
    return Turn(lengths.prompt.draw(source), lengths.output.draw(source))


def _system(model: str, tenant: int, demand: Demand, source: random.Random) -> tuple[list[int], int]:
    """A system prompt's blocks: the tenant's own, for caches are never shared between tenants."""
    if not demand.system_prompts:
        return [], 0
    first = source.random() < demand.system_share
    chosen = 0 if first else source.randrange(demand.system_prompts)
    whole = demand.system_tokens // BLOCK
    first_block = block(model, "system", tenant, chosen)
    return list(range(first_block, first_block + whole)), demand.system_tokens


def block(*names: object) -> int:
    """Number of a prompt's block, the same in every process; those that follow it are as good as new, too."""
    return int.from_bytes(blake2b(repr(names).encode(), digest_size=8).digest(), "big") >> 1


class _Tenants:
    """Draws them by Zipf's law."""

    def __init__(self, demand: Demand, source: random.Random) -> None:
        weights = [1 / (rank + 1) ** demand.tenant_skew for rank in range(demand.tenants)]
        self._cumulated = list(itertools.accumulate(weights))
        self._source = source

    def draw(self) -> int:
        return bisect.bisect(self._cumulated, self._source.random() * self._cumulated[-1])


class _Line(msgspec.Struct, frozen=True):
    timestamp: float
    input_length: int
    output_length: int
    hash_ids: list[int] = []


def _trace(path: Path, demand: Demand, tenants: _Tenants, model: str) -> Iterator[Beginning]:
    decoder = msgspec.json.Decoder(_Line)
    with path.open("rb") as lines:
        for number, data in enumerate(lines):
            try:
                line = decoder.decode(data)
            except msgspec.MsgspecError as error:
                raise BadScenario(f"line {number + 1} of {path}: {error}") from error
            tenant = tenants.draw()
            parts = range(BLOCK_TOKENS // BLOCK)
            blocks = [block(model, tenant, each) + part for each in line.hash_ids for part in parts]
            blocks = blocks[: max(0, line.input_length - 1) // BLOCK]
            turns = [Turn(line.input_length, line.output_length)]
            own = block(model, "trace", number)
            yield line.timestamp / 1000, Conversation(demand, own, tenant, turns, blocks, 0, batch=False)
