"""What the stable version does, as its last answers show: how late a first token is usual, how long a pause, an answer.

Percentiles run: they are of the last WINDOW values, so that a change of the load moves them for both versions.
"""

import math
from collections import deque

from contracts.messages.attempts import AttemptEvent
from contracts.messages.rollouts import Criterion

WINDOW = 200
"""Values a percentile is of: its own error is some 2 points then, and it follows the load within minutes."""
VALUES_MIN = 20
"""With fewer there is no percentile, and nobody is measured by it."""
RENEWED_EVERY = 10
"""Values at least between two looks: sorting each time would cost more than the rest of the judge."""

QUANTILES: dict[Criterion, float] = {"first_token": 0.90, "pauses": 0.90, "length": 0.95}

LIMITED = "limited"
"""1 for an answer that was ended by its limit, else 0."""
LIMITED_QUANTILE = 1 / 3
"""Where two thirds of stable's answers are, no version can be 1.5 times as bad by that: then it says nothing."""

SIZES = ((512, "short"), (4_096, "medium"), (32_768, "long"))
"""Uncached prompt tokens below which a request is of that class, by which first tokens are compared."""


def work_class(uncached_tokens: int) -> str:
    """What the time to the first token depends on: how much of the prompt must be computed."""
    return next((name for below, name in SIZES if uncached_tokens < below), "huge")


def values(event: AttemptEvent) -> dict[str, float]:
    """What an ended attempt measures, by key of a percentile: milliseconds, and tokens of a choice."""
    measured: dict[str, float] = {}
    if event.first_token_at_ms and event.dispatched_at_ms:
        size = work_class(event.prompt_tokens - event.cached_tokens)
        measured[first_token_key(size)] = event.first_token_at_ms - event.dispatched_at_ms
    if event.completion_tokens > event.choices:
        measured["pauses"] = event.pause_ms_max
    if event.completion_tokens and event.outcome == "completed":
        measured["length"] = event.completion_tokens / max(1, event.choices)
    if event.outcome == "completed" and event.endpoint != "embeddings":
        measured[LIMITED] = float(event.finish_reason == "length")
    return measured


def first_token_key(size: str) -> str:
    """Key of the percentile for prompts of that class."""
    return f"first_token.{size}"


def criterion_of(key: str) -> Criterion:
    """What a percentile's key measures."""
    if key == "pauses":
        return "pauses"
    return "length" if key in ("length", LIMITED) else "first_token"


def quantile_of(key: str) -> float:
    """Of stable's values, the one above which a value is bad."""
    return LIMITED_QUANTILE if key == LIMITED else QUANTILES[criterion_of(key)]


class Baseline:
    """The running percentiles of one version."""

    def __init__(self) -> None:
        self._values: dict[str, deque[float]] = {}
        self._thresholds: dict[str, float] = {}
        self._since: dict[str, int] = {}

    def add(self, measured: dict[str, float]) -> None:
        """One more answer of the stable version."""
        for key, value in measured.items():
            window = self._values.setdefault(key, deque(maxlen=WINDOW))
            window.append(value)
            self._since[key] = self._since.get(key, RENEWED_EVERY) + 1

    def threshold(self, key: str) -> float | None:
        """What lies above is bad; None while that is not known."""
        window = self._values.get(key, ())
        if len(window) >= VALUES_MIN and self._since[key] >= RENEWED_EVERY:
            ranked = sorted(window)
            self._thresholds[key] = ranked[math.ceil(quantile_of(key) * len(ranked)) - 1]
            self._since[key] = 0
        return self._thresholds.get(key)

    @property
    def thresholds(self) -> dict[str, float]:
        """All that are known, for the next owner."""
        for key in self._values:
            self.threshold(key)
        return dict(self._thresholds)

    def restore(self, thresholds: dict[str, float]) -> None:
        """An earlier owner's, until there are enough values here."""
        self._thresholds = {**thresholds, **self._thresholds}
