"""Clocks. Cores read none: the time is given to them.

The wall clock dates records; it may step, and hosts differ. Whoever waits counts spans by a monotonic clock. What a
model's owners decide they decide by a SteadyClock that starts from the bus's time, so that they agree with each other
and with when the bus stored what.
"""

import time


def now_ms() -> int:
    """UTC Unix milliseconds of this host's wall clock."""
    return time.time_ns() // 1_000_000


def monotonic_ms() -> int:
    """Milliseconds of a clock that never steps; its zero means nothing."""
    return time.monotonic_ns() // 1_000_000


class SteadyClock:
    """Unix ms: what it was told at its making, and what has passed since. Steps of the wall clock change nothing."""

    def __init__(self, now_ms: int) -> None:
        self._zero_ms = now_ms - monotonic_ms()

    def now_ms(self) -> int:
        """UTC Unix milliseconds; never goes back."""
        return self._zero_ms + monotonic_ms()
