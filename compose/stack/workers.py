"""The workers of a stack: how many of which model it begins with, more of them, fewer, while it runs."""

import asyncio
import os
from collections.abc import Callable, Sequence
from pathlib import PurePath

from compose.stack.control import ShownWorker
from compose.stack.data_dir import ComposeError, Options
from compose.stack.processes import Child, Supervisor
from contracts import shards

_OMP_BIND = "VLLM_CPU_OMP_THREADS_BIND"
"""Cores of a vLLM worker: one each, measured better than sharing them; the environment may say otherwise."""
READY_S = 900.0
"""Until an added worker is ready, as long as a start may take."""
LOOK_S = 0.05


def counts(text: str, models: Sequence[str]) -> tuple[int, ...]:
    """Workers of each of ``models``: one number for all, or ``a=2,b=1``, where those left out have one.

    A model is named as in ``--model``, or by the last part of its path. Raises ComposeError.
    """
    if text.isascii() and text.isdigit():
        return (_count(text, "--workers"),) * len(models)
    found: dict[str, int] = {}
    for part in text.split(","):
        name, equals, number = part.strip().rpartition("=")
        if not equals:
            raise ComposeError(f"--workers is a number, or such as a=2,b=1; {part.strip()!r} is neither")
        known = [model for model in models if name in (model, PurePath(model).name)]
        if len(known) != 1:
            raise ComposeError(f"--workers names {name!r}, which is not one of the models: {', '.join(models)}")
        if known[0] in found:
            raise ComposeError(f"--workers names {name!r} twice")
        found[known[0]] = _count(number, f"--workers of {name}")
    return tuple(found.get(model, 1) for model in models)


def _count(text: str, what: str) -> int:
    number = int(text) if text.isascii() and text.isdigit() and len(text) < 5 else 0
    if not number:
        raise ComposeError(f"{what} must be a whole number from 1 to 9999, not {text!r}")
    return number


class Workers:
    """Those of one stack. ``start``: has a process of that index run with these settings."""

    def __init__(self, options: Options, supervisor: Supervisor, start: Callable[[int, dict[str, str]], Child]) -> None:
        self._options = options
        self._supervisor = supervisor
        self._start = start
        self._pools: dict[str, tuple[str, str]] = {}
        """Model and version by name, of all that there were."""

    def user(self, ahead: int = 0) -> str:
        """Name of the next worker, or of one after it: no name comes twice while the stack runs."""
        return f"worker-{len(self._pools) + ahead}"

    def add(self, model: str, version: str = "") -> Child:
        """Start one more; without a version it serves whichever is the stable one when it starts."""
        index = len(self._pools)
        self._pools[self.user()] = (model, version)
        return self._start(index, self._settings(index, model, version))

    def of(self, shard: str) -> list[Child]:
        return [child for child in self._supervisor.of("worker") if self._pools[child.spec.name][0] == shard]

    def fewest(self, names: Sequence[str]) -> str:
        """Of those shards the first of which the fewest are here."""
        return min(names, key=lambda shard: len(self.of(shard)))

    def of_model(self, model: str) -> list[Child]:
        """Of all its shards."""
        workers = self._supervisor.of("worker")
        return [child for child in workers if shards.model_of(self._pools[child.spec.name][0]) == model]

    def named(self, name: str) -> Child:
        """By its name, or that of its present life on the bus; raises ComposeError."""
        for child in self._supervisor.of("worker"):
            if name == child.spec.name or name.rpartition("-")[0] == child.spec.name:
                return child
        there = ", ".join(child.spec.name for child in self._supervisor.of("worker")) or "none"
        raise ComposeError(f"there is no worker {name!r} here; there are: {there}")

    def shown(self, children: Sequence[Child]) -> list[ShownWorker]:
        return [
            ShownWorker(child.spec.name, *self._pools[child.spec.name], child.pid, _state(child)) for child in children
        ]

    async def wait_ready(self, children: Sequence[Child]) -> None:
        """Raises ComposeError when one of them is lost, leaves, or takes too long."""
        try:
            async with asyncio.timeout(READY_S):
                while not all(child.ready.is_set() for child in children):
                    for child in children:
                        if child.lost or child.leaving:
                            raise ComposeError(child.lost or f"{child.spec.name} was removed before it was ready")
                    await asyncio.sleep(LOOK_S)
        except TimeoutError as error:
            slow = ", ".join(f"{each.spec.name} ({each.reason})" for each in children if not each.ready.is_set())
            raise ComposeError(f"not ready within {READY_S:g} s, and still tried: {slow}") from error

    def _settings(self, index: int, model: str, version: str) -> dict[str, str]:
        """Of either engine: the model's manifest says which one it is."""
        options = self._options
        cores = sorted(os.sched_getaffinity(0))
        return {
            "HEADRACE_MODEL": model,
            "HEADRACE_VERSION": version,
            "HEADRACE_SIM_SLOTS": str(options.sim_slots),
            "HEADRACE_SIM_KV_TOKENS": str(options.sim_kv_tokens),
            "HEADRACE_SIM_PREFILL_TPS": str(options.sim_prefill_tps),
            "HEADRACE_SIM_ITL_MS": str(options.sim_itl_ms),
            "HEADRACE_SIM_CONTEXT": str(options.sim_context),
            _OMP_BIND: os.environ.get(_OMP_BIND, str(cores[index % len(cores)])),
        }


def _state(child: Child) -> str:
    if child.leaving:
        return "leaving"
    return "ready" if child.ready.is_set() else child.reason or "starting"
