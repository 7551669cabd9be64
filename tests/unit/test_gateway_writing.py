"""What a gateway's stream writes, and when: once a turn of the event loop, in order, while its caller reads."""

import asyncio
import time
from collections.abc import Callable

import msgspec
import pytest

from contracts.messages.base import Endpoint
from contracts.messages.frames import EndData
from contracts.messages.request import Reply, RequestEnvelope
from contracts.streaming.pattern import Pattern, text_at
from gateway.streams.stream import KEEP_ALIVE, KEEP_ALIVE_S, MERGE_LAG_MS, GatewayStream, Outbox


class Socket:
    """Of a caller that reads, or does not."""

    def __init__(self) -> None:
        self.written: list[bytes] = []
        self.reads = True
        self.on_writable: Callable[[], None] = lambda: None

    def write(self, data: bytes) -> bool:
        if self.reads:
            self.written.append(data)
        return self.reads

    def read(self) -> None:
        self.reads = True
        self.on_writable()


def stream(bytes_max: int = 1 << 20, endpoint: Endpoint = "chat/completions", lag_ms: int = 0) -> GatewayStream:
    envelope = RequestEnvelope(
        request_id="r",
        tenant="t",
        key_id="k",
        model="m",
        endpoint=endpoint,
        priority="interactive",
        prompt_tokens=1,
        max_output_tokens=1,
        stream=True,
        choices=1,
        admitted_at_ms=0,
        publish_within_ms=0,
        deadline_ms=0,
        reply=Reply(subject="_INBOX.g", stream="r"),
    )
    return GatewayStream(envelope, Outbox(lambda: lag_ms), hold_s=1.0, bytes_max=bytes_max)


def say(stream: GatewayStream, *texts: str) -> bool:
    return all(stream.on_chunk(f'{{"text":"{text}"}}'.encode(), time.monotonic()) for text in texts)


def events(*texts: str) -> bytes:
    return b"".join(f'data: {{"text":"{text}"}}\n\n'.encode() for text in texts)


async def test_what_comes_in_one_turn_is_one_write() -> None:
    one, socket = stream(), Socket()
    say(one, "a", "b")
    await one.ready()
    one.write_to(socket)
    say(one, "c", "d")
    assert socket.written == [events("a", "b")]
    await asyncio.sleep(0)
    say(one, "e")
    await asyncio.sleep(0)
    assert socket.written == [events("a", "b"), events("c", "d"), events("e")]


async def test_what_a_caller_has_yet_to_read_is_kept_and_comes_in_order() -> None:
    one, socket = stream(), Socket()
    one.write_to(socket)
    socket.reads = False
    for text in "abc":
        assert say(one, text)
        await asyncio.sleep(0)
    assert socket.written == [KEEP_ALIVE]
    socket.read()
    assert socket.written == [KEEP_ALIVE, events("a", "b", "c")]
    assert one.blocked_s > 0
    say(one, "d")
    await asyncio.sleep(0)
    assert socket.written[2:] == [events("d")]


async def test_what_is_left_at_the_end_is_taken_once() -> None:
    one, socket = stream(), Socket()
    one.write_to(socket)
    socket.reads = False
    say(one, "a")
    one.on_end(EndData(outcome="completed"))
    await one.over()
    assert one.take() == events("a")
    socket.read()
    await asyncio.sleep(0)
    assert socket.written == [KEEP_ALIVE]


async def test_a_caller_that_reads_nothing_is_too_slow_at_the_bound() -> None:
    one, socket = stream(bytes_max=100), Socket()
    one.write_to(socket)
    socket.reads = False
    assert say(one, "a" * 50)
    assert not say(one, "b" * 50)


@pytest.mark.parametrize("quiet_s", [KEEP_ALIVE_S - 1, KEEP_ALIVE_S + 1])
async def test_a_silent_stream_is_kept_alive(quiet_s: float) -> None:
    one, socket = stream(), Socket()
    say(one, "a")
    one.write_to(socket)
    one.on_tick(time.monotonic() + quiet_s)
    await asyncio.sleep(0)
    assert socket.written[1:] == ([KEEP_ALIVE] if quiet_s > KEEP_ALIVE_S else [])


@pytest.mark.parametrize("endpoint", ["chat/completions", "messages"])
async def test_a_text_is_written_as_its_chunk_would_be(endpoint: Endpoint) -> None:
    chunks = [f'{{"type":"a","text":"{text}","b":"{text}"}}'.encode() for text in ("one", "two", "\u2028")]
    whole, short = stream(endpoint=endpoint), stream(endpoint=endpoint)
    first, second = Socket(), Socket()
    for each, socket in ((whole, first), (short, second)):
        each.on_chunk(chunks[0], 0.0)
        each.write_to(socket)
    for chunk in chunks:
        whole.on_chunk(chunk, 0.0)
        at = text_at(chunk)
        assert at is not None
        short.on_text(Pattern.of(chunk, at), msgspec.Raw(chunk[slice(*at)]), 0.0)
    await asyncio.sleep(0)
    assert first.written == second.written
    assert whole.chunks == short.chunks == 4


async def test_texts_that_wait_become_one_event_while_the_gateway_is_late() -> None:
    one, socket = stream(lag_ms=MERGE_LAG_MS), Socket()
    pattern = Pattern(b'{"text":', b"}")
    one.write_to(socket)

    def text(*texts: str) -> None:
        for each in texts:
            assert one.on_text(pattern, msgspec.Raw(b'"%b"' % each.encode()), 0.0)

    text("a", "b")
    await asyncio.sleep(0)
    assert socket.written == [KEEP_ALIVE, events("a", "b")], "until it is known to be late"
    text("c", '\\"', "", "d")
    say(one, "e")
    text("f", "g")
    socket.reads = False
    await asyncio.sleep(0)
    text("h")
    socket.read()
    assert socket.written[2:] == [events('c\\"d', "e", "fgh")]
    assert one.chunks == 10
