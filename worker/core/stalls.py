"""When an attempt, or the whole engine, makes no progress any more. Counted in looks, not by a clock."""

from collections.abc import Iterable

from worker.core.attempts import InFlight


class StallWatch:
    """``samples``: looks in a row without progress that make a stall."""

    def __init__(self, samples: int) -> None:
        self._samples = samples
        self._totals = (0, 0)
        self._idle_samples = 0

    def restart(self) -> None:
        """The engine is a new one."""
        self._totals, self._idle_samples = (0, 0), 0

    def sample(self, prefill_total: int, decode_total: int, running: Iterable[InFlight]) -> tuple[list[InFlight], bool]:
        """Those of ``running`` that stalled, and whether the engine did; its totals are tokens since its start.

        Progress of an attempt is an own token or, before the first one, any prefill: its own cannot be told.
        """
        prefilled = prefill_total != self._totals[0]
        moved = (prefill_total, decode_total) != self._totals
        self._totals = (prefill_total, decode_total)
        looked_at, stalled = 0, []
        for attempt in running:
            looked_at += 1
            tokens = attempt.counts.completion_tokens
            idle = tokens == attempt.seen_tokens and not (tokens == 0 and prefilled)
            attempt.seen_tokens = tokens
            attempt.idle_samples = attempt.idle_samples + 1 if idle else 0
            if attempt.idle_samples >= self._samples:
                stalled.append(attempt)
        self._idle_samples = self._idle_samples + 1 if looked_at and not moved else 0
        return stalled, len(stalled) == looked_at and self._idle_samples >= self._samples
