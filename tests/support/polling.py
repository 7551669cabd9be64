"""Waiting for conditions, with a deadline."""

import asyncio
import inspect
import time
from collections.abc import Callable

import prometheus_client


async def eventually(condition: Callable[[], object], timeout_s: float = 10.0, what: str = "") -> None:
    """Wait until ``condition()``, awaited where it is a coroutine, holds; fails after ``timeout_s``."""
    deadline = time.monotonic() + timeout_s
    while not (await held if inspect.isawaitable(held := condition()) else held):
        assert time.monotonic() < deadline, what or "the awaited condition did not come about"
        await asyncio.sleep(0.01)


def metric(name: str, **labels: str) -> float:
    """Present value of a counter of this process."""
    return prometheus_client.REGISTRY.get_sample_value(name, labels) or 0.0
