"""Requests in pieces: what gateway.http's connection takes from bytes that come in any segments, and what h11 takes.

    python -m tests.support.http_splits [splits] [seed]

cuts every entry of the corpus, and mutants of it, wherever it can be cut until there were as many splits.
"""

import asyncio
import itertools
import random
import re
import sys
import time
from collections.abc import Coroutine, Iterator
from typing import Any

import h11
from starlette.types import ASGIApp, Receive, Scope, Send

from contracts.errors import HeadraceError
from gateway.http.connection import Connection
from gateway.http.framing import Head

KEY = b"authorization: Bearer hr_key\r\n"
GET = b"GET /v1/models HTTP/1.1\r\nhost: x\r\n\r\n"
WITH_KEY = b"GET /v1/models HTTP/1.1\r\nhost: x\r\n" + KEY + b"\r\n"
SMUGGLED = b"GET /smuggled HTTP/1.1\r\nhost: x\r\nx: "
UPGRADE = b"connection: Upgrade, HTTP2-Settings\r\nupgrade: h2c\r\nhttp2-settings: AAE\r\n"


def post(headers: bytes, body: bytes = b"", version: bytes = b"1.1") -> bytes:
    return b"POST /v1/chat/completions HTTP/" + version + b"\r\nhost: x\r\n" + headers + b"\r\n" + body


def sized(body: bytes, headers: bytes = b"") -> bytes:
    return post(headers + b"content-length: %d\r\n" % len(body), body)


def chunked(*chunks: bytes, headers: bytes = b"", end: bytes = b"0\r\n\r\n") -> bytes:
    body = b"".join(b"%x\r\n%b\r\n" % (len(chunk), chunk) for chunk in chunks)
    return post(headers + b"transfer-encoding: chunked\r\n", body + end)


def in_chunks(body: bytes) -> bytes:
    return post(b"transfer-encoding: chunked\r\n", body)


