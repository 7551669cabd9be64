"""The worker's loop: performs what `worker.core.core` decides, and tells it what happened.

One event loop; every step of the core is made in one go, so nothing else touches its state.
"""

import asyncio
from collections.abc import Callable
from contextlib import suppress
from functools import partial

import msgspec
import structlog

from contracts import registry, shards
from contracts.bus import Bus, BusError, Incoming, unreadable
from contracts.clock import monotonic_ms
from contracts.errors import HeadraceError
from contracts.messages.base import Codec
from contracts.messages.control import ControlAnswer, ControlRequest
from contracts.messages.frames import EndData, ErrorData
from contracts.messages.records import Base, Manifest, ModelRecord
from contracts.messages.request import WorkItem
from contracts.service.vitals import Vitals
from worker import attempt_store, metrics
from worker.adapters import AdapterLoader, Adapters, no_engine
from worker.cache_teller import CacheTeller
from worker.config import WorkerConfig
from worker.core import events
from worker.core.attempts import Occupancy
from worker.core.core import WorkerCore
from worker.core.outcomes import TOKENIZER_MISMATCH
from worker.engines.base import Engine, EngineEvent, EngineFailure, EngineRefused
from worker.engines.cached_blocks import CachedBlocks
from worker.engines.supervisor import SAMPLE_S, EngineSupervisor
from worker.generations import Generations
from worker.heartbeats import Heartbeats
from worker.instance import Instance
from worker.loading import Loader

MANIFEST_S = 0.5
LATE_S = 0.5
"""A worker whose event loop is later than this pulls no more work, and is placed none (scheduler.core.settings)."""
DRAIN_KNOWN_S = 1.0
"""From the heartbeat that tells of a drain until nothing is dispatched here any more, and all that was has come."""
LAST_S = 5.0
"""After the grace time: for the last terminal events and acknowledgements."""

_log = structlog.get_logger()
_item: Codec[WorkItem] = Codec(WorkItem)
_control: Codec[ControlRequest] = Codec(ControlRequest)  # type: ignore[arg-type]
_answer: Codec[ControlAnswer] = Codec(ControlAnswer)
_end: Codec[EndData] = Codec(EndData)
_error: Codec[ErrorData] = Codec(ErrorData)


async def await_manifest(bus: Bus, model: str, version: str = "") -> tuple[ModelRecord, Manifest]:
    """The record of a model or of a shard's, and the manifest of that version of it, else of the stable one.

    Waits until both can be read.
    """
    said = ""
    while True:
        try:
            record = await registry.model(bus, shards.model_of(model))
            if shards.number_of(model) < record.shards:
                return record, await registry.version(bus, record.name, version or record.stable)
            problem = f"{record.name} has {record.shards} shards"
        except (BusError, HeadraceError) as error:
            problem = str(error)
        if problem != said:
            _log.warning("manifest_awaited", model=model, problem=problem)
            said = problem
        await asyncio.sleep(MANIFEST_S)


