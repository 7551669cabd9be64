"""Where a request goes, of the workers that can take it: where the least is left to compute before it, and few wait.

A worker's cost is (tokens of prompts that it has yet to compute + those that this one would add, WHEN_FULL times where
new blocks drive out others) x (what runs and waits there + 1); the lowest wins (LMetric, arXiv 2603.15202, with our
factor) x the share of the work that it has done of late. Nobody gets one who has more than CROWDED times the mean and
one more, so that a hot prefix spreads. Which request is next is decided before, by fairness; who has no keys goes by
load alone.

Work of late evens out what chance does: who happens to hold the longer conversations stays the busiest otherwise, since
all of them come back. It is bounded on both sides, so that a faster worker, which does more by being free more
often, keeps most of that.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple, Protocol, TypeVar

from contracts.messages.attempts import AttemptEvent
from contracts.prefix import COVERED
from scheduler.core.prefix_index import Cache, PrefixIndex
from scheduler.core.prompts import Prompts
from scheduler.core.request import Request

WHEN_FULL = 4
"""What is computed where the cache is full costs others their blocks, too."""
CROWDED = 1.25
LAST_RESORT = 1e18
"""Added to the cost of who is crowded: chosen when all are."""
SHARE_MIN, SHARE_MAX = 0.8, 1.25
"""Bounds of (a worker's work of late / the mean)^2 in its cost."""
LATE_TOKENS = 256_000
"""A worker's work, on the mean, at which all of it is halved."""
NEW_TOKENS = 10_000
"""Each worker's work when it joins: the first few requests say nothing about it."""


class Expected(NamedTuple):
    """What was expected of an attempt's cache when it was placed."""

    cached_tokens: int
    used_at: int
    """Of its own use of its worker's cache."""
    first_used_at: int
    """Of the first block that was there, and of the last one, by the uses before; 0 where none was, or where who used
    it may not have computed it yet."""
    last_used_at: int


class WorkerLoad:
    """What was placed on a worker and has not ended, what it holds, and what it has done."""

    __slots__ = ("attempts", "cache", "count", "prompts", "work_share", "work_tokens")

    def __init__(self, cache: Cache) -> None:
        self.cache = cache
        self.attempts: dict[str, Expected] = {}
        """By request id; ``count`` of them."""
        self.count = 0
        self.prompts = Prompts()
        self.work_tokens: float = NEW_TOKENS
        """Computed of late for attempts that have ended: of prompts what was not cached, and of answers."""
        self.work_share = 1.0
        """Of that in the mean, as a factor of its cost."""


class Candidate(Protocol):
    """A worker that could take a request."""

    load: WorkerLoad
    kv_reserved: int


C = TypeVar("C", bound=Candidate)


class Found:
    """Tokens of the prompts of ended attempts; how many were expected in a cache, and how many were there."""

    __slots__ = ("cached", "expected", "prompt")

    def __init__(self) -> None:
        self.prompt = self.expected = self.cached = 0


class Placement:
    """The workers of one model."""

    def __init__(self) -> None:
        self.index = PrefixIndex()
        self.found = Found()
        self._loads: list[WorkerLoad] = []
        self._ends = 0
        """Since shares were told."""

    def join(self) -> WorkerLoad:
        """Of a new worker."""
        load = WorkerLoad(self.index.join())
        self._loads.append(load)
        return load

    def leave(self, load: WorkerLoad) -> None:
        """The worker is lost."""
        self.index.leave(load.cache)
        self._loads.remove(load)

    def choose(self, request: Request, candidates: Sequence[C]) -> C | None:
        """One of the candidates; None if there are none. Of equal ones that with less reserved."""
        if len(candidates) < 2:
            return candidates[0] if candidates else None
        prompt, runs = self._uncached(request)
        loads = [each.load for each in candidates]
        most = 1 + CROWDED * sum([load.count for load in loads]) / len(loads)
        best, least = candidates[0], math.inf
        warmest = runs[0][1] if runs else prompt
        for each, load in zip(candidates, loads, strict=True):
            if (load.prompts.tokens + warmest) * (load.count + 1) * load.work_share > least:
                continue  # Nor with all that any cache holds: most of them.
            cache, uncached = load.cache, prompt
            if runs:
                for bits, left in runs:
                    if bits & cache.bit:
                        uncached = left
                        break
            if cache.blocks >= cache.full_at:
                uncached *= WHEN_FULL
            cost = (load.prompts.tokens + uncached) * (load.count + 1) * load.work_share
            if cost <= least:
                if load.count > most:
                    cost += LAST_RESORT
                if cost < least or (cost == least and each.kv_reserved < best.kv_reserved):
                    best, least = each, cost
        return best

    def in_time(self, request: Request, candidates: Sequence[C], now_ms: int) -> Sequence[C]:
        """Those where its first token is expected by its deadline."""
        prompt, left_ms = request.envelope.prompt_tokens, request.envelope.deadline_at_ms - now_ms
        if all(each.load.prompts.first_token_ms(prompt, now_ms) <= left_ms for each in candidates):
            return candidates
        prompt, runs = self._uncached(request)

        def uncached(load: WorkerLoad) -> int:
            return next((left for bits, left in runs if bits & load.cache.bit), prompt)

        return [it for it in candidates if it.load.prompts.first_token_ms(uncached(it.load), now_ms) <= left_ms]

    def _uncached(self, request: Request) -> tuple[int, list[tuple[int, int]]]:
        """The prompt's tokens, and those that are left to compute for the workers of each set of bits; least first."""
        prompt = request.envelope.prompt_tokens
        return prompt, [(bits, prompt - COVERED[keys]) for bits, keys in self.index.runs(request.prefix)]

    def placed(self, request: Request, load: WorkerLoad, kv_tokens: int, now_ms: int) -> None:
        """An attempt of the request runs there from now on."""
        load.prompts.left(request.id, now_ms, computed=False)
        index, cache, keys = self.index, load.cache, request.prefix
        held = first = last = own = 0
        if keys:
            held = cache.held_of(keys)
        if held:
            first, last = cache.used_at(keys[0]), cache.used_at(keys[held - 1])
            if load.prompts:
                unsure = load.attempts[load.prompts.first].used_at
                first, last = first if first < unsure else 0, last if last < unsure else 0
        if keys:
            own = index.use(cache, keys, kv_tokens)
        load.attempts[request.id] = Expected(COVERED[held], own, first, last)
        load.count = len(load.attempts)
        load.prompts.came(request.id, request.envelope.prompt_tokens - COVERED[held], now_ms)

    def prefilled(self, request: Request, load: WorkerLoad, now_ms: int) -> None:
        """The first token of the request's attempt is known of. When that of an adopted one came nobody knows."""
        load.prompts.left(request.id, now_ms, computed=not request.adopted)

    def ended(self, request: Request, load: WorkerLoad, event: AttemptEvent | None, now_ms: int) -> None:
        """The request's attempt ended; where the cache held less than was expected, the index is corrected."""
        computed = event is not None and event.first_token_at_ms > 0 and not request.adopted
        load.prompts.left(request.id, now_ms, computed=computed)
        expected = load.attempts.pop(request.id, None)
        load.count = len(load.attempts)
        if expected is None:
            return
        if event is None or not event.first_token_at_ms:
            if request.prefix:
                held = COVERED.index(expected.cached_tokens)
                self.index.drop(load.cache, request.prefix[held:], expected.used_at)
            return
        self.found.prompt += event.prompt_tokens
        self.found.cached += event.cached_tokens
        self.found.expected += expected.cached_tokens
        self._worked(load, event.prompt_tokens - event.cached_tokens + event.completion_tokens)
        if expected.cached_tokens - event.cached_tokens >= COVERED[1]:
            missing_first = event.cached_tokens < COVERED[1]
            self.index.drop_until(load.cache, expected.first_used_at if missing_first else expected.last_used_at)

    def _worked(self, load: WorkerLoad, tokens: int) -> None:
        """It has computed these. All shares are told anew once in as many ends as there are workers."""
        load.work_tokens += tokens
        self._ends += 1
        if self._ends < len(self._loads):
            return
        self._ends = 0
        mean = sum(each.work_tokens for each in self._loads) / len(self._loads)
        for each in self._loads:
            each.work_share = min(SHARE_MAX, max(SHARE_MIN, (each.work_tokens / mean) ** 2))
            if mean > LATE_TOKENS:
                each.work_tokens /= 2
