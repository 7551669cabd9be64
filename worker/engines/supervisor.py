"""Keeps an engine: builds it, looks whether it lives and moves, builds it anew when the core says so."""

import asyncio
import time
from collections.abc import Callable

import structlog

from worker.core.events import EngineLost, EngineSampled, EngineStarted, Event
from worker.engines.base import Engine, EngineFailure, EngineStats

SAMPLE_S = 1.0
"""Between two looks at the engine's progress."""
CHECK_S = 3.0
REBUILD_S, REBUILD_S_MAX = 0.5, 30.0
"""Pause before an engine is built again; doubles until one has lived for STEADY_S."""
STEADY_S = 60.0
CLOSE_S = 15.0
"""Time limit for an engine to close."""

_log = structlog.get_logger()


class EngineSupervisor:
    """``build`` makes a new engine, not yet started. What happens to it is told to ``tell``."""

    def __init__(self, build: Callable[[], Engine], tell: Callable[[Event], None], *, check_timeout_s: float) -> None:
        self.engine: Engine | None = None
        """The one that serves; None while there is none."""
        self._build = build
        self._tell = tell
        self._check_timeout_s = check_timeout_s
        self._lost = asyncio.Event()

    def replace(self) -> None:
        """Close the engine and build another one."""
        self._lost.set()

    def stats(self) -> EngineStats:
        return self.engine.stats() if self.engine else EngineStats()

    async def run(self) -> None:
        """Build, start, wait for the loss, close, and again; until cancelled."""
        pause = REBUILD_S
        while True:
            if await self._live_once() > STEADY_S:
                pause = REBUILD_S
            _log.info("engine_rebuild", pause_s=pause)
            await asyncio.sleep(pause)
            pause = min(2 * pause, REBUILD_S_MAX)

    async def _live_once(self) -> float:
        """Seconds that one engine has served."""
        engine = self._build()
        try:
            await engine.start()
            self.engine = engine
            self._lost.clear()
            self._tell(EngineStarted(slots=engine.slots, kv_tokens=engine.kv_tokens))
            _log.info("engine_started", slots=engine.slots, kv_tokens=engine.kv_tokens, context=engine.context)
            started = time.monotonic()
            await self._lost.wait()
            return time.monotonic() - started
        except EngineFailure as failure:
            _log.error("engine_not_started", code=failure.code, error=failure.message)
            return 0.0
        finally:
            self.engine = None
            await _close(engine)

    async def sample(self) -> None:
        """Tell the engine's totals regularly, by which the core finds stalls; until cancelled."""
        while True:
            await asyncio.sleep(SAMPLE_S)
            if self.engine:
                stats = self.engine.stats()
                self._tell(
                    EngineSampled(
                        prefill_tokens_total=stats.prefill_tokens_total,
                        decode_tokens_total=stats.decode_tokens_total,
                    )
                )

    async def check(self) -> None:
        """Ask the engine regularly whether it lives; until cancelled."""
        while True:
            await asyncio.sleep(CHECK_S)
            if (engine := self.engine) is None:
                continue
            reason = ""
            try:
                async with asyncio.timeout(self._check_timeout_s):
                    await engine.check()
            except EngineFailure as failure:
                reason = failure.message
            except TimeoutError:
                reason = f"the engine did not answer within {self._check_timeout_s:g} s"
            if reason and engine is self.engine:
                self._tell(EngineLost(reason=reason))


async def _close(engine: Engine) -> None:
    try:
        async with asyncio.timeout(CLOSE_S):
            await engine.close()
    except TimeoutError:
        _log.error("engine_not_closed", limit_s=CLOSE_S)
    except Exception:
        _log.exception("engine_not_closed")
