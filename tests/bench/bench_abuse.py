"""Abuse: 20 honest streams alone, and beside 200 hostile connections, on a whole stack with the simulated engine.

    python -m tests.bench.bench_abuse [--rounds 3] [--seconds 6]

Prints the pauses between the honest streams' tokens alone, beside strangers (no key), beside one hostile tenant, and
beside both, with their ratio to those alone (goal: the 99th percentile at most doubles), and what each process grew
and computed meanwhile. A hostile connection does one thing, and again 100 ms after it was closed:

- strangers: heads, byte by byte; trailers without end; pipelines of 252 KB; chunks of a byte; gzip bombs to
  count_tokens; silence;
- the tenant: trailers, chunks of a byte, gzip bombs, large texts to count, streams that it never reads, bodies that
  trickle.

``--only`` takes one kind of hostile connection alone. The attackers have the lowest priority, and still use the cores
that the stack has: what that alone costs is measured by letting them attack something else, a server that answers 401
to everything; a second ratio is to those pauses. Phases come in turns, for others may use the machine, too.
"""

import argparse
import asyncio
import contextlib
import gzip
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from urllib.parse import urlsplit

from compose.stack.processes import die_with
from tests.support.nats_server import free_port
from tests.support.stack import ROOT, Stack

HONEST = 20
HOSTILE = 200
ITL_MS = 20
AGAIN_S = 0.1
ROLES = ("gateway", "nats", "scheduler", "worker", "ledger")
BOMB = gzip.compress(
    b'{"model":"simulated","max_tokens":1,"messages":[{"role":"user","content":"' + b"a" * (16 << 20), 9
)
TEXT = json.dumps({"model": "simulated", "max_tokens": 1, "messages": [{"role": "user", "content": "word " * 200_000}]})
CHAT = "/v1/chat/completions"
COUNT = "/v1/messages/count_tokens"

TICK_US = 1_000_000 / os.sysconf("SC_CLK_TCK")

Attack = Callable[["Hostile"], Awaitable[None]]


class Hostile:
    """One hostile connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, key: str) -> None:
        self.reader, self.writer = reader, writer
        self.key = f"authorization: Bearer {key}\r\n" if key else ""

    async def send(self, data: bytes, pause_s: float = 0.0) -> None:
        self.writer.write(data)
        await self.writer.drain()
        await asyncio.sleep(pause_s)

    def head(self, path: str, headers: str) -> bytes:
        return f"POST {path} HTTP/1.1\r\nhost: x\r\n{self.key}{headers}\r\n\r\n".encode()


async def slow_head(hostile: Hostile) -> None:
    await hostile.send(b"GET /v1/models HTTP/1.1\r\nx: ")
    while True:
        await hostile.send(b"x", 0.1)


async def trailers(hostile: Hostile) -> None:
    await hostile.send(hostile.head(CHAT, "transfer-encoding: chunked") + b"2\r\n{}\r\n0\r\n")
    while True:
        await hostile.send((b"x-trailer: " + b"y" * 80 + b"\r\n") * 300)


async def pipeline(hostile: Hostile) -> None:
    await hostile.send(b"GET /v1/models HTTP/1.1\r\nhost: x\r\n\r\n" * 6600)
    await hostile.reader.read()


async def small_chunks(hostile: Hostile) -> None:
    await hostile.send(hostile.head(CHAT, "transfer-encoding: chunked"))
    while True:
        await hostile.send(b"1\r\nx\r\n" * 5000)


async def bomb(hostile: Hostile) -> None:
    head = hostile.head(COUNT, f"content-encoding: gzip\r\nconnection: close\r\ncontent-length: {len(BOMB)}")
    await hostile.send(head + BOMB)
    await hostile.reader.read()


async def silence(hostile: Hostile) -> None:
    await hostile.reader.read()


async def large_text(hostile: Hostile) -> None:
    await hostile.send(hostile.head(COUNT, f"connection: close\r\ncontent-length: {len(TEXT)}") + TEXT.encode())
    await hostile.reader.read()


async def never_reading(hostile: Hostile) -> None:
    body = {"model": "simulated", "stream": True, "max_tokens": 100_000, "messages": [{"role": "user", "content": "x"}]}
    data = json.dumps(body).encode()
    await hostile.send(hostile.head(CHAT, f"content-length: {len(data)}") + data)
    hostile.writer.transport.pause_reading()  # type: ignore[attr-defined]
    await asyncio.sleep(120)


async def trickle(hostile: Hostile) -> None:
    await hostile.send(hostile.head(CHAT, "content-length: 16000000"))
    while True:
        await hostile.send(b"x" * 100_000, 0.2)


STRANGERS: list[Attack] = [slow_head, trailers, pipeline, small_chunks, bomb, silence]
TENANT: list[Attack] = [trailers, small_chunks, bomb, large_text, never_reading, trickle]


async def attack(url: str, key: str, many: int, only: str) -> None:
    """``many`` hostile connections until the process is ended."""
    kinds = [kind for kind in (TENANT if key else STRANGERS) if only in ("", kind.__name__)]
    many = many if kinds else 0
    split = urlsplit(url)

    async def again(kind: Attack) -> None:
        await asyncio.sleep(random.random())
        while True:
            try:
                reader, writer = await asyncio.open_connection(split.hostname, split.port)
            except OSError:
                await asyncio.sleep(AGAIN_S)
                continue
            try:
                await kind(Hostile(reader, writer, key))
            except OSError:
                pass
            finally:
                writer.transport.abort()
            await asyncio.sleep(AGAIN_S)

    await asyncio.gather(*(again(kinds[number % len(kinds)]) for number in range(many)))


async def refuse_all(port: int) -> None:
    """The something else: reads what comes for a second, then closes."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, TimeoutError):
            await reader.read(1)
            writer.write(b"HTTP/1.1 401 Unauthorized\r\ncontent-length: 0\r\nconnection: close\r\n\r\n")
            async with asyncio.timeout(1):
                while await reader.read(1 << 16):
                    pass
        writer.transport.abort()

    async with await asyncio.start_server(serve, "127.0.0.1", port) as server:
        await server.serve_forever()


