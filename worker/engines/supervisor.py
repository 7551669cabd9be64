"""Keeps an engine running: loads it, looks whether it lives and moves, and builds another one when it is told to.

Whether an engine is lost is decided in the core, by what is told from here.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress

import structlog

from contracts.ticks import tick
from worker.engines.base import (
    Engine,
    EngineEvent,
    EngineFailure,
    EngineLost,
    EngineRefused,
    EngineSampled,
    EngineStarted,
    EngineStats,
)

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
    """``load`` gives a new engine that has started. ``tell`` hears what happens to it.

    ``check_timeout_s``: how long a health check may take.
    """

    def __init__(
        self, load: Callable[[], Awaitable[Engine]], tell: Callable[[EngineEvent], None], *, check_timeout_s: float
    ) -> None:
        self.engine: Engine | None = None
        """The one that serves; None while there is none."""
        self._load = load
        self._tell = tell
        self._check_timeout_s = check_timeout_s
        self._lost = asyncio.Event()
        self._serves = asyncio.Event()
        self._switched = asyncio.Event()
        self.tokenizer_fingerprint: str | None = None

    def replace(self) -> None:
        """Close the engine and load another one."""
        self._lost.set()

    def switch(self, load: Callable[[], Awaitable[Engine]], tokenizer_fingerprint: str) -> None:
        """Close the engine, or give up the one that is being loaded, and load by this from now on."""
        self._load = load
        self.tokenizer_fingerprint = tokenizer_fingerprint
        self._lost.set()
        self._switched.set()

    async def serving(self) -> Engine:
        """The engine, once there is one that serves."""
        while self.engine is None:
            await self._serves.wait()
        return self.engine

    def stats(self) -> EngineStats:
        """Of the engine that serves; zeros while there is none."""
        return self.engine.stats() if self.engine else EngineStats()

    async def run(self) -> None:
        """Keep an engine, until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            for loop in (self._keep(), self._sample(), self._check()):
                tasks.create_task(loop)

    async def _keep(self) -> None:
        """Load, wait for the loss, close, and again."""
        pause = REBUILD_S
        while True:
            self._switched.clear()
            if await self._live_once() > STEADY_S:
                pause = REBUILD_S
            _log.info("engine_rebuild", pause_s=pause)
            try:
                async with asyncio.timeout(pause):
                    await self._switched.wait()
                pause = REBUILD_S
            except TimeoutError:
                pause = min(2 * pause, REBUILD_S_MAX)

    async def _live_once(self) -> float:
        """Seconds that one engine has served."""
        self._lost.clear()
        try:
            engine = await self._loaded()
        except EngineFailure as failure:
            _log.error("engine_not_started", code=failure.code, reason=failure.message)
            if not self._switched.is_set():
                self._tell(EngineRefused(reason=failure.message))
            return 0.0
        if engine is None:
            return 0.0
        try:
            self.engine = engine
            self._serves.set()
            self._tell(
                EngineStarted(
                    slots=engine.slots, kv_tokens=engine.kv_tokens, tokenizer_fingerprint=self.tokenizer_fingerprint
                )
            )
            _log.info("engine_started", slots=engine.slots, kv_tokens=engine.kv_tokens, context=engine.context)
            started = time.monotonic()
            await self._lost.wait()
            return time.monotonic() - started
        finally:
            self.engine = None
            self._serves.clear()
            await close(engine)

    async def _loaded(self) -> Engine | None:
        """A new engine; None when another version is wanted meanwhile. Raises EngineFailure."""
        loading = asyncio.ensure_future(self._load())
        switched = asyncio.create_task(self._switched.wait())
        try:
            await asyncio.wait((loading, switched), return_when=asyncio.FIRST_COMPLETED)
            if not switched.done():
                return await loading
            loading.cancel()
            with suppress(asyncio.CancelledError, EngineFailure):
                await close(await loading)  # it came at the same moment
            return None
        finally:
            loading.cancel()
            switched.cancel()

    async def _sample(self) -> None:
        while True:
            await tick(SAMPLE_S)
            if self.engine:
                self._tell(EngineSampled(stats=self.engine.stats()))

    async def _check(self) -> None:
        while True:
            await tick(CHECK_S)
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


async def close(engine: Engine) -> None:
    """Within CLOSE_S, whatever becomes of it."""
    try:
        async with asyncio.timeout(CLOSE_S):
            await engine.close()
    except TimeoutError:
        _log.error("engine_not_closed", limit_s=CLOSE_S)
    except Exception:
        _log.exception("engine_not_closed")
