"""Saturation: more than the machine can carry, on a whole stack with the simulated engine, generator included.

    python -m tests.bench.bench_saturation [--kinds streams short burst pair] [--seconds 15] [--factors 0.5 1 1.5 2 4]

``streams`` of 32 tokens, one each 100 ms, and ``short`` requests of one token come at a rate of so many times what the
stack carried in a closed loop, and nobody who is refused asks again. ``burst`` is 4,000 streams at once, of 64 tokens,
one each 250 ms. ``pair`` asks one of two gateways for four times what it carries, and the other one for a little: one
that refuses makes no other refuse. Aims: goodput 90 % of its peak or more at every load, every admitted answer whole,
refusals within 50 ms at the median, no worker evicted, no change of leader, and 10 s later the stack as quick as
before.
"""

import argparse
import asyncio
import json
import os
import random
import re
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, Literal, cast

import uvloop

from tests.support.stack import Stack

Kind = Literal["streams", "short", "burst", "pair"]
SHAPES: dict[Kind, dict[str, Any]] = {
    "streams": {"stream": True, "max_tokens": 32, "simulate": {"itl_ms": 100}},
    "short": {"stream": False, "max_tokens": 1},
    "pair": {"stream": False, "max_tokens": 1},
    "burst": {"stream": True, "max_tokens": 64, "simulate": {"itl_ms": 250}},
}
CLOSED = {"streams": (125, 2000), "short": (8, 128), "pair": (8, 128)}
"""Callers of the closed loop: from, doubled while it helps, at most."""
TEXT = re.compile(rb'[ "]t\d+')
"""One token of the simulated engine."""
BURST = 4000
QUIET_RATE = 10.0
CLOSED_S = 6.0
STEADY_S = 3.0
"""Of each load, not counted: what runs grows at first."""
REST_S = 10.0
PATIENCE_S = 90.0
CONNECTIONS_MAX = 16_384
SLOTS = 8192


class Tally:
    """What became of the requests of one load."""

    def __init__(self, begun: float) -> None:
        self.begun = begun
        self.ended: list[tuple[float, float, int]] = []
        """Of each answer that is whole: when it was asked for, when it ended, its tokens."""
        self.first_s: list[float] = []
        self.refused_s: list[float] = []
        self.statuses: Counter[str] = Counter()
        self.broken: Counter[str] = Counter()
        """Answers that had begun and did not end whole."""

    def goodput(self, until: float) -> float:
        """Tokens a second of whole answers that ended while the load was steady."""
        since = self.begun + STEADY_S
        return sum(tokens for _, at, tokens in self.ended if since <= at < until) / (until - since)


class Caller(asyncio.Protocol):
    """A connection of one caller: one request at a time. Parses no more than it must: it shares the machine."""

    def __init__(self) -> None:
        self.transport: asyncio.Transport
        self.done: asyncio.Future[None]
        self.buffer = bytearray()
        self.status = 0
        self.first_at = 0.0
        self.length = -1
        self.keep = True
        self.body_at = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)

    def ask(self, request: bytes) -> "asyncio.Future[None]":
        self.buffer.clear()
        self.status, self.first_at, self.length, self.body_at = 0, 0.0, -1, 0
        self.done = asyncio.get_running_loop().create_future()
        self.transport.write(request)
        return self.done

    def data_received(self, data: bytes) -> None:
        self.buffer += data
        if not self.body_at:
            end = self.buffer.find(b"\r\n\r\n")
            if end < 0:
                return
            head = bytes(self.buffer[:end]).lower()
            self.status, self.body_at = int(head[9:12]), end + 4
            self.keep = b"\r\nconnection: close" not in head
            if (at := head.find(b"\r\ncontent-length:")) >= 0:
                self.length = int(head[at + 17 :].split(b"\r\n", 1)[0])
        if not self.first_at and b'"content"' in data:
            self.first_at = time.monotonic()
        whole = (
            len(self.buffer) >= self.body_at + self.length if self.length >= 0 else self.buffer.endswith(b"0\r\n\r\n")
        )
        if whole and not self.done.done():
            self.done.set_result(None)

    def connection_lost(self, exc: Exception | None) -> None:
        self.keep = False
        if hasattr(self, "done") and not self.done.done():
            self.done.set_result(None)


