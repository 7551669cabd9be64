"""The worker's settings; the engine's kind is the manifest's business."""

from typing import Any

import msgspec

from contracts.service.config import ServiceConfig

_POSITIVE = (
    "stall_s",
    "check_timeout_s",
    "sim_slots",
    "sim_kv_tokens",
    "sim_prefill_tps",
    "sim_context",
    "vllm_slots",
    "vllm_kv_cache_bytes",
)


class WorkerConfig(ServiceConfig, frozen=True, kw_only=True):
    """One worker serves one model."""

    model: str
    """Name of the model's manifest in the MODELS bucket."""
    grace_s: float = 25.0
    """Running attempts may finish this long after SIGTERM; below the 30 s after which Docker kills."""
    stall_s: float = 60.0
    """Without any progress for so long an attempt, or the engine, is given up. A guess: far above the slowest
    step measured (1 s), far below a caller's patience."""
    check_timeout_s: float = 20.0
    """Time limit of the engine's health check; a step of vLLM on a busy CPU takes some seconds."""

    sim_slots: int = 64
    sim_kv_tokens: int = 1_000_000
    sim_prefill_tps: float = 20_000.0
    """Prompt tokens that the simulated engine computes in a second, one prompt after the other."""
    sim_itl_ms: float = 20.0
    """Between two tokens of one of its sequences."""
    sim_context: int = 1_048_576

    vllm_slots: int = 32
    vllm_kv_cache_bytes: int = 256 << 20
    """On a CPU: at 23 KB a token 11,000 tokens of the small demo model."""
    vllm_gpu_memory_utilization: float | None = None
    """Share of the GPU's memory; stating it makes a GPU engine."""
    vllm_engine_args: dict[str, Any] = msgspec.field(default_factory=dict)
    """JSON object of vLLM's own arguments, over ours; null takes one out."""

    def problems(self) -> list[str]:
        wrong = []
        if self.grace_s < 0:
            wrong.append("HEADRACE_GRACE_S is negative")
        for name in _POSITIVE:
            if getattr(self, name) <= 0:
                wrong.append(f"HEADRACE_{name.upper()} must be above 0")
        if self.vllm_gpu_memory_utilization is not None and not 0 < self.vllm_gpu_memory_utilization <= 1:
            wrong.append("HEADRACE_VLLM_GPU_MEMORY_UTILIZATION must be above 0 and at most 1")
        if self.sim_itl_ms < 0:
            wrong.append("HEADRACE_SIM_ITL_MS is negative")
        return wrong
