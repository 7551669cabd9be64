"""LoRA adapters: models of their own that the engine of their base serves beside it, as many as it has room for.

Each has a worker here as the bus sees it: a name, an owner, limits, a core. Its engine is the base's, and so are the
slots, of which all take what is free. An adapter that is published is loaded and served without a restart. While a new
version of one is rolled out both are served, by two such workers.
"""

import asyncio
from collections.abc import Callable
from functools import partial

import msgspec
import structlog

from contracts import registry, subjects, topology
from contracts.bus import Bus, KvEntry
from contracts.messages.records import Base, Manifest, ModelRecord
from contracts.messages.rollouts import OVER, RolloutPlan, RolloutProgress
from worker.config import WorkerConfig
from worker.engines.base import Counts, Engine, EngineFailure, EngineStats, Give, Job
from worker.engines.cached_blocks import CachedBlocks
from worker.engines.supervisor import EngineSupervisor
from worker.loading import Loader, prove

_log = structlog.get_logger()


class AdapterEngine:
    """See engines.base.Engine: the base's engine, for one adapter that it has loaded."""

    def __init__(self, engine: Engine, name: str, serving: Callable[[], Engine | None]) -> None:
        self.slots = engine.slots
        self.kv_tokens = engine.kv_tokens
        self.context = engine.context
        self.kept: CachedBlocks | None = None
        self._engine = engine
        self._name = name
        self._serving = serving

    async def start(self) -> None:
        """It has started."""

    async def close(self) -> None:
        if self._serving() is self._engine:
            await self._engine.unload_adapter(self._name)

    async def load_adapter(self, name: str, path: str) -> None:
        raise EngineFailure("unavailable", "an adapter has no adapters")

    async def unload_adapter(self, name: str) -> None:
        """There is none."""

    async def fingerprint(self) -> str:
        return await self._engine.fingerprint()

    def stats(self) -> EngineStats:
        return self._engine.stats()

    async def generate(self, job: Job, counts: Counts, give: Give) -> None:
        await self._engine.generate(msgspec.structs.replace(job, adapter=self._name), counts, give)

    async def check(self) -> None:
        if self._serving() is not self._engine:
            raise EngineFailure("engine_error", "the engine was replaced", retryable=True, engine_death=True)


class AdapterLoader(Loader):
    """Fetches and verifies an adapter's files, and has the base's engine load them."""

    def __init__(self, bus: Bus, config: WorkerConfig, supervisor: EngineSupervisor) -> None:
        super().__init__(bus, config, no_engine)
        self._supervisor = supervisor

    async def load(self, manifest: Manifest) -> Engine:
        """Waits for the base's engine; raises EngineFailure."""
        here = await self.fetch(manifest)
        self.stage = "waiting for the base's engine"
        try:
            engine = await self._supervisor.serving()
            self.stage = f"loading {manifest.version}"
            called = f"{manifest.name}@{manifest.version}"
            await engine.load_adapter(called, here.path)
            adapter = AdapterEngine(engine, called, lambda: self._supervisor.engine)
            await prove(adapter, manifest)
        finally:
            self.stage = ""
        return adapter


def no_engine(manifest: Manifest) -> Engine:
    """In the place of what builds an engine."""
    raise EngineFailure("internal_error", f"{manifest.name} is an adapter: its base's worker serves it")


Served = tuple[str, str]
"""Name and version of an adapter."""


