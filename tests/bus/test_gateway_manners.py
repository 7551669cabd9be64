"""HTTP manners of the edge that no client library shows: slow heads, idle connections, pipelining, stray bytes."""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from gateway import server
from tests.bus.gateway_world import BASE, K1, Raw, World, encode, serve


@pytest.fixture
async def world(nats_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[World]:
    monkeypatch.setattr(server, "HEAD_S_MAX", 0.5)
    monkeypatch.setattr(server, "KEEP_ALIVE_S", 2)
    async with serve(nats_url, tmp_path) as world:
        yield world


async def error(raw: Raw) -> tuple[int, str]:
    status, headers = await asyncio.wait_for(raw.head(), 5)
    body = json.loads(await raw.reader.readexactly(int(headers["content-length"])))
    return status, body["error"]["code"]


@pytest.mark.parametrize("start", [b"GET /", b"GET / HTTP/1.1\r\n", b"GET / HTTP/1.1\r\nhost: x\r\nx: "])
async def test_c24_a_head_that_does_not_end_is_408_in_time(world: World, start: bytes) -> None:
    raw = await Raw.open(world)
    raw.writer.write(start)

    async def drip() -> None:
        while True:
            await asyncio.sleep(0.1)
            raw.writer.write(b"x")

    dripping = asyncio.create_task(drip())
    try:
        assert await error(raw) == (408, "request_timeout")
        assert await asyncio.wait_for(raw.reader.read(), 5) == b""
    finally:
        dripping.cancel()
        await raw.close()


@pytest.mark.parametrize("stray", [b"", b"\r\n"])
async def test_a_connection_that_never_asks_is_closed(world: World, stray: bytes) -> None:
    raw = await Raw.open(world)
    raw.writer.write(stray)
    await asyncio.wait_for(raw.reader.read(), 10)
    await raw.close()


async def test_c38_a_slow_start_and_a_second_request_share_a_connection(world: World) -> None:
    raw = await Raw.open(world)
    for _ in range(3):
        await asyncio.sleep(0.8)  # Idle for longer than a head may take.
        await raw.send("GET /health/live HTTP/1.1")
        status, headers = await raw.head()
        await raw.reader.readexactly(int(headers["content-length"]))
        assert status == 200
    await raw.close()


@pytest.mark.parametrize("behind", [b"\r\n", b"GET /v1/models HTTP/1.1\r\nhost: x\r\n"])
async def test_what_waits_behind_a_stream_does_not_break_it(world: World, behind: bytes) -> None:
    """A line end too many, as old clients send, or the start of a pipelined request."""
    go = asyncio.Event()

    async def play(envelope: object) -> None:
        await go.wait()
        await world.play_hello(envelope)  # type: ignore[arg-type]

    world.play = play
    raw = await Raw.open(world)
    body = encode(BASE | {"stream": True})
    raw.writer.write(
        b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer %b\r\ncontent-length: %d\r\n\r\n%b%b"
        % (K1.encode(), len(body), body, behind)
    )
    await asyncio.sleep(1.2)
    go.set()
    status, _ = await asyncio.wait_for(raw.head(), 5)
    assert status == 200
    text = await asyncio.wait_for(raw.reader.readuntil(b"[DONE]"), 5)
    assert b"Hel" in text
    await raw.close()


async def test_pipelined_requests_are_answered_in_order(world: World) -> None:
    raw = await Raw.open(world)
    for path in ("/health/live", "/nope", "/health/live"):
        raw.writer.write(f"GET {path} HTTP/1.1\r\nhost: x\r\n\r\n".encode())
    statuses = []
    for _ in range(3):
        status, headers = await asyncio.wait_for(raw.head(), 5)
        await raw.reader.readexactly(int(headers["content-length"]))
        statuses.append(status)
    assert statuses == [200, 404, 200]
    await raw.close()
