"""NATS's protocol as bytes, against the library's own parser; and when a connection writes."""

import asyncio
import random
from typing import Any

import pytest
from nats.aio.client import Client
from nats.protocol.parser import Parser

from contracts.bus import wire
from contracts.bus.pace import AT_ONCE_MAX, GATHER_S, Pace

Message = tuple[int, bytes, bytes, bytes, bytes]
CONTROL = {"_process_ping": b"PING", "_process_pong": b"PONG"}


class Library:
    """What the library makes of the same bytes."""

    def __init__(self) -> None:
        self.messages: list[Message] = []
        self.lines: list[bytes] = []
        self._parser = Parser(self)

    def feed(self, data: bytes) -> None:
        asyncio.run(self._parser.parse(data))

    async def _process_msg(self, sid: int, subject: bytes, reply: bytes, data: bytes, headers: bytes | None) -> None:
        self.messages.append((sid, subject, reply, headers or b"", data))

    async def _process_ping(self) -> None:
        self.lines.append(b"PING")

    async def _process_pong(self) -> None:
        self.lines.append(b"PONG")

    async def _process_err(self, text: str) -> None:
        self.lines.append(b"-ERR " + text.encode())

    async def _process_info(self, info: dict[str, Any]) -> None:
        self.lines.append(b"INFO {}")


def read(pieces: list[bytes]) -> tuple[list[Message], list[bytes]]:
    messages: list[Message] = []
    reader = wire.Reader(lambda *message: messages.append(message))
    lines = [line for piece in pieces for line in reader.feed(piece)]
    return messages, [line for line in lines if line != b"+OK"]


def traffic(rng: random.Random) -> bytes:
    """Some of all that a server sends."""
    sent = []
    for _ in range(rng.randint(1, 12)):
        data = rng.choice([b"", b"\r\n", b"MSG a 1 0\r\n\r\n", rng.randbytes(rng.choice([1, 40, 9000]))])
        reply = rng.choice([b"", b"_INBOX.x.1 "])
        head = rng.choice([b"NATS/1.0\r\nA: b\r\n\r\n", b"NATS/1.0 408 Request Timeout\r\n\r\n"])
        sent.append(
            rng.choice(
                [
                    b"MSG a.b %d %b%d\r\n%b\r\n" % (rng.randint(1, 99), reply, len(data), data),
                    b"HMSG a.b 7 %b%d %d\r\n%b%b\r\n" % (reply, len(head), len(head) + len(data), head, data),
                    b"PING\r\n",
                    b"PONG\r\n",
                    b"+OK\r\n",
                    b"-ERR 'a violation'\r\n",
                    b"INFO {}\r\n",
                ]
            )
        )
    return b"".join(sent)


def test_it_reads_what_the_library_reads_in_whatever_pieces_it_comes() -> None:
    rng = random.Random(1)
    for _ in range(300):
        data, library = traffic(rng), Library()
        library.feed(data)
        cuts = sorted(rng.sample(range(len(data) + 1), min(len(data), rng.randint(0, 8))))
        pieces = [data[start:end] for start, end in zip([0, *cuts], [*cuts, len(data)], strict=True)]
        assert read(pieces) == (library.messages, library.lines)
        assert read([bytes([byte]) for byte in data[:500]])[0] == read([data[:500]])[0]


@pytest.mark.parametrize(
    "data",
    [
        b"MSG a 1\r\n",
        b"MSG a 1 b c 1\r\n",
        b"MSG a x 1\r\n",
        b"MSG a 1 -1\r\n",
        b"HMSG a 1 9 8\r\n",
        b"HMSG a 1 8\r\n",
        b"MESS a 1 0\r\n",
        b"x" * 5000,
    ],
)
def test_what_is_no_nats_is_told(data: bytes) -> None:
    with pytest.raises(wire.Malformed):
        read([data])


def test_a_reader_that_is_reset_by_a_message_forgets_what_came_with_it() -> None:
    got: list[bytes] = []

    def take(number: int, subject: bytes, reply: bytes, headers: bytes, data: bytes) -> None:
        got.append(data)
        reader.reset()

    reader = wire.Reader(take)
    reader.feed(b"MSG a 1 1\r\n1\r\nMSG a 1 1\r\n2\r\nMSG")
    reader.feed(b"MSG a 1 1\r\n3\r\n")
    assert got == [b"1", b"3"]


@pytest.mark.parametrize(
    "raw",
    [
        b"NATS/1.0\r\nNats-Msg-Id: r.1\r\nX:y\r\n\r\n",
        b"NATS/1.0 503\r\n\r\n",
        b"NATS/1.0 408 Request Timeout\r\nNats-Pending-Messages: 1\r\n\r\n",
        b"NATS/1.0 100 Idle Heartbeat\r\nNats-Last-Consumer: 1016\r\n\r\n",
        "NATS/1.0\r\nK: vé: w\r\n\r\n".encode(),
        b"NATS/1.0\r\n\r\n",
    ],
)
def test_headers_are_what_the_library_takes_them_for(raw: bytes) -> None:
    assert (wire.headers_of(raw) or None) == asyncio.run(Client()._process_headers(raw))


def test_nothing_that_is_published_becomes_two_commands() -> None:
    for subject, reply in (("", ""), ("a b", ""), ("a\r\nPUB b 0", ""), ("a", "b\r\nPUB c 0")):
        with pytest.raises(ValueError, match="no subject"):
            wire.publication(subject, b"", reply, None)
    said = wire.publication("a", b"x", "", {"K": "v\r\nL: w"})
    assert said == b"HPUB a  24 25\r\nNATS/1.0\r\nK: v  L: w\r\n\r\nx\r\n"


def test_a_few_writes_go_at_once_and_many_are_one_each_moment() -> None:
    pace, now = Pace(), 100.0
    assert [pace.wait_s(now) for _ in range(AT_ONCE_MAX)] == [0.0] * AT_ONCE_MAX
    writes = 0
    while now < 101.0:  # A write is due again at once.
        now += pace.wait_s(now) or 1e-6
        writes += 1
    assert writes <= 1.0 / GATHER_S + 1
    assert pace.wait_s(now + 1.0) == 0.0
