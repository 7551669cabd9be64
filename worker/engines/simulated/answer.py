"""What the simulated engine reads in a request, and how tokens become an OpenAI answer. Pure.

Tokens are bytes: a character may be split over them, and so may a stop string.
"""

import codecs
import re
from collections.abc import Iterator
from itertools import count
from typing import Annotated, Any

import msgspec

from contracts.errors import HeadraceError
from contracts.simulated import Simulate, measured, simulate_field, simulated_prompts
from worker.engines.base import Counts, EngineFailure, Job
from worker.engines.simulated.batch import prefix_blocks

DEFAULT_TOKENS = 16

_Count = Annotated[int, msgspec.Meta(ge=0)]
_Positive = Annotated[int, msgspec.Meta(ge=1)]
_Stop = Annotated[str, msgspec.Meta(min_length=1)]


class _StreamOptions(msgspec.Struct, frozen=True):
    include_usage: bool = False
    continuous_usage_stats: bool = False


class _Fields(msgspec.Struct):
    """The fields that this engine heeds beside prompt and ``simulate``; it ignores all others."""

    max_tokens: _Count | None = None
    max_completion_tokens: _Positive | None = None
    n: Annotated[int, msgspec.Meta(ge=1, le=128)] | None = None
    stop: _Stop | list[_Stop] | None = None
    stream_options: _StreamOptions = _StreamOptions()


class ParsedJob(msgspec.Struct, frozen=True, kw_only=True):
    """What a job asks of the simulated engine."""

    prompts: list[int]
    """Tokens of each prompt."""
    digest: str
    """Of them all."""
    blocks: list[list[int]]
    """Prefix-cache blocks of each prompt."""
    n: int
    lengths: list[int]
    """Tokens to generate for each choice of each prompt."""
    script: list[bytes] | None
    stops: list[str]
    include_usage: bool
    usage_on_chunks: bool
    simulate: Simulate

    def tokens(self) -> Iterator[bytes]:
        """The answer's tokens, the same for each choice; without a script ``t0 t1 t2 ...`` for ever."""
        if self.script is not None:
            return iter(self.script)
        return (b" t%d" % number if number else b"t0" for number in count())

    def finish_reason(self, prompt: int) -> str:
        """Of a choice that no stop string ended."""
        return "stop" if self.script is not None and self.lengths[prompt] == len(self.script) else "length"


def parse_job(job: Job, context: int) -> ParsedJob:
    """Raises EngineFailure (status 400) for a body that cannot be served."""
    try:
        body = msgspec.json.decode(job.body, type=dict[str, Any])
        fields = msgspec.convert(body, _Fields)
        simulate = simulate_field(body) or Simulate()
        prompts = simulated_prompts(job.endpoint, body)
        lengths, digest = measured(prompts)
    except HeadraceError as error:
        raise EngineFailure(error.code, error.message, param=error.param, status=400) from error
    except msgspec.MsgspecError as error:
        field = re.search(r"`\$\.(\w+)", str(error))
        raise EngineFailure("invalid_request", str(error), param=field and field.group(1), status=400) from error
    script = simulate.script()
    limit = min((it for it in (fields.max_tokens, fields.max_completion_tokens) if it is not None), default=None)
    length = DEFAULT_TOKENS if limit is None else limit
    if script is not None:
        length = len(script) if limit is None else min(limit, len(script))
    for tokens in lengths:
        if tokens + (limit or 1) > context:
            raise EngineFailure(
                "context_length_exceeded",
                f"This model's maximum context length is {context} tokens. However, you requested "
                f"{limit or 1} output tokens and your prompt contains {tokens} input tokens.",
                param="messages" if job.endpoint == "chat/completions" else "prompt",
                status=400,
            )
    return ParsedJob(
        prompts=lengths,
        digest=digest,
        blocks=[prefix_blocks(job.cache_salt, prompt) for prompt in prompts],
        n=fields.n or 1,
        lengths=[min(length, context - tokens) for tokens in lengths],
        script=script,
        stops=[fields.stop] if isinstance(fields.stop, str) else fields.stop or [],
        include_usage=fields.stream_options.include_usage,
        usage_on_chunks=fields.stream_options.continuous_usage_stats,
        simulate=simulate,
    )


