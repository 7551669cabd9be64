"""The simulated engine: scripted tokens at scripted times, for load, failure and scheduling tests.

`batch` says when a token comes, `answer` what it reads; one timer drives all streams.
A request's field ``simulate`` (contracts.simulated) is obeyed.
"""

import asyncio
import math
import os
import random
import time
from collections import deque
from collections.abc import Callable
from typing import cast

import msgspec

from contracts import clock
from contracts.messages.records import Manifest
from contracts.simulated import SimulatedVersion
from worker.config import WorkerConfig
from worker.engines.base import Counts, EngineFailure, EngineStats, Give, Job, check_prompt
from worker.engines.cached_blocks import CachedBlocks
from worker.engines.simulated.answer import ChunkWriter, ParsedJob, parse_job
from worker.engines.simulated.batch import STEP_S, Action, Batch, EventKind, Sequence, Trigger

BIG_BODY_BYTES = 65_536
"""Longer bodies are read in a thread: a million words take a good part of a second."""


def _exit_process() -> None:
    os._exit(1)


class SimulatedEngine:
    """See worker.engines.base.Engine. ``exit_process`` is called for ``exit_after``."""

    def __init__(
        self, config: WorkerConfig, manifest: Manifest, *, exit_process: Callable[[], None] = _exit_process
    ) -> None:
        self.slots = config.sim_slots
        self.kv_tokens = config.sim_kv_tokens
        self.context = config.sim_context
        self.kept: CachedBlocks | None = None
        self._model = manifest.name
        self._adapters: set[str] = set()
        self._version = msgspec.convert(manifest.engine_arguments, SimulatedVersion)
        self._fails = max(self._version.fails, config.sim_fails)
        self._rng = random.Random(manifest.version)  # noqa: S311
        self._prefill_tps = config.sim_prefill_tps
        self._itl_ms = config.sim_itl_ms
        self._exit_process = exit_process
        self._batch: Batch | None = None
        self._attempts: set[_Attempt] = set()
        self._timer: asyncio.Handle | None = None
        self._timer_at = math.inf
        self._steps = 0

    async def start(self) -> None:
        if self._version.fails_to_start:
            raise EngineFailure("engine_error", "the engine does not start, as its version says", retryable=True)
        await asyncio.sleep(self._version.starts_after_ms / 1000)
        self._loop = asyncio.get_running_loop()
        self._batch = Batch(slots=self.slots, kv_tokens=self.kv_tokens, prefill_tps=self._prefill_tps)

    async def close(self) -> None:
        self._stop(EngineFailure("shutting_down", "the engine was closed", retryable=True))

    async def fingerprint(self) -> str:
        return self._version.counts_as

    async def load_adapter(self, name: str, path: str) -> None:
        self._adapters.add(name)

    async def unload_adapter(self, name: str) -> None:
        self._adapters.discard(name)

    def stats(self) -> EngineStats:
        if self._batch is None:
            return EngineStats()
        if not self._batch.hangs:
            self._steps = int(self._loop.time() / STEP_S)
        return msgspec.structs.replace(self._batch.stats(), steps_total=self._steps)

    async def check(self) -> None:
        if self._batch is None:
            raise EngineFailure("engine_error", "the engine is not running", retryable=True, engine_death=True)

    async def generate(self, job: Job, counts: Counts, give: Give) -> None:
        if len(job.body) > BIG_BODY_BYTES:
            request = await asyncio.to_thread(parse_job, job, self.context)
        else:
            request = parse_job(job, self.context)
        check_prompt(job, sum(request.prompts), request.digest)
        if request.simulate.submit_delay_ms:
            await asyncio.sleep(request.simulate.submit_delay_ms / 1000)
        if request.simulate.block_ms:
            time.sleep(request.simulate.block_ms / 1000)  # noqa: ASYNC251
        batch = self._living_batch()
        if self._rng.random() < self._fails:
            raise EngineFailure("engine_error", "the attempt fails, as its engine was told")
        if job.adapter and job.adapter not in self._adapters:
            raise EngineFailure("unavailable", "the adapter is not loaded", retryable=True)
        answer = ChunkWriter(job, request, model=job.adapter.partition("@")[0] or self._model, created=int(time.time()))
        attempt = _Attempt(request, answer, counts, give, self._itl_ms)
        self._attempts.add(attempt)
        try:
            for sequence in attempt.sequences:
                batch.add(sequence, self._loop.time())
            self._arm()
            while (end := await attempt.end()) != "end":
                if isinstance(end, EngineFailure):
                    raise end
                if end == "exit":
                    self._exit_process()
                else:
                    reason = "the engine died as the request asked"
                    self._stop(EngineFailure("engine_error", reason, retryable=True, engine_death=True))
        finally:
            self._attempts.discard(attempt)
            attempt.closed = True
            for sequence in attempt.sequences:
                batch.remove(sequence, self._loop.time())
            if batch is self._batch:
                self._arm()

    def _living_batch(self) -> Batch:
        if self._batch is None:
            raise EngineFailure("engine_error", "the engine is not running", retryable=True)
        return self._batch

    def _arm(self) -> None:
        """Have ``_turn`` called when the next thing is due."""
        wake = self._batch.next_wake if self._batch else None
        if self._timer is not None:
            if self._timer_at == wake:
                return
            self._timer.cancel()
            self._timer = None
        if wake is not None:
            # Whole milliseconds: uvloop rounds to them, and a timer that fires early would spin.
            delay_ms = math.ceil((wake - self._loop.time()) * 1000)
            self._timer_at = wake
            if delay_ms > 0:
                self._timer = self._loop.call_later(delay_ms / 1000, self._turn)
            else:
                self._timer = self._loop.call_soon(self._turn)

    def _turn(self) -> None:
        self._timer = None
        try:
            batch = self._living_batch()
            for sequence, kind in batch.step(now := self._loop.time()):
                attempt = cast(_Attempt, sequence.owner)
                for done in attempt.take(sequence, kind):
                    batch.remove(done, now)
            self._arm()
        except Exception as error:
            failure = f"the engine broke: {error!r}"
            self._stop(EngineFailure("engine_error", failure, retryable=True, engine_death=True))
            raise

    def _stop(self, failure: EngineFailure) -> None:
        self._batch = None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        for attempt in self._attempts:
            attempt.finish(failure)


