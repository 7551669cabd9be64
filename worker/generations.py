"""Generations in progress: each reads its body, runs in the engine, and hands its chunks to the frame buffer.

Whether an attempt starts or stops is decided in the core, which is told of each end, once.
"""

import asyncio
import time
from collections.abc import Callable
from functools import partial

import msgspec
import structlog

from contracts import shards, subjects, topology
from contracts.bus import Bus, BusError
from contracts.messages.base import Codec
from contracts.messages.frames import AcceptedData
from contracts.messages.request import RequestEnvelope
from contracts.prefix import cache_salt, unshared_salt
from worker.core.events import AttemptEnded, Event, Key, StartAttempt
from worker.engines.base import EngineFailure, Job, PromptMiscounted
from worker.engines.supervisor import EngineSupervisor
from worker.frame_buffer import AttemptFrames, FrameBuffer
from worker.metrics import TokenLatency, count_miscounted_prompt

STOP_S = 5.0
"""An aborted generation that has not returned by then counts as ended: it is left alone."""
BODY_S = 10.0
"""How long a body is looked for while the bus is away."""
BODY_RETRY_S = 0.1

_log = structlog.get_logger()
_accepted: Codec[AcceptedData] = Codec(AcceptedData)


class _Generation(msgspec.Struct, kw_only=True):
    task: asyncio.Task[EngineFailure | None]
    frames: AttemptFrames
    stopping: bool = False


class Generations:
    """Those of one worker. ``tell`` gets AttemptEnded; a bug in one of the tasks is told as a failure, too."""

    def __init__(self, bus: Bus, supervisor: EngineSupervisor, tell: Callable[[Event], None]) -> None:
        self._bus = bus
        self._supervisor = supervisor
        self._tell = tell
        self._running: dict[Key, _Generation] = {}

    def start(self, effect: StartAttempt, buffer: FrameBuffer, tasks: asyncio.TaskGroup) -> None:
        """Generate, in a task of ``tasks``."""
        frames = buffer.open(effect.item.request, effect.item.attempt)
        task = tasks.create_task(self._run(effect, frames, buffer))
        generation = self._running[effect.key] = _Generation(task=task, frames=frames)
        task.add_done_callback(partial(self._done, effect.key, generation))

    def stop(self, key: Key) -> None:
        """Abort one; its end is told after STOP_S at the latest."""
        generation = self._running[key]
        generation.stopping = True
        generation.task.cancel()
        asyncio.get_running_loop().call_later(STOP_S, self._ended, key, generation, None)

    def abandon(self) -> int:
        """Abort all and tell of none; how many they were."""
        running, self._running = self._running, {}
        for generation in running.values():
            generation.task.cancel()
        return len(running)

    async def _run(self, effect: StartAttempt, frames: AttemptFrames, buffer: FrameBuffer) -> EngineFailure | None:
        """Generate and send; gives the failure, if it ended with one."""
        try:
            await self._generate(effect, frames, buffer)
        except PromptMiscounted as failure:
            self._alarm(effect.item.request, failure)
            return failure
        except EngineFailure as failure:
            return failure
        except Exception:
            request_id, attempt = effect.key
            _log.exception("attempt_broke", request_id=request_id, attempt=attempt)
            return EngineFailure("internal_error", "the worker failed to run the request")
        return None

    def _alarm(self, request: RequestEnvelope, failure: PromptMiscounted) -> None:
        count_miscounted_prompt(shards.model_of(request.model))
        _log.error(
            "prompt_miscounted",
            request_id=request.request_id,
            tenant=request.tenant,
            model=request.model,
            endpoint=request.endpoint,
            admitted=failure.admitted,
            found=failure.found,
        )

    async def _generate(self, effect: StartAttempt, frames: AttemptFrames, buffer: FrameBuffer) -> None:
        request = effect.item.request
        body = await self._body(request)
        engine = self._supervisor.engine
        if engine is None:
            raise EngineFailure("unavailable", "the worker's engine is down", retryable=True)
        job = Job(
            request_id=request.request_id,
            attempt=effect.item.attempt,
            endpoint=request.endpoint,
            body=body,
            stream=request.stream,
            tenant=request.tenant,
            cache_salt=(
                cache_salt(request.tenant, request.cache_salt)
                if request.prefix_caching
                else unshared_salt(request.request_id)
            ),
            prompt_tokens=request.prompt_tokens,
            prompt_digest=request.prompt_digest,
        )
        latency = TokenLatency(request, effect.item.version, time.monotonic())
        buffer.send(frames, "accepted", _accepted.encode(AcceptedData(version=effect.item.version)))

        def give(chunk: bytes) -> None:
            buffer.send(frames, "chunk", chunk)
            latency.chunk(time.monotonic())

        try:
            await engine.generate(job, effect.counts, give)
        finally:
            latency.end()

    async def _body(self, request: RequestEnvelope) -> bytes:
        if not request.body_bytes:
            return bytes(request.body)
        deadline = time.monotonic() + BODY_S
        while True:
            try:
                subject = subjects.body(request.model, request.tenant, request.request_id)
                body = await self._bus.objects.get(
                    topology.BODIES, subject, size=request.body_bytes, digest=request.body_digest
                )
            except BusError as error:
                if time.monotonic() > deadline:
                    raise EngineFailure("unavailable", "the body cannot be read", retryable=True) from error
                await asyncio.sleep(BODY_RETRY_S)
                continue
            if body is None:
                raise EngineFailure("internal_error", "the body is no longer stored")
            return body

    def _done(self, key: Key, generation: _Generation, task: asyncio.Task[EngineFailure | None]) -> None:
        """A task cancelled without an order belongs to a worker that breaks down: there is no one to tell."""
        if not task.cancelled():
            self._ended(key, generation, task.result())
        elif generation.stopping:
            self._ended(key, generation, None)

    def _ended(self, key: Key, generation: _Generation, failure: EngineFailure | None) -> None:
        if self._running.get(key) is generation:
            del self._running[key]
            frames = generation.frames
            self._tell(AttemptEnded(key=key, frames=frames.next_seq, chunks=frames.chunks, failure=failure))
