"""``python -m ledger``: one ledger process, configured by ``HEADRACE_*`` variables."""

import asyncio
import os
import signal
import sys

import structlog
import uvloop

from contracts.service import telemetry
from contracts.service.config import ConfigError, load
from ledger.config import LedgerConfig
from ledger.ingest import Ledger


async def serve(config: LedgerConfig) -> int:
    ledger = Ledger(config)
    telemetry.serve(config, ledger.not_ready)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, ledger.stop)
    return 0 if await ledger.run() else 1


def main() -> int:
    """Exit status: 0 stopped, 1 failed or the bus was lost for good, 2 bad configuration."""
    try:
        config = load(LedgerConfig, os.environ)
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    telemetry.configure_logging(config, "ledger")
    try:
        return uvloop.run(serve(config))
    except Exception:
        structlog.get_logger(__name__).exception("ledger_failed")
        return 1


if __name__ == "__main__":
    sys.exit(main())
