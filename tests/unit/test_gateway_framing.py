"""What is taken for a request: strict, bounded, and the same however the bytes come."""

import asyncio

import pytest

from gateway.http import framing
from gateway.http.framing import BadRequest, Chunked, head_bytes, parse_head
from tests.support import http_splits
from tests.support.http_splits import KEY

SEED = 1
SPLITS = 10_000


def read(data: bytes) -> framing.Head:
    buffer = bytearray(data)
    size = head_bytes(buffer, 0)
    assert size
    return parse_head(bytes(buffer[:size]))


def get(line: bytes = b"GET / HTTP/1.1", headers: bytes = b"", host: bytes = b"host: x\r\n") -> bytes:
    return line + b"\r\n" + host + headers + b"\r\n"


def test_a_request_in_any_pieces_is_one_request_and_h11_says_so() -> None:
    """The long form is a command: tests/README.md."""
    assert asyncio.run(http_splits.run(SPLITS, SEED)) >= SPLITS


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (get(headers=b"content-length: 3\r\ntransfer-encoding: chunked\r\n"), 400),
        (get(headers=b"transfer-encoding: chunked\r\ncontent-length: 3\r\n"), 400),
        (get(headers=b"content-length: 3\r\ncontent-length: 3\r\n"), 400),
        (get(headers=b"content-length: 3, 3\r\n"), 400),
        (get(headers=b"content-length: -3\r\n"), 400),
        (get(headers=b"content-length: +3\r\n"), 400),
        (get(headers=b"content-length: 0x3\r\n"), 400),
        (get(headers=b"content-length: \r\n"), 400),
        (get(headers=b"content-length: 9999999999999999999\r\n"), 400),
        (get(headers=b"content-length : 3\r\n"), 400),
        (get(headers=b"transfer-encoding: gzip, chunked\r\n"), 501),
        (get(headers=b"transfer-encoding: chunked\r\ntransfer-encoding: chunked\r\n"), 400),
        (get(headers=b"transfer-encoding: xchunked\r\n"), 400),
        (get(headers=b"transfer-encoding:\x0bchunked\r\n"), 400),
        (get(b"GET / HTTP/1.0", headers=b"transfer-encoding: chunked\r\n"), 501),
        (get(headers=b"x: a\r\n b\r\n"), 400),
        (get(host=b" x: a\r\nhost: x\r\n"), 400),
        (get(headers=b"x: a\x00b\r\n"), 400),
        (get(headers=b"x: a\rb\r\n"), 400),
        (get(headers=b"x: a\nb: c\r\n"), 400),
        (get(headers=b"x: a\x7f\r\n"), 400),
        (get(headers=b"x y: a\r\n"), 400),
        (get(headers=b"x\r\n"), 400),
        (get(headers=b": x\r\n"), 400),
        (get(host=b""), 400),
        (get(host=b"host: x\r\nhost: x\r\n"), 400),
        (get(b"GET  / HTTP/1.1"), 400),
        (get(b"GET / HTTP/1.1 "), 400),
        (get(b"GET /a b HTTP/1.1"), 400),
        (get(b"GET / HTTP/2.0"), 505),
        (get(b"GET / HTTP/1.2"), 400),
        (get(b"GET / RTSP/1.0"), 400),
        (get(b"GET /"), 400),
        (get(b"get / HTTP/1.1"), 400),
        (get(b"GET /\xc3\xa9 HTTP/1.1"), 400),
        (get(b"GET * HTTP/1.1"), 400),
        (get(b"GET /a#b HTTP/1.1"), 400),
        (get(b"GET a HTTP/1.1"), 400),
        (get(b"GET ftp://a/b HTTP/1.1"), 400),
        (get(b"CONNECT a:1 HTTP/1.1"), 400),
        (b"PRI * HTTP/2.0\r\n\r\n", 400),
        (get(headers=b"x: y\r\n" * framing.HEADERS_MAX), 431),
        (get(headers=b"x: " + b"y" * framing.HEAD_BYTES_MAX + b"\r\n"), 431),
        (get(b"GET /" + b"y" * framing.HEAD_BYTES_MAX + b" HTTP/1.1"), 431),
        (b"GET / HTTP/1.1\r\nx: " + b"y" * framing.HEAD_BYTES_MAX, 431),
        (b"GET / HTTP/1.1\n", 400),
    ],
)
def test_what_two_readers_could_take_differently_is_refused(data: bytes, status: int) -> None:
    with pytest.raises(BadRequest) as refused:
        read(data)
    assert refused.value.status == status, refused.value


