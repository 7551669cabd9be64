"""Tells the scheduler what the engine's cache keeps, in small numbered messages; anew where one was missed."""

from collections.abc import Callable

import structlog

from contracts import subjects
from contracts.bus import Bus, BusError
from contracts.messages.base import Codec
from contracts.messages.control import CacheChange
from contracts.ticks import tick
from worker.engines.cached_blocks import CachedBlocks

TELL_S = 0.25
"""Between two looks at what has changed: own dispatches are known to the scheduler before."""

_log = structlog.get_logger()
_change: Codec[CacheChange] = Codec(CacheChange)


class CacheTeller:
    """``run`` must be running. ``kept``: of the engine that serves; None where that tells of nothing."""

    def __init__(
        self, bus: Bus, *, model: Callable[[], str], worker: Callable[[], str], kept: Callable[[], CachedBlocks | None]
    ) -> None:
        self.number = 0
        """Of the last message under the present name."""
        self._bus = bus
        self._model, self._worker, self._kept = model, worker, kept
        self._told: tuple[str, CachedBlocks] | None = None
        self._anew = False

    @property
    def told(self) -> str:
        """Under which name it has told anything."""
        return self._told[0] if self._told is not None else ""

    def tell_anew(self) -> None:
        """Whoever listens has missed something, or is new."""
        self._anew = True

    async def run(self) -> None:
        """Tell until cancelled."""
        while True:
            await tick(TELL_S)
            worker, kept = self._worker(), self._kept()
            if kept is None or not worker or not self._bus.connected:
                continue
            if self._told is None or self._told[0] != worker:
                self.number = 0
            anew = self._anew or self._told is None or self._told != (worker, kept)
            self._told, self._anew = (worker, kept), False
            await self._tell(worker, kept, anew=anew)

    async def _tell(self, worker: str, kept: CachedBlocks, *, anew: bool) -> None:
        anew, tellings = kept.take(anew=anew)
        changes = [CacheChange(worker=worker, number=0, stored=each.stored, removed=each.removed) for each in tellings]
        if anew:
            changes.insert(0, CacheChange(worker=worker, number=0, anew=True))
        subject = subjects.worker_cache(self._model(), worker)
        for change in changes:
            self.number += 1
            numbered = CacheChange(
                worker=worker, number=self.number, anew=change.anew, stored=change.stored, removed=change.removed
            )
            try:
                await self._bus.publish(subject, _change.encode(numbered))
            except BusError as error:
                _log.warning("cache_not_told", worker=worker, reason=str(error))
                self._anew = True
                return
