"""``python -m gateway``: one gateway process, configured by ``HEADRACE_*`` variables."""

import sys

from contracts.bus import Bus
from contracts.service.process import run_service
from gateway.config import GatewayConfig
from gateway.service import Gateway


async def build(config: GatewayConfig, bus: Bus) -> Gateway:
    """The process's gateway, not yet running."""
    return Gateway(config, bus)


if __name__ == "__main__":
    sys.exit(run_service("gateway", GatewayConfig, build))
