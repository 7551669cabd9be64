"""What strangers and tenants send to harm others, against a running gateway: it stays small, and serves on."""

import json
import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx
import pytest

from tests.support.polling import wait_until
from tests.support.stack import Stack

MIB = 1 << 20
LIMIT_S = 20.0
HELLO = [{"role": "user", "content": "hi"}]
CHUNKED = "POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\n{key}transfer-encoding: chunked\r\n\r\n"


def memory_mib(stack: Stack) -> float:
    """Resident memory of the gateway."""
    [pid] = stack.run.pids["gateway"]
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / MIB


@contextmanager
def connected(stack: Stack, many: int = 1) -> Iterator[list[socket.socket]]:
    address = httpx.URL(stack.run.gateway_urls[0])
    with ExitStack() as opened:
        yield [
            opened.enter_context(socket.create_connection((address.host, address.port), LIMIT_S)) for _ in range(many)
        ]


def flood(sockets: list[socket.socket], piece: bytes, many: int) -> int:
    """Send ``piece`` so often on each, in turns, as far as the other side takes it; bytes that went out."""
    sent = 0
    for each in sockets:
        each.setblocking(False)
    for _ in range(many):
        for each in sockets:
            try:
                sent += each.send(piece)
            except BlockingIOError:
                time.sleep(0.001)
            except OSError:
                continue  # The gateway has closed it.
    return sent


def read_all(connection: socket.socket) -> bytes:
    """Until the other side closes."""
    connection.settimeout(LIMIT_S)
    data = b""
    try:
        while piece := connection.recv(1 << 16):
            data += piece
    except ConnectionResetError:
        pass
    return data


def heads(stack: Stack) -> bytes:
    return CHUNKED.format(key="").encode()


def trailers(stack: Stack) -> bytes:
    return heads(stack) + b"2\r\n{}\r\n0\r\n"


def trailers_with_a_key(stack: Stack) -> bytes:
    return CHUNKED.format(key=f"authorization: Bearer {stack.run.key}\r\n").encode() + b"2\r\n{}\r\n0\r\n"


def endless(stack: Stack) -> bytes:
    return CHUNKED.format(key=f"authorization: Bearer {stack.run.key}\r\n").encode()


@pytest.mark.parametrize(
    ("start", "piece", "statuses"),
    [
        pytest.param(trailers, b"x-trailer-of-mine: " + b"y" * 80 + b"\r\n", (401,), id="trailers of a stranger"),
        pytest.param(trailers_with_a_key, b"x-trailer: " + b"y" * 80 + b"\r\n", (400,), id="trailers of a tenant"),
        pytest.param(trailers, b"y" * 100, (401,), id="one endless trailer"),
        pytest.param(endless, b"1\r\nx\r\n" * 20, (400,), id="endless small chunks"),
        pytest.param(heads, b"1\r\nx\r\n" * 20, (401,), id="small chunks of a stranger"),
        pytest.param(lambda stack: b"GET / HTTP/1.1\r\nx: ", b"y" * 100, (431,), id="an endless head"),
        pytest.param(lambda stack: b"", b"\r\n" * 50, (), id="empty lines"),
        pytest.param(
            lambda stack: b"", b"GET /health/live HTTP/1.1\r\nhost: x\r\n\r\n" * 3, (200,), id="an endless pipeline"
        ),
    ],
)
def test_24_mb_of_it_on_each_of_8_connections_cost_little(
    stack: Stack, start: Callable[[Stack], bytes], piece: bytes, statuses: tuple[int, ...]
) -> None:
    before = memory_mib(stack)
    with connected(stack, 8) as sockets:
        first = start(stack)
        for each in sockets:
            each.sendall(first)
        flood(sockets, piece * (32_000 // len(piece)), 24 * MIB // 32_000)
        grown = memory_mib(stack) - before
        with stack.client() as client:
            assert client.get("/v1/models").status_code == 200
        for each in sockets if statuses else ():
            data = read_all(each)
            answers = {int(part[:3]) for part in data.split(b"HTTP/1.1 ")[1:]}
            assert answers <= set(statuses), data[:500]
    assert grown < 40, f"{grown:.0f} MiB"


def test_what_a_pipeline_may_hold_is_little(stack: Stack) -> None:
    """252 KB of requests behind a stream, on each of 100 connections."""
    before = memory_mib(stack)
    body = json.dumps({"model": stack.model, "stream": True, "max_tokens": 400, "messages": HELLO}).encode()
    head = f"authorization: Bearer {stack.run.key}\r\ncontent-length: {len(body)}\r\n\r\n".encode()
    with connected(stack, 100) as sockets:
        for each in sockets:
            each.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\n" + head + body)
        flood(sockets, b"GET /health/live HTTP/1.1\r\nhost: x\r\n\r\n" * 600, 10)
        grown = memory_mib(stack) - before
    assert grown < 60, f"{grown:.0f} MiB"
    with stack.client() as client:
        wait_until(lambda: client.get("/health/ready").status_code == 200, "it is ready")


def test_silent_connections_keep_nobody_out(stack: Stack) -> None:
    with connected(stack, 300) as silent, stack.client() as client:
        for each in silent[:150]:
            each.sendall(b"GET /v1/models HTT")
        assert client.get("/v1/models").status_code == 200