class Load:
    """Asks one stack for answers of one shape."""

    def __init__(self, stack: Stack, kind: Kind, url: str = "") -> None:
        """``url``: of one gateway, else of the port that all share."""
        run = stack.run
        host, _, port = (url or run.url).removeprefix("http://").rpartition(":")
        self._address = host, int(port)
        body = json.dumps(
            {"model": stack.model, "messages": [{"role": "user", "content": "one two three"}], **SHAPES[kind]}
        )
        self._request = (
            f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {run.key}\r\n"
            f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n{body}"
        ).encode()
        self._stream = bool(SHAPES[kind]["stream"])
        self._tokens = int(SHAPES[kind]["max_tokens"])
        self._free: list[Caller] = []

    async def one(self, tally: Tally) -> None:
        """One request, to its end."""
        asked_at = time.monotonic()
        try:
            caller = await self._caller()
            async with asyncio.timeout(PATIENCE_S):
                await caller.ask(self._request)
        except (OSError, TimeoutError) as error:
            tally.statuses[type(error).__name__] += 1
            return
        self._count(caller, tally, asked_at)
        if caller.keep:
            self._free.append(caller)
        else:
            caller.transport.close()

    async def _caller(self) -> Caller:
        while self._free:
            if (caller := self._free.pop()).keep:
                return caller
        _, caller = await asyncio.get_running_loop().create_connection(Caller, *self._address)
        return caller

    def _count(self, caller: Caller, tally: Tally, asked_at: float) -> None:
        now = time.monotonic()
        tally.statuses[str(caller.status)] += 1
        if caller.status != 200:
            tally.refused_s.append(now - asked_at)
            if caller.status != 529 or b"retry-after:" not in bytes(caller.buffer[: caller.body_at]).lower():
                tally.statuses[f"{caller.status} {bytes(caller.buffer[caller.body_at :])[:160]!r}"] += 1
            return
        whole = b"data: [DONE]" in caller.buffer if self._stream else b'"finish_reason"' in caller.buffer
        # A gateway that is late writes several texts as one event.
        if whole and (not self._stream or len(TEXT.findall(caller.buffer)) == self._tokens):
            tally.first_s.append((caller.first_at or now) - asked_at)
            tally.ended.append((asked_at, now, self._tokens))
        else:
            tally.broken[bytes(caller.buffer[-200:]).decode(errors="replace")] += 1

    async def closed(self, callers: int, seconds: float) -> float:
        """Goodput when so many ask again as soon as they are answered."""
        tally = Tally(time.monotonic())
        until = tally.begun + STEADY_S + seconds

        async def ask() -> None:
            while time.monotonic() < until:
                await self.one(tally)

        await asyncio.gather(*(ask() for _ in range(callers)))
        return tally.goodput(until)

    async def open(self, rate: float, seconds: float, rng: random.Random) -> Tally:
        """Requests at ``rate`` a second, whatever becomes of them; returns when all have ended."""
        tally = Tally(time.monotonic())
        tasks = set()
        at = tally.begun
        while at < tally.begun + STEADY_S + seconds:
            if (pause := at - time.monotonic()) > 0:
                await asyncio.sleep(pause)
            tasks.add(asyncio.create_task(self.one(tally)))
            at += rng.expovariate(rate)
        await asyncio.wait(tasks)
        return tally

    async def burst(self, requests: int) -> Tally:
        tally = Tally(time.monotonic())
        await asyncio.gather(*(self.one(tally) for _ in range(requests)))
        return tally


async def freshness_ms(stack: Stack) -> float:
    """Median time to a short answer of a caller who is alone."""
    alone, tally = Load(stack, "short"), Tally(time.monotonic())
    for _ in range(20):
        await alone.one(tally)
    return statistics.median(tally.first_s) * 1000 if tally.first_s else float("nan")


def counted(stack: Stack, event: str) -> int:
    """Lines of the services' logs with the event."""
    logs = (stack.data_dir / "logs").glob("*.log")
    return sum(log.read_text(errors="replace").count(f'"event": "{event}"') for log in logs)


def cpu_s(stack: Stack) -> dict[str, float]:
    """Seconds of CPU that each kind of service has used."""
    ticks = os.sysconf("SC_CLK_TCK")
    used = {}
    for role, pids in stack.run.pids.items():
        stats = [Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split() for pid in pids]
        used[role] = sum(int(stat[11]) + int(stat[12]) for stat in stats) / ticks
    return used


def percentile_ms(values: list[float], share: float) -> str:
    return f"{sorted(values)[int(len(values) * share)] * 1000:.0f}" if values else "-"


HEAD = "load | offered | goodput tok/s | whole | refused | refusal p50/p99 ms | broken | evicted | leaders | fresh ms"


async def measured(stack: Stack, load: Load, name: str, offered: str, run: Coroutine[Any, Any, Tally]) -> float:
    """Run a load and print its line; gives its goodput."""
    before = {event: counted(stack, event) for event in ("evicted", "model_owned")}
    cpu = cpu_s(stack)
    tally = await run
    took_s = time.monotonic() - tally.begun
    spent = {role: now - cpu[role] for role, now in cpu_s(stack).items()}
    used = ", ".join(f"{role} {seconds:.1f}" for role, seconds in spent.items())
    each = len(tally.ended) / max(0.01, sum(spent.values()))  # What neighbours take of the machine does not show in it.
    last = max((at for _, at, _ in tally.ended), default=tally.begun)
    goodput = tally.goodput(min(last, max((asked for asked, _, _ in tally.ended), default=last)) or last)
    if name == "burst":
        goodput = sum(tokens for *_, tokens in tally.ended) / (last - tally.begun) if tally.ended else 0.0
    await asyncio.sleep(REST_S)
    fresh = await freshness_ms(stack)
    changes = [counted(stack, event) - count for event, count in before.items()]
    refusals = f"{percentile_ms(tally.refused_s, 0.5)}/{percentile_ms(tally.refused_s, 0.99)}"
    fields = [name, offered, f"{goodput:.0f}", len(tally.ended), len(tally.refused_s), refusals]
    fields += [sum(tally.broken.values()), *changes, f"{fresh:.0f}"]
    print(" | ".join(map(str, fields)), flush=True)
    print(f"    {took_s:.0f} s; CPU seconds: {used}; {each:.0f} whole answers for each", flush=True)
    print(
        f"    first token p50/p99 {percentile_ms(tally.first_s, 0.5)}/{percentile_ms(tally.first_s, 0.99)} ms",
        flush=True,
    )
    for what in (tally.statuses, tally.broken):
        for text, times in what.most_common(4):
            print(f"    {times} x {text!r}", flush=True)
    return goodput


