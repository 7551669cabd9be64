"""What is changed of a stack while it runs, as ``headrace worker`` and ``headrace model remove`` ask: nothing restarts.

Each change is in the audit trail before it is done, like every other action of an operator.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager

from compose.stack.control import AddWorkers, Answer, Call, ListWorkers, RemoveModel, RemoveWorker
from compose.stack.data_dir import ComposeError
from compose.stack.processes import Child, Supervisor
from compose.stack.records import operator
from compose.stack.workers import Workers
from contracts import audit, operations, registry, shards
from contracts.administration import Administration
from contracts.bus import Bus, BusError
from contracts.errors import HeadraceError

LOOK_S = 0.5


class Changes:
    """Performs calls. ``bus`` connects as the operator, ``admit`` lets users onto the bus, ``changed`` is called once
    processes came or went, ``forget`` once a model is not to be restored any more.
    """

    def __init__(
        self,
        workers: Workers,
        supervisor: Supervisor,
        *,
        bus: Callable[[], AbstractAsyncContextManager[Bus]],
        admit: Callable[[list[str]], Awaitable[None]],
        changed: Callable[[], None],
        forget: Callable[[str], None],
    ) -> None:
        self._workers = workers
        self._supervisor = supervisor
        self._bus = bus
        self._admit = admit
        self._changed = changed
        self._forget = forget
        self._adding = asyncio.Lock()
        """Names are given in order, and the bus is told of them before the processes come."""

    async def perform(self, call: Call) -> Answer:
        """Raises ComposeError, having changed nothing or what the audit trail says."""
        try:
            return await self._perform(call)
        except (HeadraceError, BusError) as error:
            raise ComposeError(str(error)) from error

    async def _perform(self, call: Call) -> Answer:
        match call:
            case AddWorkers():
                return await self._add(call)
            case RemoveWorker():
                return await self._remove(call)
            case RemoveModel():
                return await self._remove_model(call)
            case ListWorkers():
                return Answer(self._workers.shown(self._supervisor.of("worker")))

    async def _add(self, call: AddWorkers) -> Answer:
        async with self._bus() as bus, self._adding:
            record = await registry.model(bus, shards.model_of(call.model))
            names = await operations.shard_names(bus, call.model)
            if base := (await registry.version(bus, record.name, call.version or record.stable)).base:
                raise ComposeError(
                    f"{call.model} is an adapter: the workers of {base.model} serve it; add one of those: "
                    f"headrace worker add {base.model} --version {base.version}"
                )
            async with audit.recorded(bus, operator(), "workers.add", call.model, call):
                await self._admit([self._workers.user(ahead) for ahead in range(call.count)])
                added = [self._workers.add(self._workers.fewest(names), call.version) for _ in range(call.count)]
        try:
            await self._workers.wait_ready(added)
        finally:
            self._changed()
        return Answer(self._workers.shown(added))

    async def _remove(self, call: RemoveWorker) -> Answer:
        child = self._workers.named(call.name)
        [shown] = self._workers.shown([child])
        async with self._bus() as bus, audit.recorded(bus, operator(), "workers.remove", shown.name, call):
            await self._stop([child], call.within_s)
        left = self._workers.of(shown.model)
        notes = [] if left else [f"no worker of {shown.model} is left here: its requests wait until their deadlines"]
        return Answer(self._workers.shown(left), notes)

    async def _remove_model(self, call: RemoveModel) -> Answer:
        async with self._bus() as bus:
            await Administration(bus, operator()).remove_model(call.name)
        self._forget(call.name)
        give_up_at = time.monotonic() + call.within_s
        notes = []
        while await self._is_known(call.name):
            if time.monotonic() > give_up_at:
                notes.append(
                    f"requests of {call.name} had not ended after {call.within_s:g} s; its workers stop all the same"
                )
                break
            await asyncio.sleep(LOOK_S)
        await self._stop(self._workers.of_model(call.name), 0)
        return Answer([], notes)

    async def _is_known(self, model: str) -> bool:
        """Whether its owner has not forgotten it yet. While the bus is away that is not known."""
        try:
            async with self._bus() as bus:
                return await registry.is_known(bus, model)
        except BusError:
            return True

    async def _stop(self, children: list[Child], within_s: float) -> None:
        await asyncio.gather(*(self._supervisor.remove(child, within_s) for child in children))
        self._changed()
