"""``python -m ledger``: one ledger process, configured by ``HEADRACE_*`` variables."""

import sys

from contracts.bus import Bus
from contracts.service.process import run_service
from ledger.config import LedgerConfig
from ledger.service import Ledger


async def build(config: LedgerConfig, bus: Bus) -> Ledger:
    """The process's ledger, not yet running."""
    return Ledger(config, bus)


if __name__ == "__main__":
    sys.exit(run_service("ledger", LedgerConfig, build))