CORPUS: list[bytes] = [
    GET,
    b"\r\n\r\n" + GET + b"\r\n" + GET,
    GET * 3,
    GET * 20,
    b"HEAD / HTTP/1.1\r\nHost: x\r\n\r\n" + GET,
    b"OPTIONS * HTTP/1.1\r\nhost: x\r\n\r\n",
    b"GET http://elsewhere/v1/models?a=b HTTP/1.1\r\nhost: x\r\n\r\n" + GET,
    b"GET /v1/models#fragment HTTP/1.1\r\nhost: x\r\n\r\n" + GET,
    b"GET / HTTP/1.0\r\nconnection: keep-alive\r\n\r\n" + GET,
    b"GET / HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n" + GET,
    sized(b"{}") + WITH_KEY,
    sized(b"") + GET,
    sized(GET) + GET,
    sized(b'{"a":"\r\n\r\n' + SMUGGLED + b'"}') + WITH_KEY,
    sized(b"x" * 100, b"expect: 100-continue\r\n") + GET,
    chunked(b"{", b"}") + WITH_KEY,
    chunked(GET, b"\r\n\r\n") + GET,
    chunked(b"a" * 300) + GET,
    chunked(*[b"x"] * 300) + GET,
    in_chunks(b"5;a=b\r\nhello\r\n0;c\r\n\r\n") + GET,
    in_chunks(b"5;" + b"a" * 300 + b"\r\nhello\r\n0\r\n\r\n") + GET,
    in_chunks(b"0005\r\nhello\r\n00\r\n\r\n") + GET,
    # An offer to upgrade, behind which a body stands, and a request in the body.
    sized(b"{}", UPGRADE) + WITH_KEY,
    sized(b"upgrade: h2c\r\n\r\n" + SMUGGLED, UPGRADE) + WITH_KEY,
    sized(b"\r\nupgrade: a\r\n" + SMUGGLED, UPGRADE) + WITH_KEY,
    chunked(b"\r\nupgrade: h2c\r\n" + SMUGGLED, headers=UPGRADE) + WITH_KEY,
    b"GET / HTTP/1.1\r\nhost: x\r\n" + UPGRADE + b"\r\n" + GET,
    b"GET / HTTP/1.1\r\nhost: x\r\nconnection: upgrade\r\nupgrade: websocket\r\n\r\n" + GET,
    # Trailers.
    chunked(b"{}", end=b"0\r\n" + KEY + b"\r\n") + GET,
    chunked(b"{}", end=b"0\r\nx: y\r\n\r\n") + WITH_KEY,
    chunked(b"{}", end=b"0\r\n" + KEY) + GET,
    chunked(b"{}", end=b"0\r\n" + b"x: y\r\n" * 100 + b"\r\n"),
    # Two lengths.
    post(b"content-length: 3\r\ntransfer-encoding: chunked\r\n", b"0\r\n\r\n" + SMUGGLED) + WITH_KEY,
    post(b"transfer-encoding: chunked\r\ncontent-length: 5\r\n", b"0\r\n\r\n") + GET,
    post(b"content-length: 5\r\ncontent-length: 6\r\n", b"hello") + GET,
    post(b"content-length: 5, 5\r\n", b"hello") + GET,
    post(b"content-length: +5\r\n", b"hello") + GET,
    post(b"content-length: 5 5\r\n", b"hello") + GET,
    post(b"content-length:5\r\n", b"hello") + GET,
    post(b"content-length:\t5 \t\r\n", b"hello") + GET,
    post(b"transfer-encoding: chunked\r\n", b"0\r\n\r\n", b"1.0") + GET,
    post(b"transfer-encoding: gzip, chunked\r\n", b"0\r\n\r\n") + GET,
    post(b"transfer-encoding: xchunked\r\n", b"0\r\n\r\n") + GET,
    post(b"transfer-encoding: chunked, chunked\r\n", b"0\r\n\r\n") + GET,
    post(b"transfer-encoding: chunked\r\ntransfer-encoding: identity\r\n", b"0\r\n\r\n") + GET,
    post(b"transfer-encoding : chunked\r\n", b"0\r\n\r\n") + GET,
    post(b"transfer-encoding:\x0bchunked\r\n", b"0\r\n\r\n") + GET,
    post(b"transfer_encoding: chunked\r\n", b"0\r\n\r\n") + GET,
    # Chunks that are none.
    *(
        in_chunks(size + b"\r\nhello\r\n0\r\n\r\n") + GET
        for size in (
            b"",
            b"-5",
            b"+5",
            b"0x5",
            b"5 ",
            b" 5",
            b"5\t;a",
            b"5,",
            b"g",
            b"ffffffffffffffff",
            b"5\r",
            b"5;\x00",
        )
    ),
    in_chunks(b"5\r\nhelloX\r\n0\r\n\r\n") + GET,
    in_chunks(b"5\nhello\n0\n\n") + GET,
    in_chunks(b"5\r\nhello\r\n0\r\nX") + GET,
    in_chunks(b"5\r\nhello0\r\n\r\n") + GET,
    # Heads that two readers may read differently.
    b"GET / HTTP/1.1\nhost: x\n\n" + GET,
    b"GET / HTTP/1.1\r\nhost: x\n\r\n" + GET,
    b"GET / HTTP/1.1\r\nhost: x\r\nx: a\rb\r\n\r\n" + GET,
    b"GET / HTTP/1.1\r\nhost: x\r\nx: a\r\n b\r\n\r\n" + GET,
    b"GET / HTTP/1.1\r\n x: a\r\nhost: x\r\n\r\n" + GET,
    b"GET / HTTP/1.1\r\nhost: x\r\nx: a\x00b\r\n\r\n" + GET,
    b"GET / HTTP/1.1\r\nhost: x\r\nno colon\r\n\r\n" + GET,
    b"GET / HTTP/1.1\r\nhost: x\r\nx y: a\r\n\r\n" + GET,
    b"GET / HTTP/1.1\r\nhost: x\r\nhost: y\r\n\r\n" + GET,
    b"GET / HTTP/1.1\r\n\r\n" + GET,
    b"GET  / HTTP/1.1\r\nhost: x\r\n\r\n" + GET,
    b"GET / HTTP/1.1 \r\nhost: x\r\n\r\n" + GET,
    b"GET / HTTP/2.0\r\nhost: x\r\n\r\n" + GET,
    b"GET /\r\n\r\n" + GET,
    b"CONNECT a:1 HTTP/1.1\r\nhost: a:1\r\n\r\n" + GET,
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(40),
    sized(b"x" * 10)[:-3],
    GET[:-1],
]
TOKENS = [
    *(
        b"\r\n",
        b"\r",
        b"\n",
        b"\r\n\r\n",
        b" ",
        b"\t",
        b"\x00",
        b":",
        b";",
        b",",
        b"0\r\n\r\n",
        b"0",
        b"5\r\n",
        b"\x7f",
    ),
    *(
        b"content-length: 3\r\n",
        b"transfer-encoding: chunked\r\n",
        UPGRADE,
        KEY,
        GET,
        b"host: x\r\n",
        b"HTTP/1.1",
        b"\xff",
    ),
]

