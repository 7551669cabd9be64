"""vLLM as an engine: its AsyncLLM and its own OpenAI application in this process, called as ASGI.

Everything that an answer is made of is vLLM's: templates, tool calls, structured output, stop strings, usage. Here
are the lifecycle, the failures, and the way from its HTTP to chunks. `parts` imports vLLM; this module
does so only in ``start``.
"""

import asyncio
import contextvars
import os
import re
import threading
from collections.abc import AsyncGenerator, Callable
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from contracts.messages.base import Endpoint
from worker.engines.base import Counts, EngineFailure, EngineStats, Job
from worker.engines.vllm.asgi import Exchange

if TYPE_CHECKING:
    from worker.engines.vllm.parts import Parts

T = TypeVar("T")

_LAST_EVENTS = (b"message_stop", b"response.completed")
"""Names of the events that end an answer, where no ``[DONE]`` does."""
_ERROR_EVENTS = (b"error", b"response.failed")


class VllmConfig(msgspec.Struct, frozen=True, kw_only=True):
    """One engine. The defaults are for a CPU; with ``gpu_memory_utilization`` vLLM's own for a GPU hold."""

    model_path: str
    public_name: str
    """The model's name in requests and answers."""
    endpoints: tuple[Endpoint, ...] = ("chat/completions", "completions", "responses", "messages")
    """What the engine serves: either text, or embeddings alone."""
    slots: int = 32
    context: int | None = None
    """Longest sequence; None: the model's own."""
    kv_cache_bytes: int = 256 * 2**20
    """On a CPU. 23 KB a token with SmolLM2-135M: 11,000 tokens."""
    gpu_memory_utilization: float | None = None
    """Share of the GPU's memory that vLLM takes."""
    omp_threads_bind: str = ""
    """Cores of the engine, such as ``0``; on a CPU two engines on the same core run at a third of the speed."""
    check_timeout_s: float = 20.0
    """How long the engine's loop may be silent. A step of 512 prompt tokens takes 1 s on a CPU alone."""
    extra_engine_args: dict[str, Any] = {}
    """vLLM's command-line arguments with underscores, over those that are set here; null takes one out."""

    @property
    def embeds(self) -> bool:
        return "embeddings" in self.endpoints


def engine_arguments(config: VllmConfig) -> list[str]:
    """vLLM's command line."""
    arguments: dict[str, Any] = {
        "model": config.model_path,
        "served_model_name": config.public_name,
        "max_num_seqs": config.slots,
        "max_model_len": config.context,
        "use_tqdm_on_load": False,
    }
    if config.embeds:
        arguments |= {"runner": "pooling", "convert": "embed"}
    else:
        arguments |= {
            "enable_prompt_tokens_details": True,
            # Free white space lets small models run on in it for ever: 14 of 24 answers ended, without it 24 of 24.
            "structured_outputs_config": {"backend": "xgrammar", "disable_any_whitespace": True},
            "enable_auto_tool_choice": True,
            "tool_call_parser": "hermes",
            # With "auto" the arguments of tools that are not strict would be free text.
            "tool_strict_level": "parameter",
        }
    if config.gpu_memory_utilization is None:
        arguments |= {
            "enforce_eager": True,  # compilation takes 65 s and gains at most 15 %
            "block_size": 32,  # with 128, the default on a CPU, short prompts never hit the prefix cache
            "kv_cache_memory_bytes": config.kv_cache_bytes,
            "worker_extension_cls": "worker.engines.vllm.cpu.Extension",  # see there
            "max_num_batched_tokens": 512,  # a step of 2048 takes 3 s, and aborts wait for it
        }
    else:
        arguments["gpu_memory_utilization"] = config.gpu_memory_utilization
    line = []
    for name, value in (arguments | config.extra_engine_args).items():
        flag = name.replace("_", "-")
        if value is True:
            line.append(f"--{flag}")
        elif value is False:
            line.append(f"--no-{flag}")
        elif value is not None:
            text = value if isinstance(value, str) else msgspec.json.encode(value).decode()
            line.append(f"--{flag}={text}")
    return line


def engine_environment(config: VllmConfig) -> dict[str, str]:
    """Variables that vLLM and its child processes read; those that are set already stay."""
    variables = {
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_LOGGING_STREAM": "ext://sys.stderr",
        "TQDM_DISABLE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        # A step that takes longer has hung; vLLM's own 300 s are too long for callers.
        "VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS": "30",
        # A fork would share this process's signal pipe and sockets: ending the child looks like SIGTERM to us.
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
    }
    if config.omp_threads_bind:
        variables["VLLM_CPU_OMP_THREADS_BIND"] = config.omp_threads_bind
    return variables


