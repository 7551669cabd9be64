"""A long run under random failures: ``python -m tests.chaos.long_run --requests 20000 --seed 1``.

Callers send scripted requests, half of them over HTTP and half over the bus, to a system of real processes in which
something is killed, frozen, cut off or restarted every few seconds, clocks are stepped, and no body can be stored. Once
nobody reaches the bus for 90 s, and once the bus's store is set back to a backup. Afterwards it is checked from outside
that every caller saw the right text and one ending, that at least 90 % were answered, that the ledger bills each
request once and for its tokens, and that nothing is left. What happens when depends on the machine; the seed repeats
the choices.
"""

import argparse
import asyncio
import logging
import random
import sys
import tempfile
import time
from collections import Counter
from contextlib import AsyncExitStack
from glob import glob
from pathlib import Path

import pytest
import structlog

from contracts import topology
from contracts.client import Client
from tests.chaos import bills
from tests.chaos.bills import Attempts
from tests.chaos.breaker import Breaker
from tests.chaos.callers import Request
from tests.support.cluster import TENANT, Cluster
from tests.support.nats_server import nats_server_binary
from tests.support.polling import until

CLUSTER = {
    "gateways": 2,
    "schedulers": 2,
    "workers": 3,
    "ledger": True,
    "sim_slots": 16,
    "sim_itl_ms": 5,
    "stall_s": 5,
    "grace_s": 3,
}
CLIENTS = 4
"""Services on the bus; each has a link of its own, and an equal part of the requests that go over the bus."""
BACKUP_AT, CUT_AT, RESTORE_AT = 0.4, 0.5, 0.7
"""Parts of all requests after which it happens."""
NOT_SERVED = {"unavailable", "overloaded", "deadline_exceeded"}
COMPLETE_MIN = 0.90
"""Of those who reached a gateway and stayed."""
QUIET_S = 120.0
MEMORY_MIB_MAX = 600.0
"""Resident, of any service but the ledger, whose engine takes what it likes."""


def faketime() -> str:
    """Path of Debian's libfaketime; empty, and said so, when it is not installed."""
    found = [*glob("/usr/lib/*/faketime/libfaketimeMT.so.1"), *glob("/usr/lib/faketime/libfaketimeMT.so.1")]
    if not found:
        print("SKIPPED: clocks are not stepped, for there is no libfaketime (Debian, Ubuntu: apt install libfaketime)")
    return found[0] if found else ""


async def run(requests: int, seed: int, concurrency: int, every_s: float, directory: Path) -> list[str]:
    """One run; gives what is wrong."""
    source = random.Random(seed)
    cluster = Cluster(directory, nats_server_binary(), faketime=faketime(), **CLUSTER)  # type: ignore[arg-type]
    line = [Request(number, source) for number in range(requests)]
    async with AsyncExitStack() as stack:
        stack.push_async_callback(cluster.close)
        await cluster.start()
        links = [cluster.links.open(cluster.nats.port) for _ in range(CLIENTS)]
        clients = [
            await stack.enter_async_context(Client(link.url, tenant=TENANT, credentials=cluster.credentials))
            for link in links
        ]
        breaker = Breaker(cluster, links, random.Random(seed + 1), every_s)
        began = time.monotonic()
        await send(cluster, clients, line, concurrency, breaker)
        await breaker.settle()
        print(f"{requests} requests in {time.monotonic() - began:.0f} s; seed {seed}")
        show("faults", breaker.counts)
        show("ended by themselves", breaker.exits)
        return await check(cluster, line, breaker)


async def send(
    cluster: Cluster, clients: list[Client], line: list[Request], concurrency: int, breaker: Breaker
) -> None:
    """All requests, so many at a time, while the breaker works."""
    waiting = iter(line)
    sent = 0
    events = {
        int(part * len(line)): (name, event)
        for part, name, event in (
            (BACKUP_AT, "backup", breaker.back_up),
            (CUT_AT, "cut all", breaker.cut_all),
            (RESTORE_AT, "restore", breaker.restore),
        )
    }

    async def caller(number: int) -> None:
        nonlocal sent
        source = random.Random(number)
        for request in waiting:
            await request.run(cluster, clients, source)
            sent += 1
            if sent in events:
                name, event = events[sent]
                breaker.begin(name, event())
            if sent % 500 == 0:
                print(f"  {sent} sent", flush=True)

    breaking = asyncio.create_task(breaker.run())
    try:
        await asyncio.gather(*(caller(number) for number in range(concurrency)))
    finally:
        breaking.cancel()


