"""The live view of this gateway: what contracts.live makes of the owners' answers, for operators to read or follow.

Readiness asks each owner about once a second; here the answers become one snapshot. Nothing is encoded while nobody
looks.
"""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import msgspec

from contracts import clock
from contracts.bus import Bus
from contracts.errors import HeadraceError
from contracts.live import LiveView, Rates, live_model
from contracts.messages.queues import QueueAnswer
from gateway.apis.response_format import one_line
from gateway.intake.catalog import Catalog

FOLLOWERS_MAX = 32
"""Of one gateway: people and their terminals. Each is sent the whole snapshot, 250 bytes a worker."""


class Live:
    """Read with ``snapshot``, or followed; ``close`` ends those who follow."""

    def __init__(self, bus: Bus, catalog: Catalog, gateway: str) -> None:
        self._bus = bus
        self._catalog = catalog
        self._gateway = gateway
        self._told: dict[str, QueueAnswer | str] = {}
        self._rates: dict[str, Rates] = {}
        self._round = 0
        self._encoded = 0, b""
        self._turned = asyncio.Event()
        self._followers = 0
        self._closed = False

    def note(self, model: str, told: QueueAnswer | str) -> None:
        """What its owner said, or why it said nothing."""
        self._told[model] = told
        if isinstance(told, QueueAnswer):
            self._rates.setdefault(model, Rates()).take(told.workers, time.monotonic())

    def round_ended(self) -> None:
        """All models have been asked once more."""
        for gone in self._told.keys() - set(self._catalog.names()):
            del self._told[gone]
            self._rates.pop(gone, None)
        self._round += 1
        self._turn()

    def close(self) -> None:
        """Those who follow have had the last snapshot."""
        self._closed = True
        self._turn()

    def _turn(self) -> None:
        self._turned.set()
        self._turned = asyncio.Event()

    def snapshot(self) -> LiveView:
        """As of the last round."""
        return LiveView(
            at_ms=clock.now_ms(),
            gateway=self._gateway,
            bus="connected" if self._bus.connected else "disconnected",
            models=[
                live_model(record.name, record.stable, self._told.get(record.name), self._rates.get(record.name))
                for record in self._catalog.records()
            ],
        )

    @asynccontextmanager
    async def following(self) -> AsyncIterator[AsyncIterator[bytes]]:
        """The snapshot now and after each round, as JSON; raises HeadraceError when too many follow."""
        if self._followers >= FOLLOWERS_MAX:
            raise HeadraceError(
                "unavailable", f"{FOLLOWERS_MAX} follow the live view of this gateway already.", retry_after_s=5
            )
        self._followers += 1
        try:
            yield self._follow()
        finally:
            self._followers -= 1

    async def _follow(self) -> AsyncIterator[bytes]:
        while not self._closed:
            turned = self._turned
            if self._encoded[0] != self._round or not self._round:
                self._encoded = self._round, one_line(msgspec.json.encode(self.snapshot()))
            yield self._encoded[1]
            await turned.wait()
