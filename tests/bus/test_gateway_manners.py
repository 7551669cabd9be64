"""HTTP manners of the edge that no client library shows: slow heads, idle connections, pipelining, stray bytes."""

import asyncio
import contextlib
import gzip
import json
import socket
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest

from contracts.messages.frames import ErrorData
from contracts.messages.request import RequestEnvelope
from gateway.config import GatewayConfig
from gateway.http import body, connection
from tests.support.gateway_world import BASE, CHAT, K1, K2, Raw, World, chunk, encode, events_of, serve, text_of
from tests.support.polling import metric, until


@pytest.fixture
async def world(nats_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[World]:
    monkeypatch.setattr(connection, "HEAD_S_MAX", 0.5)
    monkeypatch.setattr(connection, "KEEP_ALIVE_S", 2)
    monkeypatch.setattr(connection, "WRITE_S_MAX", 1)
    monkeypatch.setattr(connection, "LINGER_S", 0.2)
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


async def test_empty_lines_byte_by_byte_keep_no_connection(world: World) -> None:
    raw = await Raw.open(world)

    async def drip() -> None:
        while True:
            for byte in (b"\r", b"\n"):
                raw.writer.write(byte)
                await asyncio.sleep(0.1)

    dripping = asyncio.create_task(drip())
    with contextlib.suppress(ConnectionResetError):
        assert await asyncio.wait_for(raw.reader.read(), 10) == b""
    dripping.cancel()
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


async def test_who_reads_a_refusal_to_its_end_has_it_at_once(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """What still comes is read for a while, but the answer's end is the end of what is sent."""
    monkeypatch.setattr(connection, "LINGER_S", 60)
    raw = await Raw.open(world)
    raw.writer.write(b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 100000\r\n\r\n")
    assert await error(raw) == (401, "invalid_api_key")
    assert await asyncio.wait_for(raw.reader.read(), 5) == b""
    raw.writer.write(b"x" * 1000)
    await raw.writer.drain()
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
        (whole + gzip.compress(b"") * 100, "gzip", 400),
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


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("headers", ["", "\r\nconnection: keep-alive"])
async def test_d04_an_answer_to_http_1_0_is_not_chunked(world: World, stream: bool, headers: str) -> None:
    raw = await Raw.open(world)
    body = encode(BASE | {"stream": stream})
    await raw.send(f"POST {CHAT} HTTP/1.0{headers}\r\ncontent-length: {len(body)}", body)
    status, headers_ = await raw.head()
    text = (await asyncio.wait_for(raw.reader.read(), 5)).decode()  # to the end of the connection
    assert status == 200 and "transfer-encoding" not in headers_ and headers_["connection"] == "close"
    if stream:
        assert text_of(events_of(text)) == "Hello"
    else:
        assert len(text) == int(headers_["content-length"]) and json.loads(text)
    await raw.close()


async def test_d04_an_answer_to_http_1_0_that_fails_says_so(world: World) -> None:
    async def play(envelope: RequestEnvelope) -> None:
        failure = ErrorData(code="engine_error", message="No.")
        await world.send(envelope, [("accepted", None), ("chunk", chunk("a")), ("error", failure)])

    world.play = play
    raw = await Raw.open(world)
    body = encode(BASE | {"stream": True})
    await raw.send(f"POST {CHAT} HTTP/1.0\r\ncontent-length: {len(body)}", body)
    await raw.head()
    events = events_of((await asyncio.wait_for(raw.reader.read(), 5)).decode())
    assert "[DONE]" not in events and events[-1]["error"]["code"] == "engine_error"
    await raw.close()


BEHIND = [
    pytest.param(b"GET /v1/models HTTP/1.1\r\nhost: x\r\n\r\n", id="small"),
    pytest.param(b"GET /v1/models HTTP/1.1\r\n\r\n", id="no host"),
    pytest.param(b"POST /v1/models HTTP/1.1\r\nhost: x\r\ncontent-length: 300000\r\n\r\n" + b"x" * 300_000, id="large"),
    pytest.param(None, id="the same"),
]


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("behind", BEHIND)
async def test_d21_a_request_behind_does_not_hide_the_hang_up(world: World, stream: bool, behind: bytes | None) -> None:
    async def play(envelope: RequestEnvelope) -> None:
        await world.send(envelope, [("accepted", None), ("chunk", chunk("a"))])

    world.play = play
    raw = await Raw.open(world)
    await raw.post(BASE | {"stream": stream})
    await until(lambda: world.stored, "the request is stored")
    if behind is None:
        await raw.post(BASE | {"stream": stream})
    else:
        raw.writer.write(behind)
        await raw.writer.drain()
    await asyncio.sleep(0.1)
    await raw.close()
    await until(lambda: world.cancelled, "the request is cancelled")
    assert [request.request_id for request in world.cancelled] == [world.stored[0].request_id]
    assert len(world.stored) == 1


async def test_what_is_pipelined_beyond_the_bound_is_not_kept(world: World) -> None:
    """The answer under way still comes; then the connection closes."""
    go = asyncio.Event()

    async def play(envelope: RequestEnvelope) -> None:
        await go.wait()
        await world.play_hello(envelope)

    world.play = play
    raw = await Raw.open(world)
    await raw.post(BASE)
    await until(lambda: world.stored, "the request is stored")
    raw.writer.write(b"GET /health/live HTTP/1.1\r\nhost: x\r\n\r\n" * 6000)  # 252 KB
    await raw.writer.drain()
    go.set()
    text = await asyncio.wait_for(raw.reader.read(), 5)
    assert text.count(b"HTTP/1.1 ") == 1 and b"HTTP/1.1 200" in text
    assert len(world.stored) == 1
    await raw.close()


async def test_at_most_16_requests_come_in_one_breath(world: World) -> None:
    raw = await Raw.open(world)
    raw.writer.write(b"GET /health/live HTTP/1.1\r\nhost: x\r\n\r\n" * 1000)
    text = await asyncio.wait_for(raw.reader.read(), 5)
    assert text.count(b"HTTP/1.1 200") == connection.PIPELINE_MAX
    await raw.close()


@pytest.mark.parametrize("asks", ["a stream", "many answers"])
async def test_a_caller_that_does_not_read_is_let_go(world: World, asks: str) -> None:
    async def play(envelope: RequestEnvelope) -> None:
        for seq in range(30):
            await world.send(envelope, [("chunk", chunk("x" * 400_000))], first_seq=seq)

    world.play = play
    before = metric("headrace_connections")
    deaf = socket.socket()
    deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    deaf.setblocking(False)
    host, port = world.gateway.addresses[0].rsplit(":", 1)
    await asyncio.get_running_loop().sock_connect(deaf, (host, int(port)))
    await until(lambda: metric("headrace_connections") == before + 1, "it is connected")
    if asks == "a stream":
        body = encode(BASE | {"stream": True})
        request = (
            f"POST {CHAT} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {K1}\r\ncontent-length: {len(body)}\r\n\r\n"
        )
        deaf.send(request.encode() + body)
    while metric("headrace_connections") > before:
        if asks == "many answers":
            with contextlib.suppress(OSError):
                deaf.send(b"GET /openapi.json HTTP/1.1\r\nhost: x\r\n\r\n")
        await asyncio.sleep(0.01)
    deaf.close()


async def test_connections_are_bounded_in_all_and_by_address(nats_url: str, tmp_path: Path) -> None:
    """Beyond the bound of all the one that has waited the longest goes; one that is served stays."""
    async with serve(nats_url, tmp_path, connections_max=4, connections_per_address_max=3) as world:
        go = asyncio.Event()

        async def play(envelope: RequestEnvelope) -> None:
            await go.wait()
            await world.play_hello(envelope)

        world.play = play
        refused = metric("headrace_connections_refused_total", bound="address")
        served = await Raw.open(world, local_addr=("127.0.0.2", 0))
        await served.post(BASE)
        await until(lambda: world.stored, "the request is stored")
        silent = [await Raw.open(world, local_addr=("127.0.0.3", 0)) for _ in range(3)]
        one_more = await Raw.open(world, local_addr=("127.0.0.3", 0))
        assert await error(one_more) == (503, "unavailable")
        assert metric("headrace_connections_refused_total", bound="address") == refused + 1
        other = await Raw.open(world, local_addr=("127.0.0.4", 0))
        assert await asyncio.wait_for(silent[0].reader.read(), 5) == b""
        await other.send("GET /health/live HTTP/1.1")
        assert (await other.head())[0] == 200
        await silent[1].send("GET /health/live HTTP/1.1")
        assert (await silent[1].head())[0] == 200
        go.set()
        assert (await served.head())[0] == 200
        for raw in (served, *silent, one_more, other):
            await raw.close()


async def test_a_trailer_is_refused_and_never_a_header(world: World) -> None:
    key = f"authorization: Bearer {K1}\r\n".encode()
    body = b"2\r\n{}\r\n0\r\n" + key + b"\r\n"
    for path, given, expected in ((CHAT, "", 401), (CHAT, K1, 400), ("/v1/models", "", 401), ("/v1/models", K2, 405)):
        raw = await Raw.open(world)
        method = "POST" if path == CHAT or given else "GET"
        await raw.send(f"{method} {path} HTTP/1.1\r\ntransfer-encoding: chunked", body, key=given)
        raw.writer.write(b"GET /v1/models HTTP/1.1\r\nhost: x\r\n\r\n")
        text = await asyncio.wait_for(raw.reader.read(), 5)
        assert text.startswith(b"HTTP/1.1 %d" % expected), text
        assert b"HTTP/1.1 200" not in text
        await raw.close()
    assert world.stored == []


async def test_the_tail_of_a_body_is_no_request_however_it_is_cut(world: World) -> None:
    """A proxy's connection: one caller's request holds another in its body, and the next caller's has a key."""
    offer = b"connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAEAAEAA\r\n"
    body = b"a\r\nupgrade: x\r\n\r\nGET /v1/models HTTP/1.1\r\nhost: x\r\nx: "
    first = b"POST %b HTTP/1.1\r\nhost: x\r\n%bcontent-length: %d\r\n\r\n" % (CHAT.encode(), offer, len(body))
    second = b"GET /health/live HTTP/1.1\r\nhost: x\r\nauthorization: Bearer %b\r\n\r\n" % K1.encode()
    data = first + body
    for cut in range(len(first) - 5, len(first) + 30):
        raw = await Raw.open(world)
        raw.writer.write(data[:cut])
        await asyncio.sleep(0.005)
        raw.writer.write(data[cut:])
        statuses = []
        for request in (b"", second):
            raw.writer.write(request)
            status, headers = await asyncio.wait_for(raw.head(), 5)
            await raw.reader.readexactly(int(headers["content-length"]))
            statuses.append(status)
            if headers.get("connection") == "close":
                break
        assert statuses in ([401, 200], [401]), (cut, statuses)
        await raw.close()


@pytest.mark.parametrize(("share", "status"), [(4, 429), (1, 529)])
async def test_bodies_on_their_way_in_are_bounded_by_tenant_and_in_all(
    world: World, monkeypatch: pytest.MonkeyPatch, share: int, status: int
) -> None:
    """Bodies that never come whole, or come as gzip that grows; what is let go is free again."""
    monkeypatch.setattr(body, "RECEIVED_BYTES_MAX", 400_000)
    monkeypatch.setattr(body, "TENANT_SHARE", share)
    many = []
    for number in range(4):
        raw = await Raw.open(world)
        key = K2 if share == 1 and number % 2 else K1
        await raw.send(f"POST {CHAT} HTTP/1.1\r\ncontent-length: 400000", b"x" * (100_000 // share), key=key)
        many.append(raw)
    await until(lambda: body._Received.total == 400_000 // share, "all of it came")
    last = await Raw.open(world)
    await last.send(f"POST {CHAT} HTTP/1.1\r\ncontent-length: 400000", b"x" * 1000)
    got, headers = await asyncio.wait_for(last.head(), 5)
    assert (got, headers["retry-after"]) == (status, "1")
    other = await world.client.post(CHAT, json=BASE, headers={"authorization": f"Bearer {K2}"})
    assert other.status_code == (200 if share > 1 else 529)
    for raw in (*many, last):
        await raw.close()
    await until(lambda: not body._Received.total and not body._Received.by_tenant, "nothing is held")
    assert (await world.post(BASE)).status_code == 200
    inflated = await world.client.post(
        CHAT, content=gzip.compress(b" " * 500_000 + encode(BASE)), headers={"content-encoding": "gzip"}
    )
    assert inflated.status_code == 429


async def test_a_body_is_asked_for_only_when_it_is_wanted(world: World) -> None:
    data = encode(BASE)
    raw = await Raw.open(world)
    for key, answers in ((K1, [100, 200]), ("bad", [401])):
        await raw.send(f"POST {CHAT} HTTP/1.1\r\nexpect: 100-continue\r\ncontent-length: {len(data)}", key=key)
        for expected in answers:
            status, headers = await asyncio.wait_for(raw.head(), 5)
            assert status == expected
            if status == 100:
                raw.writer.write(data)
            else:
                await raw.reader.readexactly(int(headers["content-length"]))
    assert headers["connection"] == "close"  # Nobody can know whether the body still comes.
    await raw.close()


def test_what_operators_alone_should_reach_is_on_loopback() -> None:
    config = GatewayConfig(pepper="x" * 32)
    assert config.metrics_host == "127.0.0.1"
    assert [address.rpartition(":")[0] for address in config.admin_listen] == ["127.0.0.1"]
    assert "METRICS_HOST" not in (Path(__file__).parents[2] / "compose/deploy/Dockerfile").read_text()
