"""The worker's metrics; names follow vLLM's where vLLM has one, and vLLM's own are in the same registry."""

from prometheus_client import Counter, Gauge, Histogram

from contracts.messages.attempts import AttemptEvent
from contracts.messages.base import Priority
from worker.engines.base import EngineStats

_SCOPE = ("model", "version", "priority")
_FIRST_TOKEN_S = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160)
_BETWEEN_S = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
"""Both are vLLM's bounds."""

_attempts = Counter("headrace_worker_attempts", "Ended attempts whose event is this worker's.", (*_SCOPE, "outcome"))
_time_to_first_token = Histogram(
    "headrace_worker_time_to_first_token_seconds",
    "From the start of an attempt to its first chunk.",
    _SCOPE,
    buckets=_FIRST_TOKEN_S,
)
_inter_token_latency = Histogram(
    "headrace_worker_inter_token_latency_seconds", "Between two chunks of an attempt.", _SCOPE, buckets=_BETWEEN_S
)
_prompt_tokens = Counter("headrace_worker_prompt_tokens", "Prompt tokens of ended attempts.", _SCOPE)
_cached_tokens = Counter("headrace_worker_prompt_tokens_cached", "Those found in the prefix cache.", _SCOPE)
_generation_tokens = Counter("headrace_worker_generation_tokens", "Generated tokens of ended attempts.", _SCOPE)

_in_flight = Gauge("headrace_worker_attempts_in_flight", "Attempts pulled and not ended.", ("model",))
_kv_tokens = Gauge("headrace_worker_kv_tokens", "Capacity of the KV cache in tokens.", ("model",))
_kv_tokens_used = Gauge("headrace_worker_kv_tokens_used", "Tokens in the KV cache that are in use.", ("model",))
_preemptions = Gauge("headrace_worker_num_preemptions", "Preemptions since the engine started.", ("model",))
_engine_losses = Counter("headrace_worker_engine_losses", "Engines that died or hung.", ("model",))
_miscounted = Counter(
    "headrace_worker_prompts_miscounted", "Requests ended because the engine counts another prompt.", ("model",)
)


class TokenLatency:
    """Observes the chunks of one attempt that starts ``now``; times are seconds of one monotonic clock."""

    def __init__(self, model: str, version: str, priority: Priority, now: float) -> None:
        self._first = _time_to_first_token.labels(model, version, priority)
        self._between = _inter_token_latency.labels(model, version, priority)
        self._last = now
        self._begun = False

    def chunk(self, now: float) -> None:
        """A chunk came."""
        (self._between if self._begun else self._first).observe(now - self._last)
        self._begun = True
        self._last = now


def count_attempt(event: AttemptEvent) -> None:
    """A terminal event of this worker was stored."""
    scope = (event.model, event.version, event.priority)
    _attempts.labels(*scope, event.outcome).inc()
    _prompt_tokens.labels(*scope).inc(event.prompt_tokens)
    _cached_tokens.labels(*scope).inc(event.cached_tokens)
    _generation_tokens.labels(*scope).inc(event.completion_tokens)


def count_engine_loss(model: str) -> None:
    """The engine died or hung."""
    _engine_losses.labels(model).inc()


def count_miscounted_prompt(model: str) -> None:
    """Above zero somebody should look: a bug in counting, or a way past the limits."""
    _miscounted.labels(model).inc()


def observe(model: str, stats: EngineStats, *, in_flight: int, kv_tokens: int) -> None:
    """How it stands now: attempts in flight, and the KV cache with its capacity in tokens."""
    _in_flight.labels(model).set(in_flight)
    _kv_tokens.labels(model).set(kv_tokens)
    _kv_tokens_used.labels(model).set(stats.kv_tokens_used)
    _preemptions.labels(model).set(stats.preemptions_total)
