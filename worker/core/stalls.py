"""When an attempt, or the whole engine, makes no progress any more. Counted in looks, not by a clock."""

from worker.core.attempts import InFlight
from worker.engines.base import EngineStats


class StallWatch:
    """``samples``: looks in a row without progress that make a stall."""

    def __init__(self, samples: int) -> None:
        self._samples = samples
        self._totals = (0, 0)
        self._idle_samples = 0
        self._steps = 0
        self.engine_idle_samples = 0
        """Looks in a row at which an engine with work had made no step."""

    def restart(self) -> None:
        """The engine is a new one."""
        self._totals, self._idle_samples, self.engine_idle_samples = (0, 0), 0, 0

    def sample(self, stats: EngineStats, running: list[InFlight]) -> tuple[list[InFlight], bool]:
        """Those of ``running`` that stalled, and whether the engine did.

        Progress of an attempt is an own token or, before the first one, any step: how much of its prompt is computed
        cannot be told, for engines count that when all of it is.
        """
        totals = (stats.prefill_tokens_total, stats.decode_tokens_total)
        moved, self._totals = totals != self._totals, totals
        stepped, self._steps = stats.steps_total != self._steps, stats.steps_total
        self.engine_idle_samples = 0 if stepped or not running else self.engine_idle_samples + 1
        for attempt in running:
            tokens = attempt.counts.completion_tokens
            idle = tokens == attempt.seen_tokens and not (tokens == 0 and stepped)
            attempt.seen_tokens = tokens
            attempt.idle_samples = attempt.idle_samples + 1 if idle else 0
        stalled = [attempt for attempt in running if attempt.idle_samples >= self._samples]
        self._idle_samples = self._idle_samples + 1 if running and not moved else 0
        return stalled, len(stalled) == len(running) and self._idle_samples >= self._samples
