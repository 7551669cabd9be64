"""Prompts that a worker has yet to compute, how fast it was measured to do that, and when a first token will come.

Engines compute prompts in the order in which they get them, as many tokens a second of one as of another. Tokens are
those that placement expects to be computed, and the speed is measured in the same: over time in which there always was
one to compute, the tokens of those whose first token became known.
"""

import math
from typing import NamedTuple

BEHIND_MS = 2_000
"""While one prompt is computed, at most so much of others waits behind it in the engine, past all fairness: four
heartbeats, which tell of first tokens, so that an engine never runs out of prompts."""
BEHIND_TOKENS = 8_192
"""And at least so many, which engines compute in one step (vLLM's default on GPUs) or in a blink."""
MEASURED_MS = 2_000
"""Shortest span that says how fast: a first token is known up to a heartbeat late."""
MEASURED_TOKENS = 2_048
"""Of fewer, something else took the time."""
MEMORY_MS = 60_000.0
"""Of the speed, in time spent on prompts: some dozens of long ones. A guess."""


class Expected(NamedTuple):
    """Of one more prompt at a model's workers; all 0 while that is unknown."""

    first_token_ms: int = 0
    """From its dispatch, where that is soonest."""
    alone_ms: int = 0
    """The same there if it were alone."""
    per_ms: float = 0.0
    """Tokens of prompts that all workers together get done in a millisecond, cached ones with them; 0 while one worker
    was not measured."""


class Prompts:
    """Of one worker."""

    __slots__ = (
        "_first_since_ms",
        "_left",
        "_measured_ms",
        "_measured_tokens",
        "_since_ms",
        "_tokens",
        "enough",
        "per_ms",
        "tokens",
    )

    def __init__(self) -> None:
        self.tokens = 0
        """Left to compute, of those of which no token is known."""
        self.per_ms = 0.0
        """Tokens that it computes in a millisecond; 0 while that is unknown."""
        self.enough = False
        """Whether more would only wait there."""
        self._left: dict[str, int] = {}
        """By request, in order."""
        self._first_since_ms = 0
        """Since when the first one has been computed, as far as is known."""
        self._since_ms = 0
        self._tokens = 0
        """Of a span that is not measured yet: its beginning, and what was computed since."""
        self._measured_ms = 0.0
        self._measured_tokens = 0.0

    def __len__(self) -> int:
        return len(self._left)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._left

    @property
    def first(self) -> str:
        """Request whose prompt came first."""
        return next(iter(self._left))

    def came(self, request_id: str, tokens: int, now_ms: int) -> None:
        """One more, behind the others."""
        if not self._left:
            self._first_since_ms = self._since_ms = now_ms
            self._tokens = 0
        self._left[request_id] = tokens
        self.tokens += tokens
        self.enough = self._is_enough()

    def left(self, request_id: str, now_ms: int, *, computed: bool) -> None:
        """Its first token is known of (``computed``, since it came), or it ended without one."""
        if (tokens := self._left.get(request_id)) is None:
            return
        if request_id == self.first:
            self._first_since_ms = now_ms
        del self._left[request_id]
        self.tokens -= tokens
        if computed:
            self._measure(tokens, now_ms)
        else:
            self._since_ms, self._tokens = now_ms, 0
        self.enough = self._is_enough()

    def _measure(self, tokens: int, now_ms: int) -> None:
        self._tokens += tokens
        span_ms = now_ms - self._since_ms
        if span_ms >= MEASURED_MS and self._tokens >= MEASURED_TOKENS:
            keep = math.exp(-span_ms / MEMORY_MS)
            self._measured_tokens = self._measured_tokens * keep + self._tokens
            self._measured_ms = self._measured_ms * keep + span_ms
            self.per_ms = self._measured_tokens / self._measured_ms
            self._since_ms, self._tokens = now_ms, 0

    def _is_enough(self) -> bool:
        if self.tokens <= BEHIND_TOKENS or len(self._left) < 2:
            return False
        behind = self.tokens - self._left[self.first]
        return behind > BEHIND_TOKENS and behind > BEHIND_MS * self.per_ms > 0

    def first_token_ms(self, tokens: int, now_ms: int) -> int:
        """From now until the first token of one more prompt, of so many tokens to compute; 0 while that is unknown."""
        return math.ceil((self.before(now_ms) + tokens) / self.per_ms) if self.per_ms else 0

    def before(self, now_ms: int) -> float:
        """Tokens left to compute by now, less what is done of the first prompt."""
        if not self._left:
            return 0.0
        return self.tokens - min(self._left[self.first], self.per_ms * (now_ms - self._first_since_ms))


def expected(tokens: int, uncached: float, workers: list[Prompts], now_ms: int) -> Expected:
    """Of one more prompt at one of the workers; ``uncached``: share of all prompts that has to be computed."""
    left = round(tokens * uncached)
    least, fastest, together, known = math.inf, 0.0, 0.0, True
    for prompts in workers:  # No call for who has none: each admission comes here.
        if not (per_ms := prompts.per_ms):
            known = False
            continue
        together += per_ms
        first_ms = ((prompts.before(now_ms) if prompts.tokens else 0.0) + left) / per_ms
        if first_ms < least or (first_ms == least and per_ms > fastest):
            least, fastest = first_ms, per_ms
    if not fastest:
        return Expected()
    per_ms = together / max(uncached, 0.01) if known else 0.0
    return Expected(math.ceil(least), math.ceil(left / fastest), per_ms)
