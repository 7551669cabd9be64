"""Measures the ledger: events per second into chDB, rows per batch, delay of a lone event, time of queries.

``python -m tests.bench.bench_ledger [EVENTS]``. Starts a nats-server and a ledger of its own; asserts nothing but
that the totals are exact.
"""

import asyncio
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path

import msgspec

from contracts import ids, subjects, topology
from contracts.bus import Bus, BusError
from contracts.messages.attempts import AttemptEvent
from contracts.messages.usage import UsageAnswer, UsageDimension, UsageQuery
from ledger.core.rows import Source, row_of
from ledger.store import Store
from tests.support.nats_server import free_port

ROOT = Path(__file__).parents[2]


def events(count: int) -> list[AttemptEvent]:
    """Of 50 tenants, admitted within the last minutes."""
    now_ms = time.time_ns() // 1_000_000
    chance = random.Random(1)
    return [
        AttemptEvent(
            request_id=ids.request_id(now_ms - number % 200_000),
            attempt=1,
            tenant=f"tenant-{chance.randrange(50)}",
            key_id=f"key-{chance.randrange(200)}",
            model=f"model-{chance.randrange(3)}",
            version="1",
            endpoint="chat/completions",
            priority="interactive",
            outcome="completed",
            reporter="worker",
            worker="w-0123456789ab",
            stream=True,
            finish_reason="stop",
            billable=True,
            prompt_tokens=chance.randrange(4000),
            completion_tokens=chance.randrange(500),
            admitted_at_ms=now_ms - number % 200_000,
            dispatched_at_ms=now_ms - number % 200_000 + 3,
            first_token_at_ms=now_ms - number % 200_000 + 90,
            ended_at_ms=now_ms,
        )
        for number in range(count)
    ]


def subject(event: AttemptEvent) -> str:
    return subjects.attempt(event.model, event.request_id, event.attempt)


def launch(command: list[str], environment: dict[str, str]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(command, cwd=ROOT, env=environment)


async def until(condition: Callable[[], Awaitable[bool]], pause_s: float = 0.01) -> None:
    while True:
        if await condition():
            return
        await asyncio.sleep(pause_s)


async def in_process(sample: list[AttemptEvent], directory: Path) -> None:
    """Decoding, checking and inserting, without the bus."""
    now_ms = time.time_ns() // 1_000_000
    sources = [Source(subject(event), msgspec.json.encode(event), seq, now_ms) for seq, event in enumerate(sample, 1)]
    store = Store(f"chdb://{directory}", "headrace")
    await store.open()
    started = time.monotonic()
    for start in range(0, len(sources), 10_000):
        await store.insert([row_of(source) for source in sources[start : start + 10_000]])
    spent_s = time.monotonic() - started
    await store.close()
    print(f"without the bus: {len(sample) / spent_s:,.0f} rows/s")


async def ask(bus: Bus, by: list[UsageDimension]) -> UsageAnswer:
    now_ms = time.time_ns() // 1_000_000
    query = UsageQuery(from_at_ms=now_ms - 86_400_000, to_at_ms=now_ms + 86_400_000, by=by)
    answer = await bus.request(subjects.usage_all("usage"), msgspec.json.encode(query), timeout_s=30)
    return msgspec.json.decode(answer, type=UsageAnswer)


async def counted(bus: Bus, count: int) -> bool:
    """Whether the ledger answers and knows so many requests."""
    try:
        return (await ask(bus, [])).rows[0].requests >= count
    except BusError:
        return False


async def inserted(port: int, count: int) -> bool:
    return metric(port, "headrace_ledger_rows_total") >= count


def cpu_s(process: subprocess.Popen[bytes], thread: str = "") -> float:
    """CPU time of a process, or of its first thread, which runs the event loop."""
    path = f"/proc/{process.pid}/task/{process.pid}/stat" if thread else f"/proc/{process.pid}/stat"
    fields = Path(path).read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def metric(port: int, name: str) -> float:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5) as answer:
        lines = answer.read().decode().splitlines()
    return next(float(line.split()[1]) for line in lines if line.startswith(name + " "))


async def through_the_bus(sample: list[AttemptEvent], nats_url: str, directory: Path) -> None:
    bus = await Bus.connect(nats_url, name="bench")
    await topology.ensure(bus)

    async def store(event: AttemptEvent) -> None:
        await bus.jetstream.store(
            subject(event), msgspec.json.encode(event), msg_id=f"{event.request_id}.1", expect_last=0, timeout_s=30
        )

    for start in range(0, len(sample), 256):
        await asyncio.gather(*(store(event) for event in sample[start : start + 256]))
    port = free_port()
    environment = {
        **os.environ,
        "HEADRACE_NATS_URL": nats_url,
        "HEADRACE_CLICKHOUSE_URL": f"chdb://{directory}",
        "HEADRACE_METRICS_PORT": str(port),
        "HEADRACE_LOG_LEVEL": "warning",
    }
    ledger = launch([sys.executable, "-m", "ledger"], environment)
    try:
        started = time.monotonic()
        await until(lambda: counted(bus, 0))
        print(f"first answer after {time.monotonic() - started:.2f} s")
        started, rows = time.monotonic(), metric(port, "headrace_ledger_rows_total")
        used_s, loop_s = cpu_s(ledger), cpu_s(ledger, "loop")
        await until(lambda: inserted(port, len(sample)), 0.1)
        spent_s = time.monotonic() - started
        used_us, loop_us = (
            (now - before) * 1e6 / (len(sample) - rows)
            for now, before in ((cpu_s(ledger), used_s), (cpu_s(ledger, "loop"), loop_s))
        )
        batches = metric(port, "headrace_ledger_batches_total")
        print(f"through the bus: {(len(sample) - rows) / spent_s:,.0f} rows/s, {len(sample) / batches:,.0f} a batch")
        print(f"CPU per row: {used_us:.0f} us, of which {loop_us:.0f} us on the event loop")
        total = (await ask(bus, [])).rows[0]
        assert (total.requests, total.prompt_tokens) == (len(sample), sum(each.prompt_tokens for each in sample))

        delays_s = []
        for number, event in enumerate(events(10), 1):
            started = time.monotonic()
            await store(event)
            await until(partial(counted, bus, len(sample) + number), 0.005)
            delays_s.append(time.monotonic() - started)
        print(f"event to visible row: median {statistics.median(delays_s):.3f} s, worst {max(delays_s):.3f} s")

        questions: list[list[UsageDimension]] = [[], ["tenant"], ["day", "model"], ["hour", "tenant", "key"]]
        for by in questions:
            started = time.monotonic()
            count = len((await ask(bus, by)).rows)
            print(f"usage by {'/'.join(by) or 'nothing'}: {(time.monotonic() - started) * 1000:.0f} ms, {count} rows")
    finally:
        ledger.send_signal(signal.SIGTERM)
        ledger.wait()
        await bus.close()


async def main() -> None:
    sample = events(int(sys.argv[1]) if len(sys.argv) > 1 else 100_000)
    with tempfile.TemporaryDirectory() as folder:
        await in_process(sample, Path(folder) / "in-process")
        port = free_port()
        nats = Path(sys.executable).with_name("nats-server")
        command = [str(nats), "-a", "127.0.0.1", "-p", str(port), "-js", "-sd", f"{folder}/nats"]
        server = launch([*command, "-l", f"{folder}/nats.log"], dict(os.environ))
        try:
            await through_the_bus(sample, f"nats://127.0.0.1:{port}", Path(folder) / "through")
        finally:
            server.kill()
            server.wait()


if __name__ == "__main__":
    asyncio.run(main())
