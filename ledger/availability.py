"""Whether ClickHouse works, as the last call to it found: readiness, what is counted, and how long to wait."""

import asyncio
import random
from collections.abc import Callable

import structlog

from ledger import metrics

log = structlog.get_logger(__name__)


class Availability:
    """``problem`` says why ClickHouse does not work; empty while it does. Pauses end early once ``stopping`` is set."""

    def __init__(self, stopping: asyncio.Event) -> None:
        self.problem = ""
        self._stopping = stopping
        self._failures = 0

    async def failed(self, during: str, error: Exception) -> None:
        """Note a call that failed and pause before the next one, longer each time."""
        self._failures += 1
        self.problem = f"ClickHouse: {error}"
        metrics.FAILURES.inc()
        metrics.CONNECTED.set(0)
        pause = pause_s(self._failures, random.random)
        log.warning("clickhouse_away", during=during, failures=self._failures, pause_s=pause, error=str(error))
        await self.pause(pause)

    def succeeded(self) -> None:
        """Note a call that succeeded."""
        if self._failures:
            log.info("clickhouse_back", failures=self._failures)
        self._failures, self.problem = 0, ""
        metrics.CONNECTED.set(1)

    async def pause(self, seconds: float) -> None:
        """Sleep; shorter when the service stops."""
        try:
            async with asyncio.timeout(seconds):
                await self._stopping.wait()
        except TimeoutError:
            pass


def pause_s(failures: int, jitter: Callable[[], float]) -> float:
    """Pause after so many failures in a row: 0.2 s after one, doubling to 30 s, less up to a quarter.

    ``jitter``: gives a number in [0, 1).
    """
    return min(30.0, 0.2 * 2.0 ** min(failures - 1, 8)) * (1 - jitter() / 4)
