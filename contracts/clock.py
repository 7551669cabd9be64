"""The wall clock. Cores read no clock: the time is given to them."""

import time


def now_ms() -> int:
    """UTC Unix milliseconds."""
    return time.time_ns() // 1_000_000
