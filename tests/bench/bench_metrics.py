"""Whether metrics say what callers see, and what they cost.

    python -m tests.bench.bench_metrics [--seconds 30] [--rate 20] [--rounds 8]

Two gateways and two workers of the simulated engine, whose times are drawn anew for each request; an open loop of
streams. From outside, at the client: how many, how long to the first event, between events, and to the end. From
inside: the histograms of both gateways, summed, and quantiles read from them as Prometheus does. Every count is equal,
and sums, p50, p95 and p99 are within 5 %, or it exits with 1.

Cost: two stacks relay as many tokens as they can, in turn: one as it is, each process scraped every second, and one
with counting taken out (by a sitecustomize) and not scraped. CPU (user and system, by /proc) a token, by pairs of
neighbours; aim below 5 %. By tokens a second a machine that does something else, too, tells nothing, and a client there
measures its own waiting: look at the counts of the first part, which are exact, and run it again.
"""

import argparse
import asyncio
import contextlib
import json
import math
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
from prometheus_client.parser import text_string_to_metric_families

from tests.bench.bench_saturation import cpu_s
from tests.support.stack import Stack

TOLERANCE = 0.05
QUANTILES = (0.5, 0.95, 0.99)
NAMES = {
    "first token": "headrace_time_to_first_token_seconds",
    "between tokens": "headrace_inter_token_latency_seconds",
    "whole answer": "headrace_e2e_request_latency_seconds",
}


class Inside:
    """One histogram over all gateways."""

    def __init__(self, page: str, name: str) -> None:
        self.count, self.sum, buckets = 0.0, 0.0, dict[float, float]()
        for family in text_string_to_metric_families(page):
            for sample in family.samples if family.name == name else ():
                if sample.name.endswith("_bucket"):
                    bound = float(sample.labels["le"])
                    buckets[bound] = buckets.get(bound, 0.0) + sample.value
                elif sample.name.endswith("_count"):
                    self.count += sample.value
                elif sample.name.endswith("_sum"):
                    self.sum += sample.value
        self._buckets = sorted(buckets.items())

    def quantile(self, q: float) -> float:
        """As Prometheus' histogram_quantile has it: linear in its bucket."""
        rank, below, count = q * self.count, 0.0, 0.0
        for bound, value in self._buckets:
            if value >= rank:
                return below + (bound - below) * (rank - count) / (value - count)
            below, count = bound, value
        return math.nan


async def load(stack: Stack, seconds: float, rate: float, slower: float) -> dict[str, list[float]]:
    """An open loop; seconds by what was timed. Times are drawn around 0.3 s and 40 ms, ``slower`` times as long."""
    model = stack.model
    dice = random.Random(7)
    seen: dict[str, list[float]] = {name: [] for name in NAMES}
    gateways = stack.run.gateway_urls

    async def ask(number: int, ttft_ms: int, itl_ms: int, tokens: int) -> None:
        body = {
            "model": model,
            "stream": True,
            "messages": [{"role": "user", "content": f"request {number}"}],
            "simulate": {"tokens": ["a "] * tokens, "ttft_ms": ttft_ms, "itl_ms": itl_ms},
        }
        data, to = json.dumps(body), urlsplit(gateways[number % len(gateways)])
        reader, writer = await asyncio.open_connection(to.hostname, to.port)
        head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {stack.run.key}\r\n"
        head += f"Content-Type: application/json\r\nContent-Length: {len(data)}\r\nConnection: close\r\n\r\n"
        began = last = time.monotonic()
        writer.write((head + data).encode())
        while block := await reader.read(1 << 16):
            now = time.monotonic()
            for _ in range(block.count(b"data: {")):
                seen["first token" if last == began else "between tokens"].append(now - last)
                last = now
        seen["whole answer"].append(time.monotonic() - began)
        writer.close()

    asked: list[asyncio.Task[None]] = []
    due = time.monotonic()
    until = due + seconds
    while due < until:
        await asyncio.sleep(max(0.0, due - time.monotonic()))
        ttft_ms, itl_ms = (
            round(slower * mean * dice.lognormvariate(0, sigma)) for mean, sigma in ((300, 0.4), (40, 0.3))
        )
        asked.append(asyncio.create_task(ask(len(asked), ttft_ms, itl_ms, dice.randint(5, 30))))
        due += dice.expovariate(rate)
    await asyncio.gather(*asked)
    return seen


def compared(seen: Sequence[float], inside: Inside) -> dict[str, tuple[float, float]]:
    """What was measured outside, and inside."""
    ordered = sorted(seen)
    figures: dict[str, tuple[float, float]] = {"count": (len(seen), inside.count), "sum": (sum(seen), inside.sum)}
    for q in QUANTILES:
        figures[f"p{q * 100:g}"] = ordered[math.ceil(q * len(ordered)) - 1], inside.quantile(q)
    return figures


def agreement(seconds: float, rate: float, slower: float = 1.0) -> dict[str, dict[str, tuple[float, float]]]:
    """By what was timed."""
    options = ("--engine", "simulated", "--gateways", "2", "--workers", "2", "--sim-slots", "64")
    with tempfile.TemporaryDirectory() as directory:
        stack = Stack(Path(directory) / "data", *options).wait_ready()
        try:
            seen = asyncio.run(load(stack, seconds, rate, slower))
            pages = [httpx.get(url, trust_env=False, timeout=30).text for url in stack.run.metrics_urls["gateway"]]
        finally:
            stack.stop()
    page = "".join(pages)
    return {name: compared(seen[name], Inside(page, metric)) for name, metric in NAMES.items()}


