"""Connections to the test's server, all closed after it."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from contracts import topology
from contracts.bus import Bus
from tests.support.bus import Connect, Link
from tests.support.nats_server import NatsServer


@pytest.fixture
async def link(nats: NatsServer) -> AsyncIterator[Link]:
    relay = Link(nats.port)
    await relay.open()
    yield relay
    await relay.close()


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
