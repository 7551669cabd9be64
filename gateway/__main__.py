"""``python -m gateway``: one gateway process, configured by ``HEADRACE_*`` variables."""

import asyncio
import os
import signal
import sys

import structlog
import uvloop

from contracts.bus import Bus, BusError
from contracts.service import telemetry
from contracts.service.config import ConfigError, load
from gateway.config import GatewayConfig
from gateway.service import Gateway

_log = structlog.get_logger()


async def _run(config: GatewayConfig) -> int:
    try:
        bus = await Bus.connect(config.nats_url, name="gateway")
    except BusError as error:
        _log.error("bus_unreachable", reason=str(error))
        return 1
    gateway = Gateway(config, bus)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, gateway.stop)
    telemetry.serve(config, lambda: gateway.not_ready)
    try:
        await gateway.run()
    except (BusError, OSError) as error:
        _log.error("gateway_failed", reason=str(error))
        return 1
    finally:
        lost = bus.closed.is_set()
        await bus.close()
    if lost:
        _log.error("bus_lost")
    return 1 if lost else 0


def main() -> int:
    try:
        config = load(GatewayConfig, os.environ)
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    telemetry.configure_logging(config, "gateway")
    return uvloop.run(_run(config))


if __name__ == "__main__":
    sys.exit(main())
