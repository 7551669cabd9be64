"""A real gateway over a real NATS server, with a scripted scheduler and worker: what a test plays against it."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import msgspec

from contracts import subjects, topology
from contracts.bus import Bus, Incoming
from contracts.keys import Peppers
from contracts.messages.admission import AdmissionAnswer, AdmissionRequest
from contracts.messages.base import Epoch
from contracts.messages.control import CancelAnswer, CancelRequest, StatusAnswer, StreamOwnerHeartbeat, WorkerHeartbeat
from contracts.messages.frames import (
    AcceptedData,
    EndData,
    ErrorData,
    Frame,
    FrameKind,
    FramesAnswer,
    FramesRequest,
    ReplyMessage,
)
from contracts.messages.queues import QueueAnswer
from contracts.messages.records import KeyRecord, Manifest, ModelRecord, TenantRecord
from contracts.messages.request import RequestEnvelope
from contracts.messages.usage import UsageAnswer, UsageQuery
from gateway.config import GatewayConfig
from gateway.service import Gateway
from scheduler.administration import AdminService
from tests.support.polling import until

PEPPER = "a pepper for tests that is long enough"
K1, K2 = "hr_key-of-the-first-tenant", "hr_key-of-the-second-tenant"
ADMIN = "hr_key-of-an-operator"
MODEL = "m"
WORKER = "w-1"
EPOCH = Epoch(1, 1)
CONTEXT = 4096
BASE: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}]}
CHAT = "/v1/chat/completions"

encode = msgspec.json.encode
decode = msgspec.json.decode

Content = tuple[FrameKind, object]
ACCEPTED: Content = ("accepted", AcceptedData(version="1"))


def chunk(text: str, **fields: object) -> dict[str, object]:
    return {
        "id": "chatcmpl-1",
        "object": "chat.completion.chunk",
        "choices": [{"index": 0, "delta": {"content": text}}],
        **fields,
    }


def ended(tokens: int = 3) -> EndData:
    return EndData(outcome="completed", finish_reason="stop", prompt_tokens=5, completion_tokens=tokens)


def answer(*texts: str) -> list[Content]:
    """The frames of a whole streamed answer."""
    return [ACCEPTED, *(("chunk", chunk(text)) for text in texts), ("end", ended(len(texts)))]


def digest(secret: str) -> str:
    return Peppers.parse(PEPPER).hashes(secret.encode())[0]


class World:
    """Scheduler, worker and ledger in one; ``play`` answers each stored request."""

    def __init__(self, bus: Bus, gateway: Gateway, url: str) -> None:
        self.bus = bus
        self.gateway = gateway
        self.url = url
        self.client = httpx.AsyncClient(
            base_url=url, headers={"authorization": f"Bearer {K1}"}, timeout=httpx.Timeout(30)
        )
        self.admin = httpx.AsyncClient(headers={"authorization": f"Bearer {ADMIN}"}, timeout=httpx.Timeout(30))
        """Of the admin address; its key works once a test has put it."""
        self.play: Callable[[RequestEnvelope], Awaitable[object]] = self.play_hello
        self.decide: Callable[[AdmissionRequest], AdmissionAnswer | None] = lambda request: admitted()
        self.admissions: list[AdmissionRequest] = []
        self.stored: list[RequestEnvelope] = []
        self.cancelled: list[CancelRequest] = []
        self.asked_frames: list[FramesRequest] = []
        self.beats: list[StreamOwnerHeartbeat] = []
        self.usage_queries: list[UsageQuery] = []
        self.usage_subjects: list[str] = []
        self.usage_answer = UsageAnswer()
        self.kept: dict[str, list[Frame]] = {}
        self.status = StatusAnswer(state="running", attempt=1, worker=WORKER)
        self.undurable = 0
        """Cancels that are answered before one is durable."""
        self.worker_state = "ready"
        self.playing: set[asyncio.Task[object]] = set()

    async def start(self) -> None:
        subscribe = self.bus.subscribe
        await AdminService(self.bus, Peppers.parse(self.gateway.config.pepper)).start()
        await subscribe("admit.v1.*", self._on_admit)
        await subscribe("req.v1.>", self._on_request)
        await subscribe("cancel.v1.>", self._on_cancel)
        await subscribe("status.v1.>", self._on_status)
        await subscribe(subjects.frames_of(WORKER), self._on_frames)
        await subscribe("hb.v1.stream-owner.>", self._on_beat)
        await subscribe("queues.v1.*", self._on_queues)
        await subscribe(subjects.USAGE_QUERIES, self._on_usage)

    async def close(self) -> None:
        for task in self.playing:
            task.cancel()
        await asyncio.gather(*self.playing, return_exceptions=True)
        await self.client.aclose()
        await self.admin.aclose()

    # What the gateway asks ------------------------------------------------------------------------------------

    async def _on_admit(self, message: Incoming) -> None:
        request = decode(message.data, type=AdmissionRequest)
        self.admissions.append(request)
        if (decision := self.decide(request)) is not None:
            message.respond(encode(decision))

    def _on_request(self, message: Incoming) -> None:
        envelope = decode(message.data, type=RequestEnvelope)
        self.stored.append(envelope)
        task: asyncio.Task[object] = asyncio.ensure_future(self.play(envelope))
        self.playing.add(task)
        task.add_done_callback(self.playing.discard)

    async def _on_cancel(self, message: Incoming) -> None:
        self.cancelled.append(decode(message.data, type=CancelRequest))
        durable = self.undurable == 0
        self.undurable = max(0, self.undurable - 1)
        message.respond(encode(CancelAnswer(durable=durable)))

    async def _on_status(self, message: Incoming) -> None:
        message.respond(encode(self.status))

    async def _on_frames(self, message: Incoming) -> None:
        request = decode(message.data, type=FramesRequest)
        self.asked_frames.append(request)
        kept = [frame for frame in self.kept[request.request_id] if frame.seq >= request.from_seq]
        message.respond(encode(FramesAnswer(known=True, frames=kept)))

    def _on_beat(self, message: Incoming) -> None:
        self.beats.append(decode(message.data, type=StreamOwnerHeartbeat))

    async def _on_queues(self, message: Incoming) -> None:
        model = subjects.decode(message.subject.rsplit(".", 1)[1])
        worker = WorkerHeartbeat(worker=WORKER, model=model, version="1", state=self.worker_state)  # type: ignore[arg-type]
        answered = QueueAnswer(
            model=model,
            owner="s-1",
            epoch=Epoch(1, 1),
            waiting=0,
            running=0,
            reserved_tokens=0,
            workers=[worker],
            tenants=[],
        )
        message.respond(encode(answered))

    async def _on_usage(self, message: Incoming) -> None:
        self.usage_subjects.append(message.subject)
        self.usage_queries.append(decode(message.data, type=UsageQuery))
        message.respond(encode(self.usage_answer))

    # What a worker does ---------------------------------------------------------------------------------------

    async def play_hello(self, envelope: RequestEnvelope) -> None:
        if envelope.stream:
            await self.send(envelope, answer("Hel", "lo"))
        else:
            await self.send(envelope, [ACCEPTED, ("chunk", {"id": "chatcmpl-1"}), ("end", ended())])

    async def send(
        self,
        envelope: RequestEnvelope,
        contents: Sequence[Content],
        *,
        first_seq: int = 0,
        attempt: int = 1,
        worker: str = WORKER,
        lose: Sequence[int] = (),
    ) -> None:
        """Send frames; those whose numbers are in ``lose`` get lost on the way but are kept."""
        for offset, (kind, data) in enumerate(contents):
            seq = first_seq + offset if worker else -1
            frame = Frame(stream=envelope.reply.stream, attempt=attempt, seq=seq, kind=kind)
            if data is not None:
                frame = msgspec.structs.replace(frame, data=msgspec.Raw(encode(data)))
            self.kept.setdefault(envelope.request_id, []).append(frame)
            if seq not in lose:
                message = ReplyMessage(worker=worker, epoch=EPOCH, frames=[frame])
                await self.bus.publish(envelope.reply.subject, encode(message))

    async def fail(self, envelope: RequestEnvelope, error: ErrorData, *, attempt: int = 1) -> None:
        """The scheduler's word that it is over."""
        await self.send(envelope, [("error", error)], worker="", attempt=attempt)

    # Records --------------------------------------------------------------------------------------------------

    async def put_tenant(self, record: TenantRecord) -> None:
        await self.bus.kv.put(topology.TENANTS, subjects.encode(record.name), encode(record))

    async def put_key(self, secret: str, record: KeyRecord) -> None:
        record = msgspec.structs.replace(record, hash=digest(secret))
        await self.bus.kv.put(topology.KEYS, f"{record.id}.{record.hash}", encode(record))

    async def put_model(self, manifest: Manifest) -> None:
        """Its only version."""
        model, record = subjects.encode(manifest.name), ModelRecord(name=manifest.name, stable=manifest.version)
        await self.bus.kv.put(topology.VERSIONS, f"{model}.{subjects.encode(manifest.version)}", encode(manifest))
        await self.bus.kv.put(topology.MODELS, model, encode(record))

    async def status_of(self, path: str, **options: Any) -> int:
        return (await self.client.get(path, **options)).status_code

    # What callers do ------------------------------------------------------------------------------------------

    async def post(self, body: object, path: str = CHAT, **options: Any) -> httpx.Response:
        return await self.client.post(path, json=body, **options)

    async def body_of(self, envelope: RequestEnvelope) -> dict[str, Any]:
        """What the engine would get."""
        if envelope.body_bytes:
            subject = subjects.body(envelope.model, envelope.tenant, envelope.request_id)
            size, digest = envelope.body_bytes, envelope.body_digest
            data = await self.bus.objects.get(topology.BODIES, subject, size=size, digest=digest)
            assert data is not None
            return decode(data)
        return decode(envelope.body)


