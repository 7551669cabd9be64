"""HTTP manners of the edge that no client library shows: slow heads, idle connections, pipelining, stray bytes."""

import asyncio
import gzip
import json
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest

from gateway.http import server
from tests.support.gateway_world import BASE, CHAT, K1, K2, Raw, World, encode, serve


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


@pytest.mark.parametrize("framing", ["content-length: {size}", "transfer-encoding: chunked"])
@pytest.mark.parametrize("together", [True, False])
async def test_an_offer_to_upgrade_does_not_cost_the_body(world: World, framing: str, together: bool) -> None:
    """As Java's client sends every first request over plain HTTP."""
    raw = await Raw.open(world)
    body = encode(BASE)
    offer = "connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAEAAEAA"
    sent = body if "length" in framing else b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body)
    for _ in range(2):
        head = f"POST {CHAT} HTTP/1.1\r\n{offer}\r\n{framing.format(size=len(body))}"
        if together:
            await raw.send(head, sent)
        else:
            await raw.send(head)
            await asyncio.sleep(0.05)
            raw.writer.write(sent)
        status, headers = await asyncio.wait_for(raw.head(), 5)
        await raw.reader.readexactly(int(headers["content-length"]))
        assert status == 200
    await raw.close()


@pytest.mark.parametrize(
    "head",
    [
        b"GET /v1/models HTTP/1.1\r\nhost: x\r\nx: " + b"y" * 70_000 + b"\r\n\r\n",
        b"GET /v1/models HTTP/1.1\r\nhost: x\r\n" + b"x: y\r\n" * 12_000 + b"\r\n",
        b"GET /v1/models/" + b"a" * 70_000 + b" HTTP/1.1\r\nhost: x\r\n\r\n",
    ],
)
async def test_a_large_head_is_431_however_it_arrives(world: World, head: bytes) -> None:
    for pieces in ([head], [head[at : at + 9000] for at in range(0, len(head), 9000)]):
        raw = await Raw.open(world)
        for piece in pieces:
            raw.writer.write(piece)
            await asyncio.sleep(0.001)
        status, headers = await asyncio.wait_for(raw.head(), 5)
        assert (status, len(headers["x-request-id"])) == (431, 36)
        await raw.close()


@pytest.mark.parametrize("name", ["x-headrace-deadline-ms", "x-request-id"])
async def test_white_space_behind_a_headers_value_is_not_part_of_it(world: World, name: str) -> None:
    raw = await Raw.open(world)
    body = encode(BASE)
    await raw.send(f"POST {CHAT} HTTP/1.1\r\n{name}: 5000 \t\r\ncontent-length: {len(body)}", body)
    status, headers = await asyncio.wait_for(raw.head(), 5)
    assert status == 200
    assert world.admissions[0].deadline_ms == (5000 if "deadline" in name else None)
    assert headers.get("x-client-request-id") == (None if "deadline" in name else "5000")
    await raw.close()


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ([("authorization", f"Bearer {K1}"), ("x-api-key", K1)], 200),
        ([("authorization", f"Bearer {K1}"), ("authorization", f"bearer {K1}")], 200),
        ([("authorization", f"Bearer {K1}"), ("x-api-key", "")], 200),
        ([("authorization", ""), ("x-api-key", K1)], 200),
        ([("authorization", "Bearer"), ("x-api-key", K1)], 401),
        ([("authorization", f"Bearer {K1}"), ("x-api-key", K2)], 401),
        ([("authorization", f"Bearer {K1}"), ("authorization", f"Bearer {K2}")], 401),
        ([("authorization", f"Basic {K1}"), ("x-api-key", K1)], 401),
        ([("x-api-key", ""), ("authorization", "")], 401),
    ],
)
async def test_credentials_may_come_twice_but_not_differ(
    world: World, headers: list[tuple[str, str]], status: int
) -> None:
    async with httpx.AsyncClient(base_url=world.url) as client:
        assert (await client.get("/v1/models", headers=headers)).status_code == status


async def test_c24_gzip_members_and_a_byte_order_mark_are_taken(world: World) -> None:
    body, bom = encode(BASE), b"\xef\xbb\xbf"
    whole = gzip.compress(body)
    for data, coding, status in (
        (gzip.compress(body[:9]) + gzip.compress(b"") + gzip.compress(body[9:]), "gzip", 200),
        (whole, "gzip, identity", 200),
        (gzip.compress(bom + body), "gzip", 200),
        (bom + body, "", 200),
        (whole + b"x", "gzip", 400),
        (whole + whole[:-5], "gzip", 400),
        (whole[:5], "gzip", 400),
        (b"", "gzip", 400),
        (bom, "", 400),
        (gzip.compress(whole), "gzip, gzip", 415),
    ):
        response = await world.client.post(CHAT, content=data, headers={"content-encoding": coding})
        assert response.status_code == status, (data, coding)
    twice = [("content-encoding", "gzip"), ("content-encoding", "identity")]
    assert (await world.client.post(CHAT, content=whole, headers=twice)).status_code == 200
