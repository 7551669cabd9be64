"""``headrace up --autoscale``: each model has as many workers as its owner plans (scheduler/core/replicas.py).

What the owner does not know, or does not answer, changes nothing. One change of a model at a time, but for workers that
leave: what runs there may take long to end. Each change is in the audit trail, like an operator's.
"""

import asyncio
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager

from compose.stack.changes import Changes
from compose.stack.control import WITHIN_S, AddWorkers, RemoveWorker
from compose.stack.data_dir import ComposeError
from compose.stack.processes import Child
from compose.stack.workers import Workers
from contracts import operations
from contracts.bus import Bus, BusError
from contracts.errors import HeadraceError
from contracts.messages.queues import QueueAnswer, Replicas

LOOK_S = 2.0
RECONNECT_S = 5.0


def parse(text: str) -> tuple[int, int] | None:
    """``MIN..MAX``, 0 to 9999, as two numbers; None for an empty text. Raises ComposeError."""
    if not text:
        return None
    low, dots, high = text.partition("..")
    if not (dots and _is_count(low) and _is_count(high) and int(low) <= int(high) and int(high)):
        raise ComposeError(f"--autoscale is MIN..MAX, such as 1..4, where MIN may be 0; not {text!r}")
    return int(low), int(high)


def _is_count(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) < 5


def change(plan: Replicas, present: int, bounds: tuple[int, int]) -> int:
    """How many workers to start, or (negative) to stop, where so many do not leave yet. Pure."""
    low, high = bounds
    wanted = plan.desired if plan.known else present
    return min(max(wanted, low), high) - present


class Autoscaler:
    """Runs until it is cancelled. ``models`` names those that there are now."""

    def __init__(
        self,
        bounds: tuple[int, int],
        workers: Workers,
        changes: Changes,
        *,
        bus: Callable[[], AbstractAsyncContextManager[Bus]],
        models: Callable[[], list[str]],
        say: Callable[[str], None],
    ) -> None:
        self._bounds = bounds
        self._workers = workers
        self._changes = changes
        self._bus = bus
        self._models = models
        self._say = say
        self._adding: dict[str, asyncio.Task[None]] = {}
        self._leaving: dict[str, asyncio.Task[None]] = {}
        """By the worker's name."""

    async def run(self) -> None:
        """Look, and change what is to be changed, for ever."""
        try:
            while True:
                try:
                    async with self._bus() as bus:
                        while True:
                            for model in self._models():
                                for shard in await operations.shard_names(bus, model):
                                    await self._look_at(bus, shard)
                            await asyncio.sleep(LOOK_S)
                except BusError:
                    await asyncio.sleep(RECONNECT_S)
        finally:
            for task in (*self._adding.values(), *self._leaving.values()):
                task.cancel()

    async def _look_at(self, bus: Bus, model: str) -> None:
        """At a shard of a model as at a model of its own."""
        try:
            answer = await operations.shard_queue(bus, model)
        except HeadraceError:
            return
        staying = [it for it in self._workers.of(model) if not it.leaving and it.spec.name not in self._leaving]
        count = change(answer.replicas, len(staying), self._bounds)
        if count and model not in self._adding:
            self._say(f"{model}: {len(staying) + count} workers instead of {len(staying)} ({answer.replicas.reason})")
        if count > 0 and model not in self._adding:
            self._adding[model] = self._start(self._adding, model, AddWorkers(model, count))
        elif count < 0 and model not in self._adding:
            for child in _idlest(staying, answer)[:-count]:
                name = child.spec.name
                self._leaving[name] = self._start(self._leaving, name, RemoveWorker(name, WITHIN_S))

    def _start(
        self, tasks: dict[str, asyncio.Task[None]], key: str, call: AddWorkers | RemoveWorker
    ) -> asyncio.Task[None]:
        task = asyncio.create_task(self._perform(call))
        task.add_done_callback(lambda _: tasks.pop(key, None))
        return task

    async def _perform(self, call: AddWorkers | RemoveWorker) -> None:
        try:
            await self._changes.perform(call)
        except ComposeError as error:
            self._say(f"note: {error}")


def _idlest(children: list[Child], answer: QueueAnswer) -> list[Child]:
    """Those with the least to end first; the youngest of them."""
    running = {beat.worker.rpartition("-")[0]: beat.running + beat.waiting for beat in answer.workers}
    by_load = sorted(enumerate(children), key=lambda it: (running.get(it[1].spec.name, 0), -it[0]))
    return [child for _, child in by_load]
