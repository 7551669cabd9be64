"""What Headrace adds to a stream: time to first token at concurrency 1, and CPU per chunk at 32 streams.

    python -m tests.bench.bench_stream [--requests 200] [--streams 32] [--tokens 500]

A whole stack with the simulated engine. The first token's delay is the engine's own 0 ms, so what is measured at the
client (raw sockets, keep-alive) is ours: aim 5 ms at the median. CPU is that of gateway plus nats-server by /proc,
heartbeats and all, which are printed alone too: aim 40 microseconds per chunk. Machines are shared: look at medians
and run it more than once.
"""

import argparse
import asyncio
import json
import os
import statistics
import tempfile
import time
from pathlib import Path
from urllib.parse import urlsplit

from tests.support.stack import Stack

IDLE_S = 5.0
TICK_US = 1_000_000 / os.sysconf("SC_CLK_TCK")


class Connection:
    """One keep-alive HTTP/1.1 connection, read as cheaply as Python can."""

    def __init__(self, url: str, key: str) -> None:
        split = urlsplit(url)
        self.host, self.port, self._key = split.hostname, split.port, key

    async def open(self) -> None:
        self.reader, self.writer = await asyncio.open_connection(self.host, self.port, limit=1 << 20)

    async def stream(self, body: dict[str, object]) -> tuple[float, int, float]:
        """Milliseconds to the first data event, events, and milliseconds to the end."""
        data = json.dumps(body).encode()
        head = (
            f"POST /v1/chat/completions HTTP/1.1\r\nHost: {self.host}\r\nAuthorization: Bearer {self._key}\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
        )
        asked = time.perf_counter()
        self.writer.write(head.encode() + data)
        first = 0.0
        events = 0
        while True:
            block = await self.reader.read(1 << 16)
            if not block:
                raise ConnectionError("closed")
            count = block.count(b"data: {")
            if count and not events:
                first = (time.perf_counter() - asked) * 1000
            events += count
            if block.endswith(b"0\r\n\r\n"):
                return first, events, (time.perf_counter() - asked) * 1000


def cpu_us(pids: list[int]) -> float:
    """User and system time that these processes have used."""
    ticks = 0
    for pid in pids:
        fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
        ticks += int(fields[11]) + int(fields[12])
    return ticks * TICK_US


async def first_tokens(stack: Stack, model: str, requests: int) -> list[float]:
    connection = Connection(stack.run.url, stack.run.key)
    await connection.open()
    body = {
        "model": model,
        "messages": [{"role": "user", "content": "one two three"}],
        "stream": True,
        "simulate": {"tokens": ["a", "b"], "ttft_ms": 0, "itl_ms": 1},
    }
    for _ in range(20):
        await connection.stream(body)
    return [(await connection.stream(body))[0] for _ in range(requests)]


async def chunk_cost(stack: Stack, model: str, streams: int, tokens: int) -> dict[str, float]:
    connections = [Connection(stack.run.url, stack.run.key) for _ in range(streams)]
    for connection in connections:
        await connection.open()
    body = {
        "model": model,
        "messages": [{"role": "user", "content": "one two three"}],
        "stream": True,
        "max_tokens": tokens,
    }
    groups = {name: stack.run.pids[name] for name in ("gateway", "nats", "worker")}
    before = {name: cpu_us(pids) for name, pids in groups.items()}
    results = await asyncio.gather(*(connection.stream(body) for connection in connections))
    chunks = sum(events for _, events, _ in results)
    return {name: (cpu_us(pids) - before[name]) / chunks for name, pids in groups.items()}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=500)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        stack = Stack(Path(directory) / "data", "--engine", "simulated").wait_ready()
        try:
            model = stack.model
            spans = sorted(asyncio.run(first_tokens(stack, model, options.requests)))
            p90 = spans[int(len(spans) * 0.9)]
            print(f"added time to first token, concurrency 1: p50 {statistics.median(spans):.1f} ms, p90 {p90:.1f} ms")
            groups = {name: stack.run.pids[name] for name in ("gateway", "nats")}
            before = {name: cpu_us(pids) for name, pids in groups.items()}
            time.sleep(IDLE_S)
            idle = {name: (cpu_us(pids) - before[name]) / 1000 / IDLE_S for name, pids in groups.items()}
            print(f"CPU without requests: gateway {idle['gateway']:.0f} + nats-server {idle['nats']:.0f} ms a second")
            for run in range(3):
                cost = asyncio.run(chunk_cost(stack, model, options.streams, options.tokens))
                both = cost["gateway"] + cost["nats"]
                print(
                    f"CPU per chunk, {options.streams} streams, run {run + 1}: gateway {cost['gateway']:.1f} + "
                    f"nats-server {cost['nats']:.1f} = {both:.1f} us (worker with engine {cost['worker']:.1f} us)"
                )
        finally:
            stack.stop()


if __name__ == "__main__":
    main()
