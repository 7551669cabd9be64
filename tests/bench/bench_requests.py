"""CPU of a short request in each process, and of an idle stack, on a whole stack with the simulated engine.

    python -m tests.bench.bench_requests [--concurrency 1 16 64] [--requests 3000] [--runs 3] [--idle 20] [--gateways 1]

A short request is a chat completion of three words that is answered with one token, not streamed, on connections that
are kept. CPU is user and system time of each process by /proc, heartbeats and all: less what the stack uses when idle
is what is printed as ``less idle``. Machines are shared, so that only CPU counts; the rate is that of this machine with
the load generator on it. Aims: 1.5 ms a request in all and 0.25 ms of it the scheduler's; 10 ms a second when idle.
"""

import argparse
import asyncio
import statistics
import tempfile
import time
from pathlib import Path

import uvloop

from tests.bench.bench_saturation import Load, Tally, cpu_s
from tests.support.stack import Stack

SETTLE_S = 4.0
"""After a load or the start, until only what always ticks is left."""
WARM_UP = 500


def line(spent: dict[str, float]) -> str:
    return " + ".join(f"{role} {cost:.2f}" for role, cost in spent.items()) + f" = {sum(spent.values()):.2f} ms"


def idle_ms(stack: Stack, seconds: float) -> dict[str, float]:
    """Milliseconds of CPU a second of each kind of process while nothing is asked."""
    time.sleep(SETTLE_S)
    before, began = cpu_s(stack), time.monotonic()
    time.sleep(seconds)
    passed = time.monotonic() - began
    return {role: (used - before[role]) * 1000 / passed for role, used in cpu_s(stack).items()}


async def load(stack: Stack, callers: int, requests: int) -> tuple[float, list[float]]:
    """``requests`` short ones by so many callers, each of whom asks again as soon as it is answered.

    Gives the seconds that it took, and those of each answer.
    """
    asking, tally = Load(stack, "short"), Tally(time.monotonic())
    left = iter(range(requests))

    async def ask() -> None:
        for _ in left:
            await asking.one(tally)

    began = time.monotonic()
    await asyncio.gather(*(ask() for _ in range(callers)))
    took_s = time.monotonic() - began
    if len(tally.ended) != requests:
        raise SystemExit(f"only {len(tally.ended)} of {requests} were answered: {dict(tally.statuses)}")
    return took_s, tally.first_s


def measure(stack: Stack, callers: int, requests: int, idle: dict[str, float]) -> dict[str, float]:
    """Milliseconds of CPU for each request; prints the run."""
    before = cpu_s(stack)
    took_s, answers = uvloop.run(load(stack, callers, requests))
    time.sleep(1.5)  # The ledger writes what was the last.
    passed = took_s + 1.5
    spent = {role: (used - before[role]) * 1000 / requests for role, used in cpu_s(stack).items()}
    less = sum(spent.values()) - sum(idle.values()) * passed / requests
    p50, p99 = statistics.median(answers) * 1000, sorted(answers)[int(len(answers) * 0.99)] * 1000
    print(
        f"{callers:4} callers: {line(spent)} a request, {less:.2f} less idle; {requests / took_s:.0f}/s, "
        f"answer p50/p99 {p50:.1f}/{p99:.1f} ms",
        flush=True,
    )
    return spent


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--concurrency", nargs="+", type=int, default=[1, 16, 64])
    parser.add_argument("--requests", type=int, default=3000)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--idle", type=float, default=20)
    parser.add_argument("--gateways", type=int, default=1)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        shape = ["--sim-slots", "1024", "--sim-kv-tokens", "100000000", "--gateways", str(options.gateways)]
        stack = Stack(Path(directory) / "data", "--engine", "simulated", *shape).wait_ready()
        try:
            idle = idle_ms(stack, options.idle)
            print(f"idle, a second: {line(idle)}", flush=True)
            uvloop.run(load(stack, 16, WARM_UP))
            for callers in options.concurrency:
                requests = options.requests if callers > 1 else options.requests // 4
                runs = [measure(stack, callers, requests, idle) for _ in range(options.runs)]
                medians = {role: statistics.median(run[role] for run in runs) for role in runs[0]}
                print(f"{callers:4} callers, medians: {line(medians)}", flush=True)
            print(f"idle afterwards, a second: {line(idle_ms(stack, options.idle))}", flush=True)
        finally:
            stack.stop()


if __name__ == "__main__":
    main()