@pytest.mark.parametrize(
    ("begins", "says"),
    [
        (bytes.fromhex("16030100c8010000c40303"), "this is TLS"),
        (b"get /", "does not begin with a method"),
        (b"\x00", "does not begin with a method"),
        (b"SSH-2.0-OpenSSH_9.6", "does not begin with a method"),
        (b'{"model"', "does not begin with a method"),
        (b"A" * 33, "does not begin with a method"),
    ],
)
def test_another_protocol_is_told_at_once(begins: bytes, says: str) -> None:
    """Who speaks it waits for an answer, and sends nothing that would end a head."""
    with pytest.raises(BadRequest, match=says):
        framing.head_bytes(bytearray(begins), 0)
    assert framing.head_bytes(bytearray(b"GE"), 0) == framing.head_bytes(bytearray(b"GET /"), 2) == 0


def test_what_is_common_is_taken() -> None:
    head = read(get(b"GET http://elsewhere/a%20b?c=%20d HTTP/1.1", b"X-A: \t b \t\r\ncontent-length: 5\r\n"))
    assert (head.path, head.query, head.length, head.keep_alive) == ("/a b", b"c=%20d", 5, True)
    assert head.headers[1] == (b"x-a", b"b")
    assert read(get(headers=b"transfer-encoding: Chunked\r\n")).length is None
    assert not read(get(b"GET / HTTP/1.0", b"connection: keep-alive\r\n", host=b"")).keep_alive
    assert not read(get(headers=b"connection: close\r\n")).keep_alive
    assert read(get(b"OPTIONS * HTTP/1.1")).path == "*"
    assert len(read(get(headers=b"x: y\r\n" * (framing.HEADERS_MAX - 1))).headers) == framing.HEADERS_MAX
    assert read(get(headers=b"connection: upgrade\r\nupgrade: h2c\r\ncontent-length: 4\r\n")).length == 4


def decoded(body: bytes) -> bytes:
    buffer, chunks, data = bytearray(body), Chunked(), b""
    while not chunks.done:
        data += chunks.take(buffer)
        if not chunks.done and not chunks.more:
            raise EOFError
    assert not buffer
    return data


def test_chunks_are_taken_in_turns() -> None:
    body = b"".join(b"1\r\n%b\r\n" % bytes([number % 128]) for number in range(1000)) + b"0\r\n\r\n"
    buffer, chunks = bytearray(body), Chunked()
    assert len(chunks.take(buffer)) == framing.CHUNKS_AT_ONCE and chunks.more
    assert decoded(body) == bytes(number % 128 for number in range(1000))
    assert decoded(b"A;a=b;c\r\n0123456789\r\n00\r\n\r\n") == b"0123456789"


@pytest.mark.parametrize(
    "body",
    [
        b"0\r\n" + KEY + b"\r\n",
        b"0\r\nx",
        b"5\r\nhelloX",
        b"5\r\nhello\n",
        b"5 \r\nhello\r\n",
        b"-1\r\n",
        b"0x5\r\n",
        b"\r\n",
        b"5\n",
        b"g\r\n",
        b"123456789\r\n",
        b"5;\x00\r\n",
        b"5" * (framing.CHUNK_LINE_BYTES_MAX + 1),
        b"1\r\nx\r\n" * (framing.SMALL_CHUNKS_MAX + 1),
    ],
)
def test_what_is_no_chunk_is_refused_and_so_are_trailers(body: bytes) -> None:
    with pytest.raises(BadRequest):
        decoded(body)
