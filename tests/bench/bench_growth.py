"""What a chunk and a short request cost as a deployment grows: streams, workers, gateways, tenants.

    make bench ARGS=growth
    python -m tests.bench.bench_growth [--parts streams workers gateways tenants] [--streams 1 10 100 1000 10000]
                                       [--window 5] [--pictures DIRECTORY]

A whole stack with the simulated engine for each point (streams and tenants: one for all). Streams
give some 1,000 chunks a second together (fewer than 20 streams: 50 a second each; more than 3,500: one each in 3.5 s),
so that what grows is their number alone; their CPU over a window, with what the processes do without them, is spread
over its chunks. Then short requests of 8 callers are answered beside them, and what they cost is what is used beyond
that. In the end each stream runs out, and those that ended whole are counted. ``late``: how much later
than the engine's pause a chunk came, at the 99th percentile. ``gateway``: memory of the first one (proportional, with
its threads), and what each stream added to it.
"""

import argparse
import asyncio
import gc
import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from html import escape
from itertools import cycle
from math import floor, log, log10
from pathlib import Path

import httpx
import msgspec
import psutil  # type: ignore[import-untyped,unused-ignore]
import uvloop

from tests.bench.bench_peers import machine
from tests.bench.stream_load import Caller, Server, cpu_s, percentile
from tests.support.stack import Stack

ROLES = ("gateway", "nats", "worker", "scheduler", "ledger")
CHUNKS_PER_S = 1000
ITL_MS, ITL_MS_MAX = 20.0, 3_500.0
"""A stream that is silent for 4 s is asked about (contracts.streaming.relay): with longer pauses that is measured."""
BEGIN_PER_S, BEGIN_AT_ONCE = 200, 16
"""Streams that are begun a second, at most, and that wait for their first chunk: what is let in beside what runs."""
LIFE_S, LIFE_S_PER_STREAM = 16.0, 0.006
"""Of each stream: it outlasts the point, on a machine that begins 200 a second or somewhat fewer."""
CALLERS, SHORT = 8, 400
"""Who asks for short answers, and how many."""
AGAIN_S = 1.0
END_S = 60.0
"""After which a stream that should have ended has not."""
SETTLE_S = 3.0
BESIDE = 64
"""Streams of the points at which something else grows."""
KEYS_MAX = 64
"""Of so many tenants at most somebody asks; the others are there."""


class Point(msgspec.Struct):
    """What was measured at one size."""

    size: int
    chunk_us: dict[str, float]
    request_ms: dict[str, float]
    late_ms: float
    memory_mb: float
    stream_kb: float
    """Of no meaning where streams are few."""
    whole: int
    """Streams that came to their end, with all their tokens."""

    def __str__(self) -> str:
        chunk = " ".join(f"{self.chunk_us[role]:6.1f}" for role in ROLES)
        request = " ".join(f"{self.request_ms[role]:5.2f}" for role in ROLES)
        return (
            f"{self.size:6} | {chunk} | {request} = {sum(self.request_ms.values()):5.2f} | {self.late_ms:6.1f} | "
            f"{self.memory_mb:6.1f} {self.stream_kb:6.1f} | {self.whole:6}"
        )


def spent(stack: Stack) -> dict[str, float]:
    """Seconds of CPU of each kind of process."""
    return {role: cpu_s(stack.run.pids[role]) for role in ROLES}


def memory_mb(stack: Stack) -> float:
    """Of the first gateway: what it has for itself, and its share of what it has with others."""
    return float(psutil.Process(stack.run.pids["gateway"][0]).memory_full_info().pss) / 1e6


async def begun(server: Server, request: bytes) -> Caller:
    """A connection with a stream under way, whose first chunk has come; asked for until it is let in."""
    while True:
        caller = await server.connect()
        ended = caller.ask(request)
        ended.add_done_callback(lambda done: done.exception())
        while not ended.done() and not caller.answer.chunks:
            await asyncio.wait([ended], timeout=0.02)
        if not ended.done():
            return caller
        if not str(ended.exception()).startswith(("HTTP/1.1 529", "HTTP/1.1 503")):
            raise SystemExit(f"a stream did not begin: {ended.exception()}")
        caller.transport.abort()
        await asyncio.sleep(AGAIN_S)


async def ask_short(servers: Sequence[Server]) -> None:
    """Short answers, by callers of all ``servers`` in turn."""
    callers = [(await each.connect(), each.request(tokens=1)) for each in servers]
    left = iter(range(SHORT))

    async def ask(own: Sequence[tuple[Caller, bytes]]) -> None:
        turns = cycle(own)
        for _ in left:
            caller, request = next(turns)
            await caller.ask(request)

    await asyncio.gather(*(ask(callers[number::CALLERS]) for number in range(CALLERS)))
    for caller, _ in callers:
        caller.transport.abort()


