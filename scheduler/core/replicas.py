"""How many workers a model should have, by what its requests ask of them in tokens. Pure.

Demand is what came in the last WINDOW_MS, what was refused for want of capacity included; supply is what a worker was
measured to do. Each of these bounds says how many workers are needed, the largest decides, the spare ones are added:

- throughput: (prompt tokens/s x A + output tokens/s x B) / 0.8, and what waits worked off within DRAIN_MS. A and B are
  a worker's seconds for a token of each, fitted to time in which its slots were full or it had prompts enough.
- kv_cache: requests/s x E[(P + G/2) x T] / (0.9 x K): the tokens held at once, T from dispatch to end.
- slots: sequences/s x E[T] / S.
- running: what runs now, by its reservations; nothing that runs has to be cut off.

Numbers of messages or requests alone say nothing, for one may weigh as much as a thousand. More are wanted at once, at
most twice as many within STEP_MS; fewer only when for ``replicas_hold_s`` no more were needed. Where nothing is known,
all stays.
"""

import math
from collections import deque
from collections.abc import Iterable

from contracts.messages.attempts import AttemptEvent
from contracts.messages.control import WorkerHeartbeat
from contracts.messages.queues import Replicas, ReplicaTerm
from contracts.messages.records import PoolLimits
from scheduler.core.request import Request
from scheduler.core.transitions import WAITING
from scheduler.core.worker_pool import Worker

WINDOW_MS = 30_000
"""Of the demand: long enough for a rate, short enough to follow a step."""
BUCKET_MS = 1_000
STEP_MS = 15_000
DRAIN_MS = 30_000
"""What waits should be worked off within: half the default deadline."""
BUSY = 0.8
"""Share of a worker's throughput that is planned with: queues grow without bound towards 1."""
KV_FULL = 0.9
"""The same of its KV cache: a fuller one preempts."""
TOLERANCE = 1.02
"""A bound that passes a whole number by less asks for no further worker."""
MEMORY = 0.98
"""A mean forgets half within 34 ended requests."""
FIT_MEMORY = 0.97
FIT_MS = 1_000
"""Least span at a worker's limit that is a sample of its speed."""
REFUSED_MAX = 4096
"""Bodies of refused requests that are remembered, so that whoever asks again within the window counts once."""


class Speed:
    """A worker's seconds for a prompt token that it computes and for one that it generates: never negative.

    Least squares over spans in which it did all that it could, the latest counting most.
    """

    def __init__(self) -> None:
        self._pp = self._pg = self._gg = self._pt = self._gt = 0.0
        self.prompt_s = 0.0
        self.output_s = 0.0

    @property
    def known(self) -> bool:
        return self.prompt_s > 0 or self.output_s > 0

    def fit(self, prompt: int, output: int, span_s: float) -> None:
        """Within ``span_s`` a worker at its limit did so many tokens of each."""
        if span_s <= 0 or prompt + output <= 0:
            return
        self._pp = self._pp * FIT_MEMORY + prompt * prompt
        self._pg = self._pg * FIT_MEMORY + prompt * output
        self._gg = self._gg * FIT_MEMORY + output * output
        self._pt = self._pt * FIT_MEMORY + prompt * span_s
        self._gt = self._gt * FIT_MEMORY + output * span_s
        determinant = self._pp * self._gg - self._pg * self._pg
        if determinant > 1e-6 * self._pp * self._gg:
            prompt_s = (self._pt * self._gg - self._gt * self._pg) / determinant
            output_s = (self._gt * self._pp - self._pt * self._pg) / determinant
            if prompt_s >= 0 and output_s >= 0:
                self.prompt_s, self.output_s = prompt_s, output_s
                return
        # One of them explains it all, or they cannot be told apart.
        alone_prompt = self._pt / self._pp if self._pp else 0.0
        alone_output = self._gt / self._gg if self._gg else 0.0
        if self._pt * alone_prompt > self._gt * alone_output:
            self.prompt_s, self.output_s = alone_prompt, 0.0
        else:
            self.prompt_s, self.output_s = 0.0, alone_output


class Means:
    """Of what ended, the latest counting most: what a request used, and for how long."""

    def __init__(self) -> None:
        self.count = 0.0
        self._sums = [0.0] * 5

    def take(self, prompt: int, cached: int, output: int, choices: int, span_s: float) -> None:
        held = (prompt + output / 2) * span_s
        values = prompt, cached, output, choices * span_s, held
        self.count = self.count * MEMORY + 1
        self._sums = [each * MEMORY + value for each, value in zip(self._sums, values, strict=True)]

    def _mean(self, index: int) -> float:
        return self._sums[index] / self.count if self.count else 0.0

    @property
    def uncached(self) -> float:
        """Share of the prompts' tokens that had to be computed; 1 while nothing is known."""
        return 1 - self._sums[1] / self._sums[0] if self._sums[0] else 1.0

    @property
    def output(self) -> float:
        """Tokens of a request's answers."""
        return self._mean(2)

    @property
    def sequence_s(self) -> float:
        """Seconds for which a request takes slots, times their number."""
        return self._mean(3)

    @property
    def held_token_s(self) -> float:
        """Tokens that it holds in the KV cache, times the seconds for which it does."""
        return self._mean(4)


