"""The one NATS adapter: the only package that imports nats. Every hazard of NATS that was measured is guarded here.
It decides nothing about Headrace.

A ``Bus`` is one connection and its parts; ``OrderedConsumer`` (live reading), ``PullConsumer`` and ``BatchConsumer``
(taking work) are made upon ``bus.jetstream`` and started.
"""

import asyncio
from typing import Self

from contracts.bus.complaints import unreadable
from contracts.bus.credentials import ANONYMOUS, Credentials
from contracts.bus.jetstream import JetStream
from contracts.bus.kv import KeyValue, Watch
from contracts.bus.objects import Objects
from contracts.bus.ordered import OrderedConsumer
from contracts.bus.pull import BatchConsumer, PullConsumer
from contracts.bus.session import Session, Subscription
from contracts.bus.types import (
    BusError,
    Handler,
    Incoming,
    KvEntry,
    NoResponder,
    NotFound,
    Stored,
    StreamFull,
    TooLarge,
    Unavailable,
    Unconfirmed,
    WrongSequence,
)


class Bus:
    """A connection to NATS with everything that Headrace uses of it.

    ``publish``, ``send``, ``request``, ``subscribe`` and ``close`` are the session's own; ``jetstream`` stores
    and reads streams, ``kv`` are the buckets, ``objects`` what is larger than a message.
    """

    def __init__(self, session: Session) -> None:
        self.session = session
        self.jetstream = JetStream(session)
        self.kv = KeyValue(self.jetstream)
        self.objects = Objects(self.jetstream)
        self.publish = session.publish
        self.send = session.send
        self.request = session.request
        self.subscribe = session.subscribe
        self.close = session.close
        self.closed = session.closed
        """Set when the connection is lost for good: the service must exit non-zero."""

    @classmethod
    async def connect(
        cls, url: str, *, name: str, user: str = "", credentials: Credentials = ANONYMOUS, timeout_s: float = 10.0
    ) -> Self:
        """A bus upon ``Session.connect``, with its arguments and errors."""
        session = await Session.connect(url, name=name, user=user, credentials=credentials, timeout_s=timeout_s)
        return cls(session)

    async def another(self, purpose: str) -> "Bus":
        """One more connection of the same user, for the event loop that calls. Raises as ``connect``."""
        session = self.session
        name = f"{session.name}-{purpose}"
        return await Bus.connect(session.url, name=name, user=session.user, credentials=session.credentials)

    @property
    def user(self) -> str:
        """Whose inbox this connection has: the name of its user on the server."""
        return self.session.user

    @property
    def connected(self) -> bool:
        """Whether the server is reached now."""
        return self.session.connected
