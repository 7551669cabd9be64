"""An engine of the kind that a model's manifest names. Only what it needs is imported: vLLM takes seconds."""

from contracts.messages.records import Manifest
from worker.config import WorkerConfig
from worker.engines.base import Engine


def build_engine(config: WorkerConfig, manifest: Manifest) -> Engine:
    """A new engine, not yet started."""
    if manifest.engine == "simulated":
        from worker.engines.simulated.engine import SimConfig, SimulatedEngine

        return SimulatedEngine(
            SimConfig(
                model=manifest.name,
                slots=config.sim_slots,
                kv_tokens=config.sim_kv_tokens,
                prefill_tps=config.sim_prefill_tps,
                itl_ms=config.sim_itl_ms,
                context=config.sim_context,
            )
        )
    from worker.engines.vllm.engine import VllmConfig, VllmEngine

    return VllmEngine(
        VllmConfig(
            model_path=manifest.path,
            public_name=manifest.name,
            endpoints=manifest.endpoints,
            slots=config.vllm_slots,
            context=manifest.context,
            kv_cache_bytes=config.vllm_kv_cache_bytes,
            gpu_memory_utilization=config.vllm_gpu_memory_utilization,
            check_timeout_s=config.check_timeout_s,
            extra_engine_args=config.vllm_engine_args,
        )
    )
