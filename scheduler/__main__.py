"""``python -m scheduler``: one scheduler process, configured by ``HEADRACE_*`` variables."""

import sys

from contracts.bus import Bus
from contracts.service.process import run_service
from scheduler.config import SchedulerConfig
from scheduler.service import Scheduler


async def build(config: SchedulerConfig, bus: Bus) -> Scheduler:
    """The process's scheduler, not yet running."""
    return Scheduler(bus, config)


if __name__ == "__main__":
    sys.exit(run_service("scheduler", SchedulerConfig, build))
