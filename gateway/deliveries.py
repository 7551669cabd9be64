"""What this gateway saw of finished requests, told to the ledger about once a second: one message for many."""

import asyncio

import structlog

from contracts import subjects
from contracts.bus import Bus, BusError
from contracts.messages.base import Codec
from contracts.messages.deliveries import DELIVERIES_MAX, Deliveries, Delivery
from contracts.ticks import tick
from gateway import metrics

EVERY_S = 1.0
WAITING_MAX = 10_000
"""While the bus is away, or when requests end faster than one gateway can serve them."""

_log = structlog.get_logger()
_codec: Codec[Deliveries] = Codec(Deliveries)


class DeliveryReports:
    """``add`` from anywhere on the loop; sends between ``start`` and ``close``."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._waiting: list[Delivery] = []
        self._task: asyncio.Task[None] | None = None

    def add(self, delivery: Delivery) -> None:
        """A request has ended. Beyond WAITING_MAX it is forgotten: nothing rests on it."""
        if len(self._waiting) < WAITING_MAX:
            self._waiting.append(delivery)
        else:
            metrics.DELIVERIES_DROPPED.inc()

    def start(self) -> None:
        self._task = asyncio.create_task(self._run())

    async def close(self) -> None:
        """Tell of what is left, once."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            await self._send()

    async def _run(self) -> None:
        while True:
            await tick(EVERY_S)
            await self._send()

    async def _send(self) -> None:
        while self._waiting and self._bus.connected:
            batch = self._waiting[:DELIVERIES_MAX]
            try:
                await self._bus.publish(subjects.DELIVERIES, _codec.encode(Deliveries(deliveries=batch)))
            except BusError as error:
                _log.warning("deliveries_not_sent", reason=str(error))
                return
            del self._waiting[: len(batch)]
