"""What is done again and again is done at the same instants: on an idle machine a process wakes once for all of it.

The monotonic clock is a host's, so its processes wake together, too, and what they tell each other arrives together.
"""

import asyncio
import time

EARLY_S = 0.005
"""A timer of the event loop may fire so early."""


def next_tick_s(period_s: float, now_s: float) -> float:
    """How long from ``now_s`` until the next multiple of ``period_s``."""
    return (int((now_s + EARLY_S) / period_s) + 1) * period_s - now_s


async def tick(period_s: float) -> None:
    """Until the next of the instants that are ``period_s`` apart."""
    await asyncio.sleep(next_tick_s(period_s, time.monotonic()))