def attackers(url: str, key: str, many: int, only: str) -> "subprocess.Popen[bytes]":
    parent = os.getpid()

    def low() -> None:
        die_with(parent)
        os.nice(19)

    command = [sys.executable, "-m", "tests.bench.bench_abuse", "--attack", url, "--many", str(many)]
    command += ["--only", only]
    return subprocess.Popen(
        command,
        env=os.environ | {"PYTHONPATH": str(ROOT), "HOSTILE_KEY": key},
        preexec_fn=low,  # noqa: PLW1509
    )


async def honest(url: str, key: str, seconds: float) -> list[float]:
    """Milliseconds between arrivals of text in one stream."""
    split = urlsplit(url)
    reader, writer = await asyncio.open_connection(split.hostname, split.port)
    tokens = int(seconds * 1000 / ITL_MS)
    body = {"model": "simulated", "stream": True, "max_tokens": tokens, "messages": [{"role": "user", "content": "x"}]}
    data = json.dumps(body).encode()
    writer.write(
        f"POST {CHAT} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {key}\r\n".encode()
        + b"content-length: %d\r\n\r\n%b" % (len(data), data)
    )
    pauses: list[float] = []
    last = 0.0
    while block := await reader.read(1 << 16):
        now = time.perf_counter()
        if last:
            pauses.append((now - last) * 1000)
        last = now
        if block.endswith(b"0\r\n\r\n"):
            break
    writer.close()
    return pauses


def used(stack: Stack) -> dict[str, tuple[float, float]]:
    """Seconds of CPU and MiB of memory, by role."""
    found = {}
    for role in ROLES:
        ticks = pages = 0
        for pid in stack.run.pids[role]:
            fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
            ticks += int(fields[11]) + int(fields[12])
            pages += int(fields[21])
        found[role] = (ticks * TICK_US / 1e6, pages * os.sysconf("SC_PAGE_SIZE") / 2**20)
    return found


