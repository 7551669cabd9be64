"""``python -m gateway``: one gateway process, configured by ``HEADRACE_*`` variables."""

import sys
from collections.abc import Callable
from pathlib import Path

from contracts.bus import Bus
from contracts.service.process import run_service
from gateway.config import GatewayConfig
from gateway.management.gathering import Gathering
from gateway.service import Gateway


async def build(config: GatewayConfig, bus: Bus) -> Gateway:
    """The process's gateway, not yet running."""
    return Gateway(config, bus)


def gathered(config: GatewayConfig) -> Callable[[], bytes] | None:
    """Makes the metrics page of the stack that it belongs to, if it does."""
    return Gathering(Path(config.stack_run)).page if config.stack_run else None


if __name__ == "__main__":
    sys.exit(run_service("gateway", GatewayConfig, build, gathered))
