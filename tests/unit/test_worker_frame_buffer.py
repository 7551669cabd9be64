"""Frames on their way out: one message per turn and subject, bounded in size; kept for repair, bounded in bytes."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from contracts.messages.frames import Frame, FramesRequest, ReplyMessage
from contracts.messages.request import Reply, RequestEnvelope
from contracts.streaming.generation import Bounds, Generation
from worker import frame_buffer
from worker.frame_buffer import FRAME_BYTES, KEEP_S, AttemptFrames, FrameBuffer


def request(request_id: str = "r1", *, tenant: str = "t", subject: str = "reply.v1._gw.g") -> RequestEnvelope:
    return RequestEnvelope(
        request_id=request_id,
        tenant=tenant,
        key_id="k",
        model="m",
        endpoint="completions",
        stream=True,
        prompt_tokens=1,
        max_output_tokens=1,
        choices=1,
        priority="batch",
        admitted_at_ms=0,
        publish_within_ms=0,
        deadline_ms=0,
        reply=Reply(subject=subject, stream=request_id),
    )


class Bench:
    """An buffer, its clock, and what it published."""

    def __init__(self, *, max_payload: int = 1 << 20, kept_bytes_max: int = 1 << 20) -> None:
        self.seconds = 0.0
        self.sent: list[tuple[str, ReplyMessage]] = []
        self.sizes: list[int] = []
        self.buffer = FrameBuffer(
            "w-1", self.publish, max_payload=max_payload, now=lambda: self.seconds, kept_bytes_max=kept_bytes_max
        )

    async def publish(self, subject: str, data: bytes) -> None:
        self.sizes.append(len(data))
        self.sent.append((subject, msgspec.json.decode(data, type=ReplyMessage)))

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        task = asyncio.create_task(self.buffer.run())
        yield
        task.cancel()

    def frames(self) -> list[Frame]:
        return [frame for _, message in self.sent for frame in message.frames]

    def kept(self, request_id: str, from_seq: int = 0, *, tenant: str = "t") -> list[int] | None:
        answer = self.buffer.read(tenant, FramesRequest(request_id=request_id, attempt=1, from_seq=from_seq))
        return [frame.seq for frame in answer.frames] if answer.known else None


def chunks(bench: Bench, stream: AttemptFrames, count: int, size: int = 10) -> None:
    for _ in range(count):
        bench.buffer.send(stream, "chunk", b'"' + b"x" * (size - 2) + b'"')


async def test_a_turns_frames_for_one_subject_are_one_message() -> None:
    bench = Bench()
    one, two = bench.buffer.open(request("r1"), 1), bench.buffer.open(request("r2"), 1)
    other = bench.buffer.open(request("r3", subject="reply.v1._gw.h"), 1)
    async with bench.running():
        for stream in (one, two, other):
            bench.buffer.send(stream, "accepted")
            bench.buffer.send(stream, "chunk", b'{"a":1}')
        await bench.buffer.flushed()
        bench.buffer.send(one, "chunk", b'{"a":2}')
        await bench.buffer.flushed()
    subjects = [(subject, len(message.frames)) for subject, message in bench.sent]
    assert subjects == [("reply.v1._gw.g", 4), ("reply.v1._gw.h", 2), ("reply.v1._gw.g", 1)]
    assert [frame.seq for frame in bench.frames() if frame.stream == "r1"] == [0, 1, 2]
    assert {message.worker for _, message in bench.sent} == {"w-1"}
    assert bytes(bench.sent[0][1].frames[1].data) == b'{"a":1}'


async def test_a_message_stays_under_the_limit() -> None:
    bench = Bench(max_payload=20_000)
    stream = bench.buffer.open(request(), 1)
    async with bench.running():
        chunks(bench, stream, 50, size=3000)
        await bench.buffer.flushed()
    assert max(bench.sizes) <= 20_000
    assert [frame.seq for frame in bench.frames()] == list(range(50))


@settings(max_examples=20, deadline=None)
@given(text=st.text(st.sampled_from('ab"\\/\u00e9\u4e2d\U0001f600\n'), min_size=2000, max_size=20_000))
def test_a_large_chunk_is_sent_in_parts_that_join_to_the_same_text(text: str) -> None:
    async def send() -> list[Frame]:
        bench = Bench(max_payload=4000)
        stream = bench.buffer.open(request(), 1)
        async with bench.running():
            bench.buffer.send(stream, "chunk", msgspec.json.encode({"text": text}))
            await bench.buffer.flushed()
        assert max(bench.sizes) <= 4000
        return bench.frames()

    frames = asyncio.run(send())
    if len(frames) == 1:
        whole = bytes(frames[0].data)
    else:
        assert [frame.kind for frame in frames] == ["part"] * (len(frames) - 1) + ["chunk"]
        whole = "".join(msgspec.json.decode(frame.data, type=str) for frame in frames).encode()
    assert msgspec.json.decode(whole) == {"text": text}


def said(text: str, **more: object) -> bytes:
    return msgspec.json.encode({"id": "c", "choices": [{"index": 0, "delta": {"content": text} | more}]})


async def test_of_chunks_that_differ_in_their_text_alone_only_the_text_travels() -> None:
    bench = Bench()
    stream = bench.buffer.open(request(), 1)
    sent = [said("", role="assistant"), said("a"), said(' "b\\'), said("\u2028é"), said("c", n=1), said("d"), said("e")]
    async with bench.running():
        for chunk in sent:
            bench.buffer.send(stream, "chunk", chunk)
        await bench.buffer.flushed()
    assert [frame.kind for frame in bench.frames()] == ["chunk", "chunk", "text", "text", "chunk", "chunk", "text"]
    generation = Generation(1, "w-1", Bounds())
    assert [bytes(generation.assemble(frame) or b"") for frame in bench.frames()] == sent
    assert stream.chunks == len(sent)


async def test_repair_comes_in_pages_and_only_for_the_tenant(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frame_buffer, "PAGE_BYTES_MAX", 4 * (1000 + FRAME_BYTES))
    bench = Bench()
    stream = bench.buffer.open(request(), 1)
    chunks(bench, stream, 10, size=1000)
    answer = bench.buffer.read("t", FramesRequest(request_id="r1", attempt=1, from_seq=2))
    assert answer.known and answer.more
    assert [frame.seq for frame in answer.frames] == [2, 3, 4, 5]
    assert bench.kept("r1", 8) == [8, 9]
    assert bench.kept("r1", 10) == []
    assert bench.kept("r1", tenant="other") is None
    assert bench.kept("r2") is None


async def test_frames_are_kept_a_while_after_the_end() -> None:
    bench = Bench()
    chunks(bench, bench.buffer.open(request(), 1), 2)
    bench.buffer.end(request(), 1)
    bench.seconds = KEEP_S - 1
    bench.buffer.expire()
    assert bench.kept("r1") == [0, 1]
    bench.seconds = KEEP_S + 1
    bench.buffer.expire()
    assert bench.kept("r1") is None
    assert bench.buffer.kept_bytes == 0


async def test_kept_bytes_are_bounded_ended_attempts_first() -> None:
    weight = 1000 + FRAME_BYTES
    bench = Bench(kept_bytes_max=10 * weight)
    chunks(bench, bench.buffer.open(request("r1"), 1), 4, size=1000)
    bench.buffer.end(request("r1"), 1)
    running = bench.buffer.open(request("r2"), 1)
    chunks(bench, running, 8, size=1000)
    assert bench.kept("r1") is None
    assert bench.kept("r2") == list(range(8))
    chunks(bench, running, 8, size=1000)
    assert bench.kept("r2", 0) is None, "a hole is never handed out"
    assert bench.kept("r2", 6) == list(range(6, 16))
    assert bench.buffer.kept_bytes == 10 * weight


async def test_whoever_keeps_most_gives_up_its_oldest_frames() -> None:
    weight = 1000 + FRAME_BYTES
    bench = Bench(kept_bytes_max=10 * weight)
    small, large = bench.buffer.open(request("r1"), 1), bench.buffer.open(request("r2"), 1)
    chunks(bench, small, 2, size=1000)
    chunks(bench, large, 20, size=1000)
    chunks(bench, small, 1, size=1000)
    assert bench.kept("r1") == [0, 1, 2]
    assert bench.kept("r2", 13) == list(range(13, 20))
    assert bench.buffer.kept_bytes == 10 * weight


async def test_nothing_follows_the_end() -> None:
    bench = Bench()
    stream = bench.buffer.open(request("r1"), 1)
    async with bench.running():
        bench.buffer.send(stream, "end")
        bench.buffer.end(request("r1"), 1)
        chunks(bench, stream, 3)
        await bench.buffer.flushed()
    assert [frame.kind for frame in bench.frames()] == ["end"]
    assert bench.kept("r1") == [0] and bench.buffer.kept_bytes == FRAME_BYTES


async def test_nothing_is_sent_after_close() -> None:
    bench = Bench()
    stream = bench.buffer.open(request(), 1)
    async with bench.running():
        bench.buffer.send(stream, "accepted")
        bench.buffer.close()
        bench.buffer.send(stream, "chunk", b"{}")
        await bench.buffer.flushed()
        await asyncio.sleep(0.01)
    assert bench.sent == []


async def test_frames_never_leave_the_reply_subjects() -> None:
    bench = Bench()
    stream = bench.buffer.open(request(subject="work.v1.m.v1.w-2"), 1)
    async with bench.running():
        bench.buffer.send(stream, "accepted")
        await bench.buffer.flushed()
        await asyncio.sleep(0.01)
    assert bench.sent == []
