"""How many workers a load needs, for a stated service level: bounds by tokens, and a tail for the waits.

With R requests a second, U prompt tokens that must be computed, G output tokens, a worker's prefill speed pi, gap t
between tokens, S slots and K KV tokens, N workers must satisfy, over the joint sample of lengths (not of averages):

- throughput: R (E[U] / pi + E[G] t / S) <= 0.8 N: prefill and decode share the engine;
- slots: R E[T] <= 0.9 S N, with T = U / pi + G t;
- kv_cache: R E[(P + G / 2) T] <= 0.9 K N, weighted by size, so larger than the product of the means;
- tail: the 99th percentile of the first token within the service level. It is the wait for a slot (Erlang's C for N S
  servers, with Kimura's approximation for times that are not exponential), the same for the prefills of N engines
  (requests go where the least is to be computed, which is nearly one queue for all), and the prompt's own prefill.

Arrivals are Poisson. The wait for a slot is added at its own 99th percentile, which is more than is so.
"""

import bisect
import math
from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

import msgspec

from simulator.traces import Lengths, seeded

BUSY = 0.8
FULL = 0.9
MOST = 100_000
SAMPLE = 20_000
SENSITIVITY = 0.2

Bound = Literal["throughput", "slots", "kv_cache", "tail"]


class Size(NamedTuple):
    """One request: prompt tokens, those of them that a cache has, output tokens."""

    prompt: int
    cached: int
    output: int


class Speeds(msgspec.Struct, frozen=True, kw_only=True):
    """Of one worker."""

    prefill_tps: float
    itl_ms: float
    slots: int
    kv_tokens: int


class Level(msgspec.Struct, frozen=True, kw_only=True):
    """Of the service: what 99 of 100 requests must have."""

    ttft_ms: float
    tpot_ms: float


class Need(msgspec.Struct, frozen=True, kw_only=True):
    """What a load needs."""

    workers: int
    """Without the spare ones; the least that keeps every bound."""
    binding: Bound
    bounds: dict[Bound, int]
    """Workers by each."""
    ttft_p99_ms: float
    """With so many."""


class Unreachable(ValueError):
    """No number of workers is enough; the message says why."""


def sample(lengths: Lengths, *, hit_rate: float = 0.0, longest: int = 1_000_000) -> list[Size]:
    """SAMPLE requests, always the same ones."""
    source = seeded("capacity")
    found = []
    for _ in range(SAMPLE):
        prompt, output = (min(longest, each.draw(source)) for each in (lengths.prompt, lengths.output))
        found.append(Size(prompt, int(prompt * hit_rate), output))
    return found


def need(rate: float, sizes: Sequence[Size], speeds: Speeds, level: Level) -> Need:
    """For ``rate`` requests a second of these sizes. Raises Unreachable."""
    if speeds.itl_ms > level.tpot_ms:
        raise Unreachable(f"a worker gives a token each {speeds.itl_ms:g} ms: {level.tpot_ms:g} ms cannot be kept")
    prefills = sorted((size.prompt - size.cached) / speeds.prefill_tps for size in sizes)
    own_s = _at(prefills, 0.99)
    if own_s * 1000 > level.ttft_ms:
        raise Unreachable(
            f"a prompt at the 99th percentile takes {own_s * 1000:.0f} ms alone: {level.ttft_ms:g} ms cannot be kept"
        )
    spans = [(size.prompt - size.cached) / speeds.prefill_tps + size.output * speeds.itl_ms / 1000 for size in sizes]
    count = len(sizes)
    decode_s = sum(size.output for size in sizes) / count * speeds.itl_ms / 1000 / speeds.slots
    held = sum((size.prompt + size.output / 2) * span_s for size, span_s in zip(sizes, spans, strict=True)) / count
    mean_s = sum(spans) / count
    bounds: dict[Bound, int] = {
        "throughput": _whole(rate * (sum(prefills) / count + decode_s) / BUSY),
        "slots": _whole(rate * mean_s / (FULL * speeds.slots)),
        "kv_cache": _whole(rate * held / (FULL * speeds.kv_tokens)),
    }

    def ttft_ms(workers: int) -> float:
        slot_s = _tail_s(*_wait(rate, spans, workers * speeds.slots), 0.01)
        return (slot_s + _with_own_s(*_wait(rate, prefills, workers), prefills)) * 1000

    bounds["tail"] = _least(max(bounds.values()), lambda workers: ttft_ms(workers) <= level.ttft_ms)
    workers = max(bounds.values())
    binding = next(bound for bound, least in bounds.items() if least == workers)
    return Need(workers=workers, binding=binding, bounds=bounds, ttft_p99_ms=round(ttft_ms(workers), 1))


