"""Whether requests would be served now: asks every model's scheduler about once a second, also for the live view.

A gateway is ready while one model is: that another one has no worker is no reason to send its callers away, nor that
one has none which may be without while nobody asks.
A clock that differs is no reason not to serve, for nothing is decided by it; it is logged when it is found.
"""

import asyncio

import msgspec
import structlog

from contracts import shards, subjects
from contracts.bus import Bus, Unavailable
from contracts.messages.base import Codec
from contracts.messages.queues import QueueAnswer, merged
from contracts.messages.records import ModelRecord
from contracts.ticks import tick
from gateway.intake.catalog import Catalog
from gateway.intake.shedding import Shedding
from gateway.live import Live

ASK_EVERY_S = 1.0
ASK_SOON_S = 0.1
"""Until everything is ready once: a stack that starts is not made to wait."""
ASK_TIMEOUT_S = 1.0

_log = structlog.get_logger()

_queue_codec = Codec[QueueAnswer](QueueAnswer)


class Readiness:
    """``not_ready`` says what was found at the last look."""

    def __init__(self, bus: Bus, catalog: Catalog, live: Live, shedding: Shedding, stream_owner: str) -> None:
        self._bus = bus
        self._live = live
        self._shedding = shedding
        self._stream_owner = stream_owner
        self._clock_differs = False
        self._ahead_ms = 0
        """By the answers of one round."""
        self._catalog = catalog
        self._reasons: list[str] = ["the models have not been looked at yet"]
        self._task: asyncio.Task[None] | None = None
        self.draining = False

    def start(self) -> None:
        """Begin to ask."""
        self._task = asyncio.create_task(self._run())

    async def close(self) -> None:
        """Stop asking."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def not_ready(self) -> str:
        """The reason, or nothing. Called from any thread."""
        if self.draining:
            return "shutting down"
        if not self._bus.connected:
            return "the bus is not connected"
        if self._shedding.refusing:
            return "more to do than it can"
        return "; ".join(self._reasons)

    async def _run(self) -> None:
        while True:
            records = self._catalog.records()
            found = await asyncio.gather(*map(self._look_at, records))
            self._tell_clock()
            self._live.round_ended()
            self._reasons = (found if all(found) else []) if records else ["there is no model"]
            await tick(ASK_SOON_S if self._reasons else ASK_EVERY_S)

    def _tell_clock(self) -> None:
        """Once when it begins to differ, once when it does no longer."""
        if bool(self._ahead_ms) is not self._clock_differs:
            self._clock_differs = bool(self._ahead_ms)
            _log.warning("clock_differs", ahead_s=self._ahead_ms / 1000)
        self._ahead_ms = 0

    async def _look_at(self, record: ModelRecord) -> str:
        """Why not all of its shards serve; nothing where they do."""
        model = record.name
        found = await asyncio.gather(*map(self._ask, shards.names(model, record.shards)))
        answers = [each for each in found if isinstance(each, QueueAnswer)]
        if len(answers) < len(found):
            self._catalog.note_load(model, None)
            reason = next(each for each in found if isinstance(each, str))
            self._live.note(model, reason if self._bus.connected else "the bus is not connected")
            return reason
        answer = merged(answers)
        self._live.note(model, answer)
        slots = sum(worker.slots for worker in answer.workers if worker.state == "ready")
        self._catalog.note_load(model, (answer.waiting + answer.running) / slots if slots else None)
        self._ahead_ms = next((it.ahead_ms for it in answer.clocks if it.process == self._stream_owner), self._ahead_ms)
        for shard in answers:
            if not shard.owner:
                return f"no scheduler owns {shard.model!r}"
            if record.limits.replicas_min and not any(worker.state == "ready" for worker in shard.workers):
                return f"no worker is ready for {shard.model!r}"
        return ""

    async def _ask(self, shard: str) -> QueueAnswer | str:
        try:
            data = await self._bus.request(subjects.queues(shard), b"{}", timeout_s=ASK_TIMEOUT_S)
            return _queue_codec.decode(data)
        except Unavailable:
            return f"no scheduler answers for {shard!r}"
        except msgspec.MsgspecError:
            return f"the scheduler of {shard!r} gives no readable answer"