def admitted(**fields: Any) -> AdmissionAnswer:
    return AdmissionAnswer(
        admitted=True, epoch=Epoch(1, 1), **{"publish_within_ms": 2**45, "deadline_ms": 2**45, **fields}
    )


def simulated(name: str = MODEL, **fields: Any) -> Manifest:
    given = {"version": "1", "engine": "simulated", "context": CONTEXT, "default_output_tokens": 16, **fields}
    return Manifest(name=name, **given)


def error_of(response: httpx.Response) -> dict[str, Any]:
    """The error of an answer that must be OpenAI's error body."""
    assert response.headers["content-type"] == "application/json"
    assert response.headers["x-request-id"]
    body = response.json()
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert isinstance(body["error"]["message"], str)
    assert isinstance(body["error"]["type"], str)
    return body["error"]


def events_of(text: str) -> list[Any]:
    """Data of server-sent events, parsed strictly: blocks have one data line, and nothing but comments beside."""
    events: list[Any] = []
    assert text.endswith("\n\n")
    for block in text[:-2].split("\n\n"):
        lines = [line for line in block.split("\n") if not line.startswith(":")]
        assert len(lines) == 1, block
        assert lines[0].startswith("data: "), block
        data = lines[0].removeprefix("data: ")
        events.append(data if data == "[DONE]" else json.loads(data))
    return events


