"""Scheduler processes within a test, on a real bus, and what the others of the system would do to them."""

import asyncio
import contextlib
import time
from collections.abc import Callable
from typing import Any

import msgspec

from contracts import ids, registry, subjects, topology
from contracts.bus import Bus, BusError, Incoming, PullConsumer
from contracts.messages.admission import AdmissionAnswer, AdmissionRequest
from contracts.messages.attempts import AttemptEvent
from contracts.messages.base import NOTHING, Epoch
from contracts.messages.control import (
    Announce,
    CancelAnswer,
    CancelAttempt,
    CancelReason,
    CancelRequest,
    ControlAnswer,
    ControlRequest,
    Evict,
    Progress,
    StatusAnswer,
    StatusRequest,
    WorkerHeartbeat,
)
from contracts.messages.frames import Frame, ReplyMessage
from contracts.messages.queues import QueueAnswer
from contracts.messages.records import Manifest
from contracts.messages.request import Reply, RequestEnvelope, WorkItem
from scheduler.config import SchedulerConfig
from scheduler.service import Scheduler
from scheduler.term import Term
from tests.support.polling import until

MODEL = "m/1"
TENANT = "acme"
MANIFEST = Manifest(name=MODEL, version="v1", engine="simulated", context=1000, default_output_tokens=16)
BODY = b'{"messages":[{"role":"user","content":"hello"}]}'
LOST_AFTER_S = 1.0
PEPPER = "a pepper for tests that is long enough"
QUICK: dict[str, Any] = {"lost_after_s": LOST_AFTER_S, "heartbeat_s": 0.1, "lease_ttl_s": 1, "lease_renew_s": 0.2}
LONG_LEASE: dict[str, Any] = {**QUICK, "lease_ttl_s": 20_000, "lease_renew_s": 10_000.0}
"""Whoever is deposed does not notice: renewals come at common instants, hours apart."""


class Worker:
    """What a scheduler sees of a worker; it runs nothing by itself."""

    def __init__(self, bus: Bus, name: str, slots: int, version: str = "v1") -> None:
        self.name = name
        self.version = version
        self.slots = slots
        self.epoch = Epoch()
        self.deaf = False
        """It acknowledges nothing."""
        self.in_flight: dict[tuple[str, int], Progress] = {}
        self.orders: list[ControlRequest] = []
        self._bus = bus
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Sends heartbeats from now on, and obeys."""
        await self._bus.subscribe(subjects.control(self.name), self._on_control)
        self._tasks.append(asyncio.create_task(self._send_heartbeats()))

    async def stop(self) -> None:
        """It dies."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def pull(self) -> None:
        """Take what WORK holds for it, and die before it tells of that."""

        def take(_: Incoming) -> None:
            taken.set()

        taken = asyncio.Event()
        consumer = PullConsumer(
            self._bus.jetstream,
            topology.WORK,
            f"w-{self.name}",
            subjects.work(MODEL, self.version, self.name),
            take,
            ack_wait_s=60,
            credit=lambda: 1,
        )
        await consumer.start()
        await taken.wait()
        await consumer.close()

    def heartbeat(self) -> WorkerHeartbeat:
        return WorkerHeartbeat(
            worker=self.name,
            model=MODEL,
            version=self.version,
            state="ready",
            epoch=self.epoch,
            slots=self.slots,
            kv_tokens=10_000,
            in_flight=list(self.in_flight.values()),
        )

    async def beat(self) -> None:
        await self._bus.publish(subjects.worker_heartbeat(MODEL, self.name), msgspec.json.encode(self.heartbeat()))

    async def _send_heartbeats(self) -> None:
        while True:
            with contextlib.suppress(BusError):
                await self.beat()
            await asyncio.sleep(0.1)

    async def _on_control(self, message: Incoming) -> None:
        order = msgspec.json.decode(message.data, type=ControlRequest)
        self.orders.append(order)
        if self.deaf:
            return
        if order.epoch < self.epoch:
            answer = ControlAnswer(status="stale", epoch=self.epoch)
        else:
            self.epoch = order.epoch
            answer = ControlAnswer(status="unknown" if isinstance(order, CancelAttempt) else "ok", epoch=self.epoch)
        message.respond(msgspec.json.encode(answer))

    def told(self, kind: type[Announce | CancelAttempt | Evict]) -> list[Any]:
        return [order for order in self.orders if isinstance(order, kind)]


