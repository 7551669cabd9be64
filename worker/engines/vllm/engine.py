"""vLLM as an engine: its AsyncLLM and its own OpenAI application in this process, called as ASGI.

Everything that an answer is made of is vLLM's: templates, tool calls, structured output, stop strings, usage. Here are
the lifecycle and the failures. `parts` imports vLLM; this module imports `parts` only in ``start``.
"""

import asyncio
import concurrent.futures
import contextvars
import os
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import structlog

from contracts.messages.base import Endpoint
from contracts.messages.records import Manifest
from worker.config import WorkerConfig
from worker.engines.base import Counts, EngineFailure, EngineStats, Give, Job
from worker.engines.cached_blocks import CachedBlocks
from worker.engines.vllm.arguments import ENVIRONMENT, engine_arguments, task_of
from worker.engines.vllm.asgi import AsgiCall, UnknownForm
from worker.engines.vllm.cache_events import CacheEvents
from worker.engines.vllm.probing import fingerprint_of
from worker.engines.vllm.translation import (
    checked_answer,
    event_kind,
    failed,
    failure_of,
    vllm_request,
    with_own_id,
    with_usage,
)

if TYPE_CHECKING:
    from worker.engines.vllm.parts import Parts, Record

T = TypeVar("T")

_log = structlog.get_logger()


def _start_vllm(config: WorkerConfig, manifest: Manifest, more: dict[str, Any]) -> "Parts":
    from worker.engines.vllm.parts import start_vllm

    return start_vllm(engine_arguments(config, manifest, more), task_of(manifest))