def sensitivity(rate: float, sizes: Sequence[Size], speeds: Speeds, level: Level) -> dict[str, Need | str]:
    """What is needed if the rate, the prompts or the outputs are a fifth more or less; or why nothing is enough."""
    found: dict[str, Need | str] = {}
    for what in ("rate", "prompt", "output"):
        for sign, factor in (("-20 %", 1 - SENSITIVITY), ("+20 %", 1 + SENSITIVITY)):
            scaled = [
                Size(
                    max(1, round(size.prompt * factor)) if what == "prompt" else size.prompt,
                    round(size.cached * factor) if what == "prompt" else size.cached,
                    max(1, round(size.output * factor)) if what == "output" else size.output,
                )
                for size in sizes
            ]
            try:
                found[f"{what} {sign}"] = need(rate * factor if what == "rate" else rate, scaled, speeds, level)
            except Unreachable as error:
                found[f"{what} {sign}"] = str(error)
    return found


def least_by(is_enough: Callable[[int], bool], first: int) -> int:
    """The least number of workers that is enough, by bisection; ``first`` is where to begin. Raises Unreachable."""
    low, high = 0, max(1, first)
    while not is_enough(high):
        low, high = high, 2 * high
        if high > MOST:
            raise Unreachable(f"{MOST} workers are not enough")
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if is_enough(middle) else (middle, high)
    return high


def _least(first: int, is_enough: Callable[[int], bool]) -> int:
    """From ``first`` up: what a bound allows is not asked below it."""
    return least_by(lambda workers: workers >= first and is_enough(workers), first)


def _whole(workers: float) -> int:
    if workers > MOST:
        raise Unreachable(f"more than {MOST} workers would be needed")
    return max(1, math.ceil(workers - 1e-9))


def _wait(rate: float, spans: Sequence[float], servers: int) -> tuple[float, float]:
    """How likely one waits for one of ``servers`` that are each taken for ``spans``, and how fast the tail falls."""
    mean_s = sum(spans) / len(spans)
    if rate * mean_s >= servers:
        return 1.0, 0.0
    variation = sum((span_s - mean_s) ** 2 for span_s in spans) / len(spans) / mean_s**2 if mean_s else 0.0
    return _erlang_c(rate * mean_s, servers), (servers / mean_s - rate) * 2 / (1 + variation) if mean_s else math.inf


def _tail_s(waits: float, decay: float, beyond: float) -> float:
    """What the wait is longer than with probability ``beyond``."""
    if waits <= beyond:
        return 0.0
    return math.log(waits / beyond) / decay if decay else math.inf


def _with_own_s(waits: float, decay: float, ordered: Sequence[float]) -> float:
    """99th percentile of a wait and one's own time together, by bisection."""
    low = _at(ordered, 0.99)
    high = low + _tail_s(waits, decay, 0.001)
    if math.isinf(high):
        return high
    for _ in range(30):
        middle = (low + high) / 2
        own = bisect.bisect_left(ordered, middle)
        late = len(ordered) - own + waits * sum(math.exp(decay * (each - middle)) for each in ordered[:own])
        low, high = (middle, high) if late > 0.01 * len(ordered) else (low, middle)
    return high


def _erlang_c(offered: float, servers: int) -> float:
    """Probability of a wait, by the recursion of Erlang's B, which cannot overflow."""
    blocked = 1.0
    for number in range(1, servers + 1):
        blocked = offered * blocked / (number + offered * blocked)
        if blocked < 1e-12 and number > offered:
            return 0.0
    busy = offered / servers
    return blocked / (1 - busy * (1 - blocked))


def _at(ordered: Sequence[float], share: float) -> float:
    return ordered[min(len(ordered) - 1, int(len(ordered) * share))]
