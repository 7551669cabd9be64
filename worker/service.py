"""The worker's loop: performs what `worker.core.core` decides, and tells it what happened.

One event loop; every step of the core is made in one go, so nothing else touches its state.
"""

import asyncio
import time
from collections.abc import Callable
from contextlib import aclosing, suppress
from functools import partial

import msgspec
import structlog

from contracts import subjects, topology
from contracts.bus import Bus, BusError, Incoming
from contracts.clock import now_ms
from contracts.messages.base import Codec
from contracts.messages.control import ControlAnswer, ControlRequest, WorkerHeartbeat
from contracts.messages.frames import EndData, ErrorData
from contracts.messages.records import Manifest
from contracts.messages.request import RequestEnvelope, WorkItem
from worker import attempt_store, metrics
from worker.config import WorkerConfig
from worker.core import events
from worker.core.core import WorkerCore
from worker.engines.base import Engine, EngineFailure, Job
from worker.engines.supervisor import SAMPLE_S, EngineKeeper
from worker.frame_buffer import Stream
from worker.instance import Incarnation

HEARTBEAT_S = 0.5
BEAT_GAP_S = 0.02
"""Between two heartbeats: a burst of ends makes one."""
STOP_S = 5.0
"""An aborted generation that has not returned by then counts as ended: it is left alone."""
BODY_S = 10.0
"""How long a body is looked for while the bus is away."""
BODY_RETRY_S = 0.1
MANIFEST_S = 0.5
LAST_S = 5.0
"""After the grace time: for the last terminal events and acknowledgements."""

_log = structlog.get_logger()
_manifest: Codec[Manifest] = Codec(Manifest)
_item: Codec[WorkItem] = Codec(WorkItem)
_control: Codec[ControlRequest] = Codec(ControlRequest)  # type: ignore[arg-type]
_answer: Codec[ControlAnswer] = Codec(ControlAnswer)
_heartbeat: Codec[WorkerHeartbeat] = Codec(WorkerHeartbeat)
_end: Codec[EndData] = Codec(EndData)
_error: Codec[ErrorData] = Codec(ErrorData)


class Run(msgspec.Struct, kw_only=True):
    """A generation in progress."""

    task: asyncio.Task[EngineFailure | None]
    stream: Stream
    stopping: bool = False


async def await_manifest(bus: Bus, model: str) -> Manifest:
    """The model's manifest, once there is one that can be read."""
    said = ""
    while True:
        try:
            if entry := await bus.kv.get(topology.MODELS, subjects.encode(model)):
                return _manifest.decode(entry.value)
            problem = "the model has no manifest yet"
        except (BusError, msgspec.MsgspecError) as error:
            problem = str(error)
        if problem != said:
            _log.warning("manifest_awaited", model=model, problem=problem)
            said = problem
        await asyncio.sleep(MANIFEST_S)


