"""What a worker tells of itself: heartbeats on the bus, the same figures as metrics, and pulses.

A heartbeat says what the worker is doing, and is made by the event loop that does it. A pulse says that it lives, and
is sent by the thread of the signs of life.
"""

import asyncio
import time
from collections.abc import Callable

import structlog

from contracts import subjects
from contracts.bus import Bus, BusError
from contracts.clock import now_ms
from contracts.messages.base import Codec
from contracts.messages.control import WorkerHeartbeat, WorkerPulse
from contracts.messages.records import Manifest
from contracts.service.vitals import Vitals
from contracts.ticks import next_tick_s, tick
from worker import metrics
from worker.core.core import WorkerCore
from worker.engines.supervisor import SAMPLE_S, EngineSupervisor
from worker.loading import Loader

HEARTBEAT_S = 0.5
BURST_S = 0.02
"""Between two heartbeats: a burst of ends makes one."""
BURST_COST = 20
"""And so many times what it took to make one: thousands in flight are not listed fifty times a second."""

REASON_MAX = 1000
"""Characters."""

_log = structlog.get_logger()
_heartbeat: Codec[WorkerHeartbeat] = Codec(WorkerHeartbeat)
_pulse: Codec[WorkerPulse] = Codec(WorkerPulse)


class Heartbeats:
    """``run`` must be running. Without a name or a bus only the metrics are kept."""

    def __init__(
        self,
        bus: Bus,
        vitals: Vitals,
        core: WorkerCore,
        supervisor: EngineSupervisor,
        *,
        shard: str,
        served: Callable[[], Manifest],
        loader: Loader,
        cache_number: Callable[[], int],
    ) -> None:
        self._bus = bus
        self._vitals = vitals
        self._shard = shard
        self._served = served
        self._loader = loader
        self._cache_number = cache_number
        self._core = core
        self._supervisor = supervisor
        self._notified = asyncio.Event()

    def notify(self) -> None:
        """Send one at once."""
        self._notified.set()

    async def run(self) -> None:
        """Send one each HEARTBEAT_S and when notified, until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            self._notified.clear()
            begun = time.monotonic()
            await self._send()
            sent = time.monotonic()
            again = sent + min(HEARTBEAT_S, max(BURST_S, BURST_COST * (sent - begun)))
            timer = loop.call_later(next_tick_s(HEARTBEAT_S, sent), self._notified.set)
            await self._notified.wait()
            timer.cancel()
            if (early_s := again - time.monotonic()) > 0:
                await asyncio.sleep(early_s)

    async def live(self, bus: Bus) -> None:
        """Send a pulse each HEARTBEAT_S, until cancelled; not while no work could arrive."""
        while True:
            if (worker := self._core.worker) and self._bus.connected:
                pulse = WorkerPulse(
                    worker=worker,
                    lag_ms=self._vitals.lag_ms,
                    engine_idle_ms=round(self._core.engine_idle_samples * SAMPLE_S * 1000),
                )
                try:
                    await bus.publish(subjects.worker_pulse(self._shard, worker), _pulse.encode(pulse))
                except BusError as error:
                    _log.warning("pulse_not_sent", worker=worker, reason=str(error))
            await tick(HEARTBEAT_S)

    async def _send(self) -> None:
        core, attempts, served = self._core, self._core.attempts, self._served()
        model = self._shard
        engine, stats = self._supervisor.engine, self._supervisor.stats()
        metrics.observe(served.name, stats, in_flight=len(attempts), kv_tokens=attempts.kv_tokens)
        if not core.worker or not self._bus.connected:
            return
        state, reason = core.shown
        heartbeat = WorkerHeartbeat(
            worker=core.worker,
            model=model,
            version=served.version,
            state=state,
            pinned=core.pinned,
            reason=(reason or self._loader.stage)[:REASON_MAX],
            loading=self._loader.loading,
            epoch=core.epoch,
            slots=attempts.slots_here,
            kv_tokens=attempts.kv_tokens,
            kv_tokens_used=stats.kv_tokens_used,
            context=engine.context if engine else 0,
            running=stats.running,
            waiting=stats.waiting + attempts.waiting,
            prefill_tokens_total=stats.prefill_tokens_total,
            decode_tokens_total=stats.decode_tokens_total,
            in_flight=core.progress(),
            cache_number=self._cache_number(),
            sent_at_ms=now_ms(),
        )
        try:
            await self._bus.publish(subjects.worker_heartbeat(model, core.worker), _heartbeat.encode(heartbeat))
        except BusError as error:
            _log.warning("heartbeat_not_sent", worker=core.worker, reason=str(error))