def off(outside: float, inside: float) -> float:
    return abs(inside - outside) / max(outside, 1e-9)


UNCOUNTED = """
import os
if os.environ.get("HEADRACE_BENCH_UNCOUNTED"):
    import contracts.histograms as histograms
    import prometheus_client
    histograms.Child.observe = histograms.Child.observe_all = lambda self, seconds: None
    nothing = lambda self, *values, **labels: None
    prometheus_client.Counter.inc = prometheus_client.Histogram.observe = nothing
    prometheus_client.Gauge.inc = prometheus_client.Gauge.dec = prometheus_client.Gauge.set = nothing
    import gateway.streams.stream as stream
    class Nothing(list):
        def append(self, gap): pass
    stream.array = lambda kind: Nothing()
"""


STREAMS, TOKENS = 48, 2000
"""A second of the gateway's CPU, of which /proc counts hundredths."""


async def relayed(stack: Stack, *, scraped: bool) -> int:
    """Tokens that the gateways relay to STREAMS callers; scraped: every process's page is read each second."""
    body = json.dumps(
        {
            "model": stack.model,
            "stream": True,
            "messages": [{"role": "user", "content": "x"}],
            "simulate": {"tokens": ["a "] * TOKENS, "ttft_ms": 0, "itl_ms": 1},
        }
    )
    headers = {"authorization": f"Bearer {stack.run.key}", "content-type": "application/json"}
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(headers=headers, timeout=300, trust_env=False, limits=limits) as client:

        async def ask() -> int:
            async with client.stream("POST", f"{stack.run.url}/v1/chat/completions", content=body) as answer:
                return sum([block.count(b"data: {") async for block in answer.aiter_bytes()])

        async def scrape() -> None:
            while scraped:
                for urls in stack.run.metrics_urls.values():
                    await asyncio.gather(*(client.get(url) for url in urls))
                await asyncio.sleep(1)

        scraping = asyncio.create_task(scrape())
        events = sum(await asyncio.gather(*(ask() for _ in range(STREAMS))))
        scraping.cancel()
    return events


def spent(stack: Stack, *, scraped: bool) -> tuple[float, float]:
    """Microseconds of CPU a token: of the gateway, of all services."""
    before = cpu_s(stack)
    tokens = asyncio.run(relayed(stack, scraped=scraped))
    used = {role: (now - before[role]) * 1e6 / tokens for role, now in cpu_s(stack).items()}
    return used["gateway"], sum(used.values())


def cost(rounds: int) -> list[tuple[tuple[float, float], tuple[float, float]]]:
    """By round: what a token costs counted and scraped, and neither."""
    with tempfile.TemporaryDirectory() as directory, contextlib.ExitStack() as ending:
        (Path(directory) / "sitecustomize.py").write_text(UNCOUNTED)
        stacks = []
        for uncounted in ("", "1"):
            place = Path(directory) / f"data{uncounted}"
            variables = {"HEADRACE_BENCH_UNCOUNTED": uncounted, "PYTHONPATH": f"{directory}:{Path.cwd()}"}
            stacks.append(Stack(place, "--engine", "simulated", "--sim-slots", "64", **variables).wait_ready())
            ending.callback(stacks[-1].stop)
            asyncio.run(relayed(stacks[-1], scraped=False))
        counted, bare = stacks
        found = []
        for turn in range(rounds):
            if turn % 2:
                found.append((spent(counted, scraped=True), spent(bare, scraped=False)))
            else:
                found.append((spent(bare, scraped=False), spent(counted, scraped=True))[::-1])
    return found


def main(arguments: Any = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=30, help="0: the cost alone")
    parser.add_argument("--rate", type=float, default=20)
    parser.add_argument("--rounds", type=int, default=8)
    given = parser.parse_args(arguments)
    wrong = 0
    agreed = agreement(given.seconds, given.rate) if given.seconds else {}
    for name, figures in agreed.items():
        for figure, (outside, inside) in figures.items():
            apart = off(outside, inside)
            wrong += apart > (0 if figure == "count" else TOLERANCE)
            print(f"{name:<16}{figure:<8}outside {outside:>12.4f}   inside {inside:>12.4f}   {apart:>7.2%}")
    pairs = cost(given.rounds) if given.rounds else []
    for index, what in enumerate(("gateway", "all services")) if pairs else ():
        counted, bare = (statistics.fmean(pair[side][index] for pair in pairs) for side in (0, 1))
        ratios = sorted(pair[0][index] / pair[1][index] - 1 for pair in pairs)
        middle = ", ".join(f"{ratio:+.1%}" for ratio in statistics.quantiles(ratios, n=4)) if len(ratios) > 1 else "-"
        print(f"CPU a token, {what}: {counted:.2f} us, without metrics {bare:.2f}: {counted / bare - 1:+.1%}")
        print(f"  by pairs, quartiles: {middle}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
