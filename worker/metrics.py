"""The worker's figures; names follow vLLM's where vLLM has one, and vLLM's own are in the same registry."""

from prometheus_client import Counter, Gauge, Histogram

from contracts.messages.attempts import AttemptEvent
from contracts.messages.base import Priority

_SCOPE = ("model", "version", "priority")

_attempts = Counter("headrace_worker_attempts", "Ended attempts whose event is this worker's.", (*_SCOPE, "outcome"))
_first_token = Histogram(
    "headrace_worker_time_to_first_token_seconds",
    "From the start of an attempt to its first chunk.",
    _SCOPE,
    buckets=(
        0.001,
        0.005,
        0.01,
        0.02,
        0.04,
        0.06,
        0.08,
        0.1,
        0.25,
        0.5,
        0.75,
        1,
        2.5,
        5,
        7.5,
        10,
        20,
        40,
        80,
        160,
    ),
)
_inter_token = Histogram(
    "headrace_worker_inter_token_latency_seconds",
    "Between two chunks of an attempt.",
    _SCOPE,
    buckets=(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80),
)
_prompt_tokens = Counter("headrace_worker_prompt_tokens", "Prompt tokens of ended attempts.", _SCOPE)
_cached_tokens = Counter("headrace_worker_prompt_tokens_cached", "Those found in the prefix cache.", _SCOPE)
_generation_tokens = Counter("headrace_worker_generation_tokens", "Generated tokens of ended attempts.", _SCOPE)

attempts_held = Gauge("headrace_worker_attempts_held", "Attempts pulled and not ended.", ("model",))
kv_tokens = Gauge("headrace_worker_kv_tokens", "Capacity of the KV cache in tokens.", ("model",))
kv_tokens_used = Gauge("headrace_worker_kv_tokens_used", "Tokens in the KV cache that are in use.", ("model",))
preemptions = Gauge("headrace_worker_preemptions", "Preemptions since the engine started.", ("model",))
engine_losses = Counter("headrace_worker_engine_losses", "Engines that died or hung.", ("model",))


class Pace:
    """Observes the chunks of one attempt."""

    def __init__(self, model: str, version: str, priority: Priority, now: float) -> None:
        self._first = _first_token.labels(model, version, priority)
        self._between = _inter_token.labels(model, version, priority)
        self._last = now
        self._begun = False

    def chunk(self, now: float) -> None:
        (self._between if self._begun else self._first).observe(now - self._last)
        self._begun = True
        self._last = now


def count(event: AttemptEvent) -> None:
    """A terminal event of this worker was stored."""
    scope = (event.model, event.version, event.priority)
    _attempts.labels(*scope, event.outcome).inc()
    _prompt_tokens.labels(*scope).inc(event.prompt_tokens)
    _cached_tokens.labels(*scope).inc(event.cached_tokens)
    _generation_tokens.labels(*scope).inc(event.completion_tokens)
