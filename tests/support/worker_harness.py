"""A scheduler's and a gateway's hands around workers on a real server, and what they hear."""

import asyncio
import contextlib
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import msgspec

from contracts import ids, registry, subjects, topology
from contracts.bus import Bus, Incoming
from contracts.messages.attempts import AttemptEvent
from contracts.messages.base import Epoch
from contracts.messages.control import Announce, CancelAttempt, ControlAnswer, Evict, WorkerHeartbeat
from contracts.messages.frames import Frame, FramesAnswer, FramesRequest, ReplyMessage
from contracts.messages.records import Manifest
from contracts.messages.request import Reply, RequestEnvelope, WorkItem
from contracts.streaming.pattern import Pattern
from tests.support.polling import until
from worker.config import WorkerConfig
from worker.engines import table
from worker.engines.base import Engine
from worker.service import Worker

WAIT_S = 30.0
MODEL = "sim/model 1"
MANIFEST = Manifest(
    name=MODEL, version="v1", engine="simulated", context=1000, default_output_tokens=16, tokenizer_fingerprint="ours"
)


Build = Callable[[Manifest], Engine]


class Harness:
    """A scheduler's and a gateway's hands, and what they hear."""

    def __init__(self, bus: Bus, url: str) -> None:
        self.bus = bus
        self.url = url
        self.reply_inbox = subjects.gateway_reply_inbox(ids.incarnation("g"))
        self.messages: list[ReplyMessage] = []
        self.beats: list[WorkerHeartbeat] = []
        self.epoch = Epoch(1, 1)
        self.workers: list[tuple[Worker, asyncio.Task[None]]] = []
        self._stack = contextlib.AsyncExitStack()

    async def open(self) -> None:
        await topology.ensure(self.bus)
        await registry.put_version(self.bus, MANIFEST)
        await self.bus.subscribe(self.reply_inbox, self._on_reply)
        await self.bus.subscribe(subjects.HEARTBEATS, self._on_beat)

    def _on_reply(self, incoming: Incoming) -> None:
        self.messages.append(msgspec.json.decode(incoming.data, type=ReplyMessage))

    def _on_beat(self, incoming: Incoming) -> None:
        self.beats.append(msgspec.json.decode(incoming.data, type=WorkerHeartbeat))

    async def start(
        self, build: Callable[[Manifest], Engine] | None = None, *, url: str = "", **settings: Any
    ) -> Worker:
        """A worker that is ready."""
        config = WorkerConfig(model=MODEL, **{"sim_itl_ms": 5.0, "sim_slots": 4, **settings})
        bus = await Bus.connect(url or self.url, name="worker")
        self._stack.push_async_callback(bus.close)
        worker = Worker(bus, config, MANIFEST, build or partial(table.build, config))
        self.workers.append((worker, asyncio.create_task(worker.run())))
        await self.ready()
        return worker

    async def ready(self, *but: str) -> str:
        """Name of a worker that is ready and none of ``but``."""

        def found() -> str:
            return next((b.worker for b in reversed(self.beats) if b.state == "ready" and b.worker not in but), "")

        return str(await until(found, "no worker gets ready"))

    async def close(self) -> None:
        while self.workers:
            worker, task = self.workers.pop()
            worker.stop()
            await asyncio.wait_for(task, WAIT_S)
        await self._stack.aclose()

    @property
    def worker(self) -> str:
        return self.beats[-1].worker

    def item(
        self, worker: str, *, stream: bool = True, attempt: int = 1, max_tokens: int = 100, **fields: Any
    ) -> WorkItem:
        simulate = fields.pop("simulate", {})
        request_id = fields.pop("request_id", "") or ids.request_id()
        epoch, version = fields.pop("epoch", self.epoch), fields.pop("version", "v1")
        body = {
            "model": MODEL,
            "messages": [{"role": "user", "content": "one two three"}],
            "max_tokens": max_tokens,
            "stream": stream,
            "simulate": simulate,
        }
        now = time.time_ns() // 1_000_000
        request = RequestEnvelope(
            **{
                "request_id": request_id,
                "tenant": "ten.ant",
                "key_id": "k1",
                "model": MODEL,
                "endpoint": "chat/completions",
                "stream": stream,
                "prompt_tokens": 7,
                "max_output_tokens": max_tokens,
                "choices": 1,
                "priority": "interactive",
                "admitted_at_ms": now,
                "publish_within_ms": 5000,
                "deadline_ms": 60_000,
                "reply": Reply(subject=self.reply_inbox, stream=request_id),
                "tokenizer_fingerprint": "ours",
                "body": msgspec.Raw(msgspec.json.encode(body)),
                **fields,
            }
        )
        return WorkItem(
            epoch=epoch, attempt=attempt, version=version, worker=worker, dispatched_at_ms=now, request=request
        )

    async def dispatch(self, item: WorkItem, *, msg_id: str = "") -> str:
        request_id = item.request.request_id
        await self.bus.jetstream.store(
            subjects.work(MODEL, item.version, item.worker),
            msgspec.json.encode(item),
            msg_id=msg_id or f"{request_id}.{item.attempt}",
        )
        return request_id

    async def send(self, **fields: Any) -> str:
        return await self.dispatch(self.item(fields.pop("worker", "") or self.worker, **fields))

    # What came of it ---------------------------------------------------------------------------------------

    def frames(self, request_id: str) -> list[Frame]:
        return whole([frame for m in self.messages for frame in m.frames if frame.stream == request_id])

    async def closed(self, request_id: str) -> list[Frame]:
        """All frames, once the last one came."""

        def ended() -> list[Frame]:
            frames = self.frames(request_id)
            return frames if frames and frames[-1].kind in ("end", "error") else []

        frames: list[Frame] = await until(ended, "no closing frame")
        assert [frame.seq for frame in frames] == list(range(len(frames)))
        return frames

    async def event(self, request_id: str, attempt: int = 1) -> AttemptEvent:
        """The stored terminal event."""
        deadline = time.monotonic() + WAIT_S
        subject = subjects.attempt(MODEL, request_id, attempt)
        while (stored := await self.bus.jetstream.last(topology.ATTEMPTS, subject)) is None:
            assert time.monotonic() < deadline, "no terminal event"
            await asyncio.sleep(0.01)
        return msgspec.json.decode(stored.data, type=AttemptEvent)

    async def no_event(self, request_id: str) -> bool:
        return await self.bus.jetstream.last(topology.ATTEMPTS, subjects.attempt(MODEL, request_id, 1)) is None

    async def work_left(self) -> int:
        return len([m async for m in self.bus.jetstream.read(topology.WORK, "work.v1.>")])

    async def work_done(self, left: int = 0) -> None:
        """Only ``left`` messages stay in WORK: what may be tried again is the scheduler's to delete."""
        deadline = time.monotonic() + WAIT_S
        while await self.work_left() != left:
            assert time.monotonic() < deadline, "work is not acknowledged"
            await asyncio.sleep(0.02)

    async def tokens(self, request_id: str, count: int) -> None:
        await until(lambda: len(texts(self.frames(request_id))) >= count, "too few tokens")

    async def order(self, worker: str, request: Announce | CancelAttempt | Evict) -> ControlAnswer:
        data = await self.bus.request(subjects.control(worker), msgspec.json.encode(request), timeout_s=10)
        return msgspec.json.decode(data, type=ControlAnswer)

    async def cancel(self, request_id: str, *, epoch: Epoch | None = None) -> str:
        order = CancelAttempt(epoch=epoch or self.epoch, request_id=request_id, attempt=1)
        return (await self.order(self.worker, order)).status

    async def repaired(self, worker: str, request_id: str, tenant: str = "ten.ant") -> list[Frame] | None:
        """All frames that the worker still has, page by page."""
        frames: list[Frame] = []
        while True:
            request = FramesRequest(request_id=request_id, attempt=1, from_seq=len(frames))
            data = await self.bus.request(subjects.frames(worker, tenant), msgspec.json.encode(request))
            answer = msgspec.json.decode(data, type=FramesAnswer)
            if not answer.known:
                return None
            frames += answer.frames
            if not answer.more:
                return whole(frames)


def whole(frames: list[Frame]) -> list[Frame]:
    """With chunks in place of their texts, as readers put them together."""
    pattern, found = None, []
    for frame in frames:
        if frame.kind == "text":
            assert pattern is not None
            data = msgspec.Raw(pattern.filled(bytes(frame.data)))
            found.append(msgspec.structs.replace(frame, kind="chunk", data=data))
            continue
        if frame.text_at is not None:
            pattern = Pattern.of(bytes(frame.data), frame.text_at)
        found.append(frame)
    return found


def texts(frames: list[Frame]) -> list[str]:
    """Generated text of each chunk that has some."""
    found = []
    for frame in frames:
        if frame.kind == "chunk":
            for choice in msgspec.json.decode(frame.data).get("choices", ()):
                if text := choice["delta"].get("content"):
                    found.append(text)
    return found


def words(count: int) -> list[str]:
    return [f"w{number} " for number in range(count)]
