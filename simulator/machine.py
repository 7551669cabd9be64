"""A worker's timing, in closed form: the simulated engine's (worker/engines/simulated/batch.py) without a step a token.

Slots with a queue before them, one prefill at a time, equal gaps between tokens, a KV cache that preempts the youngest
when it is full, and a prefix cache of blocks with the least recently used evicted. Differences from the engine: a
prefill that is cut off does not pull those behind it forward, and a full cache is noticed when something begins or
ends.
"""

from collections import OrderedDict, deque
from collections.abc import Sequence

from contracts.prefix import BLOCK_TOKENS
from simulator.scenario import Timing

BLOCK = BLOCK_TOKENS
"""Tokens of a block of the cache: the scheduler's, four of the engine's."""

Key = tuple[str, int]
"""Request and attempt."""


class Job:
    """One attempt on a machine."""

    __slots__ = (
        "blocks",
        "cached",
        "end_ms",
        "first_ms",
        "given",
        "key",
        "order",
        "output",
        "preempted_first_ms",
        "prompt",
        "stamp",
    )

    def __init__(self, key: Key, prompt: int, output: int, blocks: Sequence[int]) -> None:
        self.key = key
        self.prompt = prompt
        self.output = output
        self.blocks = blocks
        self.cached = -1
        """Prompt tokens that the cache had when it began; -1 before."""
        self.given = 0
        """Tokens that it had given when it was preempted."""
        self.first_ms = 0.0
        """When it gives its next first token: of its life, or after a preemption."""
        self.preempted_first_ms = 0.0
        """When it gave its first token, if it was preempted since."""
        self.end_ms = 0.0
        self.order = 0
        self.stamp = 0
        """Ends that were planned with an older one are void."""

    def tokens_at(self, now_ms: float, itl_ms: float) -> int:
        """Given by then."""
        if not self.end_ms or now_ms < self.first_ms:
            return self.given
        return min(self.output, self.given + 1 + int((now_ms - self.first_ms) / itl_ms))

    @property
    def began_ms(self) -> float:
        """When it gave the first token of its life; 0 before it has begun."""
        return self.preempted_first_ms or self.first_ms


class Machine:
    """One worker; ``begun`` holds what has begun since it was last read, so that its end can be planned."""

    def __init__(self, name: str, number: int, timing: Timing, ready_ms: float) -> None:
        self.name = name
        self.number = number
        self.timing = timing
        self.ready_ms = ready_ms
        self.alive = True
        self.leaving = False
        self.running: dict[Key, Job] = {}
        self.waiting: deque[Job] = deque()
        self.begun: list[Job] = []
        self.prompt_tokens = 0
        """Of what has begun: computed, or next to be."""
        self.cached_tokens = 0
        self.output_tokens = 0
        self.preemptions = 0
        self.began_ms = ready_ms
        self._cache: OrderedDict[int, None] = OrderedDict()
        self._blocks_max = timing.kv_tokens // BLOCK
        self._prefill_free_ms = 0.0
        self._orders = 0
        self._prompt_held = 0
        """Prompt tokens of what runs."""
        self._output_held = 0
        """Output tokens that it will have given."""

    def add(self, job: Job, now_ms: float) -> None:
        """Queue an attempt; it begins at once where there is room."""
        self._orders += 1
        job.order = self._orders
        self.waiting.append(job)
        self._fill(now_ms)

    def remove(self, key: Key, now_ms: float) -> Job | None:
        """Take it off: it ended, or is cancelled. None when it is not here."""
        job = self.running.pop(key, None)
        if job is None:
            job = next((it for it in self.waiting if it.key == key), None)
            if job is not None:
                self.waiting.remove(job)
            return job
        job.stamp += 1
        job.given = job.tokens_at(now_ms, self.timing.itl_ms)
        self._prompt_held -= job.prompt
        self._output_held -= job.output
        self.output_tokens += job.given
        self._fill(now_ms)
        return job

    def computed(self, now_ms: float) -> int:
        """Prompt tokens computed by then."""
        left_ms = max(0.0, self._prefill_free_ms - now_ms)
        return self.prompt_tokens - round(left_ms * self.timing.prefill_tps / 1000)

    def held(self, given: int) -> int:
        """KV tokens in use when what runs has ``given`` so many tokens."""
        return self._prompt_held + given

    def given(self, now_ms: float) -> int:
        """Tokens so far of what runs."""
        itl_ms = self.timing.itl_ms
        return sum([job.tokens_at(now_ms, itl_ms) for job in self.running.values()])

    def _fill(self, now_ms: float) -> None:
        timing = self.timing
        while self.waiting and len(self.running) < timing.slots:
            job = self.waiting[0]
            if self.running and self._prompt_held + job.prompt > timing.kv_tokens - len(self.running):
                held = self.held(self.given(now_ms))
                if held + job.prompt + job.given + 1 > timing.kv_tokens:
                    return
            self.waiting.popleft()
            self._begin(job, now_ms)
        if self._prompt_held + self._output_held > timing.kv_tokens:
            self._preempt(now_ms)

    def _begin(self, job: Job, now_ms: float) -> None:
        timing = self.timing
        cached = self._look_up(job)
        if job.cached < 0:
            job.cached = cached
            self.cached_tokens += cached
        computed = job.prompt + job.given - cached
        self.prompt_tokens += computed
        self._prefill_free_ms = max(now_ms, self._prefill_free_ms) + computed / timing.prefill_tps * 1000
        job.first_ms = self._prefill_free_ms
        job.end_ms = job.first_ms + max(0, job.output - job.given - 1) * timing.itl_ms
        job.stamp += 1
        self.running[job.key] = job
        self._prompt_held += job.prompt
        self._output_held += job.output
        self.begun.append(job)

    def _preempt(self, now_ms: float) -> None:
        while len(self.running) > 1 and self.held(self.given(now_ms)) > self.timing.kv_tokens:
            youngest = max(self.running.values(), key=lambda job: job.order)
            del self.running[youngest.key]
            youngest.given = youngest.tokens_at(now_ms, self.timing.itl_ms)
            if youngest.given and not youngest.preempted_first_ms:
                youngest.preempted_first_ms = youngest.first_ms
            youngest.stamp += 1
            self._prompt_held -= youngest.prompt
            self._output_held -= youngest.output
            self.waiting.appendleft(youngest)
            self.preemptions += 1

    def _look_up(self, job: Job) -> int:
        """Prompt tokens that the cache holds; the whole prompt is in it from now on."""
        cache, blocks, hits = self._cache, job.blocks, 0
        for block in blocks:
            if block not in cache:
                break
            cache.move_to_end(block)
            hits += 1
        for block in blocks[hits:]:
            cache[block] = None
            cache.move_to_end(block)
        for _ in range(len(cache) - self._blocks_max):
            cache.popitem(last=False)
        return min(hits * BLOCK, max(0, job.prompt - 1))
