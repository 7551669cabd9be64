"""The one NATS adapter: the only package that imports nats. Every hazard of NATS that was measured is guarded
here.

``Bus`` is made of layers: ``connection`` (core NATS), ``streams`` (store and read), ``buckets`` (keys,
objects), with ``tail`` (live reading) and ``pull`` (taking work) as the two kinds of consumers. It decides
nothing about Headrace.
"""

from collections.abc import Awaitable, Callable

from contracts.bus import lean  # noqa: F401  before the first import of nats
from contracts.bus.kv import Buckets, Watch
from contracts.bus.ordered import Tail
from contracts.bus.pull import BatchPuller, Puller
from contracts.bus.session import Subscription
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

__all__ = [
    "BatchPuller",
    "Bus",
    "BusError",
    "Handler",
    "Incoming",
    "KvEntry",
    "NoResponder",
    "NotFound",
    "Puller",
    "Stored",
    "StreamFull",
    "Subscription",
    "Tail",
    "TooLarge",
    "Unavailable",
    "Unconfirmed",
    "Watch",
    "WrongSequence",
]


class Bus(Buckets):
    """A connection to NATS with everything that Headrace uses of it."""

    async def tail(
        self,
        stream: str,
        subject_filter: str,
        handler: Handler,
        *,
        start_seq: int | None = None,
        start_at_ms: int | None = None,
    ) -> Tail:
        """Hand each message of ``stream`` to ``handler``, once and in order, until closed; over restarts too.

        Starts at ``start_seq`` or at ``start_at_ms`` (Unix ms), else with what is stored from now on. Not for
        work-queue streams. Raises NotFound without the stream; later it waits for the stream to come back.
        """
        tail = Tail(self, stream, subject_filter, handler, start_seq=start_seq, start_at_ms=start_at_ms)
        await tail.start()
        return tail

    async def pull(
        self,
        stream: str,
        durable: str,
        subject_filter: str,
        handler: Handler,
        *,
        ack_wait_s: float,
        credit: Callable[[], int],
        max_ack_pending: int = -1,
        inactive_s: float | None = None,
        recreate: bool = False,
    ) -> Puller:
        """Take messages as ``credit()`` allows and hand each to ``handler``, which sees to its ``ack``.

        What is asked for and what the handler has in its hands counts against ``credit()``, so a handler that
        takes a message must lower it before it returns. With ``recreate`` the consumer is made anew now and
        after every reconnect: all unacknowledged messages come again, and the handler ignores what it knows.
        Raises NotFound without the stream; later it waits for the stream to come back. ``inactive_s``: the
        server forgets a consumer that nobody used for so long.
        """
        puller = Puller(
            self,
            stream,
            durable,
            subject_filter,
            handler,
            ack_wait_s=ack_wait_s,
            credit=credit,
            max_ack_pending=max_ack_pending,
            inactive_s=inactive_s,
            recreate=recreate,
        )
        await puller.start()
        return puller

    async def consume_batches(
        self,
        stream: str,
        durable: str,
        subject_filter: str,
        handler: Callable[[list[Incoming]], Awaitable[None]],
        *,
        batch: int,
        max_wait_s: float,
        ack_wait_s: float,
    ) -> BatchPuller:
        """Hand over up to ``batch`` messages, gathered for at most ``max_wait_s`` from the first one on.

        One batch at a time; the handler acknowledges. ``ack_wait_s`` must exceed two calls of the handler,
        else messages come again while they wait.
        """
        puller = BatchPuller(self, handler, batch=batch, max_wait_s=max_wait_s)
        await puller.start(stream, durable, subject_filter, ack_wait_s=ack_wait_s)
        return puller
