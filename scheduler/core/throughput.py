"""How fast a pool works off its queue, measured; the predicted wait and every Retry-After follow from it."""

import math

TIME_CONSTANT_MS = 20_000.0
"""Memory of the measured rate: a few generations long, short enough to follow a lost worker. A guess."""
KNOWN_AFTER_MS = 1_000.0
"""Saturated time after which the rate is trusted."""
BOUND_AFTER_MS = 200.0
"""Saturated time after which an upper bound of the rate is worth something."""
DURATION_GUESS_MS = 5_000.0


class ThroughputEstimate:
    """Rate in reserved tokens per millisecond, over time in which requests waited.

    Queue and rate are both counted in reserved tokens, so the estimate needs no model of real use.
    """

    def __init__(self, now_ms: int) -> None:
        self._at_ms = now_ms
        self._tokens = 0.0
        self._busy_ms = 0.0
        self._fresh = 0.0
        self._running = 0.0
        """Reserved tokens of what ran when requests last waited."""
        self._duration_ms = DURATION_GUESS_MS

    def done(self, tokens: float, duration_ms: int) -> None:
        """An attempt that had reserved ``tokens`` ended ``duration_ms`` after its dispatch."""
        self._fresh += tokens
        self._duration_ms += 0.1 * (duration_ms - self._duration_ms)

    def pass_time(self, now_ms: int, *, saturated: bool, running_tokens: float) -> None:
        """Fold in what ended since the last call; time without a queue tells nothing about capacity.

        ``running_tokens``: reserved by what runs now.
        """
        elapsed = now_ms - self._at_ms
        self._at_ms = now_ms
        if saturated and elapsed > 0:
            keep = math.exp(-elapsed / TIME_CONSTANT_MS)
            self._tokens = self._tokens * keep + self._fresh
            self._busy_ms = self._busy_ms * keep + elapsed
            self._running = running_tokens
        self._fresh = 0.0

    def wait_ms(self, tokens: float) -> int:
        """Expected time until ``tokens`` have been worked off; 0 while nothing is known.

        Until as much has ended as ran then, the rate is taken as if that had ended, too: an upper bound. What ended
        after the queue, by hang-ups all at once perhaps, would else count as not done.
        """
        done = self._tokens
        if self._busy_ms < KNOWN_AFTER_MS or done < self._running:
            done += self._running + self._fresh
        if self._busy_ms < BOUND_AFTER_MS or done <= 0:
            return 0
        return math.ceil(tokens * self._busy_ms / done)

    def turnover_ms(self, running: int) -> int:
        """Expected time until one of ``running`` requests ends."""
        return math.ceil(self._duration_ms / max(1, running))
