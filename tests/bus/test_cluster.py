"""A NATS cluster of three, and the end of the server that leads a stream: nothing acknowledged is lost, and the bus
goes on by itself."""

import asyncio
import itertools
from collections.abc import AsyncIterator, Awaitable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from contracts import topology
from contracts.bus import Bus, BusError, Incoming, KvEntry, OrderedConsumer, PullConsumer, Unavailable
from tests.support.nats_cluster import NatsCluster
from tests.support.polling import until

pytestmark = pytest.mark.slow

REPLICATED = (topology.ATTEMPTS, topology.WORK, f"KV_{topology.KEYS}")
PAUSE_S_MAX = 20.0
"""Of a stream without a leader: 5 s on an idle machine (measured), and elections take long on a busy one."""


@pytest.fixture
async def cluster(nats_binary: str, tmp_path: Path) -> AsyncIterator[NatsCluster]:
    cluster = NatsCluster(nats_binary, tmp_path)
    cluster.start()
    yield cluster
    cluster.stop()


@pytest.fixture
async def buses(cluster: NatsCluster) -> AsyncIterator[list[Bus]]:
    """One connection to each server, which has heard of the others from it; what the test uses is kept three times."""
    made = [await Bus.connect(server.url, name=f"test-{name}") for name, server in cluster.servers.items()]
    await until(lambda: _ensured(made[0]), "the cluster is ready")
    for name in REPLICATED:
        config = (await made[0].jetstream.api(f"STREAM.INFO.{name}"))["config"]
        await made[0].jetstream.api(f"STREAM.UPDATE.{name}", {**config, "num_replicas": 3})
        await until(partial(_is_whole, made[0], name), f"{name} has three replicas")
    yield made
    await asyncio.gather(*(bus.close() for bus in made))


async def _ensured(bus: Bus) -> bool:
    try:
        return await topology.ensure(bus) == []
    except BusError:
        return False  # no leader yet


async def _cluster_of(bus: Bus, stream: str) -> dict[str, Any]:
    try:
        return (await bus.jetstream.api(f"STREAM.INFO.{stream}"))["cluster"]
    except Unavailable:
        return {}


async def _is_whole(bus: Bus, stream: str) -> bool:
    found = await _cluster_of(bus, stream)
    replicas = found.get("replicas", [])
    return bool(found.get("leader")) and len(replicas) == 2 and all(each.get("current") for each in replicas)


class Writers:
    """Store numbered messages, one after the other through each bus, until told to stop."""

    def __init__(self, buses: list[Bus], subject: str, expect_last: int | None = None) -> None:
        self.stored: list[str] = []
        self._subject = subject
        self._expect_last = expect_last
        self._going = True
        self._tasks = [asyncio.create_task(self._write(bus, number)) for number, bus in enumerate(buses)]

    async def _write(self, bus: Bus, writer: int) -> None:
        for number in itertools.count():
            if not self._going:
                return
            name = f"{writer}-{number}"
            await bus.jetstream.store(
                self._subject.format(name),
                name.encode(),
                msg_id=name,
                expect_last=self._expect_last,
                timeout_s=PAUSE_S_MAX,
            )
            self.stored.append(name)

    async def more(self) -> None:
        """Wait until all that is written now and some more is stored."""
        before = len(self.stored)
        await until(lambda: len(self.stored) > before + 100, "the writers go on", PAUSE_S_MAX)

    async def stop(self) -> list[str]:
        """The names of all that was acknowledged, and of nothing else, since every writer gets its answer."""
        self._going = False
        await asyncio.gather(*self._tasks)
        return self.stored


class Readers:
    """A reader of ATTEMPTS, a worker on WORK and a watch of a bucket, each by a connection of its own."""

    def __init__(self, buses: list[Bus]) -> None:
        self.read: list[str] = []
        self.done: set[str] = set()
        self.key = b""
        self._buses = buses

    async def open(self) -> None:
        reading, working, watching = self._buses
        await OrderedConsumer(
            reading.jetstream, topology.ATTEMPTS, "attempt.v1.>", self._take_event, start_seq=1
        ).start()
        await PullConsumer(
            working.jetstream,
            topology.WORK,
            "w",
            "work.v1.>",
            self._work,
            ack_wait_s=3600,
            credit=lambda: 100,
            recreate=True,  # as workers do: what was sent into a lost connection comes again at once
        ).start()
        await watching.kv.watch(topology.KEYS, self._take_key)

    def _take_event(self, message: Incoming) -> None:
        self.read.append(message.data.decode())

    async def _work(self, message: Incoming) -> None:
        self.done.add(message.data.decode())
        while not await message.ack():
            pass

    def know(self, value: bytes) -> bool:
        return self.key == value

    def _take_key(self, key: str, entry: KvEntry | None) -> None:
        self.key = entry.value if entry is not None else b""


async def test_the_leader_of_a_stream_dies_and_nothing_acknowledged_is_lost(
    cluster: NatsCluster, buses: list[Bus]
) -> None:
    readers = Readers(buses)
    await readers.open()
    events, work = Writers(buses, "attempt.v1.m.{}.1", expect_last=0), Writers(buses, "work.v1.m.v.{}")
    for stream in (topology.ATTEMPTS, topology.WORK):
        await asyncio.gather(events.more(), work.more())
        await _leader_dies(cluster, buses[0], stream, asyncio.gather(events.more(), work.more()))
        await buses[0].kv.put(topology.KEYS, "k", stream.encode())
        await until(partial(readers.know, stream.encode()), "the watch goes on", PAUSE_S_MAX)
    stored, worked = await events.stop(), await work.stop()
    found = [message.data.decode() async for message in buses[0].jetstream.read(topology.ATTEMPTS, "attempt.v1.>")]
    assert sorted(found) == sorted(stored), "each is there once"
    await until(lambda: len(readers.read) >= len(found), "all events are read", PAUSE_S_MAX)
    assert readers.read == found, "and was read once, in the stream's order"
    await until(lambda: readers.done == set(worked), "all work is done", PAUSE_S_MAX)
    assert [message async for message in buses[0].jetstream.read(topology.WORK, "work.v1.>")] == []
    assert not any(bus.closed.is_set() for bus in buses)


async def _leader_dies(cluster: NatsCluster, bus: Bus, stream: str, work_goes_on: Awaitable[object]) -> None:
    """Kill the server that leads ``stream``, wait until the work goes on without it, and start it again."""
    leader = cluster.servers[(await _cluster_of(bus, stream))["leader"]]
    leader.stop()
    await work_goes_on
    leader.start()
    for name in REPLICATED:
        await until(partial(_is_whole, bus, name), f"{name} has three replicas again", PAUSE_S_MAX)
