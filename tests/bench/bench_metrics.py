"""Whether metrics say what callers see, and what they cost.

    python -m tests.bench.bench_metrics [--seconds 30] [--rate 20] [--rounds 3]

Two gateways and two workers of the simulated engine, whose times are drawn anew for each request; an open loop of
streams. From outside, at the client: how many, how long to the first event, between events, and to the end. From
inside: the histograms of both gateways, summed, and quantiles read from them as Prometheus does. Every count is equal,
and sums, p50, p95 and p99 are within 5 %, or it exits with 1.

Cost: a stack relays as many tokens as it can, with what counts them and with counting taken out (by a sitecustomize),
turn about, scraped each second meanwhile; aim below 5 % of the tokens per second. On a machine that does something
else, too, a client measures its own waiting: then look at the counts, which are exact, and run it again.
"""

import argparse
import asyncio
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
    histograms.Child.observe = histograms.Child.observe_all = lambda self, seconds: None
    import gateway.streams.stream as stream
    class Nothing(list):
        def append(self, gap): pass
    stream.array = lambda kind: Nothing()
"""


async def relayed(stack: Stack, streams: int, tokens: int) -> float:
    """Tokens a second that the gateways relay to so many streams, scraped each second."""
    model = stack.model
    body = json.dumps(
        {
            "model": model,
            "stream": True,
            "messages": [{"role": "user", "content": "x"}],
            "simulate": {"tokens": ["a "] * tokens, "ttft_ms": 0, "itl_ms": 1},
        }
    )
    headers = {"authorization": f"Bearer {stack.run.key}", "content-type": "application/json"}
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(headers=headers, timeout=300, trust_env=False, limits=limits) as client:

        async def ask() -> int:
            async with client.stream("POST", f"{stack.run.url}/v1/chat/completions", content=body) as answer:
                return sum([block.count(b"data: {") async for block in answer.aiter_bytes()])

        async def scrape() -> None:
            while True:
                await client.get(stack.run.metrics_urls["gateway"][0])
                await asyncio.sleep(1)

        scraping = asyncio.create_task(scrape())
        began = time.monotonic()
        events = sum(await asyncio.gather(*(ask() for _ in range(streams))))
        took = time.monotonic() - began
        scraping.cancel()
    return events / took


def cost(rounds: int) -> tuple[float, float]:
    """Median tokens a second, counted and not."""
    found: dict[str, list[float]] = {"": [], "1": []}
    with tempfile.TemporaryDirectory() as directory:
        (Path(directory) / "sitecustomize.py").write_text(UNCOUNTED)
        for turn in range(rounds):
            for uncounted in sorted(found, reverse=bool(turn % 2)):
                stack = Stack(
                    Path(directory) / f"data{turn}{uncounted}", "--engine", "simulated", "--sim-slots", "64",
                    HEADRACE_BENCH_UNCOUNTED=uncounted, PYTHONPATH=f"{directory}:{Path.cwd()}",
                ).wait_ready()  # fmt: skip
                try:
                    found[uncounted].append(asyncio.run(relayed(stack, 48, 400)))
                finally:
                    stack.stop()
    return statistics.median(found[""]), statistics.median(found["1"])


def main(arguments: Any = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=30)
    parser.add_argument("--rate", type=float, default=20)
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args(arguments)
    wrong = 0
    for name, figures in agreement(given.seconds, given.rate).items():
        for figure, (outside, inside) in figures.items():
            apart = off(outside, inside)
            wrong += apart > (0 if figure == "count" else TOLERANCE)
            print(f"{name:<16}{figure:<8}outside {outside:>12.4f}   inside {inside:>12.4f}   {apart:>7.2%}")
    if given.rounds:
        counted, uncounted = cost(given.rounds)
        print(f"tokens/s relayed: {counted:,.0f} counted, {uncounted:,.0f} not: {1 - counted / uncounted:.1%}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
