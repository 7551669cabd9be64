"""Connections to the test's server, all closed after it."""

import asyncio
from collections.abc import AsyncIterator, Iterator

import pytest

from contracts import topology
from contracts.bus import Bus
from tests.support.nats_server import Connect, NatsServer
from tests.support.proxy import Link, Links


@pytest.fixture
def link(nats: NatsServer) -> Iterator[Link]:
    """A way to the server that can be cut or clogged."""
    links = Links()
    yield links.open(nats.port)
    links.close()


@pytest.fixture
async def connect(nats: NatsServer) -> AsyncIterator[Connect]:
    """Make connections: ``await connect()``."""
    made: list[Bus] = []

    async def make(url: str = nats.url, name: str = "test") -> Bus:
        bus = await Bus.connect(url, name=name)
        made.append(bus)
        return bus

    yield make
    await asyncio.gather(*(bus.close() for bus in made))


@pytest.fixture
async def bus(connect: Connect) -> Bus:
    """A connection to a server that has Headrace's streams and buckets."""
    bus = await connect()
    assert await topology.ensure(bus) == []
    return bus