Taken = tuple[str, bytes, bytes]
"""Method, target and body of a request."""


class Recorder:
    """A connection's owner, and its application, which records every request that came whole."""

    def __init__(self) -> None:
        self.scheme = "http"
        self.app: ASGIApp = self.record
        self.taken: list[Taken] = []
        self.seen = 0
        self.tasks: set[asyncio.Task[None]] = set()

    async def record(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = b""
        more = True
        status = 200
        while more:
            try:
                message = await receive()
            except HeadraceError:
                status = 400
                break
            if message["type"] == "http.disconnect":
                return
            body += message["body"]
            more = message["more_body"]
            self.seen += 1
        if status == 200:
            target = scope["raw_path"] + (b"?" + scope["query_string"] if scope["query_string"] else b"")
            self.taken.append((scope["method"], target, body))
        await send({"type": "http.response.start", "status": status, "headers": [(b"content-length", b"0")]})
        await send({"type": "http.response.body", "body": b""})
        self.seen += 1

    def waits(self, connection: Connection) -> None: ...

    def works(self, connection: Connection, request: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(request)
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)
        self.seen += 1

    def lost(self, connection: Connection) -> None: ...

    def refusal(self, head: Head) -> None: ...


class Transport(asyncio.Transport):
    def __init__(self) -> None:
        super().__init__()
        self.written = b""
        self.closed = False

    def write(self, data: Any) -> None:
        self.written += data

    def can_write_eof(self) -> bool:
        return False

    def close(self) -> None:
        self.closed = True

    abort = close

    def is_closing(self) -> bool:
        return self.closed

    def pause_reading(self) -> None: ...

    def resume_reading(self) -> None: ...


async def ours(pieces: list[bytes], *, pause: bool) -> tuple[list[Taken], list[int]]:
    """Requests that the connection took whole, and the statuses of its answers; ``pause``: pieces come apart."""
    owner, transport = Recorder(), Transport()
    connection = Connection(owner, ("127.0.0.1", 1))
    connection.connection_made(transport)
    for piece in pieces:
        if transport.closed:
            break
        connection.data_received(piece)
        if pause:
            await _settle(owner)
    await _settle(owner)
    connection.connection_lost(None)
    await _settle(owner)
    assert not owner.tasks
    return owner.taken, [int(status) for status in re.findall(rb"HTTP/1\.1 (\d{3}) ", transport.written)]


async def _settle(owner: Recorder) -> None:
    """Until nothing happens any more."""
    idle = 0
    while idle < 3:
        seen = owner.seen
        await asyncio.sleep(0)
        idle = 0 if owner.seen != seen else idle + 1


def of_h11(data: bytes) -> list[Taken]:
    """What h11 takes from the same bytes, up to the first that it refuses; it gets no empty lines before a request."""
    taken: list[Taken] = []
    while True:
        data = re.sub(rb"\A(\r\n)+", b"", data)
        connection = h11.Connection(h11.SERVER, max_incomplete_event_size=1 << 20)
        connection.receive_data(data)
        request, body = None, b""
        try:
            while not isinstance(event := connection.next_event(), h11.EndOfMessage):
                if isinstance(event, h11.Request):
                    request = event
                elif isinstance(event, h11.Data):
                    body += event.data
                else:
                    return taken
        except h11.RemoteProtocolError:
            return taken
        assert request is not None
        taken.append((request.method.decode(), request.target, body))
        if connection.their_state is h11.MUST_CLOSE:
            return taken
        data = connection.trailing_data[0]


def path_of(taken: Taken) -> Taken:
    """An absolute target as the path that it names, which is how we pass it on."""
    method, target, body = taken
    target = re.sub(rb"\Ahttps?://[^/?]*/?", b"/", target)
    return method, target, body


def splits(data: bytes, random_: random.Random, many: int) -> Iterator[list[bytes]]:
    """Ways to cut ``data``: bytewise, in two at every place, in three at every pair of places, then at random ones."""
    places = range(1, len(data))
    yield [data[at : at + 1] for at in range(len(data))]
    ways: Iterator[tuple[int, ...]] = itertools.chain(((at,) for at in places), itertools.combinations(places, 2))
    if many < len(data):
        ways = (tuple(random_.sample(places, 1)) for _ in range(many))
    for cuts in itertools.islice(ways, many):
        ends = [0, *cuts, len(data)]
        yield [data[start:end] for start, end in itertools.pairwise(ends)]
    at_random = (sorted(random_.sample(places, min(len(places), random_.randint(3, 12)))) for _ in range(many // 8))
    for some in at_random:
        ends = [0, *some, len(data)]
        yield [data[start:end] for start, end in itertools.pairwise(ends)]


def mutant(random_: random.Random) -> bytes:
    """An entry of the corpus with tokens and bytes put in, taken out and changed."""
    data = bytearray(random_.choice(CORPUS))
    for _ in range(random_.randint(1, 4)):
        at = random_.randrange(len(data) + 1)
        end = at + random_.choice((0, 0, 1, 2, 10))
        data[at:end] = random_.choice((random_.choice(TOKENS), bytes([random_.randrange(256)]), b""))
    return bytes(data)


async def check(data: bytes, random_: random.Random, many: int) -> int:
    """Raises AssertionError unless all splits are taken alike, and as h11 takes them; the number of splits."""
    whole, statuses = await ours([data], pause=False)
    theirs = [path_of(taken) for taken in of_h11(data)]
    assert whole == theirs[: len(whole)], f"h11 disagrees on {data!r}: {whole} and {theirs}"
    if all(status in (100, 200) for status in statuses) and len(whole) < 16:
        assert len(whole) == len(theirs), f"h11 takes more of {data!r}: {whole} and {theirs}"
    count = 0
    for pieces in splits(data, random_, many):
        found, answers = await ours(pieces, pause=bool(count % 2))
        same = found[: len(whole)] == whole[: len(found)] if len(whole) >= 16 else found == whole
        assert same, f"{data!r} in {pieces!r}: {found} and not {whole}"
        assert answers[-1:] == statuses[-1:] or len(whole) >= 16, f"{data!r} in {pieces!r}: {answers}, not {statuses}"
        count += 1
    return count


async def run(least: int, seed: int) -> int:
    """The whole corpus, then mutants, until there were ``least`` splits."""
    random_ = random.Random(seed)
    count = 0
    for data in CORPUS:
        count += await check(data, random_, max(8, least // (4 * len(CORPUS))))
    while count < least:
        data = mutant(random_)
        if len(data) > 1:
            count += await check(data, random_, min(64, least // 200))
    return count


if __name__ == "__main__":
    wanted, first = (int(text) for text in [*sys.argv[1:], "1000000", "1"][:2])
    begun = time.monotonic()
    done = asyncio.run(run(wanted, first))
    print(f"{done} splits from seed {first}: all alike, and as h11 has them ({time.monotonic() - begun:.0f} s)")