async def check(cluster: Cluster, line: list[Request], breaker: Breaker) -> list[str]:
    """The invariants, from outside."""
    wrong = [f"request {request.number} {request.story()}" for request in line if request.problem()]
    wrong += [fault for fault in breaker.exits if fault.startswith("the fault")]
    try:
        await cluster.quiet(QUIET_S)
    except pytest.fail.Exception as leak:
        wrong.append(str(leak))
    wrong += await leaks(cluster, restored=bool(breaker.restores))
    wrong += await stop_ledger(cluster)
    attempts = await bills.read(cluster.data.ledger)
    wrong += bills.wrong_attempts(attempts, bills.ids_around(line, attempts, breaker.backups))
    wrong += bills.wrong_bills(line, attempts, breaker.restores)
    wrong += too_few(Counter(request.ending() for request in line))
    show("attempts", Counter(row.outcome for rows in attempts.values() for row in rows))
    show_takeovers(line, attempts, breaker.kills)
    return wrong


async def leaks(cluster: Cluster, *, restored: bool) -> list[str]:
    """What grew and should not have, or is left. A restore brings back bodies of requests that have ended."""
    wrong = []
    for gateway in cluster.gateways:
        if streams := await gateway.metric("headrace_streams"):
            wrong.append(f"{gateway.name} has {streams:.0f} streams open")
    memory = {service.name: service.memory_mib() for service in cluster.services if service.role != "ledger"}
    print("memory, MiB: " + ", ".join(f"{name} {mib:.0f}" for name, mib in memory.items()))
    wrong += [f"{name} takes {mib:.0f} MiB" for name, mib in memory.items() if mib > MEMORY_MIB_MAX]
    if (bodies := await cluster.stored(topology.BODIES)) and not restored:
        wrong.append(f"{bodies} messages of bodies are left")
    print(f"messages of bodies left: {bodies}" + (", of the backup" if bodies and restored else ""))
    return wrong


async def stop_ledger(cluster: Cluster) -> list[str]:
    """Once it has booked all; its totals must be those of its rows, which are read after it has stopped."""
    wrong = []
    try:
        async with cluster.bus() as bus:

            async def booked() -> bool:
                info = await bus.jetstream.api(f"CONSUMER.INFO.{topology.ATTEMPTS}.ledger")
                return not info["num_pending"] and not info["num_ack_pending"]

            await until(booked, "the ledger has booked all", 60)
        row = await cluster.usage()
        print(f"ledger: {row.requests} requests, {row.prompt_tokens} prompt and {row.completion_tokens} output tokens")
    except pytest.fail.Exception as error:
        wrong.append(str(error))
    for ledger in cluster.ledgers:
        ledger.signal(15)
        await ledger.exited(60)
    return wrong


def too_few(endings: Counter[str]) -> list[str]:
    """What is wrong with how the callers ended together."""
    show("callers", endings)
    reached = endings.total() - endings["left"]
    share = endings["complete"] / max(1, reached)
    print(f"complete: {endings['complete']} of {reached} who stayed, {share:.1%}; at least {COMPLETE_MIN:.0%} must be")
    return [] if share >= COMPLETE_MIN else [f"only {share:.1%} of those who stayed were answered"]


def show_takeovers(line: list[Request], attempts: Attempts, kills: dict[str, float]) -> None:
    """From the kill of a worker to the first token of its waiting requests elsewhere, the engine's part left out."""
    times = []
    for request in line:
        call = request.call
        rows = attempts.get(call.request_id, []) if call is not None else []
        killed = [kills[row.worker] for row in rows if row.outcome == "lost" and row.worker in kills]
        if call is not None and call.complete and request.stream and len(killed) == 1 and call.first_at > killed[0]:
            times.append(call.first_at - max(killed[0], call.asked_at) - request.ttft_s)
    if times:
        times.sort()
        print(
            f"first token elsewhere after a kill: median {times[len(times) // 2]:.1f} s, "
            f"longest {times[-1]:.1f} s, of {len(times)}"
        )


def show(what: str, counts: Counter[str]) -> None:
    print(f"{what}: " + (", ".join(f"{count} {name}" for name, count in sorted(counts.items())) or "none"))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--concurrency", type=int, default=24)
    parser.add_argument("--every", type=float, default=4.0, help="seconds between two faults, on average")
    options = parser.parse_args()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))  # Of the clients here.
    print(f"seed {options.seed}", flush=True)
    with tempfile.TemporaryDirectory(prefix="headrace-chaos-") as directory:
        wrong = asyncio.run(run(options.requests, options.seed, options.concurrency, options.every, Path(directory)))
    for line in wrong[:50]:
        print(f"WRONG {line}")
    print(f"VERDICT: {'all is well' if not wrong else f'{len(wrong)} wrong'}; repeat with --seed {options.seed}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
