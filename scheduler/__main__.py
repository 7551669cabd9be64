"""``python -m scheduler``: one scheduler process, owner or standby of every model."""

import asyncio
import os
import signal
import sys

import structlog
import uvloop

from contracts import ids
from contracts.bus import Bus, BusError
from contracts.service import telemetry
from contracts.service.config import ConfigError, load
from scheduler.config import SchedulerConfig
from scheduler.service import Scheduler

log = structlog.get_logger()


async def serve(config: SchedulerConfig) -> int:
    """Exit status: 0 after a stop, 1 when the bus is gone for good or a core broke."""
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    try:
        bus = await Bus.connect(config.nats_url, name=ids.incarnation("scheduler"), inbox="scheduler")
    except BusError as error:
        log.error("bus_unreachable", reason=str(error))
        return 1
    scheduler = Scheduler(bus, config)
    telemetry.serve(config, scheduler.not_ready)
    try:
        await scheduler.run(stop)
    except BusError as error:
        log.error("bus_failed", reason=str(error))
        return 1
    finally:
        await bus.close()
    return 0 if stop.is_set() else 1


def main() -> None:
    try:
        config = load(SchedulerConfig, os.environ)
    except ConfigError as error:
        print(error, file=sys.stderr)
        raise SystemExit(2) from error
    telemetry.configure_logging(config, "scheduler")
    raise SystemExit(uvloop.run(serve(config)))


if __name__ == "__main__":
    main()