class Shell:
    """The schedulers of a test, and the rest of the system."""

    def __init__(self, bus: Bus, url: str) -> None:
        self.bus = bus
        self.frames: list[tuple[Epoch, Frame]] = []
        self.workers: list[Worker] = []
        self._url = url
        self._running: dict[Scheduler, asyncio.Task[None]] = {}
        self._stack = contextlib.AsyncExitStack()

    async def open(self) -> None:
        await registry.put_version(self.bus, MANIFEST)
        await self.bus.subscribe("reply.v1.test", self._on_reply)

    async def _on_reply(self, incoming: Incoming) -> None:
        message = msgspec.json.decode(incoming.data, type=ReplyMessage)
        self.frames += [(message.epoch, frame) for frame in message.frames]
        for frame in message.frames:
            if frame.kind == "lost":  # Nothing of it was seen.
                question = StatusRequest(request_id=frame.stream, void_below=frame.attempt + 1)
                await self.bus.publish(subjects.status(MODEL, TENANT), msgspec.json.encode(question))

    async def close(self) -> None:
        for worker in self.workers:
            await worker.stop()
        for scheduler in list(self._running):
            await self.stop(scheduler)
        await self._stack.aclose()

    # Schedulers --------------------------------------------------------------------------------------------

    async def start(self, **settings: Any) -> Scheduler:
        """A candidate for the model."""
        bus = await Bus.connect(self._url, name=ids.incarnation("scheduler"), user="scheduler")
        self._stack.push_async_callback(bus.close)
        scheduler = Scheduler(bus, SchedulerConfig(**{"pepper": PEPPER, **QUICK, **settings}))
        self._running[scheduler] = asyncio.create_task(scheduler.run())
        return scheduler

    async def stop(self, scheduler: Scheduler) -> None:
        """In order; raises what broke it."""
        scheduler.stop()
        await asyncio.wait_for(self._running.pop(scheduler), 10)

    async def ended(self, scheduler: Scheduler) -> BaseException | None:
        """What broke it."""
        task = self._running.pop(scheduler)
        await asyncio.wait([task], timeout=10)
        return task.exception()

    async def owner(self, scheduler: Scheduler) -> Term:
        """The scheduler's term, once it has begun to dispatch."""

        def dispatches() -> Term | None:
            term = scheduler._terms.get(MODEL)
            return term if term is not None and not term.core.recovering else None

        term: Term = await until(dispatches, "it owns the model")
        return term

    async def depose(self, term: Term) -> None:
        """The owner was frozen for longer than its lease, and wakes: it does not know yet that it is deposed."""
        term._lease._renewed_at -= 100_000
        await self.bus.kv.delete(topology.LEASES, subjects.encode(MODEL))

    # Callers and gateways ----------------------------------------------------------------------------------

    async def ask(self, subject: str, question: msgspec.Struct) -> bytes:
        """The owner's answer, as soon as there is an owner."""

        async def answer() -> bytes:
            with contextlib.suppress(BusError):
                return await self.bus.request(subject, msgspec.json.encode(question), timeout_s=1.0)
            return b""

        found: bytes = await until(answer, f"nobody answers on {subject}")
        return found

    async def admit(self, request_id: str = "", **fields: Any) -> AdmissionAnswer:
        asked = AdmissionRequest(
            **{
                "request_id": request_id or ids.request_id(),
                "tenant": TENANT,
                "key_id": "k",
                "model": MODEL,
                "endpoint": "chat/completions",
                "prompt_tokens": 10,
                "max_output_tokens": 10,
                "stream": True,
                **fields,
            }
        )
        return msgspec.json.decode(await self.ask(subjects.admit(MODEL), asked), type=AdmissionAnswer)

    async def publish(self, request_id: str, body: bytes = BODY, **fields: Any) -> int:
        """Store a request in REQUESTS, as a gateway does once it is admitted; gives the sequence."""
        now_ms = time.time_ns() // 1_000_000
        envelope = RequestEnvelope(
            **{
                "request_id": request_id,
                "tenant": TENANT,
                "key_id": "k",
                "model": MODEL,
                "endpoint": "chat/completions",
                "stream": True,
                "prompt_tokens": 10,
                "max_output_tokens": 10,
                "choices": 1,
                "priority": "interactive",
                "admitted_at_ms": now_ms,
                "publish_within_ms": 10_000,
                "deadline_ms": 60_000,
                "reply": Reply(subject="reply.v1.test", stream=request_id),
                "body": NOTHING if "body_bytes" in fields else msgspec.Raw(body),
                **fields,
            }
        )
        stored = await self.bus.jetstream.store(
            subjects.request(MODEL, TENANT), msgspec.json.encode(envelope), msg_id=request_id
        )
        return stored.seq

    async def submit(self, body: bytes = BODY, **fields: Any) -> str:
        """An admitted request that REQUESTS holds; gives its id."""
        request_id = ids.request_id()
        answer = await self.admit(request_id, **fields)
        assert answer.admitted, answer
        await self.publish(request_id, body, **fields)
        return request_id

    async def cancel(
        self, request_id: str, reason: CancelReason = "client_cancelled", subject: str = subjects.cancel(MODEL, TENANT)
    ) -> CancelAnswer:
        question = CancelRequest(request_id=request_id, reason=reason)
        return msgspec.json.decode(await self.ask(subject, question), type=CancelAnswer)

    async def status(self, request_id: str) -> StatusAnswer:
        question = StatusRequest(request_id=request_id)
        return msgspec.json.decode(await self.ask(subjects.status(MODEL, TENANT), question), type=StatusAnswer)

    async def queues(self) -> QueueAnswer:
        return msgspec.json.decode(
            await self.ask(subjects.queues(MODEL), StatusRequest(request_id="")), type=QueueAnswer
        )

    async def state(self, request_id: str, state: str) -> StatusAnswer:
        """The request's status, once it is ``state``."""

        async def found() -> StatusAnswer | None:
            answer = await self.status(request_id)
            return answer if answer.state == state else None

        answer: StatusAnswer = await until(found, f"the request is {state}")
        return answer

    # Workers and streams -----------------------------------------------------------------------------------

    async def worker(self, *, slots: int = 1, heard: bool = True, version: str = "v1") -> Worker:
        """A worker that is ready; ``heard``: and sends heartbeats."""
        worker = Worker(self.bus, ids.incarnation("w"), slots, version)
        self.workers.append(worker)
        if heard:
            await worker.start()
        return worker

    async def messages(self, stream: str) -> list[Incoming]:
        everything = {topology.REQUESTS: "req.v1.>", topology.WORK: "work.v1.>", topology.ATTEMPTS: "attempt.v1.>"}
        return [message async for message in self.bus.jetstream.read(stream, everything.get(stream, ">"))]

    async def work(self) -> list[WorkItem]:
        return [msgspec.json.decode(message.data, type=WorkItem) for message in await self.messages(topology.WORK)]

    async def item(self, request_id: str, attempt: int = 1) -> WorkItem:
        """The attempt in WORK, once it is there and REQUESTS holds the request no more."""

        async def found() -> WorkItem | None:
            return next(
                (i for i in await self.work() if (i.request.request_id, i.attempt) == (request_id, attempt)), None
            )

        item: WorkItem = await until(found, f"attempt {attempt} is in WORK")
        return item

    async def is_empty(self, stream: str) -> bool:
        return not await self.messages(stream)

    async def event(self, request_id: str, attempt: int = 1) -> AttemptEvent:
        """The attempt's stored end."""
        subject = subjects.attempt(MODEL, request_id, attempt)
        last: Callable[[], Any] = lambda: self.bus.jetstream.last(topology.ATTEMPTS, subject)  # noqa: E731
        stored = await until(last, f"attempt {attempt} has an end")
        return msgspec.json.decode(stored.data, type=AttemptEvent)

    async def run(self, worker: Worker, item: WorkItem, tokens: int = 0) -> None:
        """The worker tells that it has the attempt, and so many tokens of it."""
        key = (item.request.request_id, item.attempt)
        worker.in_flight[key] = Progress(request_id=key[0], attempt=key[1], prompt_tokens=10, completion_tokens=tokens)
        await worker.beat()

    async def end(self, worker: Worker, item: WorkItem, **fields: Any) -> AttemptEvent:
        """The worker stores the attempt's end, and acknowledges its work."""
        request = item.request
        worker.in_flight.pop((request.request_id, item.attempt), None)
        event = AttemptEvent(
            **{
                "request_id": request.request_id,
                "attempt": item.attempt,
                "tenant": request.tenant,
                "key_id": request.key_id,
                "model": MODEL,
                "version": "v1",
                "endpoint": request.endpoint,
                "priority": request.priority,
                "outcome": "completed",
                "reporter": "worker",
                "worker": worker.name,
                "stream": True,
                "prompt_tokens": 10,
                "completion_tokens": 4,
                "last_seq": 5,
                "admitted_at_ms": request.admitted_at_ms,
                **fields,
            }
        )
        await self.bus.jetstream.store(
            subjects.attempt(MODEL, request.request_id, item.attempt),
            msgspec.json.encode(event),
            msg_id=f"{request.request_id}.{item.attempt}.{worker.name}",
            expect_last=0,
        )
        if not event.retryable:
            for message in await self.messages(topology.WORK):
                if msgspec.json.decode(message.data, type=WorkItem) == item:
                    await self.bus.jetstream.delete(topology.WORK, message.stream_seq)
        return event
