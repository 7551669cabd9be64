"""In which pieces an answer is written: each is a packet, and wakes its caller."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest
from starlette.types import Receive, Scope, Send

from gateway.http.connection import Connection
from tests.support.http_splits import Recorder, Transport

START = {"type": "http.response.start", "status": 200, "headers": []}
SIZED = {"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]}


class Pieces(Transport):
    """What was written, piece by piece."""

    def __init__(self) -> None:
        super().__init__()
        self.pieces: list[bytes] = []

    def write(self, data: bytes) -> None:  # type: ignore[override]
        self.pieces.append(bytes(data))


async def written(answer: Callable[[Scope, Send], Awaitable[None]], method: bytes = b"GET") -> list[bytes]:
    """The pieces of an answer, less their heads' dates and what the server puts in."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await answer(scope, send)

    owner, transport = Recorder(), Pieces()
    owner.app = app
    connection = Connection(owner, ("127.0.0.1", 1))
    connection.connection_made(transport)
    connection.data_received(method + b" / HTTP/1.1\r\nhost: x\r\n\r\n")
    for _ in range(20):
        await asyncio.sleep(0)
    return [b"HEAD" + piece.partition(b"\r\n\r\n")[2] if piece[:5] == b"HTTP/" else piece for piece in transport.pieces]


async def whole(scope: Scope, send: Send) -> None:
    await send(SIZED)
    await send({"type": "http.response.body", "body": b"ok"})


async def in_parts(scope: Scope, send: Send) -> None:
    await send(START)
    await send({"type": "http.response.body", "body": b"a", "more_body": True})
    await send({"type": "http.response.body", "body": b"b", "more_body": False})


async def in_later_parts(scope: Scope, send: Send) -> None:
    await send(START)
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    await send({"type": "http.response.body", "body": b"a", "more_body": True})
    await send({"type": "http.response.body"})


async def by_the_writer(scope: Scope, send: Send) -> None:
    await send(START)
    scope["extensions"]["headrace.writer"].write(b"a")
    await asyncio.sleep(0)
    await send({"type": "http.response.body", "body": b"b"})


async def broken(scope: Scope, send: Send) -> None:
    await send(START)


@pytest.mark.parametrize(
    ("answer", "pieces"),
    [
        (whole, [b"HEADok"]),
        (in_parts, [b"HEAD1\r\na\r\n", b"1\r\nb\r\n0\r\n\r\n"]),
        (in_later_parts, [b"HEAD", b"1\r\na\r\n", b"0\r\n\r\n"]),
        (by_the_writer, [b"HEAD1\r\na\r\n", b"1\r\nb\r\n0\r\n\r\n"]),
        (broken, [b"HEAD"]),
    ],
)
async def test_a_head_goes_with_what_follows_in_its_turn_and_an_end_with_what_is_last(
    answer: Callable[[Scope, Send], Awaitable[None]], pieces: list[bytes]
) -> None:
    assert await written(answer) == pieces


@pytest.mark.parametrize("answer", [whole, in_parts])
async def test_an_answer_to_head_is_a_head(answer: Callable[[Scope, Send], Awaitable[None]]) -> None:
    assert await written(answer, b"HEAD") == [b"HEAD"]
