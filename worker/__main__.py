"""``python -m worker``: one worker process, configured by ``HEADRACE_*`` variables."""

import sys

from contracts.bus import Bus
from contracts.service.process import run_service
from worker.config import WorkerConfig
from worker.engines import table
from worker.service import Worker, await_manifest


async def build(config: WorkerConfig, bus: Bus) -> Worker:
    """A worker of the model, once the model has a manifest."""
    record, manifest = await await_manifest(bus, config.model, config.version)
    overbooking = record.limits.kv_overbooking
    return Worker(bus, config, manifest, lambda: table.build(config, manifest), kv_overbooking=overbooking)


if __name__ == "__main__":
    sys.exit(run_service("worker", WorkerConfig, build))
