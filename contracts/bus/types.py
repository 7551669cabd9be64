"""What the bus hands out and raises: received messages, entries, errors, and the counters that make trouble visible."""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

import prometheus_client

from contracts.bus import wire

RECONNECTS = prometheus_client.Counter("headrace_bus_reconnects", "Connections to NATS that were lost and made again")
DEAD_LOOPS = prometheus_client.Counter(
    "headrace_bus_dead_loops", "Connections whose read, write or reconnect task had died and that were revived"
)
SLOW_CONSUMER_DROPS = prometheus_client.Counter(
    "headrace_bus_slow_consumer_drops", "Messages dropped because a handler was too slow for its subscription"
)
HANDLER_ERRORS = prometheus_client.Counter("headrace_bus_handler_errors", "Exceptions that handlers let escape")
STORE_RETRIES = prometheus_client.Counter("headrace_bus_store_retries", "Repeated tries of a publish to a stream")
STORES_UNCONFIRMED = prometheus_client.Counter(
    "headrace_bus_stores_unconfirmed", "Publishes to a stream that stayed without an answer"
)
ACKS_UNCONFIRMED = prometheus_client.Counter("headrace_bus_acks_unconfirmed", "Acks that stayed without an answer")
RESUMES = prometheus_client.Counter(
    "headrace_bus_consumer_resumes", "Consumers that were lost and made again", ["kind"]
)
REPLIES_REFUSED = prometheus_client.Counter(
    "headrace_bus_replies_refused", "Answers not sent because the asker's reply subject is no inbox"
)


class BusError(Exception):
    """Something the bus could not do; the subclass says what the caller does next."""

    err_code = 0
    """The server's own code when it said no (server/errors.json)."""


class Unavailable(BusError):
    """No responder, no answer in time, or no connection. An asked-for effect may still happen."""


class NoResponder(Unavailable):
    """Nobody listens, the stream is not ready, or the bus is away: nothing happened."""


class TooLarge(BusError):
    """The message with its headers, or its subject, is over the server's limit. Nothing was sent."""


class StreamFull(BusError):
    """The stream, the subject's share of it or the store is full. Nothing was stored."""


class NotFound(BusError):
    """There is no such stream, bucket or consumer."""


class WrongSequence(BusError):
    """The subject's last message is not the expected one but ``found`` (None: there is none). Nothing was stored."""

    found: "Incoming | None" = None


class Unconfirmed(BusError):
    """A publish got no answer: the message may be stored, or be stored later. Repeat with the same ``msg_id``."""


class Stored(NamedTuple):
    """Answer of a stream. ``duplicate``: the message id was known, ``seq`` is the first copy's."""

    seq: int
    duplicate: bool


class KvEntry(NamedTuple):
    """A key as it is stored; ``revision`` is its sequence in the bucket's stream."""

    key: str
    value: bytes
    revision: int
    created_at_ms: int


_NO_HEADERS: Mapping[str, str] = MappingProxyType({})
INBOX = "_INBOX."
OTHER_ACCOUNT = "_R_."
"""Where the server itself takes an answer to an asker of another account: nobody names such a subject."""


class Sender(Protocol):
    """What a message answers and acknowledges through: the session that received it."""

    def send(self, subject: str, data: bytes) -> None: ...

    def dropped(self, inner: Any) -> None: ...

    def confirm_ack(self, reply: str) -> asyncio.Future[bool]: ...


class Incoming:
    """One received message. The client library builds it itself, so that reception costs no second object."""

    __slots__ = ("_headers", "_place", "_sender", "data", "reply", "subject")

    def __init__(
        self,
        subject: str,
        reply: str,
        data: bytes,
        headers: Mapping[str, str] | bytes,
        sender: Sender,
        place: tuple[int, int, int] | None = None,
    ) -> None:
        self.subject = subject
        self.reply = reply
        self.data = data
        self._headers = headers
        self._sender = sender
        self._place = place

    @property
    def headers(self) -> Mapping[str, str]:
        """Taken apart when somebody asks for them, which of most messages nobody does."""
        if isinstance(self._headers, bytes):
            self._headers = wire.headers_of(self._headers) if self._headers else _NO_HEADERS
        return self._headers

    @property
    def stream_seq(self) -> int:
        """Sequence in the stream; 0 when not from a stream."""
        return (self._place or self._locate())[0]

    @property
    def stored_at_ms(self) -> int:
        """The server's time of storage; 0 when not from a stream."""
        return (self._place or self._locate())[1]

    @property
    def pending(self) -> int:
        """Messages of the consumer still to come after this one; 0 when not from a consumer."""
        return (self._place or self._locate())[2]

    @property
    def consumer_seq(self) -> int:
        """How many messages its consumer has delivered up to this one; 0 when not from a consumer."""
        tokens = _ack_tokens(self.reply)
        return int(tokens[-3]) if tokens else 0

    def _locate(self) -> tuple[int, int, int]:
        tokens = _ack_tokens(self.reply)
        place = (int(tokens[-4]), int(tokens[-2]) // 1_000_000, int(tokens[-1])) if tokens else (0, 0, 0)
        self._place = place
        return place

    def respond(self, data: bytes) -> None:
        """Answer the asker, who asks again when the answer is lost, as it is while the bus is away.

        To inboxes only, else a reply subject could make us publish anywhere.
        """
        if self.reply.startswith((INBOX, OTHER_ACCOUNT)):
            with contextlib.suppress(Unavailable):
                self._sender.send(self.reply, data)
        elif self.reply:
            REPLIES_REFUSED.inc()

    def ack(self) -> asyncio.Future[bool]:
        """Acknowledge to the consumer; what comes is whether the server has it, False when that stays unconfirmed.

        An ack is no fence: it also settles what another worker runs after a redelivery.
        """
        return self._sender.confirm_ack(self.reply)


def consumer_of(reply: str) -> str | None:
    """What the ack subjects of one consumer have in common; None for what is none."""
    tokens = _ack_tokens(reply)
    return None if tokens is None else ".".join(tokens[:-5])


def _ack_tokens(reply: str) -> list[str] | None:
    """Tokens of an ack subject up to ``pending``: ``$JS.ACK[.<domain>.<account>].<stream>.<consumer>.<deliveries>.
    <stream seq>.<consumer seq>.<time ns>.<pending>[.<random>]``.
    """
    if not reply.startswith("$JS.ACK."):
        return None
    tokens = reply.split(".")
    return tokens if len(tokens) == 9 else tokens[:11]


Handler = Callable[[Incoming], Awaitable[None] | None]