def text_of(events: Sequence[Any]) -> str:
    return "".join(
        choice["delta"].get("content", "")
        for event in events
        if event != "[DONE]"
        for choice in event.get("choices", ())
    )


@asynccontextmanager
async def serve(nats_url: str, directory: Path, **settings: Any) -> AsyncIterator[World]:
    """Two tenants, T1 with key K1 and T2 with K2, a simulated model ``m``, and one gateway."""
    bus = await Bus.connect(nats_url, name="test")
    await topology.ensure(bus)
    gateway_bus = await Bus.connect(nats_url, name="gateway")
    addresses = {"listen": ("127.0.0.1:0",), "admin_listen": ("127.0.0.1:0",)}
    # What the test does is no load of the gateway.
    own: dict[str, Any] = {"pepper": PEPPER, "nats_url": nats_url, "shed_lag_s": 60}
    config = GatewayConfig(**(own | addresses | settings))
    gateway = Gateway(config, gateway_bus)
    world = World(bus, gateway, "")
    await world.start()
    for tenant, secret in (("T1", K1), ("T2", K2)):
        await world.put_tenant(TenantRecord(name=tenant))
        await world.put_key(secret, KeyRecord(id=f"key-{tenant}", tenant=tenant))
    await world.put_model(simulated())
    running = asyncio.create_task(gateway.run())
    try:
        await until(lambda: gateway.addresses or running.done())
        world.url = f"http://{gateway.addresses[0]}"
        world.client.base_url = httpx.URL(world.url)
        world.admin.base_url = httpx.URL(f"http://{gateway.admin_addresses[0]}")
        yield world
    finally:
        gateway.stop()
        await world.close()
        await asyncio.wait_for(running, 40)
        await gateway_bus.close()
        await bus.close()


class Raw:
    """A plain connection, for what no client library would send."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    @classmethod
    async def open(cls, world: World, **options: Any) -> "Raw":
        host, port = world.gateway.addresses[0].rsplit(":", 1)
        return cls(*await asyncio.open_connection(host, int(port), **options))

    async def send(self, head: str, *pieces: bytes, key: str = K1) -> None:
        """A request: first lines without the key, then the body's bytes as they are."""
        authorization = f"authorization: Bearer {key}\r\n" if key else ""
        self.writer.write(f"{head}\r\nhost: x\r\n{authorization}\r\n".encode("latin-1"))
        for piece in pieces:
            self.writer.write(piece)
        await self.writer.drain()

    async def post(self, body: object, *, key: str = K1, path: str = CHAT) -> None:
        data = encode(body)
        await self.send(f"POST {path} HTTP/1.1\r\ncontent-length: {len(data)}", data, key=key)

    async def head(self) -> tuple[int, dict[str, str]]:
        """Status and headers of the answer."""
        lines = (await self.reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        headers = dict(line.split(": ", 1) for line in lines[1:] if line)
        return int(lines[0].split()[1]), headers

    async def close(self) -> None:
        self.writer.close()
        with contextlib.suppress(OSError):
            await self.writer.wait_closed()
