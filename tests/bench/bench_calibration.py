"""Whether the simulator tells the truth: the same arrivals and lengths on a real stack and in it, side by side.

    python -m tests.bench.bench_calibration [--rate 7] [--requests 840] [--seed 1]

The stack has four workers with the simulated engine, whose timing is the scenario's; ``headrace bench``'s generator
offers the load, open loop. What was asked, by the instants that were planned and the tokens that the stack counted, is
then replayed as a trace. The scenario's delay of the way is what short requests took alone before the load, less their
prefill. The load is one that the machine carries beside the stack: some tens of streams. Exits with 1 when a figure
differs by more than AGREES.
"""

import argparse
import asyncio
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from compose.bench.client import Generator, Target
from compose.bench.measure import Seen
from compose.bench.workload import Load, Planned, plan
from simulator.report import ModelReport, simulate
from simulator.scenario import Delays, Demand, Model, Scenario, Timing
from simulator.traces import Lengths, Lognormal
from tests.bench.bench_saturation import cpu_s
from tests.support.stack import Stack

AGREES = 0.15
WORKERS = 4
WORKER = Timing(slots=4, kv_tokens=100_000, prefill_tps=2_000.0, itl_ms=20.0)
LENGTHS = Lengths(Lognormal(5.7, 0.7), Lognormal(4.0, 0.6))
"""Prompts of 300 tokens at the median, answers of 55: a second and a half on one of 16 slots."""


ALONE = [Planned(number, number * 0.3, 0, "", (("word", 1),)) for number in range(20)]


def real(planned: Sequence[Planned]) -> tuple[list[Seen], float]:
    """On a stack of its own; and how many ms its way took for who was alone."""
    shape = {
        "--workers": WORKERS,
        "--sim-slots": WORKER.slots,
        "--sim-kv-tokens": WORKER.kv_tokens,
        "--sim-prefill-tps": WORKER.prefill_tps,
        "--sim-itl-ms": WORKER.itl_ms,
    }
    options = [str(part) for option in shape.items() for part in option]
    with tempfile.TemporaryDirectory() as directory:
        stack = Stack(Path(directory) / "data", "--engine", "simulated", *options).wait_ready()
        try:
            target = Target(url=stack.run.url, model=stack.model, keys=(stack.run.key,))
            alone = asyncio.run(offer(target, ALONE))
            before = sum(cpu_s(stack).values())
            seen = asyncio.run(offer(target, planned))
            print(f"CPU of the stack: {(sum(cpu_s(stack).values()) - before) / planned[-1].at_s:.2f} of a core")
        finally:
            stack.stop()
    if failed := [each.error for each in (*alone, *seen) if each.error]:
        sys.exit(f"{len(failed)} requests failed: {set(failed)}")
    way_ms = statistics.median((each.ttft - each.prompt_tokens / WORKER.prefill_tps) * 1000 for each in alone)
    print(f"the way alone: {way_ms:.1f} ms")
    return seen, way_ms


async def offer(target: Target, planned: Sequence[Planned]) -> list[Seen]:
    """Open loop."""
    return await Generator(target, concurrency=None, on_end=lambda _: None).run(planned, closed=False)


def simulated(seen: Sequence[Seen], way_ms: float) -> tuple[ModelReport, float]:
    """The same requests; and how many seconds they took."""
    delays = Delays(bus_ms=1.0, gateway_ms=max(0.0, way_ms - 2.0))
    with tempfile.TemporaryDirectory() as directory:
        lines = (
            msgspec.json.encode(
                {
                    "timestamp": each.due_s * 1000,
                    "input_length": each.prompt_tokens,
                    "output_length": each.output_tokens,
                    "hash_ids": [],
                }
            )
            for each in seen
        )
        (Path(directory) / "trace.jsonl").write_bytes(b"\n".join(lines))
        model = Model(name="m", workers=WORKERS, worker=WORKER, demand=Demand(trace="trace.jsonl", tenants=1))
        report = simulate(Scenario(models=[model], requests=len(seen), delays=delays), Path(directory))
        return report.total, report.simulated_s


def spread(seen: Sequence[Seen], of: Callable[[Seen], float]) -> tuple[float, float]:
    """Median and 95th percentile in ms, as the simulator's report has them."""
    line = sorted(of(each) * 1000 for each in seen)
    return line[len(line) // 2], line[int(len(line) * 0.95)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rate", type=float, default=7.0)
    parser.add_argument("--requests", type=int, default=840)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    load = Load(requests=options.requests, lengths=LENGTHS, rate=options.rate, seed=options.seed)
    seen, way_ms = real(list(plan(load)))
    report, simulated_s = simulated(seen, way_ms)
    real_s = max(each.end_s for each in seen)
    ttft, e2e = spread(seen, lambda each: each.ttft), spread(seen, lambda each: each.e2e)
    tpot = spread([each for each in seen if each.output_tokens > 1], lambda each: each.tpot)
    rows = [
        ("requests/s", len(seen) / real_s, report.requests / simulated_s),
        ("output tokens/s", sum(each.output_tokens for each in seen) / real_s, report.output_tokens_per_s),
        ("first token, ms, p50", ttft[0], report.ttft_ms.p50),
        ("first token, ms, p95", ttft[1], report.ttft_ms.p95),
        ("per output token, ms, p50", tpot[0], report.tpot_ms.p50),
        ("whole answer, ms, p50", e2e[0], report.e2e_ms.p50),
        ("whole answer, ms, p95", e2e[1], report.e2e_ms.p95),
    ]
    print(f"{len(seen)} requests, {options.rate:g} a second, seed {options.seed}\n")
    print("| | real stack | simulator | simulator / real |\n|---|---|---|---|")
    for name, was, is_ in rows:
        print(f"| {name} | {was:,.1f} | {is_:,.1f} | {is_ / was:.2f} |")
    sys.exit(any(abs(is_ / was - 1) > AGREES for _, was, is_ in rows))


if __name__ == "__main__":
    main()
