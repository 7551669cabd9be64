"""``python -m worker``: one worker process."""

import asyncio
import os
import signal
import sys

import structlog
import uvloop

from contracts import topology
from contracts.bus import Bus, BusError
from contracts.messages.records import Manifest
from contracts.service import config as contracts_config
from contracts.service import telemetry
from worker.config import WorkerConfig
from worker.engines.base import Engine
from worker.service import Worker, await_manifest

_log = structlog.get_logger()


def main() -> int:
    """The process's exit code: 0 after a drain, 1 when something broke, 2 for a bad configuration."""
    try:
        config = contracts_config.load(WorkerConfig, os.environ)
    except contracts_config.ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    telemetry.configure_logging(config, "worker")
    return uvloop.run(_Process(config).run())


class _Process:
    def __init__(self, config: WorkerConfig) -> None:
        self._config = config
        self._worker: Worker | None = None
        self._stopped = False

    async def run(self) -> int:
        telemetry.serve(self._config, self._not_ready)
        serving = asyncio.create_task(self._serve())
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._stop, serving)
        try:
            return await serving
        except asyncio.CancelledError:
            return 0
        except BusError as error:
            _log.error("bus_unavailable", error=str(error))
        except Exception:
            _log.exception("worker_broke")
        return 1

    def _stop(self, serving: asyncio.Task[int]) -> None:
        """Drain; a worker that holds nothing yet just ends."""
        if self._worker:
            self._worker.stop()
        else:
            serving.cancel()

    def _not_ready(self) -> str:
        return self._worker.not_ready() if self._worker else "no manifest yet"

    async def _serve(self) -> int:
        bus = await Bus.connect(self._config.nats_url, name="worker")
        try:
            for line in await topology.ensure(bus):
                _log.warning("topology_drift", drift=line)
            manifest = await await_manifest(bus, self._config.model)
            self._worker = Worker(bus, self._config, manifest, lambda: build_engine(self._config, manifest))
            return await _until_closed(self._worker, bus)
        finally:
            await bus.close()


def build_engine(config: WorkerConfig, manifest: Manifest) -> Engine:
    """A new engine of the manifest's kind. Only what it needs is imported: vLLM takes seconds."""
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


async def _until_closed(worker: Worker, bus: Bus) -> int:
    running = asyncio.create_task(worker.run())
    closed = asyncio.create_task(bus.closed.wait())
    await asyncio.wait({running, closed}, return_when=asyncio.FIRST_COMPLETED)
    if running.done():
        closed.cancel()
        running.result()
        return 0
    _log.error("bus_closed")
    running.cancel()
    await asyncio.wait({running})
    return 1


if __name__ == "__main__":
    sys.exit(main())
