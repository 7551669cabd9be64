"""What a worker asks of an engine. Two engines obey it, vLLM and the simulated one, and one conformance suite.

An engine answers OpenAI request bodies with OpenAI chunks. Counts never come from parsing chunks: the engine
writes them into ``Counts`` as tokens are generated.
"""

from collections.abc import Callable
from typing import Any, Protocol

import msgspec

from contracts.messages.base import Endpoint
from worker.engines.cached_blocks import CachedBlocks


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """One attempt. ``body`` is the caller's OpenAI body (JSON object), already stripped of privileged fields."""

    request_id: str
    attempt: int
    endpoint: Endpoint
    body: bytes
    stream: bool
    tenant: str = ""
    """Whose; what is done for a request before the engine sees it goes in turns by tenant."""
    adapter: str = ""
    """Of those that the engine has loaded, ``model@version``; empty: its own weights alone."""
    cache_salt: str
    """Prompts share prefix-cache blocks only under the same salt."""
    prompt_tokens: int | None = None
    """As admitted, over all prompts: the engine must count the same, or it refuses before the first token. None: nobody
    counted (a warm-up)."""
    prompt_digest: str = ""
    """Of the token ids that were counted (contracts.fingerprint); likewise. Empty: only their number is known."""


class Counts(msgspec.Struct, kw_only=True):
    """What one attempt has used so far; the engine writes, the worker reads. Tokens are over all choices."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    reasoning_tokens: int = 0
    first_token_at_ms: int = 0
    """When the engine gave the first token, by ``clock.monotonic_ms``; 0 before."""
    last_token_at_ms: int = 0
    pause_ms_max: int = 0
    """Longest time between two outputs of tokens."""
    finish_reason: str = ""

    def usage(self) -> dict[str, Any]:
        """As OpenAI's chat and completions tell it, reasoning apart."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }

    def came(self, now_ms: int) -> None:
        """The engine gave tokens, which are counted already."""
        if self.first_token_at_ms:
            self.pause_ms_max = max(self.pause_ms_max, now_ms - self.last_token_at_ms)
        else:
            self.first_token_at_ms = now_ms
        self.last_token_at_ms = now_ms


Give = Callable[[bytes], None]
"""Takes the next chunk of an answer, at once, and does not raise."""


class EngineStats(msgspec.Struct, frozen=True, kw_only=True):
    """A snapshot of the engine's own figures."""

    running: int = 0
    waiting: int = 0
    kv_tokens_used: int = 0
    prefill_tokens_total: int = 0
    decode_tokens_total: int = 0
    preemptions_total: int = 0
    steps_total: int = 0
    """While the engine has work and lives they go on, also when a step gives no token."""


class EngineEvent(msgspec.Struct, frozen=True, kw_only=True):
    """What happened to the engine; its supervisor tells it."""


class EngineStarted(EngineEvent, frozen=True, kw_only=True):
    """A new one serves: sequences that it runs at once, and tokens that its KV cache holds."""

    slots: int
    kv_tokens: int
    tokenizer_fingerprint: str | None = None
    """Of the version that it serves; None: as before."""


class EngineRefused(EngineEvent, frozen=True, kw_only=True):
    """The version could not be loaded, or is not what was published; it is tried again, later each time."""

    reason: str


class EngineSampled(EngineEvent, frozen=True, kw_only=True):
    """A look at the one that serves, once per sampling interval; stalls are counted in these looks."""

    stats: EngineStats


class EngineLost(EngineEvent, frozen=True, kw_only=True):
    """It died or hangs."""

    reason: str


class EngineFailure(Exception):
    """An attempt failed. ``code`` is a code of contracts.errors.TABLE; ``retryable``: another worker may succeed.

    ``engine_death``: the engine itself died or hangs, everything that it ran is lost.
    """

    def __init__(
        self,
        code: str,
        message: str,
        *,
        param: str | None = None,
        status: int = 0,
        retryable: bool = False,
        engine_death: bool = False,
    ) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.param = param
        self.status = status
        self.retryable = retryable
        self.engine_death = engine_death


class PromptMiscounted(EngineFailure):
    """The engine's prompt is not the one that was admitted and reserved for: another tokenizer, a bug, or somebody's
    way past a limit. Another worker may count as the gateway does.
    """

    def __init__(self, admitted: int, found: int) -> None:
        text = "The engine counts other prompt tokens than were admitted."
        super().__init__("unavailable", text, status=503, retryable=True)
        self.admitted = admitted
        self.found = found


def check_prompt(job: Job, found: int, digest: str) -> None:
    """Raises PromptMiscounted unless ``found`` tokens of all prompts, of that digest, were admitted."""
    if job.prompt_tokens not in (None, found) or (job.prompt_digest and job.prompt_digest != digest):
        raise PromptMiscounted(job.prompt_tokens or 0, found)


class Engine(Protocol):
    """Lifecycle: ``start`` (loads, warms up), any number of ``generate``, ``close``. One event loop."""

    slots: int
    """Sequences that run at once."""
    kv_tokens: int
    """KV-cache capacity in tokens; known after ``start``."""
    context: int
    """Longest sequence in tokens; known after ``start``."""
    kept: CachedBlocks | None
    """What its cache keeps of prompts; None where that is not known."""

    async def start(self) -> None:
        """Load and warm up; returns when the first request would be served. Raises EngineFailure."""

    async def close(self) -> None:
        """Stop everything that the engine started; generators still open raise EngineFailure."""

    async def fingerprint(self) -> str:
        """How it counts (contracts.fingerprint), by the code that serves; empty where it has no files for it."""

    async def load_adapter(self, name: str, path: str) -> None:
        """Have a LoRA adapter from that directory ready for jobs that name it; raises EngineFailure.

        ``name``: ``model@version``, for two versions of one may be served at a time. Answers name the model.
        """

    async def unload_adapter(self, name: str) -> None:
        """Forget it; nothing when it is not there."""

    def stats(self) -> EngineStats:
        """How it stands; zeros before ``start``."""

    async def generate(self, job: Job, counts: Counts, give: Give) -> None:
        """Give the chunks of the answer, each one JSON object: the API's events, or one whole response without
        ``stream``. They are given as they come, without a turn of the event loop for each.

        Returns after the last chunk. Cancellation of the task aborts the generation within one engine step, frees its
        slot and KV, and nothing more is given. Raises EngineFailure, also for an error that the engine puts inside a
        stream.
        """
        ...

    async def check(self) -> None:
        """Round trip through the engine's loop; raises EngineFailure when the engine is dead."""