class VllmEngine:
    """See engines.base.Engine. After ``close``, or the engine's death and ``close``, ``start`` builds another one."""

    def __init__(
        self,
        config: WorkerConfig,
        manifest: Manifest,
        *,
        start_vllm: Callable[[WorkerConfig, Manifest, dict[str, Any]], "Parts"] = _start_vllm,
    ) -> None:
        self.slots = config.vllm_slots
        self.kv_tokens = 0
        self.context = manifest.context
        self._config = config
        self._manifest = manifest
        self._start_vllm = start_vllm
        self._parts: Parts | None = None
        self._cache_events: CacheEvents | None = None
        self.kept: CachedBlocks | None = None
        self._open: set[AsgiCall] = set()
        self._found_dead = False
        """``check`` found the engine dead or silent."""

    async def start(self) -> None:
        for name, value in ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        self._found_dead = False
        try:
            more = self._follow_cache()
            self._parts = parts = await _in_thread(lambda: self._start_vllm(self._config, self._manifest, more))
            await parts.open_application()
            await self._warm_up()
        except Exception as error:
            await self.close()
            text = f"vLLM did not start: {error}"
            raise EngineFailure("engine_error", text, retryable=True, engine_death=True) from error
        self.kv_tokens = parts.kv_tokens
        self.context = parts.context

    async def close(self) -> None:
        parts, self._parts = self._parts, None
        died = self._found_dead or (parts is not None and parts.dead)
        reason = "the engine died" if died else "the engine was closed"
        code = "engine_error" if died else "shutting_down"
        for call in self._open:
            call.fail(EngineFailure(code, reason, retryable=True, engine_death=died))
        if parts is not None:
            await parts.close_application()
            await _in_thread(parts.shut_down)
        followed, self._cache_events, self.kept = self._cache_events, None, None
        if followed is not None:
            await _in_thread(followed.close)

    def _follow_cache(self) -> dict[str, Any]:
        """Begin to read the events of the cache of the engine that is to be started; vLLM's arguments for that."""
        if not self._config.vllm_kv_events:
            return {}
        self._cache_events = followed = CacheEvents()
        followed.start()
        self.kept = followed.kept
        return {"kv_events_config": followed.configuration}

    async def fingerprint(self) -> str:
        if self._parts is None:
            raise EngineFailure("engine_error", "the engine is not running", retryable=True, engine_death=True)
        return await fingerprint_of(self._parts.application, self._manifest)

    async def load_adapter(self, name: str, path: str) -> None:
        if self._parts is None:
            raise EngineFailure("engine_error", "the engine is not running", retryable=True, engine_death=True)
        if problem := await self._parts.load_adapter(name, path):
            raise EngineFailure("unavailable", f"vLLM does not load the adapter: {problem}")

    async def unload_adapter(self, name: str) -> None:
        if self._parts is not None:
            await self._parts.unload_adapter(name)

    def stats(self) -> EngineStats:
        return EngineStats() if self._parts is None else self._parts.stats()

    async def check(self) -> None:
        parts = self._parts
        try:
            if parts is None or parts.dead:
                raise EngineFailure("engine_error", "the engine is not running", retryable=True, engine_death=True)
            async with asyncio.timeout(self._config.check_timeout_s):
                await parts.round_trip()
        except EngineFailure:
            self._found_dead = True
            raise
        except Exception as error:
            self._found_dead = True
            text = "does not answer" if isinstance(error, TimeoutError) else f"is broken: {type(error).__name__}"
            raise EngineFailure("engine_error", f"the engine {text}", retryable=True, engine_death=True) from error

    async def generate(self, job: Job, counts: Counts, give: Give) -> None:
        parts = self._parts
        if parts is None:
            raise EngineFailure("engine_error", "the engine is not running", retryable=True)
        request = vllm_request(job, job.adapter or self._manifest.name)
        context, record = parts.record(job, counts, only_scores=request.only_scores)
        call = AsgiCall(
            parts.application,
            f"/v1/{job.endpoint}",
            request.body,
            headers={"x-request-id": job.request_id},
            context=context,
        )
        self._open.add(call)
        whole = False
        try:
            status = await call.status()
            if status != 200:
                raise record.failure or failure_of(await call.body(), status, job.request_id)
            if not job.stream:
                answer = with_own_id(checked_answer(await call.body()), job)
                if record.failure:
                    raise record.failure
                whole = True
                give(answer)
                return
            await _give_chunks(
                call,
                job,
                record,
                lambda chunk: give(with_usage(chunk, counts) if request.usage_on_chunks else with_own_id(chunk, job)),
            )
            whole = True
        except EngineFailure:
            raise
        except UnknownForm as error:
            raise record.failure or EngineFailure("engine_error", f"vLLM sent {error}") from error
        except Exception as error:
            _log.warning("engine_call_broke", request_id=job.request_id, kind=type(error).__name__)
            raise record.failure or failed(job.request_id) from error
        finally:
            self._open.discard(call)
            await call.close()
            if not whole:
                record.count_cut_reasoning()

    async def _warm_up(self) -> None:
        """The first request pays for lazy set-up; let it be ours.

        So does the first with log probabilities, whose kernel is compiled in the engine's loop (20 s and more on a busy
        CPU): by then the health check takes the engine for dead.
        """
        embeds = task_of(self._manifest) == "embed"
        endpoint: Endpoint = "embeddings" if embeds else "completions"
        text = b'{"prompt": "Hello", "max_tokens": 2, "logprobs": 1, "echo": true}'
        body, stream = (b'{"input": "Hello"}', False) if embeds else (text, True)
        job = Job(request_id="warm-up", attempt=0, endpoint=endpoint, body=body, stream=stream, cache_salt="warm-up")
        await self.generate(job, Counts(), lambda chunk: None)


async def _give_chunks(call: AsgiCall, job: Job, record: "Record", give: Give) -> None:
    """Those of a stream that ends as its API's do; raises EngineFailure or UnknownForm.

    The Responses API begins to speak before the first token. Until that comes the attempt may fail and be made again
    elsewhere, so nothing of it must be seen: what comes before is kept back.
    """
    whole = False
    early: list[bytes] = []

    def take(name: bytes, data: bytes) -> None:
        nonlocal whole
        kind = event_kind(job.endpoint, name, data)
        if kind == "error":
            raise record.failure or failure_of(data, 0, job.request_id)
        whole = whole or kind != "chunk"
        if kind != "done":
            early.append(data)
        if record.counts.completion_tokens or whole:
            for event in early:
                give(event)
            early.clear()

    await call.events(take)
    if record.failure or not whole:
        raise record.failure or EngineFailure("engine_error", "vLLM's stream was cut", retryable=True)


async def _in_thread(call: Callable[[], T]) -> T:
    """``call`` in a daemon thread: it takes up to a minute, and must hold up neither the loop nor an exit."""
    future: concurrent.futures.Future[T] = concurrent.futures.Future()
    future.set_running_or_notify_cancel()  # the call goes on when its caller has been cancelled

    def run() -> None:
        try:
            future.set_result(contextvars.Context().run(call))
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name="vllm", daemon=True).start()
    return await asyncio.wrap_future(future)