class VllmEngine:
    """See engines.base.Engine. After ``close``, or the engine's death and ``close``, ``start`` builds it anew."""

    def __init__(self, config: VllmConfig) -> None:
        self.slots = config.slots
        self.kv_tokens = 0
        self.context = config.context or 0
        self._config = config
        self._parts: Parts | None = None
        self._open: set[Exchange] = set()
        self._suspected = False
        """``check`` found the engine dead or silent."""

    async def start(self) -> None:
        for name, value in engine_environment(self._config).items():
            os.environ.setdefault(name, value)
        self._suspected = False
        try:
            task = "embed" if self._config.embeds else "generate"
            self._parts = parts = await _in_thread(lambda: _build(self._config, task))
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
        died = self._suspected or (parts is not None and parts.dead)
        reason = "the engine died" if died else "the engine was closed"
        code = "engine_error" if died else "shutting_down"
        for exchange in self._open:
            exchange.fail(EngineFailure(code, reason, retryable=True, engine_death=died))
        if parts is not None:
            await _in_thread(parts.shut_down)

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
            self._suspected = True
            raise
        except Exception as error:
            self._suspected = True
            text = "does not answer" if isinstance(error, TimeoutError) else f"is broken: {error}"
            raise EngineFailure("engine_error", f"the engine {text}", retryable=True, engine_death=True) from error

    async def generate(self, job: Job, counts: Counts) -> AsyncGenerator[bytes, None]:
        parts = self._parts
        if parts is None:
            raise EngineFailure("engine_error", "the engine is not running", retryable=True)
        context, record = parts.record(counts)
        exchange = Exchange(
            parts.application,
            f"/v1/{job.endpoint}",
            request_body(job, self._config.public_name),
            headers={"x-request-id": job.request_id},
            context=context,
        )
        self._open.add(exchange)
        try:
            status = await exchange.status()
            if status != 200:
                raise record.failure or failure_of(await exchange.body(), status)
            if not job.stream:
                body = await exchange.body()
                if record.failure:
                    raise record.failure
                yield body
                return
            done = False
            # The Responses API begins to speak before the first token. Until that comes the attempt may fail and be
            # made again elsewhere, so that nothing of it must be seen.
            held: list[bytes] = []
            async for name, data in exchange.events():
                if name in _ERROR_EVENTS or data.startswith(b'{"error"'):
                    raise record.failure or failure_of(data, 0)
                done = done or data == b"[DONE]" or name in _LAST_EVENTS
                if data != b"[DONE]":
                    held.append(data)
                if counts.completion_tokens or done:
                    for event in held:
                        yield event
                    held.clear()
            if record.failure or not done:
                raise record.failure or EngineFailure("engine_error", "vLLM's stream was cut", retryable=True)
        except EngineFailure:
            raise
        except Exception as error:
            failure = EngineFailure("engine_error", f"vLLM failed: {error!r}", retryable=True)
            raise record.failure or failure from error
        finally:
            self._open.discard(exchange)
            await exchange.close()

    async def _warm_up(self) -> None:
        """The first request pays for lazy set-up; let it be ours.

        So does the first with log probabilities, whose kernel is compiled in the engine's loop (20 s and more on a busy
        CPU): by then the health check takes the engine for dead.
        """
        endpoint: Endpoint = "embeddings" if self._config.embeds else "completions"
        text = b'{"prompt": "Hello", "max_tokens": 2, "logprobs": 1, "echo": true}'
        body = b'{"input": "Hello"}' if self._config.embeds else text
        stream = not self._config.embeds
        job = Job(request_id="warm-up", attempt=0, endpoint=endpoint, body=body, stream=stream, cache_salt="warm-up")
        async for _ in self.generate(job, Counts()):
            pass


def request_body(job: Job, model: str) -> bytes:
    """The body for vLLM; values are passed on undecoded. Raises EngineFailure."""
    try:
        fields = msgspec.json.decode(job.body, type=dict[str, msgspec.Raw])
    except msgspec.MsgspecError as error:
        raise EngineFailure("invalid_request", f"the body is no JSON object: {error}", status=400) from error
    if bytes(fields.pop("simulate", b"null")) != b"null":
        raise EngineFailure(
            "invalid_request", "only the simulated engine takes this field", param="simulate", status=400
        )
    ours: dict[str, Any] = {"model": model}
    if job.endpoint != "embeddings":
        ours["stream"] = job.stream
    if job.endpoint == "responses":
        ours["request_id"] = f"resp_{job.request_id}"  # the others take it from the header
    if job.cache_salt:
        ours["cache_salt"] = job.cache_salt
    return msgspec.json.encode(fields | ours)


class _Error(msgspec.Struct, frozen=True):
    message: str = ""
    code: int | str | None = None
    param: str | None = None


class _ErrorBody(msgspec.Struct, frozen=True):
    error: _Error = _Error()


def failure_of(body: bytes, status: int) -> EngineFailure:
    """vLLM's error answer as a failure; a status of 0 is read from the body, as for an error inside a stream."""
    try:
        error = msgspec.json.decode(body, type=_ErrorBody).error
    except msgspec.MsgspecError:
        error = _Error(message="vLLM gave an error that is no JSON")
    status = status or (error.code if isinstance(error.code, int) else 500)
    if not 400 <= status < 500:
        return EngineFailure("engine_error", _without_input(error.message), status=status, retryable=status != 501)
    return refusal(error.message, error.param, status)


def refusal(message: str, param: str | None, status: int = 400) -> EngineFailure:
    """What vLLM finds wrong with a request."""
    too_long = re.search("maximum context length|(greater than|exceeds the) max_model_len", message)
    code = "context_length_exceeded" if too_long else "invalid_request"
    return EngineFailure(code, _without_input(message), param=param and param.removeprefix("body."), status=status)


def _without_input(message: str) -> str:
    """Messages go to logs and the ledger: what the caller sent stays out."""
    return re.sub(r", 'input': .*", "}", message)


def _build(config: VllmConfig, task: str) -> "Parts":
    from worker.engines.vllm.parts import build

    return build(engine_arguments(config), task)


async def _in_thread(call: Callable[[], T]) -> T:
    """``call`` in a daemon thread: it takes up to a minute, and must hold up neither the loop nor an exit."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def settle(result: T | None, error: BaseException | None) -> None:
        if future.done():
            return
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(result)  # type: ignore[arg-type]

    def run() -> None:
        result, error = None, None
        try:
            result = contextvars.Context().run(call)
        except BaseException as raised:
            error = raised
        if not loop.is_closed():
            loop.call_soon_threadsafe(settle, result, error)

    threading.Thread(target=run, name="vllm", daemon=True).start()
    return await future
