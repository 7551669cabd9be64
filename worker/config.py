"""The worker's settings and those of its engines; which engine it runs is for the model's manifest to say."""

from typing import Annotated, Any

import msgspec
from msgspec import Meta

from contracts.service.config import Count, Positive, ServiceConfig


class WorkerConfig(ServiceConfig, frozen=True, kw_only=True):
    """One worker serves one model."""

    model: str
    """Name of the model's record in the MODELS bucket, or of one of its shards (contracts.shards)."""
    version: str = ""
    """The version that it serves; empty for the stable one when it starts."""
    cache: str = ""
    """Where files of versions are kept; empty: $XDG_CACHE_HOME/headrace, else ~/.cache/headrace."""
    cache_bytes: Count = 200 << 30
    """Of them; what was used longest ago goes first."""
    grace_s: Annotated[float, Meta(ge=0)] = 25.0
    """Running attempts may finish this long after SIGTERM; below the 30 s after which Docker kills."""
    stall_s: Positive = 60.0
    """Without any progress for so long an attempt, or the engine, is given up. A guess: far above the slowest
    step measured (1 s), far below a caller's patience."""
    check_timeout_s: Positive = 20.0
    """Time limit of the engine's health check; a step of vLLM on a busy CPU takes some seconds."""

    sim_slots: Count = 64
    sim_kv_tokens: Count = 1_000_000
    sim_prefill_tps: Positive = 20_000.0
    """Prompt tokens that the simulated engine computes in a second, one prompt after the other."""
    sim_itl_ms: Annotated[float, Meta(ge=0)] = 20.0
    """Between two tokens of one of its sequences."""
    sim_context: Count = 1_048_576
    sim_fails: Annotated[float, Meta(ge=0, le=1)] = 0.0
    """Share of attempts that end with an error here, whatever the version: a bad worker, for tests."""

    vllm_slots: Count = 32
    vllm_kv_cache_bytes: Count = 256 << 20
    """On a CPU: at 23 KB a token 11,000 tokens of the small demo model."""
    vllm_gpu_memory_utilization: Annotated[float, Meta(gt=0, le=1)] | None = None
    """Share of the GPU's memory; stating it makes a GPU engine."""
    vllm_adapters: Annotated[int, Meta(ge=0)] = 0
    """LoRA adapters that the engine holds beside its weights at a time; 0: it can load none."""
    vllm_adapter_rank: Count = 16
    """Highest rank of an adapter: memory is taken for it."""
    vllm_kv_events: bool = False
    """Whether the scheduler is told what the engine's cache keeps; else it goes by what it dispatched."""
    vllm_engine_args: dict[str, Any] = msgspec.field(default_factory=dict)
    """JSON object of vLLM's own arguments, over ours; null takes one out."""