class Worker:
    """One worker process. ``build`` makes a new engine, not yet started, each time one is needed."""

    def __init__(self, bus: Bus, config: WorkerConfig, manifest: Manifest, build: Callable[[], Engine]) -> None:
        self._bus = bus
        self._config = config
        self._manifest = manifest
        self._keeper = EngineKeeper(
            build,
            self._step,
            check_timeout_s=config.check_timeout_s + 1.0,  # the engine's own limit, which knows more, is first
        )
        self._core = WorkerCore(
            tokenizer_fingerprint=manifest.tokenizer_fingerprint,
            kv_overbooking=manifest.limits.kv_overbooking,
            stall_samples=max(1, round(config.stall_s / SAMPLE_S)),
        )
        self._stopping = asyncio.Event()
        self._broken: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._beat = asyncio.Event()
        self._emptied = asyncio.Event()
        self._runs: dict[events.Key, Run] = {}
        self._deliveries: dict[int, Incoming] = {}
        self._acks: set[asyncio.Task[None]] = set()

    # What others call --------------------------------------------------------------------------------------

    def stop(self) -> None:
        """Drain, then return from ``run``."""
        self._stopping.set()

    def not_ready(self) -> str:
        """Why requests would not be served; empty when they would. Any thread may ask."""
        if not self._bus.connected:
            return "not connected to NATS"
        if self._core.state != "ready":
            return self._core.state
        return "" if self._core.worker else "joining"

    async def run(self) -> None:
        """Serve until ``stop``, then drain. Raises what broke."""
        async with asyncio.TaskGroup() as tasks:
            self._tasks = tasks
            self._join()
            loops = [
                tasks.create_task(loop)
                for loop in (
                    self._send_heartbeats(),
                    self._keeper.keep(),
                    self._keeper.sample(),
                    self._keeper.check(),
                )
            ]
            stop = tasks.create_task(self._stopping.wait())
            await asyncio.wait((stop, self._broken), return_when=asyncio.FIRST_COMPLETED)
            if stop.done():
                await self._drain()
            if self._broken.done():
                self._broken.result()
            for task in loops:
                task.cancel()
            await self._incarnation.close()

    def _join(self) -> None:
        """Take a new name."""
        self._incarnation = Incarnation(
            self._bus,
            self._tasks,
            model=self._manifest.name,
            version=self._manifest.version,
            on_work=self._on_work,
            on_control=self._on_control,
            credit=self._core.credit,
        )
        self._incarnation.spawn(self._announce(self._incarnation))

    async def _announce(self, incarnation: Incarnation) -> None:
        """Begin to send heartbeats once orders can arrive."""
        await incarnation.open()
        self._step(events.Joined(worker=incarnation.name))
        _log.info("joined", worker=incarnation.name, model=self._manifest.name, version=self._manifest.version)

    async def _drain(self) -> None:
        self._step(events.DrainStarted())
        _log.info("draining", held=self._core.held)
        await self._until_empty(self._config.grace_s)
        self._step(events.GraceEnded())
        await self._until_empty(LAST_S)
        with suppress(TimeoutError):
            async with asyncio.timeout(LAST_S):
                await self._incarnation.outbox.flushed()
        if self._core.held:
            _log.error("left_behind", held=self._core.held)

    async def _until_empty(self, seconds: float) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while self._core.held or self._acks:
                    self._emptied.clear()
                    await self._emptied.wait()

    # Steps -------------------------------------------------------------------------------------------------

    def _step(self, event: events.Event) -> None:
        credit = self._core.credit()
        try:
            for effect in self._core.step(event, now_ms()):
                self._perform(effect)
        except Exception as error:  # a bug: the state is not to be trusted any more
            if not self._broken.done():
                self._broken.set_exception(error)
            return
        if self._core.credit() > credit:
            self._incarnation.notify()
        if not self._core.held:
            self._emptied.set()

    def _perform(self, effect: events.Effect) -> None:
        match effect:
            case events.StartAttempt():
                self._start(effect)
            case events.StopAttempt():
                self._abort(effect.key)
            case events.StoreEvent():
                self._incarnation.spawn(self._store(effect, self._incarnation))
            case events.CloseStream():
                self._close_stream(effect)
            case events.LeaveWork():
                self._deliveries.pop(effect.delivery, None)
            case events.AckWork():
                if incoming := self._deliveries.pop(effect.delivery, None):
                    self._acknowledge(incoming)
            case events.Answer():
                self._tasks.create_task(_respond(effect.asker, _answer.encode(effect.answer)))
            case events.Beat():
                self._beat.set()
            case events.RebuildEngine():
                _log.error("engine_lost", reason=effect.reason, worker=self._core.worker)
                metrics.engine_losses.labels(self._manifest.name).inc()
                self._keeper.replace()
            case events.Rejoin():
                self._tasks.create_task(self._rejoin())
                self._leave()

    # What arrives ------------------------------------------------------------------------------------------

    def _on_work(self, incoming: Incoming) -> None:
        try:
            item = _item.decode(incoming.data)
        except msgspec.MsgspecError as error:
            _log.error("work_malformed", stream_seq=incoming.stream_seq, error=str(error))
            self._acknowledge(incoming)
            return
        self._deliveries[incoming.stream_seq] = incoming
        self._step(events.WorkPulled(item=item, delivery=incoming.stream_seq))

    def _on_control(self, incoming: Incoming) -> None:
        try:
            request = _control.decode(incoming.data)
        except msgspec.MsgspecError as error:
            _log.warning("message_malformed", subject=incoming.subject, error=str(error))
            return
        self._step(events.ControlAsked(request=request, asker=incoming))

    # An attempt --------------------------------------------------------------------------------------------

    def _start(self, effect: events.StartAttempt) -> None:
        stream = self._incarnation.outbox.open(effect.item.request, effect.item.attempt)
        task = self._tasks.create_task(self._run(effect, stream, self._incarnation))
        run = self._runs[effect.key] = Run(task=task, stream=stream)
        task.add_done_callback(partial(self._run_done, effect.key, run))

    async def _run(self, effect: events.StartAttempt, stream: Stream, incarnation: Incarnation) -> EngineFailure | None:
        """Generate and send; gives the failure, if it ended with one."""
        try:
            await self._generate(effect, stream, incarnation)
        except EngineFailure as failure:
            return failure
        except Exception:
            request_id, attempt = effect.key
            _log.exception("attempt_broke", request_id=request_id, attempt=attempt)
            return EngineFailure("internal_error", "the worker failed to run the request")
        return None

    async def _generate(self, effect: events.StartAttempt, stream: Stream, incarnation: Incarnation) -> None:
        request = effect.item.request
        body = await self._body(request)
        engine, outbox = self._keeper.engine, incarnation.outbox
        if engine is None:
            raise EngineFailure("unavailable", "the worker's engine is down", retryable=True)
        job = Job(
            request_id=request.request_id,
            attempt=effect.item.attempt,
            endpoint=request.endpoint,
            body=body,
            stream=request.stream,
            cache_salt=request.tenant if request.prefix_caching else request.request_id,
        )
        pace = metrics.Pace(request.model, effect.item.version, request.priority, time.monotonic())
        outbox.send(stream, "accepted")
        async with aclosing(engine.generate(job, effect.counts)) as chunks:
            async for chunk in chunks:
                outbox.send(stream, "chunk", chunk)
                pace.chunk(time.monotonic())

    async def _body(self, request: RequestEnvelope) -> bytes:
        if not request.body_object:
            return bytes(request.body)
        deadline = time.monotonic() + BODY_S
        while True:
            try:
                body = await self._bus.objects.get(topology.BODIES, request.body_object)
            except BusError as error:
                if time.monotonic() > deadline:
                    raise EngineFailure("unavailable", "the body cannot be read", retryable=True) from error
                await asyncio.sleep(BODY_RETRY_S)
                continue
            if body is None:
                raise EngineFailure("internal_error", "the body is no longer stored")
            return body

    def _abort(self, key: events.Key) -> None:
        run = self._runs[key]
        run.stopping = True
        run.task.cancel()
        asyncio.get_running_loop().call_later(STOP_S, self._ended, key, run, None)

    def _run_done(self, key: events.Key, run: Run, task: asyncio.Task[EngineFailure | None]) -> None:
        """A task cancelled without an order belongs to a worker that breaks down: there is no one to tell."""
        if not task.cancelled():
            self._ended(key, run, task.result())
        elif run.stopping:
            self._ended(key, run, None)

    def _ended(self, key: events.Key, run: Run, failure: EngineFailure | None) -> None:
        if self._runs.get(key) is run:
            del self._runs[key]
            self._step(
                events.AttemptEnded(key=key, frames=run.stream.next_seq, chunks=run.stream.chunks, failure=failure)
            )

    async def _store(self, effect: events.StoreEvent, incarnation: Incarnation) -> None:
        won = await attempt_store.decide(self._bus, effect.event)
        if incarnation.abandoned:
            return
        if won:
            metrics.count(effect.event)
        attempt_store.log(effect.event, won=won)
        self._step(events.EventDecided(key=effect.key, won=won))

    def _close_stream(self, effect: events.CloseStream) -> None:
        outbox, request, attempt = self._incarnation.outbox, effect.item.request, effect.item.attempt
        match effect.last:
            case EndData() as end:
                outbox.send(outbox.open(request, attempt), "end", _end.encode(end))
            case ErrorData() as error:
                outbox.send(outbox.open(request, attempt), "error", _error.encode(error))
        outbox.end(request, attempt)

    def _acknowledge(self, incoming: Incoming) -> None:
        task = self._incarnation.spawn(_acknowledge(incoming, self._incarnation))
        self._acks.add(task)
        task.add_done_callback(self._acknowledged)

    def _acknowledged(self, task: asyncio.Task[None]) -> None:
        self._acks.discard(task)
        self._emptied.set()

    # Eviction ----------------------------------------------------------------------------------------------

    def _leave(self) -> None:
        """Abort everything at once; nothing more is said under this name."""
        _log.error("evicted", worker=self._incarnation.name, aborted=len(self._runs))
        runs, self._runs = self._runs, {}
        for run in runs.values():
            run.task.cancel()
        self._deliveries.clear()
        self._incarnation.abandon()

    async def _rejoin(self) -> None:
        await self._incarnation.close()
        if not self._stopping.is_set():
            self._join()

    # Heartbeats --------------------------------------------------------------------------------------------

    async def _send_heartbeats(self) -> None:
        while True:
            self._beat.clear()
            await self._send_heartbeat()
            await asyncio.sleep(BEAT_GAP_S)
            with suppress(TimeoutError):
                async with asyncio.timeout(HEARTBEAT_S - BEAT_GAP_S):
                    await self._beat.wait()

    async def _send_heartbeat(self) -> None:
        state, model = self._core, self._manifest.name
        engine, stats = self._keeper.engine, self._keeper.stats()
        metrics.attempts_held.labels(model).set(state.held)
        metrics.kv_tokens.labels(model).set(state.kv_tokens)
        metrics.kv_tokens_used.labels(model).set(stats.kv_tokens_used)
        metrics.preemptions.labels(model).set(stats.preemptions_total)
        if not state.worker or not self._bus.connected:
            return
        heartbeat = WorkerHeartbeat(
            worker=state.worker,
            model=model,
            version=self._manifest.version,
            state=state.state,
            epoch=state.epoch,
            slots=state.slots,
            kv_tokens=state.kv_tokens,
            kv_tokens_used=stats.kv_tokens_used,
            context=engine.context if engine else 0,
            running=stats.running,
            waiting=stats.waiting + state.waiting,
            prefill_tokens_total=stats.prefill_tokens_total,
            decode_tokens_total=stats.decode_tokens_total,
            in_flight=state.progress(),
        )
        try:
            await self._bus.publish(subjects.worker_heartbeat(model, state.worker), _heartbeat.encode(heartbeat))
        except BusError as error:
            _log.warning("heartbeat_not_sent", worker=state.worker, error=str(error))


async def _acknowledge(incoming: Incoming, incarnation: Incarnation) -> None:
    """After the closing frame; what stays unconfirmed is cleaned up by the scheduler."""
    await incarnation.outbox.flushed()
    confirmed = False
    with suppress(BusError):
        confirmed = await incoming.ack()
    if not confirmed:
        _log.warning("work_not_acknowledged", worker=incarnation.name, stream_seq=incoming.stream_seq)


async def _respond(incoming: Incoming, data: bytes) -> None:
    with suppress(BusError):  # who asked asks again
        await incoming.respond(data)