async def capacity(load: Load, kind: Kind) -> float:
    """Tokens a second in a closed loop, with as many callers as make the most of it."""
    callers, most = CLOSED[kind]
    best = 0.0
    while callers <= most:
        goodput = await load.closed(callers, CLOSED_S)
        print(f"    {callers} callers: {goodput:.0f} tok/s", flush=True)
        if goodput < best * 1.05:
            return max(best, goodput)
        best, callers = goodput, callers * 2
    return best


async def bench_pair(stack: Stack, seconds: float, rng: random.Random) -> None:
    """A line for each gateway."""
    busy, quiet = (Load(stack, "pair", url) for url in stack.run.gateway_urls)
    carried = await capacity(busy, "pair")
    loads = {"4x": busy.open(4 * carried, seconds, rng), "a little": quiet.open(QUIET_RATE, seconds, rng)}
    tallies = dict(zip(loads, await asyncio.gather(*loads.values()), strict=True))
    print("pair: asked for | whole | refused | refusal p50/p99 ms | first token p50/p99 ms")
    for name, tally in tallies.items():
        refusals = f"{percentile_ms(tally.refused_s, 0.5)}/{percentile_ms(tally.refused_s, 0.99)}"
        firsts = f"{percentile_ms(tally.first_s, 0.5)}/{percentile_ms(tally.first_s, 0.99)}"
        print(f"{name} | {len(tally.ended)} | {len(tally.refused_s)} | {refusals} | {firsts}", flush=True)


async def bench(stack: Stack, kind: Kind, factors: list[float], seconds: float, seed: int) -> None:
    load, rng = Load(stack, kind), random.Random(seed)
    if kind == "pair":
        await bench_pair(stack, seconds, rng)
        return
    print(f"{kind}: a caller alone is answered after {await freshness_ms(stack):.0f} ms", flush=True)
    if kind == "burst":
        print(HEAD)
        await measured(stack, load, kind, f"{BURST} at once", load.burst(BURST))
        return
    carried = await capacity(load, kind)
    print(f"{kind}: capacity {carried:.0f} tok/s\n{HEAD}", flush=True)
    goodputs = []
    for factor in factors:
        rate = factor * carried / SHAPES[kind]["max_tokens"]
        run = load.open(rate, seconds, rng)
        goodputs.append(await measured(stack, load, f"{factor:g}x", f"{rate:.0f}/s", run))
    above = [each for factor, each in zip(factors, goodputs, strict=True) if factor >= 1]
    if above:
        print(f"{kind}: least goodput from 1x on {min(above) / max(goodputs):.0%} of the peak", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--kinds", nargs="+", default=["streams", "short", "burst", "pair"], choices=list(SHAPES))
    parser.add_argument("--seconds", type=float, default=15)
    parser.add_argument("--factors", nargs="+", type=float, default=[0.5, 1, 1.5, 2, 4])
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--gateways", type=int, default=1)
    parser.add_argument("--apart", action="store_true", help="the generator on a core of its own")
    options = parser.parse_args()
    for kind in options.kinds:
        with tempfile.TemporaryDirectory() as directory:
            bounds = {f"HEADRACE_CONNECTIONS_{name}": str(CONNECTIONS_MAX) for name in ("MAX", "PER_ADDRESS_MAX")}
            sim = ["--sim-slots", str(SLOTS), "--sim-itl-ms", "20", "--sim-kv-tokens", "100000000"]
            gateways = ["--gateways", str(2 if kind == "pair" else options.gateways)]
            cores = sorted(os.sched_getaffinity(0))
            if options.apart:
                os.sched_setaffinity(0, cores[:-1])  # Processes that are started inherit it.
            stack = Stack(Path(directory) / "data", "--engine", "simulated", *sim, *gateways, **bounds).wait_ready()
            if options.apart:
                os.sched_setaffinity(0, cores[-1:])
            try:
                uvloop.run(bench(stack, kind, options.factors, options.seconds, options.seed))
            finally:
                stack.stop()
                os.sched_setaffinity(0, cores)


if __name__ == "__main__":
    main()
