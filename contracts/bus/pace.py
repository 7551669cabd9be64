"""When a connection writes: at once, unless it has just written often; then what is published meanwhile goes with it.

A write costs both sides the same for one message as for fifty, so under load fewer are made; a request that is alone
waits for nothing.
"""

GATHER_S = 0.002
"""Least time between two writes on average; a timer of the event loop may take a millisecond longer."""
AT_ONCE_MAX = 16
"""Writes in a row that do not wait: more than all steps of a request that is alone."""


class Pace:
    """A bucket of writes. Pure; times are seconds of a monotonic clock."""

    def __init__(self) -> None:
        self._left = float(AT_ONCE_MAX)
        self._at = 0.0

    def wait_s(self, now: float) -> float:
        """A write is due: how long it has to wait, 0.0 for not at all. It is counted as made."""
        self._left = min(AT_ONCE_MAX, self._left + (now - self._at) / GATHER_S) - 1
        self._at = now
        return 0.0 if self._left >= 0 else min(1.0, -self._left) * GATHER_S
