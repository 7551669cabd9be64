"""The lease of a model: one owner at a time, known by its own clock, given back or run out."""

import asyncio
import time

import pytest

from contracts import topology
from contracts.bus import Bus, Unavailable
from scheduler.lease import Lease
from tests.support.nats_server import NatsServer
from tests.support.polling import until

KEY = "m"


def candidate(bus: Bus, owner: str, *, ttl_s: int = 1) -> Lease:
    return Lease(bus, KEY, owner, ttl_s=ttl_s, renew_s=0.1)


async def test_one_owner_at_a_time_and_every_epoch_is_higher(bus: Bus) -> None:
    first, second = candidate(bus, "a"), candidate(bus, "b")
    await first.acquire()
    keeping = asyncio.create_task(first.keep())
    waiting = asyncio.create_task(second.acquire())
    epoch = first.epoch
    await asyncio.sleep(1.5)
    assert first.held and not waiting.done(), "it is renewed for as long as its owner lives"
    assert first.epoch == epoch and epoch.revision > 0 and epoch.bucket_created_ns > 0
    keeping.cancel()
    await first.release()
    await asyncio.wait_for(waiting, 0.5)
    assert second.held and second.epoch > epoch


async def test_an_owner_that_dies_is_followed_when_its_lease_runs_out(bus: Bus) -> None:
    first, second = candidate(bus, "a"), candidate(bus, "b")
    started = time.monotonic()
    await first.acquire()
    acquiring = asyncio.create_task(second.acquire())
    await until(lambda: not first.held, "its clock says so")
    assert not acquiring.done(), "it knows that it is deposed before anybody else owns the model"
    await asyncio.wait_for(acquiring, 3)
    assert time.monotonic() - started > 0.9
    await first.release()
    entry = await bus.kv.get(topology.LEASES, KEY)
    assert entry is not None and entry.value == b"b", "what is another's is not given back"


async def test_a_bus_that_does_not_answer_ends_the_lease_in_time(bus: Bus, nats: NatsServer) -> None:
    lease = candidate(bus, "a", ttl_s=2)
    await lease.acquire()
    nats.freeze()
    started = time.monotonic()
    await asyncio.wait_for(lease.keep(), 3)
    nats.thaw()
    assert not lease.held and time.monotonic() - started < 2.0


async def test_a_lease_taken_by_another_ends_at_the_next_renewal(bus: Bus) -> None:
    lease = candidate(bus, "a", ttl_s=20)
    await lease.acquire()
    await bus.kv.put(topology.LEASES, KEY, b"b")
    await asyncio.wait_for(lease.keep(), 1)
    assert not lease.held


async def test_a_renewal_whose_answer_was_lost_counts(bus: Bus, monkeypatch: pytest.MonkeyPatch) -> None:
    lease = candidate(bus, "a", ttl_s=2)
    await lease.acquire()
    update = bus.kv.update
    lost: list[int] = []

    async def unanswered(*args: object, **fields: object) -> int:
        revision = await update(*args, **fields)  # type: ignore[arg-type]
        if not lost:
            lost.append(revision)
            raise Unavailable("no answer in time")
        return revision

    monkeypatch.setattr(bus.kv, "update", unanswered)
    keeping = asyncio.create_task(lease.keep())
    await asyncio.sleep(2.5)
    assert lost and lease.held and not keeping.done()
    keeping.cancel()