class Worker:
    """One worker process. ``build`` makes a new engine of a manifest, not yet started, each time one is needed."""

    def __init__(
        self,
        bus: Bus,
        config: WorkerConfig,
        manifest: Manifest,
        build: Callable[[Manifest], Engine],
        *,
        kv_overbooking: float = 1.0,
        host: "Worker | None" = None,
    ) -> None:
        """``host``: the worker of its base, whose process and engine this one of an adapter shares."""
        self._bus = bus
        self._config = config
        self._manifest = manifest
        self._shard = config.model if host is None else manifest.name
        """The model whose requests are run here, or the shard of it."""
        self._host = host
        self._supervisor: EngineSupervisor
        self._vitals: Vitals
        self._family: list[Worker] = [self] if host is None else host._family
        """Those that share the engine, once they have joined."""
        self._occupancy: Occupancy = Occupancy() if host is None else host._occupancy
        self._loader = Loader(bus, config, build) if host is None else AdapterLoader(bus, config, host._supervisor)
        self._fetched = {manifest.version: manifest}
        """Versions that may be loaded: what is served, what was, and what is to be."""
        self._retired: set[asyncio.Task[None]] = set()
        self._supervisor = EngineSupervisor(
            partial(self._loader.load, manifest),
            self._hear,
            check_timeout_s=config.check_timeout_s + 1.0,  # the engine's own limit, which knows more, is first
        )
        self._core = WorkerCore(
            version=manifest.version,
            pinned=host is not None or bool(config.version),
            tokenizer_fingerprint=manifest.tokenizer_fingerprint,
            kv_overbooking=kv_overbooking,
            stall_samples=max(1, round(config.stall_s / SAMPLE_S)),
            occupancy=self._occupancy,
        )
        self._generations = Generations(bus, self._supervisor, self._step)
        self._vitals = Vitals(bus, late_s=LATE_S, changed=self._loop_changed) if host is None else host._vitals
        base = Base(model=manifest.name, version=manifest.version)
        self._adapters = Adapters(bus, base, self._serve_adapter) if host is None else None
        self._heartbeats = Heartbeats(
            bus,
            self._vitals,
            self._core,
            self._supervisor,
            shard=self._shard,
            served=lambda: self._manifest,
            loader=self._loader,
            cache_number=lambda: self._teller.number if self._teller.told == self._core.worker else 0,
        )
        self._teller = CacheTeller(bus, model=lambda: self._shard, worker=lambda: self._core.worker, kept=self._kept)
        self._stopping = asyncio.Event()
        self._hurried = False
        self._broken: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._emptied = asyncio.Event()
        self._deliveries: dict[int, Incoming] = {}
        self._acks: set[asyncio.Task[None]] = set()

    def stop(self) -> None:
        """Drain within the grace time, then return from ``run``."""
        for each in self._family if self._host is None else (self,):
            each._hurried = True
            each._emptied.set()
        self._stopping.set()

    def leave(self) -> None:
        """Take nothing more, and return from ``run`` once what runs has ended; ``stop`` still limits that."""
        self._stopping.set()

    def not_ready(self) -> str:
        """Why requests would not be served; empty when they would. Any thread may ask."""
        if not self._bus.connected:
            return "not connected to NATS"
        state, reason = self._core.shown
        if state != "ready":
            reason = reason or self._loader.stage
            return f"{state}: {reason}" if reason else state
        return "" if self._core.worker else "joining"

    async def run(self) -> None:
        """Serve until ``stop``, then drain. Raises what broke."""
        if self._host is not None:
            self._family.append(self)
            try:
                await self._run()
            finally:
                self._family.remove(self)
            return
        await self._vitals.start()
        try:
            await self._run()
        finally:
            await self._vitals.close()

    async def _run(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            self._tasks = tasks
            self._join()
            running = [self._heartbeats.run(), self._supervisor.run(), self._vitals.run(self._heartbeats.live)]
            running.append(self._teller.run())
            if self._adapters is not None:
                running.append(self._adapters.run())
            loops = [tasks.create_task(loop) for loop in running]
            stop = tasks.create_task(self._stopping.wait())
            await asyncio.wait((stop, self._broken), return_when=asyncio.FIRST_COMPLETED)
            if stop.done():
                await asyncio.gather(self._drain(), *([self._adapters.drain()] if self._adapters else []))
            if self._broken.done():
                self._broken.result()
            for task in (*loops, *self._retired):
                task.cancel()
            await self._instance.close()

    def _join(self) -> None:
        """Take a new name."""
        self._instance = Instance(
            self._bus,
            self._tasks,
            model=self._shard,
            version=self._manifest.version,
            on_work=self._on_work,
            on_control=self._on_control,
            credit=self._credit,
        )
        self._instance.spawn(self._announce(self._instance))

    def _kept(self) -> CachedBlocks | None:
        """What the engine's cache keeps. Adapters tell nothing: their blocks are not those of the base."""
        engine = self._supervisor.engine if self._host is None else None
        return engine.kept if engine is not None else None

    def _credit(self) -> int:
        """What may be pulled now: nothing while the event loop is late, for what runs would be later still."""
        return 0 if self._vitals.late else self._core.credit()

    def _loop_changed(self, late: bool) -> None:
        if not late:
            self._wake_family()

    def _wake_family(self) -> None:
        for each in self._family:
            each._step(events.RoomFreed())
            each._instance.notify()

    def _serve_adapter(self, record: ModelRecord, manifest: Manifest) -> tuple[asyncio.Task[None], Callable[[], None]]:
        overbooking = record.limits.kv_overbooking
        guest = Worker(self._bus, self._config, manifest, no_engine, kv_overbooking=overbooking, host=self)
        return self._tasks.create_task(guest.run()), guest.leave

    async def _announce(self, instance: Instance) -> None:
        """Begin to send heartbeats once orders can arrive."""
        await instance.open()
        if instance is not self._instance:
            return  # Another version is loaded already.
        self._step(events.Joined(worker=instance.name))
        _log.info("joined", worker=instance.name, model=self._manifest.name, version=self._manifest.version)

    async def _drain(self) -> None:
        self._step(events.DrainStarted())
        _log.info("draining", in_flight=len(self._core.attempts))
        await self._until_empty(None, patiently=True)
        await self._until_empty(self._config.grace_s)
        self._step(events.GraceEnded())
        await self._until_empty(LAST_S)
        with suppress(TimeoutError):
            async with asyncio.timeout(LAST_S):
                await self._instance.buffer.flushed()
        if left := len(self._core.attempts):
            _log.error("left_behind", in_flight=left)

    async def _until_empty(self, seconds: float | None, *, patiently: bool = False) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while (self._core.attempts or self._acks) and not (patiently and self._hurried):
                    self._emptied.clear()
                    await self._emptied.wait()

    def _hear(self, event: EngineEvent) -> None:
        if isinstance(event, EngineRefused):
            metrics.count_refused_version(self._manifest.name)
            _log.error("version_refused", version=self._manifest.version, reason=event.reason)
        self._step(event)

    def _step(self, event: events.Event | EngineEvent) -> None:
        credit, releases = self._core.credit(), self._occupancy.releases
        try:
            for effect in self._core.step(event, monotonic_ms()):
                self._perform(effect)
        except Exception as error:  # a bug: the state is not to be trusted any more
            if not self._broken.done():
                self._broken.set_exception(error)
            return
        if self._core.credit() > credit:
            self._instance.notify()
        if not self._core.attempts:
            self._emptied.set()
        if self._occupancy.releases != releases and len(self._family) > 1:
            asyncio.get_running_loop().call_soon(self._wake_family)

    def _perform(self, effect: events.Effect) -> None:
        match effect:
            case events.StartAttempt():
                self._generations.start(effect, self._instance.buffer, self._tasks)
            case events.StopAttempt():
                self._generations.stop(effect.key)
            case events.StoreEvent():
                self._instance.spawn(self._store(effect, self._instance))
            case events.CloseStream():
                self._close_stream(effect)
            case events.LeaveWork():
                self._deliveries.pop(effect.delivery, None)
            case events.AckWork():
                if incoming := self._deliveries.pop(effect.delivery, None):
                    self._acknowledge(incoming)
            case events.AnswerControl():
                _respond(effect.asker, _answer.encode(effect.answer))
            case events.SendHeartbeat():
                self._heartbeats.notify()
            case events.TellCache():
                self._teller.tell_anew()
            case events.RebuildEngine():
                _log.error("engine_lost", reason=effect.reason, worker=self._core.worker)
                metrics.count_engine_loss(self._manifest.name)
                self._supervisor.replace()
            case events.FetchVersion():
                self._tasks.create_task(self._fetch(effect.version))
            case events.LoadVersion():
                self._load(self._fetched[effect.version])
            case events.Rejoin():
                self._tasks.create_task(self._rejoin())
                self._leave()

    def _on_work(self, incoming: Incoming) -> None:
        try:
            item = _item.decode(incoming.data)
        except msgspec.MsgspecError as error:
            unreadable("work_undecodable", incoming, error, seq=incoming.stream_seq)
            self._acknowledge(incoming)
            return
        self._deliveries[incoming.stream_seq] = incoming
        self._step(events.WorkPulled(item=item, delivery=incoming.stream_seq))

    def _on_control(self, incoming: Incoming) -> None:
        try:
            request = _control.decode(incoming.data)
        except msgspec.MsgspecError as error:
            unreadable("control_undecodable", incoming, error)
            return
        self._step(events.ControlAsked(request=request, asker=incoming))

    async def _store(self, effect: events.StoreEvent, instance: Instance) -> None:
        won = await attempt_store.store(self._bus, effect.event)
        if instance.abandoned:
            return
        if won:
            metrics.count_attempt(effect.event)
        if effect.event.error_message.startswith(TOKENIZER_MISMATCH):
            metrics.count_other_tokenizer(shards.model_of(effect.event.model))
            _log.error("tokenizer_mismatch", request_id=effect.event.request_id, reason=effect.event.error_message)
        attempt_store.log(effect.event, won=won)
        self._step(events.EventStored(key=effect.key, won=won))

    def _close_stream(self, effect: events.CloseStream) -> None:
        buffer, request, attempt = self._instance.buffer, effect.item.request, effect.item.attempt
        match effect.last:
            case EndData() as end:
                buffer.send(buffer.open(request, attempt), "end", _end.encode(end))
            case ErrorData() as error:
                buffer.send(buffer.open(request, attempt), "error", _error.encode(error))
        buffer.end(request, attempt)

    def _acknowledge(self, incoming: Incoming) -> None:
        task = self._instance.spawn(_acknowledge(incoming, self._instance))
        self._acks.add(task)
        task.add_done_callback(self._acknowledged)

    def _acknowledged(self, task: asyncio.Task[None]) -> None:
        self._acks.discard(task)
        self._emptied.set()

    async def _fetch(self, version: str) -> None:
        """Have another version's files here while this one is served."""
        name = self._manifest.name
        try:
            if self._host is not None:
                raise HeadraceError("conflict", "each version of an adapter has a worker of its own beside its base's")
            if self._adapters is not None and (adapters := self._adapters.served()):
                served = f"it serves adapters of {self._manifest.version}: {', '.join(adapters)}"
                raise HeadraceError("conflict", f"{served[:500]}; give them versions for {version}, or remove them")
            manifest = await registry.version(self._bus, name, version)
            await self._loader.fetch(manifest)
        except (BusError, HeadraceError, EngineFailure) as error:
            metrics.count_refused_version(name)
            _log.error("version_refused", model=name, version=version, reason=str(error))
            self._step(events.VersionRefused(version=version, reason=str(error)))
            return
        self._fetched[version] = manifest
        self._step(events.VersionFetched(version=version))
        await asyncio.sleep(DRAIN_KNOWN_S)
        self._step(events.DrainKnown())

    def _load(self, manifest: Manifest) -> None:
        """Serve it, under a new name; the old one still hands out frames to who missed some."""
        _log.info("version_switched", model=manifest.name, version=manifest.version, before=self._manifest.version)
        kept = {self._manifest.version, manifest.version}
        self._fetched = {version: each for version, each in self._fetched.items() if version in kept}
        self._manifest = manifest
        if self._adapters is not None:
            self._adapters.based_on(Base(model=manifest.name, version=manifest.version))
        self._supervisor.switch(partial(self._loader.load, manifest), manifest.tokenizer_fingerprint)
        retired = self._tasks.create_task(self._instance.retire())
        self._retired.add(retired)
        retired.add_done_callback(self._retired.discard)
        self._join()

    def _leave(self) -> None:
        """Abort everything at once; nothing more is said under this name."""
        _log.error("evicted", worker=self._instance.name, aborted=self._generations.abandon())
        self._deliveries.clear()
        self._instance.abandon()

    async def _rejoin(self) -> None:
        await self._instance.close()
        if not self._stopping.is_set():
            self._join()


async def _acknowledge(incoming: Incoming, instance: Instance) -> None:
    """After the closing frame; what stays unconfirmed is cleaned up by the scheduler."""
    await instance.buffer.flushed()
    confirmed = False
    with suppress(BusError):
        confirmed = await incoming.ack()
    if not confirmed:
        _log.warning("work_not_acknowledged", worker=instance.name, stream_seq=incoming.stream_seq)


def _respond(incoming: Incoming, data: bytes) -> None:
    with suppress(BusError):  # who asked asks again
        incoming.respond(data)