async def measure(stack: Stack, size: int, streams: int, window_s: float, keys: Sequence[str] = ()) -> Point:
    """With so many streams, and ``keys`` of tenants that ask (the demo's where there are none)."""
    loop = asyncio.get_running_loop()
    servers = [Server(stack.run.url, stack.model, key) for key in keys or [stack.run.key]]
    asking = [servers[number % len(servers)] for number in range(max(CALLERS, len(servers)))]
    await ask_short(asking)  # warms up
    before_mb = memory_mb(stack)
    itl_ms = min(ITL_MS_MAX, max(ITL_MS, streams * 1000 / CHUNKS_PER_S))
    tokens = int((LIFE_S + streams * LIFE_S_PER_STREAM) * 1000 / itl_ms)
    request = {"tokens": tokens, "simulate": {"ttft_ms": 0, "itl_ms": itl_ms}}
    began = loop.time()
    at_once = asyncio.Semaphore(BEGIN_AT_ONCE)

    async def begin(number: int) -> Caller:
        await asyncio.sleep(began + number / BEGIN_PER_S - loop.time())
        server = servers[number % len(servers)]
        async with at_once:
            return await begun(server, server.request(**request))  # type: ignore[arg-type]

    callers = await asyncio.gather(*(begin(number) for number in range(streams)))
    gc.collect()
    gc.disable()  # It would make pauses of its own.
    await asyncio.sleep(2.0)
    window_s = max(window_s, 1.2 * itl_ms / 1000)  # Each stream's chunk falls into it.
    chunks, pauses = sum(each.answer.chunks for each in callers), [len(each.answer.pauses) for each in callers]
    used, started = spent(stack), loop.time()
    await asyncio.sleep(window_s)
    window_took_s, now = loop.time() - started, spent(stack)
    rate = {role: (now[role] - used[role]) / window_took_s for role in ROLES}
    count = sum(each.answer.chunks for each in callers) - chunks
    late = [
        pause * 1000 - itl_ms
        for each, first in zip(callers, pauses, strict=True)
        for pause in each.answer.pauses[first:]
    ]
    memory = memory_mb(stack)
    used, started = spent(stack), loop.time()
    await ask_short(asking)
    took_s, now = loop.time() - started, spent(stack)
    if any(each.answer.ended_at for each in callers):
        raise SystemExit("streams ended within the measurement: the machine began them too slowly")
    async with asyncio.timeout(LIFE_S + streams * LIFE_S_PER_STREAM + END_S):
        await asyncio.gather(*(each.ended for each in callers), return_exceptions=True)
    gc.enable()
    for each in callers:
        each.transport.abort()
    await asyncio.sleep(SETTLE_S)
    return Point(
        size,
        {role: rate[role] * window_took_s / count * 1e6 for role in ROLES},
        {role: (now[role] - used[role] - rate[role] * took_s) / SHORT * 1000 for role in ROLES},
        percentile(late, 0.99) if late else 0.0,
        memory,
        (memory - before_mb) * 1000 / streams,
        sum(bool(each.answer.ended_at) and each.answer.chunks >= tokens for each in callers),
    )


@contextmanager
def stack_of(*options: str) -> Iterator[Stack]:
    environment = {"HEADRACE_CONNECTIONS_MAX": "20000", "HEADRACE_CONNECTIONS_PER_ADDRESS_MAX": "20000"}
    simulated = ("--engine", "simulated", "--sim-slots", "16384", "--sim-kv-tokens", "50000000")
    with tempfile.TemporaryDirectory() as directory:
        stack = Stack(Path(directory) / "data", *simulated, *options, **environment).wait_ready(120.0)
        try:
            yield stack
        finally:
            stack.stop()