class _Attempt:
    """One ``generate``: its sequences, and how it ends."""

    def __init__(self, request: ParsedJob, answer: ChunkWriter, counts: Counts, give: Give, itl_ms: float) -> None:
        self.closed = False
        self._request = request
        self._answer = answer
        self._counts = counts
        self._give = give
        self._ends: deque[EngineFailure | str] = deque()
        self._ended = asyncio.Event()
        simulate = request.simulate
        itl_s = (itl_ms if simulate.itl_ms is None else simulate.itl_ms) / 1000
        ttft_s = None if simulate.ttft_ms is None else simulate.ttft_ms / 1000
        trigger = _trigger(request)
        self.sequences = [
            Sequence(
                owner=self,
                index=prompt * request.n + choice,
                prompt_tokens=tokens,
                blocks=request.blocks[prompt],
                length=request.lengths[prompt],
                itl_s=itl_s,
                ttft_s=ttft_s,
                trigger=trigger,
            )
            for prompt, tokens in enumerate(request.prompts)
            for choice in range(request.n)
        ]

    async def end(self) -> EngineFailure | str:
        """A failure, ``crash``, ``exit``, or ``end``."""
        while not self._ends:
            self._ended.clear()
            await self._ended.wait()
        return self._ends.popleft()

    def finish(self, end: EngineFailure | str) -> None:
        """No chunk follows."""
        self.closed = True
        self._ends.append(end)
        self._ended.set()

    def take(self, sequence: Sequence, kind: EventKind) -> list[Sequence]:
        """Make output of an event; gives the sequences that are to be dropped from the batch."""
        if self.closed:
            return []
        if kind in ("fail", "crash", "exit"):
            failure = EngineFailure("engine_error", "the engine failed as the request asked", retryable=True)
            self.finish(failure if kind == "fail" else kind)
            return self.sequences if kind == "fail" else []
        counts = self._counts
        if kind != "empty":
            counts.completion_tokens += 1
        if not counts.first_token_at_ms:
            counts.prompt_tokens = sum(self._request.prompts)
        counts.came(clock.monotonic_ms())
        if sequence.given <= 1 and sequence.index % self._request.n == 0:
            counts.cached_tokens += sequence.cached_tokens
        reason = None if kind == "token" else self._request.finish_reason(sequence.index // self._request.n)
        for chunk in self._answer.give(sequence.index, reason, counts, empty=kind == "empty"):
            self._give(chunk)
        stopped = self._answer.stopped(sequence.index)
        if reason is not None or stopped:
            counts.finish_reason = "stop" if stopped else reason or ""
        if self._answer.complete:
            for chunk in self._answer.close(counts):
                self._give(chunk)
            self.finish("end")
        return [sequence] if stopped else []


def _trigger(request: ParsedJob) -> Trigger | None:
    """The one of ``fail_after``, ``crash_after``, ``exit_after`` and ``hang_after`` that comes first."""
    simulate = request.simulate
    limits: list[tuple[Action, int | None]] = [
        ("fail", simulate.fail_after),
        ("crash", simulate.crash_after),
        ("exit", simulate.exit_after),
        ("hang", simulate.hang_after),
    ]
    stated = [Trigger(action, after) for action, after in limits if after is not None]
    return min(stated, key=lambda trigger: trigger.after, default=None)
