"""Proves the ledger's totals: events doubled and shuffled over a month's edge, ledgers killed, ClickHouse away.

``python -m tests.bench.bench_ledger_kills [EVENTS] [AWAY_S]`` (1,000,000 and 60). One event in ten comes twice. A
ledger writes to the real engine behind an HTTP bridge of the tests; it is killed five times, the engine once, which
stays away. Then usage by every grouping, while parts are still unmerged, must be that of the events; so must it be
after the rollups are built.
"""

import asyncio
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from contracts import ids, instants, subjects, topology
from contracts.bus import Bus, BusError
from contracts.messages.attempts import AttemptEvent
from contracts.messages.usage import UsageAnswer, UsageQuery
from tests.bench.bench_ledger import launch, metric, subject, until
from tests.support.nats_server import free_port

BRIDGE = Path(__file__).parents[1] / "support" / "clickhouse_http.py"
KILLS = 5
GROUPINGS = (
    ["tenant"], ["key"], ["model", "version"], ["day"], ["hour"], ["endpoint", "priority", "outcome"],
    ["tenant", "key", "model", "version", "day", "endpoint", "priority", "outcome"],
)  # fmt: skip
EDGE_MS = instants.month_around(time.time_ns() // 1_000_000)[0]
FROM_MS, TO_MS = EDGE_MS - 86_400_000, EDGE_MS + 86_400_000


def event(chance: random.Random) -> AttemptEvent:
    at_ms = chance.randrange(FROM_MS, TO_MS)
    completed = chance.random() < 0.9
    return AttemptEvent(
        request_id=ids.request_id(at_ms - chance.randrange(1000)),
        attempt=1,
        tenant=f"tenant-{chance.randrange(20)}",
        key_id=f"key-{chance.randrange(50)}",
        model=f"model-{chance.randrange(3)}",
        version=chance.choice("12"),
        endpoint="chat/completions",
        priority=chance.choice(["interactive", "batch"]),
        outcome="completed" if completed else "failed",
        reporter="worker",
        billable=completed,
        prompt_tokens=chance.randrange(4000),
        completion_tokens=chance.randrange(500),
        admitted_at_ms=at_ms,
        ended_at_ms=at_ms + 1000,
    )


def expected(events: list[AttemptEvent], by: list[str]) -> dict[Any, tuple[int, int, int]]:
    sums: dict[Any, list[int]] = defaultdict(lambda: [0, 0, 0])
    for each in events:
        at = time.gmtime(each.admitted_at_ms // 1000)
        shown = {"day": time.strftime("%Y-%m-%d", at), "hour": time.strftime("%Y-%m-%dT%H:00:00Z", at)}
        shown["key"] = each.key_id
        of = sums[tuple(shown.get(name) or getattr(each, name) for name in by)]
        of[0] += 1
        of[1] += each.billable and each.prompt_tokens
        of[2] += each.billable and each.completion_tokens
    return {key: (of[0], of[1], of[2]) for key, of in sums.items()}


async def asked(bus: Bus, by: list[str]) -> dict[Any, tuple[int, int, int]]:
    found: dict[Any, tuple[int, int, int]] = {}
    while True:
        query = UsageQuery(from_at_ms=FROM_MS, to_at_ms=TO_MS, by=by, offset=len(found))  # type: ignore[arg-type]
        data = await bus.request(subjects.usage_all("usage"), msgspec.json.encode(query), timeout_s=60)
        answer = msgspec.json.decode(data, type=UsageAnswer)
        if answer.error:
            raise BusError(answer.error)
        for row in answer.rows:
            key = tuple(getattr(row, name) for name in by)
            found[key] = (row.requests, row.prompt_tokens, row.completion_tokens)
        if not answer.has_more:
            return found


async def counted(bus: Bus, count: int) -> bool:
    """Whether the ledger answers and knows so many requests."""
    try:
        return sum(of[0] for of in (await asked(bus, [])).values()) >= count
    except BusError:
        return False


async def publish(bus: Bus, stream: list[AttemptEvent]) -> None:
    started = time.monotonic()
    for number, each in enumerate(stream):
        await bus.publish(subject(each), msgspec.json.encode(each))
        if number % 500 == 499:
            await bus.jetstream.api(f"STREAM.INFO.{topology.ATTEMPTS}")  # no faster than the server stores

    async def stored() -> bool:
        state = (await bus.jetstream.api(f"STREAM.INFO.{topology.ATTEMPTS}"))["state"]
        return bool(state["messages"] == len(stream))

    async with asyncio.timeout(60):
        await until(stored)
    print(f"{len(stream):,} messages stored in {time.monotonic() - started:.0f} s", flush=True)


async def compare(bus: Bus, events: list[AttemptEvent], when: str) -> None:
    for by in GROUPINGS:
        started = time.monotonic()
        found = await asked(bus, by)
        spent_ms = (time.monotonic() - started) * 1000
        assert found == expected(events, by), (when, by)
        print(f"exact {when} by {'/'.join(by)}: {len(found):,} groups, {spent_ms:.0f} ms", flush=True)


async def run(count: int, away_s: float, folder: str) -> None:
    chance = random.Random(1)
    events = [event(chance) for _ in range(count)]
    stream = events + chance.sample(events, count // 10)
    chance.shuffle(stream)
    nats_port, engine_port, metrics_port = free_port(), free_port(), free_port()
    nats = [str(Path(sys.executable).with_name("nats-server")), "-a", "127.0.0.1", "-p", str(nats_port)]
    server = launch([*nats, "-js", "-sd", f"{folder}/nats", "-l", f"{folder}/nats.log"], dict(os.environ))
    url = f"nats://127.0.0.1:{nats_port}"
    environment = {
        **os.environ,
        "HEADRACE_NATS_URL": url,
        "HEADRACE_CLICKHOUSE_URL": f"http://127.0.0.1:{engine_port}",
        "HEADRACE_METRICS_PORT": str(metrics_port),
        "HEADRACE_LOG_LEVEL": "error",
    }

    def engine() -> subprocess.Popen[bytes]:
        return launch([sys.executable, str(BRIDGE), str(engine_port), f"{folder}/engine"], dict(os.environ))

    def ledger() -> subprocess.Popen[bytes]:
        return launch([sys.executable, "-m", "ledger"], environment)

    running = {"engine": engine(), "ledger": ledger()}
    await asyncio.sleep(1)
    bus = await Bus.connect(url, name="bench")
    try:
        await topology.ensure(bus)
        publishing = asyncio.create_task(publish(bus, stream))
        started = time.monotonic()
        for number in range(KILLS):
            aim = count * (number + 1) // (KILLS + 2)
            await until(partial(counted, bus, aim), 0.2)
            running["ledger"].kill()
            running["ledger"].wait()
            print(f"ledger killed after {aim:,} requests or more", flush=True)
            running["ledger"] = ledger()
        running["engine"].kill()
        running["engine"].wait()
        print(f"engine away for {away_s:g} s", flush=True)
        await asyncio.sleep(away_s)
        running["engine"] = engine()
        await publishing
        await until(partial(counted, bus, count), 0.2)
        print(f"all there after {time.monotonic() - started:.0f} s", flush=True)
        await compare(bus, events, "at once")

        async def built() -> bool:
            return metric(metrics_port, 'headrace_ledger_built_total{level="hour"}') >= 48

        async with asyncio.timeout(300):
            await until(built, 1.0)
        await compare(bus, events, "from rollups")
    finally:
        running["ledger"].send_signal(signal.SIGTERM)
        running["ledger"].wait()
        running["engine"].kill()
        running["engine"].wait()
        await bus.close()
        server.kill()
        server.wait()


def main() -> None:
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 1_000_000
    away_s = float(sys.argv[2]) if len(sys.argv) > 2 else 60.0
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(run(count, away_s, folder))


if __name__ == "__main__":
    main()