class ChoiceText:
    """Text of one choice as its tokens come: parts of characters and of stop strings are held back."""

    def __init__(self, stops: list[str]) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._stops = stops
        self._longest = max(map(len, stops), default=0)
        self._held = ""
        self.stopped = False
        """A stop string came; it and what follows are cut off."""

    def add(self, token: bytes) -> str:
        """The text that is certain after this token."""
        text = self._cut(self._decoder.decode(token))
        if self.stopped:
            return text
        keep = self._possible_stop(text)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def close(self) -> str:
        """What was held back; a character cut in the middle becomes one U+FFFD."""
        return "" if self.stopped else self._cut(self._decoder.decode(b"", final=True))

    def _cut(self, text: str) -> str:
        text, self._held = self._held + text, ""
        found = min((at for stop in self._stops if (at := text.find(stop)) >= 0), default=-1)
        self.stopped = found >= 0
        return text[:found] if self.stopped else text

    def _possible_stop(self, text: str) -> int:
        """Length of the longest end of ``text`` that a stop string starts with."""
        for length in range(min(self._longest - 1, len(text)), 0, -1):
            end = text[-length:]
            if any(stop.startswith(end) for stop in self._stops):
                return length
        return 0


class ChunkWriter:
    """The chunks of one attempt, or its one response. Choices are numbered prompt by prompt, as OpenAI's."""

    def __init__(self, job: Job, request: ParsedJob, *, model: str, created: int) -> None:
        self._chat = job.endpoint == "chat/completions"
        self._stream = job.stream
        self._include_usage = request.include_usage
        self._usage_on_chunks = request.usage_on_chunks
        prefix, kind = ("chatcmpl", "chat.completion") if self._chat else ("cmpl", "text_completion")
        if self._chat and self._stream:
            kind = "chat.completion.chunk"
        self._head = {"id": f"{prefix}-{job.request_id}", "object": kind, "created": created, "model": model}
        self._texts = [ChoiceText(request.stops) for _ in request.prompts for _ in range(request.n)]
        self._tokens = [request.tokens() for _ in self._texts]
        self._begun = [False] * len(self._texts)
        self._parts: list[list[str]] = [[] for _ in self._texts]
        self._reasons: list[str | None] = [None] * len(self._texts)
        self._reasoning = [False] * len(self._texts)
        """Whether the choice is between the tokens ``<think>`` and ``</think>``."""

    def give(self, choice: int, reason: str | None, counts: Counts, *, empty: bool = False) -> list[bytes]:
        """The chunks that the choice's next token makes; ``reason`` is given with its last one.

        ``counts`` are those after it, but for reasoning, which is counted here.
        ``empty`` closes a choice without a token. Afterwards ``stopped`` may say that a stop string came.
        """
        text = self._texts[choice]
        token = b"" if empty else next(self._tokens[choice])
        if token in (b"<think>", b"</think>"):
            self._reasoning[choice] = token == b"<think>"
        elif token and self._reasoning[choice]:
            counts.reasoning_tokens += 1
        piece = "" if empty else text.add(token)
        if text.stopped:
            reason = "stop"
        elif reason is not None:
            piece += text.close()
        self._reasons[choice] = reason
        if not self._stream:
            self._parts[choice].append(piece)
            return []
        if not piece and reason is None and self._begun[choice]:
            return []
        chunk: dict[str, Any] = self._head | {"choices": [self._delta(choice, piece, reason)]}
        if self._usage_on_chunks:
            chunk["usage"] = _usage(counts)
        return [msgspec.json.encode(chunk)]

    def stopped(self, choice: int) -> bool:
        """Whether a stop string ended the choice."""
        return self._texts[choice].stopped

    @property
    def complete(self) -> bool:
        """Whether each choice has ended."""
        return None not in self._reasons

    def close(self, counts: Counts) -> list[bytes]:
        """What comes after the last choice's end."""
        if self._stream and not self._include_usage:
            return []
        choices = [] if self._stream else [self._whole(choice) for choice in range(len(self._texts))]
        return [msgspec.json.encode(self._head | {"choices": choices, "usage": _usage(counts)})]

    def _delta(self, choice: int, piece: str, reason: str | None) -> dict[str, Any]:
        first, self._begun[choice] = not self._begun[choice], True
        if not self._chat:
            return {"index": choice, "text": piece, "logprobs": None, "finish_reason": reason}
        delta = {"role": "assistant", "content": piece} if first else {"content": piece}
        return {"index": choice, "delta": delta, "logprobs": None, "finish_reason": reason}

    def _whole(self, choice: int) -> dict[str, Any]:
        text = "".join(self._parts[choice])
        content: dict[str, Any] = {"message": {"role": "assistant", "content": text}} if self._chat else {"text": text}
        return {"index": choice, **content, "logprobs": None, "finish_reason": self._reasons[choice]}


def _usage(counts: Counts) -> dict[str, Any]:
    return counts.usage() | {"completion_tokens_details": {"reasoning_tokens": counts.reasoning_tokens}}
