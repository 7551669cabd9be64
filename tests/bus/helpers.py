"""Waiting for conditions, with a deadline."""

import asyncio
import time
from collections.abc import Callable

import prometheus_client


async def eventually(condition: Callable[[], object], timeout_s: float = 10.0, what: str = "") -> None:
    """Wait until ``condition()`` holds; fails after ``timeout_s``."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, what or "the awaited condition did not come about"
        await asyncio.sleep(0.01)


def metric(name: str, **labels: str) -> float:
    """Present value of a counter of this process."""
    return prometheus_client.REGISTRY.get_sample_value(name, labels) or 0.0