def with_tenants(stack: Stack, count: int, known: list[str]) -> list[str]:
    """Keys of tenants, of whom there are ``count`` now; ``known`` are the names of those that were there."""
    run = stack.run
    headers = {"Authorization": f"Bearer {run.admin_key}"}
    keys: list[str] = []

    async def make(client: httpx.AsyncClient, names: Iterator[str]) -> None:
        for name in names:
            (await client.post("/admin/v1/tenants", json={"name": name})).raise_for_status()
            known.append(name)

    async def work() -> None:
        async with httpx.AsyncClient(base_url=run.admin_url, headers=headers, timeout=60, trust_env=False) as client:
            names = iter([f"tenant-{number}" for number in range(len(known), count)])
            await asyncio.gather(*(make(client, names) for _ in range(4)))
            for name in known[:: max(1, count // KEYS_MAX)][:KEYS_MAX]:
                made = (await client.post("/admin/v1/keys", json={"tenant": name})).raise_for_status()
                keys.append(made.json()["key"])
            await asyncio.sleep(2.0)  # Gateways watch the bucket.

    uvloop.run(work())
    return keys


def grow(part: str, sizes: Sequence[int], window_s: float) -> Iterator[Point]:
    """Each point of one part, as it comes."""
    if part == "streams":
        with stack_of() as stack:
            for size in sizes:
                yield uvloop.run(measure(stack, size, size, window_s))
    elif part == "tenants":
        with stack_of() as stack:
            known: list[str] = []
            for size in sizes:
                keys = with_tenants(stack, size, known)
                yield uvloop.run(measure(stack, size, BESIDE, window_s, keys))
    else:
        for size in sizes:
            with stack_of(f"--{part}", str(size)) as stack:
                yield uvloop.run(measure(stack, size, BESIDE, window_s))


WIDTH, HEIGHT, PANEL, LEFT, TOP = 1080, 400, 280, 60, 70
COLOURS = dict(zip(ROLES, ("#2a7ab0", "#c77d0a", "#3a923a", "#c0392b", "#7d5ba6"), strict=True))
_STYLE = "text{font:13px system-ui,sans-serif;fill:#222}.grid{stroke:#ddd}.line{fill:none;stroke-width:2}"


def draw(part: str, points: Sequence[Point]) -> str:
    """One SVG: CPU of a chunk and of a short request by process, a gateway's memory; over the size (in logarithms)."""
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img">',
        f'<style>{_STYLE}</style><rect width="100%" height="100%" fill="#fff"/>',
        f'<text x="{LEFT}" y="28" style="font-size:16px">{escape(part)}: what a chunk and a short request cost</text>',
    ]
    panels = {
        "us of a chunk": [(point.size, point.chunk_us) for point in points],
        "ms of a short request": [(point.size, point.request_ms) for point in points],
        "memory of a gateway, MB": [(point.size, {"gateway": point.memory_mb}) for point in points],
    }
    for number, (name, found) in enumerate(panels.items()):
        parts += _panel(LEFT + number * (PANEL + LEFT), name, found)
    for number, (role, colour) in enumerate(COLOURS.items()):
        x, y = LEFT + number * 130, HEIGHT - 18
        parts.append(f'<line class="line" stroke="{colour}" x1="{x}" x2="{x + 24}" y1="{y - 4}" y2="{y - 4}"/>')
        parts.append(f'<text x="{x + 30}" y="{y}">{role}</text>')
    return "\n".join([*parts, "</svg>"])


def _panel(left: float, name: str, found: Sequence[tuple[int, dict[str, float]]]) -> Iterator[str]:
    height = HEIGHT - TOP - 90
    step = _round_up(max(max(costs.values()) for _, costs in found) / 4)
    most = 4 * step
    span = log(found[-1][0] / found[0][0]) or 1.0
    yield f'<text x="{left}" y="{TOP - 14}">{escape(name)}</text>'
    for part in (0, 0.25, 0.5, 0.75, 1):
        y = TOP + height * (1 - part)
        yield f'<line class="grid" x1="{left}" x2="{left + PANEL}" y1="{y}" y2="{y}"/>'
        yield f'<text x="{left - 8}" y="{y + 4}" text-anchor="end">{most * part:g}</text>'
    places = [left + PANEL * log(size / found[0][0]) / span for size, _ in found]
    for x, (size, _) in zip(places, found, strict=True):
        yield f'<text x="{x:.1f}" y="{TOP + height + 20}" text-anchor="middle">{size:,}</text>'
    for role, colour in COLOURS.items():
        if role not in found[0][1]:
            continue
        heights = [TOP + height * (1 - max(0.0, costs[role]) / most) for _, costs in found]
        line = list(zip(places, heights, strict=True))
        yield f'<polyline class="line" stroke="{colour}" points="{" ".join(f"{x:.1f},{y:.1f}" for x, y in line)}"/>'
        yield from (f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>' for x, y in line)


def _round_up(value: float) -> float:
    """To a number that is easily read."""
    power = 10.0 ** floor(log10(value)) if value > 0 else 1.0
    return next(part * power for part in (1, 2, 2.5, 5, 10) if part * power >= value)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--parts", nargs="+", default=["streams", "workers", "gateways", "tenants"])
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 10, 100, 1000, 10_000])
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--gateways", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--tenants", type=int, nargs="+", default=[1, 10, 100, 1000, 5000])
    parser.add_argument("--window", type=float, default=5.0, help="seconds, and a pause of the streams at least")
    parser.add_argument("--pictures", type=Path, help="a directory; one SVG of each part")
    options = parser.parse_args()
    print(machine())
    for part in options.parts:
        print(
            f"{part}\n  size | us of a chunk: {' '.join(ROLES)} | ms of a short request: the same | late p99, ms | "
            "gateway: MB, KB of a stream | ended whole"
        )
        points = []
        for point in grow(part, getattr(options, part), options.window):
            points.append(point)
            print(point, f"  load {os.getloadavg()[0]:.1f}", flush=True)
        if options.pictures:
            (options.pictures / f"growth-{part}.svg").write_text(draw(part, points))


if __name__ == "__main__":
    main()
