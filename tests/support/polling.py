"""Waiting for conditions, with a deadline; and what a counter says now."""

import asyncio
import inspect
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from contracts.service import telemetry

LIMIT_S = 30.0
"""Far more than anything takes, also on a busy machine: a test that must be quick says its own limit."""
PAUSES_S = (0.005, 0.05)
"""First and longest pause between two looks."""


async def until(condition: Callable[[], Any], what: str = "", limit_s: float = LIMIT_S) -> Any:
    """The first true value of ``condition``, which may be async; fails the test when there is none in time."""
    pauses = _pauses(what, limit_s)
    while True:
        value = condition()
        if inspect.isawaitable(value):
            value = await value
        if value:
            return value
        await asyncio.sleep(next(pauses))


def wait_until(condition: Callable[[], Any], what: str = "", limit_s: float = LIMIT_S) -> Any:
    """``until`` for tests without an event loop: it blocks the thread."""
    pauses = _pauses(what, limit_s)
    while not (value := condition()):
        time.sleep(next(pauses))
    return value


def _pauses(what: str, limit_s: float) -> Iterator[float]:
    """How long to wait before each further look, growing; after the deadline there is none, and the test fails."""
    deadline = time.monotonic() + limit_s
    pause_s, longest_s = PAUSES_S
    while time.monotonic() < deadline:
        yield pause_s
        pause_s = min(pause_s * 1.5, longest_s)
    pytest.fail(f"not within {limit_s:g} s: {what or 'what the test waits for'}")


def day_with(left_s: float) -> datetime:
    """Now, of a UTC day of which so much is left: waits over midnight for the next when this one is about to end.

    For what is told by the day or the month, which a test must not see change.
    """
    now = datetime.now(UTC)
    tomorrow = (now + timedelta(days=1)).replace(hour=0, minute=0, second=0, microsecond=0)
    if (rest := tomorrow - now) < timedelta(seconds=left_s):
        time.sleep(rest.total_seconds())
        now = max(datetime.now(UTC), tomorrow)
    return now


def metric(name: str, **labels: str) -> float:
    """Present value of a metric of this process, summed over labels that are not named."""
    return value_in(telemetry.page().decode(), name, **labels)


def value_in(page: str, name: str, **labels: str) -> float:
    """The same of a metrics page's text."""
    samples = (sample for family in text_string_to_metric_families(page) for sample in family.samples)
    wanted = labels.items()
    return sum(sample.value for sample in samples if sample.name == name and wanted <= sample.labels.items())
