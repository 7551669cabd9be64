"""What is asked and when: arrivals, lengths, shared prefixes, conversations, replayed traces. The seed decides all."""

import itertools
import math
import random
from collections.abc import Iterator
from pathlib import Path

import msgspec

from simulator.traces import BLOCK_TOKENS, LENGTH_MAX, Lengths, seeded

WORDS = """
time year people way day man thing woman life child world school state family student group country problem
hand part place case week company system program question work government number night point home water room
mother area money story fact month lot right study book eye job word business issue side kind head house
service friend father power hour game line end member law car city community name president team minute idea
kid body back
""".split()  # noqa: SIM905
"""A token each, with the space before it, in the vocabularies in use."""


class Load(msgspec.Struct, frozen=True):
    """A whole run's demand."""

    requests: int
    """Conversations, where ``turns`` is above 1."""
    lengths: Lengths
    rate: float = math.inf
    """Of arrivals a second; inf: all are there from the start, and only the concurrency bounds them."""
    burstiness: float = 1.0
    """Shape of the gamma distributed gaps: 1 is a Poisson process, below it bursts, inf a metronome."""
    prefixes: int = 0
    """System prompts that requests share; each takes one at random."""
    prefix_tokens: int = 0
    turns: int = 1
    tenants: int = 1
    """API keys in use, each with an equal share."""
    seed: int = 0


class Planned(msgspec.Struct, frozen=True):
    """One conversation (mostly of one turn) that begins ``at_s`` after the run's start."""

    number: int
    at_s: float
    tenant: int
    system: str
    """Empty: none."""
    turns: tuple[tuple[str, int], ...]
    """What its caller says, and how many tokens it wants back."""


def text(source: random.Random, tokens: int) -> str:
    """So many words."""
    return " ".join(source.choices(WORDS, k=tokens))


def plan(load: Load) -> Iterator[Planned]:
    """All conversations in the order of their arrival."""
    source = seeded(f"load {load.seed}")
    systems = [text(source, load.prefix_tokens) for _ in range(load.prefixes)]
    at_s = 0.0
    for number in range(load.requests):
        wanted = [(load.lengths.prompt.draw(source), load.lengths.output.draw(source)) for _ in range(load.turns)]
        yield Planned(
            number=number,
            at_s=at_s,
            tenant=source.randrange(load.tenants),
            system=source.choice(systems) if systems else "",
            turns=tuple((text(source, prompt), output) for prompt, output in wanted),
        )
        at_s += _gap_s(source, load.rate, load.burstiness)


def _gap_s(source: random.Random, rate: float, burstiness: float) -> float:
    if math.isinf(rate):
        return 0.0
    if math.isinf(burstiness):
        return 1 / rate
    return source.gammavariate(burstiness, 1 / (rate * burstiness))


class _Line(msgspec.Struct, frozen=True):
    """Of a Mooncake trace; ``timestamp`` in ms."""

    timestamp: float
    input_length: int
    output_length: int
    hash_ids: list[int] = []


class BadTrace(ValueError):
    """A trace cannot be replayed; the message names the line."""


def replay(path: Path, *, requests: int, speed: float, tenants: int) -> Iterator[Planned]:
    """The first ``requests`` of a trace in Mooncake's form, ``speed`` times as fast. Raises BadTrace and OSError.

    Equal hashes become equal text, so that prompts share what they shared.
    """
    decoder = msgspec.json.Decoder(_Line)
    with path.open("rb") as lines:
        for number, data in enumerate(itertools.islice(lines, requests)):
            try:
                line = decoder.decode(data)
            except msgspec.MsgspecError as error:
                raise BadTrace(f"line {number + 1} of {path}: {error}") from error
            if not (0 < line.input_length <= LENGTH_MAX and 0 < line.output_length <= LENGTH_MAX):
                raise BadTrace(f"line {number + 1} of {path}: lengths must be from 1 to {LENGTH_MAX}")
            turn = (_of_blocks(line, number), line.output_length)
            yield Planned(number, line.timestamp / 1000 / speed, number % tenants, "", (turn,))


def _of_blocks(line: _Line, number: int) -> str:
    blocks = [text(seeded(f"block {each}"), BLOCK_TOKENS) for each in line.hash_ids]
    words = " ".join(blocks).split()[: line.input_length]
    rest = text(seeded(f"rest {number}"), line.input_length - len(words))
    return " ".join([*words, rest]).strip()
