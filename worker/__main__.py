"""``python -m worker``: one worker process, configured by ``HEADRACE_*`` variables.

SIGTERM stops it within its grace time; SIGUSR1 once what it runs has ended, however long that takes.
"""

import asyncio
import signal
import sys
from functools import partial

from contracts.bus import Bus
from contracts.service.process import run_service
from worker.config import WorkerConfig
from worker.engines import table
from worker.service import Worker, await_manifest


async def build(config: WorkerConfig, bus: Bus) -> Worker:
    """A worker of the model, once the model has a manifest."""
    record, manifest = await await_manifest(bus, config.model, config.version)
    overbooking = record.limits.kv_overbooking
    worker = Worker(bus, config, manifest, partial(table.build, config), kv_overbooking=overbooking)
    asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, worker.leave)
    return worker


if __name__ == "__main__":
    sys.exit(run_service("worker", WorkerConfig, build))
