"""The worker's metrics; names follow vLLM's where vLLM has one, and vLLM's own are in the same registry."""

from array import array
from functools import cache

from prometheus_client import Counter, Gauge

from contracts.histograms import Histogram
from contracts.messages.attempts import AttemptEvent
from contracts.messages.request import RequestEnvelope
from contracts.workload import LABELS, scope
from worker.engines.base import EngineStats

GAPS_MAX = 256
"""Pauses between chunks of one attempt that are kept until they are counted in one go: 1 KB."""

_attempts = cache(
    Counter("headrace_worker_attempts", "Ended attempts whose event is this worker's.", (*LABELS, "outcome")).labels
)
_prompt_tokens = cache(Counter("headrace_worker_prompt_tokens", "Prompt tokens of ended attempts.", LABELS).labels)
_cached_tokens = cache(
    Counter("headrace_worker_prompt_tokens_cached", "Those found in the prefix cache.", LABELS).labels
)
_generation_tokens = cache(
    Counter("headrace_worker_generation_tokens", "Generated tokens of ended attempts.", LABELS).labels
)
_time_to_first_token = Histogram(
    "headrace_worker_time_to_first_token_seconds",
    "From the start of an attempt to its first chunk.",
    LABELS,
    least=0.001,
    most=600.0,
)
_inter_token_latency = Histogram(
    "headrace_worker_inter_token_latency_seconds", "Between two chunks of an attempt.", LABELS, least=0.0005, most=30.0
)

_in_flight = Gauge("headrace_worker_attempts_in_flight", "Attempts pulled and not ended.", ("model",))
_kv_tokens = Gauge("headrace_worker_kv_tokens", "Capacity of the KV cache in tokens.", ("model",))
_kv_tokens_used = Gauge("headrace_worker_kv_tokens_used", "Tokens in the KV cache that are in use.", ("model",))
_preemptions = Gauge("headrace_worker_num_preemptions", "Preemptions since the engine started.", ("model",))
_engine_losses = Counter("headrace_worker_engine_losses", "Engines that died or hung.", ("model",))
_refused_versions = Counter(
    "headrace_worker_versions_refused", "Versions that could not be loaded, or are not what was published.", ("model",)
)
_other_tokenizers = Counter(
    "headrace_worker_tokenizer_mismatches", "Requests refused because another tokenizer counted them.", ("model",)
)
_miscounted = Counter(
    "headrace_worker_prompts_miscounted", "Requests ended because the engine counts another prompt.", ("model",)
)


class TokenLatency:
    """Times the chunks of one attempt that starts ``now``; times are seconds of one monotonic clock."""

    def __init__(self, request: RequestEnvelope, version: str, now: float) -> None:
        self._scope = scope(request, version)
        self._last = now
        self._begun = False
        self._gaps = array("f")

    def chunk(self, now: float) -> None:
        """A chunk came."""
        if self._begun:
            self._gaps.append(now - self._last)
            if len(self._gaps) >= GAPS_MAX:
                self.end()
        else:
            _time_to_first_token.of(*self._scope).observe(now - self._last)
        self._begun = True
        self._last = now

    def end(self) -> None:
        """Count what was gathered: no more comes, or enough has come."""
        gaps, self._gaps = self._gaps, array("f")
        _inter_token_latency.of(*self._scope).observe_all(gaps)


def count_attempt(event: AttemptEvent) -> None:
    """A terminal event of this worker was stored."""
    where = scope(event, event.version)
    _attempts(*where, event.outcome).inc()
    _prompt_tokens(*where).inc(event.prompt_tokens)
    _cached_tokens(*where).inc(event.cached_tokens)
    _generation_tokens(*where).inc(event.completion_tokens)


def count_engine_loss(model: str) -> None:
    """The engine died or hung."""
    _engine_losses.labels(model).inc()


def count_refused_version(model: str) -> None:
    """A version failed its verification or its warm-up."""
    _refused_versions.labels(model).inc()


def count_other_tokenizer(model: str) -> None:
    """Above zero gateways and workers serve with different tokenizers."""
    _other_tokenizers.labels(model).inc()


def count_miscounted_prompt(model: str) -> None:
    """Above zero somebody should look: a bug in counting, or a way past the limits."""
    _miscounted.labels(model).inc()


def observe(model: str, stats: EngineStats, *, in_flight: int, kv_tokens: int) -> None:
    """How it stands now: attempts in flight, and the KV cache with its capacity in tokens."""
    _engine_losses.labels(model)  # From the beginning: an increase from nothing is none to Prometheus.
    _miscounted.labels(model)
    _other_tokenizers.labels(model)
    _refused_versions.labels(model)
    _in_flight.labels(model).set(in_flight)
    _kv_tokens.labels(model).set(kv_tokens)
    _kv_tokens_used.labels(model).set(stats.kv_tokens_used)
    _preemptions.labels(model).set(stats.preemptions_total)