class _Bucket:
    """What came within one BUCKET_MS."""

    __slots__ = ("at_ms", "prompt", "requests")

    def __init__(self, at_ms: int) -> None:
        self.at_ms = at_ms
        self.requests = 0
        self.prompt = 0


class _Seen:
    """A worker's counters where a span at its limit began, and since when it has been loading."""

    __slots__ = ("loading_since_ms", "output", "prompt", "since_ms")

    def __init__(self, now_ms: int) -> None:
        self.loading_since_ms = now_ms
        self.since_ms = 0
        self.prompt = 0
        self.output = 0


class ReplicaPlanner:
    """The wanted number of one model's workers. A new owner begins with those that there are, and takes none away
    before it has seen as much.
    """

    def __init__(self, model: str, now_ms: int) -> None:
        self.speed = Speed()
        self.means = Means()
        self.warm_up_ms = 0
        """From a worker's first heartbeat until it is ready, of the last one that came; 0: none was seen to."""
        self.plan = Replicas(model=model)
        self._began_ms = now_ms
        self._buckets: deque[_Bucket] = deque()
        self._refused: dict[object, int] = {}
        self._needs: deque[tuple[int, int]] = deque()
        """Falling maxima of what was needed: (when, how many)."""
        self._raised_ms = 0
        self._slots = 0.0
        self._kv_tokens = 0.0
        """Of a worker: a mean of those that there are, or that there were last."""
        self._seen: dict[str, _Seen] = {}

    def came(self, prompt: int, now_ms: int) -> None:
        """A request was admitted."""
        bucket = self._bucket(now_ms)
        bucket.requests += 1
        bucket.prompt += prompt

    def refused(self, body: object, prompt: int, now_ms: int) -> None:
        """A request was refused because the model has too few workers; ``body`` is the same when it is asked again."""
        if body in self._refused or len(self._refused) >= REFUSED_MAX:
            return
        self._refused[body] = now_ms
        self.came(prompt, now_ms)

    def ended(self, used: AttemptEvent, choices: int, span_ms: int) -> None:
        """An attempt ended, so long after its dispatch."""
        self.means.take(used.prompt_tokens, used.cached_tokens, used.completion_tokens, choices, span_ms / 1000)

    def heard(self, beat: WorkerHeartbeat, now_ms: int, *, computing: bool = False) -> None:
        """A worker's heartbeat: how fast it is while it does all that it can, and how long it took to be ready.

        ``computing``: it has prompts enough, so that it gets no more to fill its slots with.
        """
        seen = self._seen.get(beat.worker)
        if seen is None:
            seen = self._seen[beat.worker] = _Seen(now_ms if beat.state == "starting" else 0)
        if beat.state == "ready" and seen.loading_since_ms:
            self.warm_up_ms = now_ms - seen.loading_since_ms
            seen.loading_since_ms = 0
        if beat.state != "ready" or not beat.slots or (beat.running < beat.slots and not computing):
            seen.since_ms = 0
            return
        span_ms = now_ms - seen.since_ms
        if seen.since_ms and span_ms < FIT_MS:
            return
        if seen.since_ms and beat.decode_tokens_total >= seen.output:
            prompt, output = beat.prefill_tokens_total - seen.prompt, beat.decode_tokens_total - seen.output
            # What generates meanwhile takes next to nothing from an engine that is busy with prompts.
            self.speed.fit(max(0, prompt), 0 if computing else output, span_ms / 1000)
        seen.since_ms, seen.prompt, seen.output = now_ms, beat.prefill_tokens_total, beat.decode_tokens_total

    def wait_for_worker_ms(self, now_ms: int) -> int:
        """How long until a worker that loads is ready, or one that has yet to be started; 0 while that is unknown."""
        loading = [seen.loading_since_ms for seen in self._seen.values() if seen.loading_since_ms]
        return max(0, min(loading, default=now_ms) + self.warm_up_ms - now_ms) if self.warm_up_ms else 0

    def pass_time(
        self,
        now_ms: int,
        limits: PoolLimits,
        workers: Iterable[Worker],
        requests: Iterable[Request],
        *,
        silent: bool = False,
        rolling_out: bool = False,
    ) -> Replicas:
        """Plan anew. ``silent``: not all is known now (a takeover, the bus away). ``rolling_out``: each version needs
        its own workers, so none is taken away.
        """
        present = list(workers)
        self._forget(now_ms, present)
        ready = [worker for worker in present if worker.beat.state == "ready"]
        loading = sum(worker.beat.state in ("starting", "engine_down") for worker in present)
        leaving = sum(worker.beat.state == "draining" for worker in present)
        there = len(ready) + loading
        if ready:
            self._slots = sum(worker.beat.slots for worker in ready) / len(ready)
            self._kv_tokens = sum(worker.beat.kv_tokens for worker in ready) / len(ready)
        terms = self._terms(now_ms, present, requests)
        largest = max(terms.values())
        wanted = math.ceil(largest / TOLERANCE) if largest > 0 else 0
        if largest > 0 or self._buckets:
            wanted = max(1, wanted) + limits.replicas_spare
        reason: str = max(terms, key=lambda term: terms[term])
        if largest == 0:
            reason = "activation" if wanted else "idle"
        bounded = max(wanted, limits.replicas_min)
        if limits.replicas_max is not None:
            bounded = min(bounded, limits.replicas_max)
        if bounded != wanted:
            reason = "replicas_max" if bounded < wanted else "replicas_min"
        desired = self._desired(now_ms, bounded, there, limits.replicas_hold_s * 1000, hold=rolling_out, silent=silent)
        if desired != bounded:
            reason = "stepping_up" if desired < bounded else "holding"
        self.plan = Replicas(
            model=self.plan.model,
            desired=desired,
            reason=reason,
            needed={term: round(value, 3) for term, value in terms.items()},
            ready=len(ready),
            loading=loading,
            leaving=leaving,
            warm_up_ms=self.warm_up_ms,
        )
        return self.plan

    def _desired(self, now_ms: int, bounded: int, there: int, hold_ms: int, *, hold: bool, silent: bool) -> int:
        """Up at once and at most doubled, down to the most that was needed lately."""
        before = self.plan.desired if self.plan.known else there
        if silent:
            return before
        while self._needs and self._needs[-1][1] <= bounded:
            self._needs.pop()
        self._needs.append((now_ms, bounded))
        while self._needs[0][0] < now_ms - hold_ms:
            self._needs.popleft()
        if bounded > before:
            if now_ms - self._raised_ms < STEP_MS and self._raised_ms:
                return before
            self._raised_ms = now_ms
            return min(bounded, max(1, 2 * before))
        if hold or now_ms - self._began_ms < hold_ms:
            return before
        return min(before, self._needs[0][1])

    def _terms(self, now_ms: int, workers: list[Worker], requests: Iterable[Request]) -> dict[ReplicaTerm, float]:
        span_s = max(BUCKET_MS, min(WINDOW_MS, now_ms - self._began_ms)) / 1000
        rate = sum(bucket.requests for bucket in self._buckets) / span_s
        means, speed = self.means, self.speed
        prompt_rate = means.uncached * sum(bucket.prompt for bucket in self._buckets) / span_s
        queued_prompt = queued_output = 0.0
        for request in requests:
            if request.state in WAITING:
                queued_prompt += request.cost.input_tokens
                queued_output += min(means.output, request.cost.output_tokens)
        work = prompt_rate * speed.prompt_s + rate * means.output * speed.output_s
        queued = means.uncached * queued_prompt * speed.prompt_s + queued_output * speed.output_s
        slots = sum(worker.slots_reserved for worker in workers)
        kv_tokens = sum(worker.kv_reserved for worker in workers)
        return {
            "throughput": work / BUSY + queued / (DRAIN_MS / 1000),
            "kv_cache": rate * means.held_token_s / (KV_FULL * self._kv_tokens) if self._kv_tokens else 0.0,
            "slots": rate * means.sequence_s / self._slots if self._slots else 0.0,
            "running": max(_share(slots, self._slots), _share(kv_tokens, self._kv_tokens)),
        }

    def _bucket(self, now_ms: int) -> _Bucket:
        if not self._buckets or now_ms - self._buckets[-1].at_ms >= BUCKET_MS:
            self._buckets.append(_Bucket(now_ms))
        return self._buckets[-1]

    def _forget(self, now_ms: int, present: list[Worker]) -> None:
        while self._buckets and self._buckets[0].at_ms <= now_ms - WINDOW_MS:
            self._buckets.popleft()
        while self._refused and self._refused[next(iter(self._refused))] <= now_ms - WINDOW_MS:
            del self._refused[next(iter(self._refused))]
        names = {worker.beat.worker for worker in present}
        for name in [name for name in self._seen if name not in names]:
            del self._seen[name]


def _share(of: float, whole: float) -> float:
    return of / whole if whole else 0.0
