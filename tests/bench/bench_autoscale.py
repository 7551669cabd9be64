"""How many workers there are: fixed, by counts of requests, by tokens; in the simulator, as a table and a picture.

    python -m tests.bench.bench_autoscale [--pictures DIR] [CURVE ...]

The curves: ``daily`` (0.2 to 1.8 times the mean; a day takes two hours, so it is twelve times as steep), ``step``
(three times as much from one second to the next, for ten minutes), ``prompts`` (a chat goes on, and is joined for half
an hour by callers with long prompts and short answers: one weighs five times as much, and is there for less time). All
else is the same for all.
"""

import argparse
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from simulator.picture import compare
from simulator.report import Report, simulate
from simulator.scenario import Model, Scenario

WORKER = {"slots": 32, "kv_tokens": 400_000, "prefill_tps": 8_000.0, "itl_ms": 20.0, "start_s": 60.0}
PER_HOUR = 2.5
IN_FLIGHT = 24.0
"""Requests that a worker of 32 slots has at four fifths of what it can: 5.2 a second for 4.6 s. From the chat alone, as
who sets it would measure it."""
QUEUED = 4.0
HOLD_S = 300
"""As long as Kubernetes waits before it takes workers away."""
CHAT_S, LONG_S = 0.154, 0.70
"""Of an engine's time for the mean prompt of each kind."""
BUSY = 0.8
CURVES: dict[str, tuple[list[dict[str, Any]], int, float, float]] = {
    "daily": ([{"rate": 16.0, "arrivals": "daily", "day_s": 7_200.0}], 115_200, 28.8 * CHAT_S, 16.0 * CHAT_S),
    "step": ([{"rate": 12.0, "steps": [(0, 1.0), (600, 3.0), (1_200, 1.0)]}], 36_000, 36.0 * CHAT_S, 20.0 * CHAT_S),
    "prompts": (
        [
            {"rate": 12.0},
            {
                "rate": 5.0,
                "steps": [(0, 0.0), (900, 1.0), (2_700, 0.001)],
                "prompt": {"mu": 8.5, "sigma": 0.5},
                "output": {"mu": 2.57, "sigma": 1.0},
            },
        ],
        50_000,
        12.0 * CHAT_S + 5.0 * LONG_S,
        12.0 * CHAT_S + 2.5 * LONG_S,
    ),
}
"""Demand; requests in all; workers that are busy at the peak, and in the mean."""


def policies(curve: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """What differs, by name. Fixed fleets are four fifths busy, and have a spare worker as those by tokens have."""
    _, _, peak_s, mean_s = CURVES[curve]
    for name, busy_s in (("fixed: peak", peak_s), ("fixed: mean", mean_s)):
        yield name, {"workers": math.ceil(busy_s / BUSY) + 1}
    scaled: dict[str, Any] = {"workers": 4, "autoscale": (1, 40)}
    yield "requests in flight", scaled | {"scale_by": "in_flight", "requests_per_worker": IN_FLIGHT}
    yield "requests queued", scaled | {"scale_by": "queued", "requests_per_worker": QUEUED}
    yield "tokens", scaled | {"limits": {"replicas_hold_s": HOLD_S}}


def run(curve: str, changed: dict[str, Any]) -> Report:
    """One policy under one curve."""
    demands, requests, _, _ = CURVES[curve]
    fields = {"name": "chat", "worker": WORKER | {"cost_per_hour": PER_HOUR}, "demand": demands} | changed
    return simulate(Scenario(models=[msgspec.convert(fields, Model)], requests=requests), Path())


HEAD = "| | workers, mean / most | not good | no answer | TTFT ms p50 / p99 | worker hours | cost per M tokens |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("curves", nargs="*", choices=[*CURVES, "all"], default="all")
    parser.add_argument("--pictures", type=Path, default=Path(), help="folder of autoscale-CURVE.svg")
    options = parser.parse_args()
    for curve in CURVES if "all" in options.curves else options.curves:
        print(f"\n{curve}\n{HEAD}\n|---|---|---|---|---|---|---|")
        reports = {}
        for name, changed in policies(curve):
            found = reports[name] = run(curve, changed)
            total = found.total
            mean = total.worker_hours * 3600 / found.simulated_s
            most = max(workers for _, workers, _ in found.replicas["chat"])
            refused = sum(count for code, count in total.ended.items() if code != "completed")
            print(
                f"| {name} | {mean:.1f} / {most} | {1 - total.good / total.requests:.2%} | {refused} "
                f"| {total.ttft_ms.p50:.0f} / {total.ttft_ms.p99:.0f} | {total.worker_hours:.1f} "
                f"| {total.cost_per_million_tokens:.2f} |",
                flush=True,
            )
        (options.pictures / f"autoscale-{curve}.svg").write_text(compare(reports, f"How many workers: {curve}"))


if __name__ == "__main__":
    main()