class Wanted:
    """Which adapters a worker of ``base`` is to serve. Pure.

    Those whose model's stable version is one of it, and the new version of an open roll-out likewise.
    """

    def __init__(self, base: Base) -> None:
        self.base = base
        self._records: dict[str, ModelRecord] = {}
        self._versions: dict[str, Manifest] = {}
        self._plans: dict[str, RolloutPlan] = {}
        """All by their keys."""
        self._over: dict[str, str] = {}
        """Model -> id of a roll-out that is over."""

    def set_model(self, key: str, record: ModelRecord | None) -> None:
        """A removed model is served until its owner has forgotten it: what it had admitted goes on."""
        if record is None:
            self._records.pop(key, None)
        else:
            self._records[key] = record

    def set_version(self, key: str, manifest: Manifest | None) -> None:
        if manifest is not None and manifest.base is not None:
            self._versions[key] = manifest
        else:
            self._versions.pop(key, None)

    def set_plan(self, key: str, plan: RolloutPlan | None) -> None:
        if plan is None:
            self._plans.pop(key, None)
        else:
            self._plans[key] = plan

    def set_progress(self, progress: RolloutProgress) -> None:
        if progress.phase in OVER:
            self._over[progress.model] = progress.id

    def now(self) -> dict[Served, tuple[ModelRecord, Manifest]]:
        """By name and version."""
        found = {}
        for key, record in self._records.items():
            plan = self._plans.get(key)
            rolled_out = [plan.to] if plan is not None and self._over.get(record.name) != plan.id else []
            for version in (record.stable, *rolled_out):
                manifest = self._versions.get(f"{key}.{subjects.encode(version)}")
                if manifest is not None and manifest.base == self.base:
                    found[record.name, version] = (record, manifest)
        return found


class Adapters:
    """Serves what is wanted, each by ``serve`` until ``leave`` is told to that one; ``run`` until cancelled.

    ``serve``: starts to, and gives its task and what ends it.
    """

    def __init__(
        self,
        bus: Bus,
        base: Base,
        serve: Callable[[ModelRecord, Manifest], tuple[asyncio.Task[None], Callable[[], None]]],
    ) -> None:
        self._bus = bus
        self._wanted = Wanted(base)
        self._serve = serve
        self._serving: dict[Served, tuple[Manifest, asyncio.Task[None], Callable[[], None]]] = {}
        self._changed = asyncio.Event()
        self._closed = False

    async def run(self) -> None:
        """Follow the registry."""
        watches = [
            await self._bus.kv.watch(topology.VERSIONS, self._on_version),
            await self._bus.kv.watch(topology.MODELS, self._on_model),
            await self._bus.kv.watch(topology.ROLLOUTS, self._on_rollout),
        ]
        try:
            while True:
                await self._changed.wait()
                self._changed.clear()
                self._look()
        finally:
            for watch in watches:
                await watch.close()

    def served(self) -> list[str]:
        """Names of those that are served, or are to be."""
        return sorted({name for name, _ in self._serving.keys() | self._wanted.now().keys()})

    def based_on(self, base: Base) -> None:
        """The worker serves another version now, and adapters of that."""
        self._wanted.base = base
        self._changed.set()

    async def drain(self) -> None:
        """Serve no more: returns when each has ended as it ends."""
        self._closed = True
        tasks = [task for _, task, _ in self._serving.values()]
        for _, _, leave in self._serving.values():
            leave()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _look(self) -> None:
        wanted = {} if self._closed else self._wanted.now()
        for served, (manifest, _, leave) in self._serving.items():
            if served not in wanted or wanted[served][1] != manifest:
                leave()
        for served in wanted.keys() - self._serving.keys():
            record, manifest = wanted[served]
            task, leave = self._serve(record, manifest)
            self._serving[served] = manifest, task, leave
            task.add_done_callback(partial(self._ended, served))
            _log.info("adapter_served", model=record.name, version=manifest.version)

    def _ended(self, served: Served, _: asyncio.Task[None]) -> None:
        self._serving.pop(served, None)
        self._changed.set()

    def _on_model(self, key: str, entry: KvEntry | None) -> None:
        try:
            self._wanted.set_model(key, None if entry is None else registry.read_model(entry))
        except msgspec.MsgspecError as error:
            _log.error("model_unreadable", key=key, reason=str(error))
        self._changed.set()

    def _on_version(self, key: str, entry: KvEntry | None) -> None:
        try:
            self._wanted.set_version(key, None if entry is None else registry.read_version(entry))
        except msgspec.MsgspecError as error:
            _log.error("manifest_unreadable", key=key, reason=str(error))
        self._changed.set()

    def _on_rollout(self, key: str, entry: KvEntry | None) -> None:
        try:
            if registry.is_progress(key):
                if entry is not None:
                    self._wanted.set_progress(registry.read_progress(entry))
            else:
                self._wanted.set_plan(key, None if entry is None else registry.read_plan(entry))
        except msgspec.MsgspecError as error:
            _log.error("rollout_unreadable", key=key, reason=str(error))
        self._changed.set()