async def measure(stack: Stack, seconds: float) -> tuple[list[float], dict[str, tuple[float, float]]]:
    """Pauses of the honest streams; CPU a second and the peak of memory, by role."""
    before = used(stack)
    begun = time.monotonic()
    peaks = dict.fromkeys(ROLES, 0.0)

    async def watch() -> None:
        while True:
            for role, (_, mib) in used(stack).items():
                peaks[role] = max(peaks[role], mib)
            await asyncio.sleep(0.2)

    watching = asyncio.create_task(watch())
    streams = await asyncio.gather(*(honest(stack.run.url, stack.run.key, seconds) for _ in range(HONEST)))
    watching.cancel()
    after, took = used(stack), time.monotonic() - begun
    figures = {role: ((after[role][0] - before[role][0]) / took, peaks[role]) for role in ROLES}
    return [pause for stream in streams for pause in stream], figures


def p99_of(values: list[float]) -> float:
    return sorted(values)[int(len(values) * 0.99)]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=6)
    parser.add_argument("--attack", default="", help="used by the benchmark itself: what to attack, or to be")
    parser.add_argument("--many", type=int, default=HOSTILE)
    parser.add_argument("--only", default="", help="such as bomb")
    options = parser.parse_args()
    if options.attack.startswith("127.0.0.1:"):
        asyncio.run(refuse_all(int(options.attack.rpartition(":")[2])))
    elif options.attack:
        asyncio.run(attack(options.attack, os.environ["HOSTILE_KEY"], options.many, options.only))
    with tempfile.TemporaryDirectory() as directory:
        stack = Stack(Path(directory) / "data", "--engine", "simulated", "--sim-itl-ms", str(ITL_MS)).wait_ready()
        try:
            with stack.admin() as admin:
                admin.post("/admin/v1/tenants", json={"name": "hostile"}).raise_for_status()
                key = admin.post("/admin/v1/keys", json={"tenant": "hostile"}).raise_for_status().json()["key"]
            half = options.many // 2
            other = f"127.0.0.1:{free_port()}"
            gateway, elsewhere = stack.run.url, f"http://{other}"
            groups = [("", half), (key, half)]
            phases: list[tuple[str, str, list[tuple[str, int]]]] = [
                ("alone", gateway, []),
                ("beside both, who attack something else", elsewhere, groups),
            ]
            if options.only in ("", *(kind.__name__ for kind in STRANGERS)):
                phases.append(("beside strangers", gateway, [("", options.many)]))
            if options.only in ("", *(kind.__name__ for kind in TENANT)):
                phases.append(("beside a tenant", gateway, [(key, options.many)]))
            if not options.only:
                phases.append(("beside both", gateway, groups))
            pauses: dict[str, list[float]] = {name: [] for name, _, _ in phases}
            figures: dict[str, dict[str, list[tuple[float, float]]]] = {
                name: {role: [] for role in ROLES} for name, _, _ in phases
            }
            for _ in range(options.rounds):
                for name, url, hostile in phases:
                    running = [attackers(url, given, many, options.only) for given, many in hostile]
                    if url == elsewhere:
                        running.append(attackers(other, "", 0, ""))
                    time.sleep(3 if running else 1)
                    found, used_by = asyncio.run(measure(stack, options.seconds))
                    pauses[name] += found
                    for role, figure in used_by.items():
                        figures[name][role].append(figure)
                    for process in running:
                        process.send_signal(signal.SIGKILL)
                        process.wait()
                    time.sleep(1)
            alone, same_load = (p99_of(pauses[name]) for name, _, _ in phases[:2])
            for name, found in pauses.items():
                p99 = p99_of(found)
                print(
                    f"{name}: pauses p50 {statistics.median(found):.1f}, p99 {p99:.1f}, most {max(found):.1f} ms; p99 "
                    f"{p99 / alone:.2f} times alone, {p99 / same_load:.2f} times under the same load elsewhere"
                )
                shown = [
                    f"{role} {statistics.mean(cpu for cpu, _ in each):.2f} s/s {max(mib for _, mib in each):.0f} MiB"
                    for role, each in figures[name].items()
                ]
                print(f"    CPU and peak memory: {', '.join(shown)}", flush=True)
        finally:
            stack.stop()


if __name__ == "__main__":
    main()
