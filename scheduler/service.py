"""The scheduler process: campaigns for the lease of every model in the registry, and runs a term of each that it owns.
Beside that it serves administration, as every other does.

Nothing about requests is decided here (``core``); what happens during a term is ``term``'s.
"""

import asyncio
from contextlib import AsyncExitStack
from typing import Any

import msgspec
import structlog

from contracts import ids, registry, shards, subjects, topology
from contracts.bus import Bus, BusError, KvEntry
from contracts.keys import Peppers
from contracts.messages.base import Codec
from contracts.messages.records import Budget, ModelRecord, Spending, TenantRecord
from contracts.messages.rollouts import RolloutPlan
from contracts.service.vitals import Vitals
from scheduler.administration import AdminService
from scheduler.config import SchedulerConfig
from scheduler.core import events
from scheduler.lease import Lease
from scheduler.metrics import Collector
from scheduler.term import Term

log = structlog.get_logger()

LATE_S = 0.5
"""An event loop that is later than this is told of in the log."""

_budget: Codec[Budget] = Codec(Budget)
_spending: Codec[Spending] = Codec(Spending)


class Scheduler:
    """A candidate for every model, owner of some."""

    def __init__(self, bus: Bus, config: SchedulerConfig) -> None:
        self._bus = bus
        self._config = config
        self._models: dict[str, ModelRecord] = {}
        self._tenants: dict[str, TenantRecord] = {}
        self._plans: dict[str, RolloutPlan] = {}
        self._budgets: dict[str, events.BudgetSeen] = {}
        self._spending: dict[str, dict[str, Spending]] = {}
        """By model, then tenant."""
        self._terms: dict[str, Term] = {}
        self._campaigns: dict[str, asyncio.Task[None]] = {}
        self._forgetting: dict[str, asyncio.Task[None]] = {}
        """By model, until the next time."""
        self._vitals = Vitals(bus, late_s=LATE_S)
        self._admin = AdminService(bus, Peppers.parse(config.pepper))
        self._broken: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._stopping = asyncio.Event()
        Collector(lambda: [term.core for term in list(self._terms.values())], config.heartbeat_s).register()

    def not_ready(self) -> str:
        """Why the process cannot do its part, or an empty string; a standby is ready."""
        return "" if self._bus.connected else "not connected to the bus"

    def stop(self) -> None:
        """End ``run``; what is owned is released for the standbys."""
        self._stopping.set()

    async def run(self) -> None:
        """Until ``stop``; raises what broke a core."""
        async with AsyncExitStack() as stack:
            await self._vitals.start()
            stack.push_async_callback(self._vitals.close)
            for bucket, handler in (
                (topology.TENANTS, self._on_tenant),
                (topology.BUDGETS, self._on_budget),
                (topology.SPENDING, self._on_spending),
                (topology.ROLLOUTS, self._on_rollout),
                (topology.MODELS, self._on_model),
            ):
                watch = await self._bus.kv.watch(bucket, handler)
                stack.push_async_callback(watch.close)
            await self._admin.start()
            stack.push_async_callback(self._admin.close)
            stopping = asyncio.create_task(self._stopping.wait())
            try:
                waiting: set[asyncio.Future[Any]] = {stopping, self._broken}
                await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                if self._broken.done():
                    self._broken.result()
            finally:
                tasks = [stopping, *self._campaigns.values()]
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, *self._forgetting.values(), return_exceptions=True)

    async def _campaign(self, model: str) -> None:
        """Be a candidate for ``model``'s lease, and serve each term that is won, until cancelled."""
        try:
            while True:
                lease = Lease(
                    self._bus,
                    subjects.encode(model),
                    ids.incarnation(self._bus.user),
                    ttl_s=self._config.lease_ttl_s,
                    renew_s=self._config.lease_renew_s,
                )
                await lease.acquire()
                try:
                    if await self._serve_term(model, lease):
                        # The campaign is cancelled as soon as the model is gone, and its other records are not yet.
                        forgetting = self._forgetting[model] = asyncio.create_task(self._forget(model))
                        await asyncio.shield(forgetting)
                except (BusError, TimeoutError) as error:
                    log.warning("term_failed", model=model, reason=str(error))
                finally:
                    self._terms.pop(model, None)
                    await lease.release()
        except Exception as error:
            if not self._broken.done():
                self._broken.set_exception(error)
            raise

    async def _forget(self, model: str) -> None:
        if await registry.forget_removed(self._bus, model):
            await registry.forget_rollout(self._bus, model)

    async def _serve_term(self, model: str, lease: Lease) -> bool:
        """Whether the model was removed and nothing of it is left to do."""
        shown = await registry.find_rollout(self._bus, model)
        term = Term(self._bus, self._vitals, self._config, model, self._models[model], lease)
        for name, record in self._tenants.items():
            term.feed(events.TenantChanged(name, record))
        for seen in self._budgets.values():
            term.feed(seen)
        for other in [name for name in self._spending if name in self._models]:
            for tenant, spending in self._spending[other].items():
                term.feed(events.SpendingSeen(other, tenant, spending))
        if shown is not None:
            term.feed(events.RolloutChanged(self._plans.get(model, shown.plan), shown.progress))
        self._terms[model] = term
        await term.run()
        return term.core.over

    def _on_model(self, key: str, entry: KvEntry | None) -> None:
        if entry is None:
            self._keep_shards(subjects.decode(key), [])
            return
        record = registry.read_model(entry)
        names = shards.names(record.name, record.shards)
        self._keep_shards(record.name, names)
        for name in names:
            self._on_shard(msgspec.structs.replace(record, name=name))

    def _keep_shards(self, model: str, names: list[str]) -> None:
        """Those of that model that are not among ``names`` are gone."""
        for name in [name for name in self._models if shards.model_of(name) == model and name not in names]:
            if (campaign := self._campaigns.pop(name, None)) is not None:
                campaign.cancel()
            del self._models[name]
            self._tell_spending_of(name, gone=True)

    def _on_shard(self, record: ModelRecord) -> None:
        """A shard is to its owner what a model of one is. How limits are shared is decided for a whole term."""
        known = self._models.get(record.name)
        self._models[record.name] = record
        if known is None:
            self._tell_spending_of(record.name)
        if (term := self._terms.get(record.name)) is not None:
            term.feed(events.ModelChanged(record))
            if known is not None and known.shards != record.shards and not record.removed:
                term.end()
        if record.name not in self._campaigns:
            self._campaigns[record.name] = asyncio.create_task(self._campaign(record.name))

    def _on_rollout(self, key: str, entry: KvEntry | None) -> None:
        """Progress is the owner's own word, and comes back only to who looks for it."""
        if registry.is_progress(key):
            return
        model = subjects.decode(key)
        plan = None if entry is None else registry.read_plan(entry)
        if plan is None:
            self._plans.pop(model, None)
        else:
            self._plans[model] = plan
        if (term := self._terms.get(model)) is not None:
            term.feed(events.RolloutChanged(plan))

    def _on_tenant(self, key: str, entry: KvEntry | None) -> None:
        name = subjects.decode(key)
        record = None if entry is None else registry.read_tenant(entry)
        if record is None:
            self._tenants.pop(name, None)
        else:
            self._tenants[name] = record
        self._feed_all(events.TenantChanged(name, record))

    def _on_budget(self, key: str, entry: KvEntry | None) -> None:
        if entry is None:
            return
        budget = _budget.decode(entry.value)
        seen = events.BudgetSeen(subjects.decode(key), budget.month, budget.tokens, budget.covers_seq)
        self._budgets[seen.tenant] = seen
        self._feed_all(seen)

    def _on_spending(self, key: str, entry: KvEntry | None) -> None:
        model, tenant = map(subjects.decode, key.split("."))
        known = self._spending.setdefault(model, {})
        if entry is None:
            known.pop(tenant, None)
        else:
            known[tenant] = _spending.decode(entry.value)
        if model in self._models:
            self._feed_others(events.SpendingSeen(model, tenant, known.get(tenant)))

    def _tell_spending_of(self, model: str, *, gone: bool = False) -> None:
        """A model is there, or is not any more: then nothing of it runs, and nobody will tell of it."""
        for tenant, spending in self._spending.get(model, {}).items():
            self._feed_others(events.SpendingSeen(model, tenant, None if gone else spending))

    def _feed_others(self, event: events.SpendingSeen) -> None:
        """The owner of the model itself knows better, and its next one begins with what is known then."""
        for model, term in self._terms.items():
            if model != event.model:
                term.feed(event)

    def _feed_all(self, event: events.Event) -> None:
        for term in self._terms.values():
            term.feed(event)
