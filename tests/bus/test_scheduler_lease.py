"""The lease of a model: one owner at a time, known by its own clock, given back or run out."""

import asyncio
import shutil
import signal
import time
from pathlib import Path

import pytest

from contracts import topology
from contracts.bus import Bus, Unavailable
from contracts.messages.base import Epoch
from contracts.service.vitals import Vitals
from scheduler.lease import Lease
from tests.support.nats_server import NatsServer
from tests.support.polling import until

KEY = "m"


def candidate(bus: Bus, owner: str, *, ttl_s: int = 1) -> Lease:
    return Lease(bus, KEY, owner, ttl_s=ttl_s, renew_s=0.1)


async def test_one_owner_at_a_time_and_every_epoch_is_higher(bus: Bus) -> None:
    first, second = candidate(bus, "a"), candidate(bus, "b")
    await first.acquire()
    keeping = asyncio.create_task(first.keep(bus))
    waiting = asyncio.create_task(second.acquire())
    epoch = first.epoch
    await asyncio.sleep(1.5)
    assert first.held and not waiting.done(), "it is renewed for as long as its owner lives"
    assert first.epoch == epoch and epoch.revision > 0 and epoch.era > 0
    keeping.cancel()
    await first.release()
    await asyncio.wait_for(waiting, 0.5)
    assert second.held and second.epoch > epoch


async def test_an_owner_whose_event_loop_stands_still_keeps_its_lease_until_it_is_given_up(bus: Bus) -> None:
    vitals, lease = Vitals(bus, late_s=0.5), candidate(bus, "a")
    await vitals.start()
    await lease.acquire()
    epoch = lease.epoch
    keeping = asyncio.create_task(vitals.run(lambda other: lease.keep(other, lambda: vitals.lag_ms < 2_500)))
    await asyncio.sleep(0.2)
    time.sleep(1.8)
    assert lease.held and lease.epoch == epoch
    entry = await bus.kv.get(topology.LEASES, KEY)
    assert entry is not None and entry.value == b"a" and not keeping.done()
    time.sleep(4.5)
    await asyncio.wait_for(keeping, 1)
    assert (await bus.kv.get(topology.LEASES, KEY)) is None, "nobody owns a model for ever without a move"
    await vitals.close()


async def test_what_the_thread_runs_has_ended_when_its_cancel_returns(bus: Bus) -> None:
    vitals, seen = Vitals(bus, late_s=0.5), list[str]()
    await vitals.start()

    async def work(other: Bus) -> None:
        assert other is not bus and other.user == bus.user
        seen.append("begun")
        try:
            await asyncio.sleep(60)
        finally:
            await asyncio.sleep(0.05)
            seen.append("ended")

    running = asyncio.create_task(vitals.run(work))
    await until(lambda: seen == ["begun"])
    running.cancel()
    await asyncio.wait({running})
    assert running.cancelled() and seen == ["begun", "ended"]

    async def failing(other: Bus) -> None:
        raise Unavailable("as the test wants")

    with pytest.raises(Unavailable):
        await vitals.run(failing)
    await vitals.close()


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
    await asyncio.wait_for(lease.keep(bus), 3)
    nats.thaw()
    assert not lease.held and time.monotonic() - started < 2.0


async def test_a_lease_taken_by_another_ends_at_the_next_renewal(bus: Bus) -> None:
    lease = candidate(bus, "a", ttl_s=20)
    await lease.acquire()
    await bus.kv.put(topology.LEASES, KEY, b"b")
    await asyncio.wait_for(lease.keep(bus), 1)
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
    keeping = asyncio.create_task(lease.keep(bus))
    await asyncio.sleep(2.5)
    assert lost and lease.held and not keeping.done()
    keeping.cancel()


async def test_the_term_s_time_is_the_bus_s_and_no_step_of_the_wall_clock_moves_it(
    bus: Bus, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = time.time_ns()
    monkeypatch.setattr(time, "time_ns", lambda: real + 3_600 * 10**9)
    lease = candidate(bus, "a")
    await lease.acquire()
    before = lease.clock.now_ms()
    assert abs(before - real // 10**6) < 60_000, "an hour ahead, and no matter"
    monkeypatch.setattr(time, "time_ns", lambda: real - 3_600 * 10**9)
    assert 0 <= lease.clock.now_ms() - before < 60_000


async def test_an_owner_that_meets_a_higher_epoch_ends_its_term_and_the_next_is_above(bus: Bus) -> None:
    lease = candidate(bus, "a", ttl_s=20)
    await lease.acquire()
    era, revision = lease.epoch.era, lease.epoch.revision
    theirs = Epoch(era, revision + 5_000)
    keeping = asyncio.create_task(lease.keep(bus))
    await lease.rise_above(theirs)
    await asyncio.wait_for(keeping, 1)
    await lease.release()
    for owner in ("b", "c"):
        heir = candidate(bus, owner)
        await asyncio.wait_for(heir.acquire(), 1)
        assert heir.epoch > theirs and heir.epoch.era == era + 1
        await heir.release()
    last = candidate(bus, "d")
    await last.acquire()
    assert last.epoch > heir.epoch
    await last.rise_above(Epoch(era, revision + 9_000))
    await last.release()
    await last.acquire()
    assert last.epoch.era == era + 1, "what is below already is no reason for another era"


async def test_a_deposed_owner_and_a_nonsensical_epoch_raise_nothing(bus: Bus) -> None:
    lease = candidate(bus, "a", ttl_s=20)
    await lease.acquire()
    await lease.rise_above(Epoch(2**63 - 1, 1))
    assert lease.held
    lease._renewed_at -= 1000
    await lease.rise_above(Epoch(lease.epoch.era, 2**40))
    assert await bus.kv.get(topology.LEASES, f"{KEY}/era") is None


async def test_after_a_restore_the_owner_s_lease_ends_and_later_epochs_can_be_raised_above_all(
    bus: Bus, nats: NatsServer, tmp_path: Path
) -> None:
    """A backup that holds an earlier renewal of the same owner: what it read of the streams holds no longer."""
    lease = candidate(bus, "a", ttl_s=20)
    await lease.acquire()
    nats.stop(signal.SIGTERM)
    shutil.copytree(nats.store, tmp_path / "backup")
    nats.start()
    keeping = asyncio.create_task(lease.keep(bus))
    began = lease._revision
    await until(lambda: lease._revision > began + 2, "it was renewed after the backup")
    nats.stop()
    shutil.rmtree(nats.store)
    shutil.copytree(tmp_path / "backup", nats.store)
    nats.start()
    await asyncio.wait_for(keeping, 10)
    assert not lease.held
