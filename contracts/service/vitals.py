"""Signs of life: how late the main event loop is, and a thread that speaks for the process while it is late.

A process whose loop is late (a long garbage collection, a noisy neighbour, too much to do) lives, and what it runs is
worth going on with. So what others judge its life by is sent by a thread with an event loop and a connection of its
own, and tells how late the main loop is. A process that is stopped or dies falls silent as ever, which a second
process in the thread's place would not. Python code, however busy, gives the thread its
turn within 8 ms; a call into C that keeps the interpreter for 4.8 s (a sort of 4 million) kept the thread silent for
4.7 s (measured).
"""

import asyncio
import contextlib
import math
import threading
import time
from collections.abc import Callable, Coroutine
from typing import Any

import structlog
import uvloop

from contracts.bus import Bus, BusError
from contracts.ticks import next_tick_s

PULSE_S = 0.25
"""Period in which the main loop shows that it turns."""
SMOOTH_S = 0.5
"""Memory of the lag: a pause of a tenth of a second, which every process has now and then, hardly shows."""

log = structlog.get_logger(__name__)


class Lag:
    """How late a loop is that is to call ``turned`` each PULSE_S at most; whether it is *late*, with hysteresis.

    Pure; times are seconds of one monotonic clock. Late above ``late_s``, on time again below half of it. One thread
    calls ``turned``, any may ask.
    """

    def __init__(self, now: float, late_s: float) -> None:
        self.late = False
        self._late_s = late_s
        self._seen = now, 0.0, now + PULSE_S
        """When the loop last turned, the lag then, and when it is to turn again: together, for another thread may look
        in between."""

    def turned(self, now: float, again_s: float = PULSE_S) -> bool:
        """The loop turns, and is to do so again in ``again_s``; whether it has begun or ceased to be late."""
        lag_s = self.at(now)
        self._seen = now, lag_s, now + again_s
        was_late, self.late = self.late, lag_s > (self._late_s / 2 if self.late else self._late_s)
        return self.late is not was_late

    def at(self, now: float) -> float:
        """The lag in seconds, smoothed: close to what is overdue, once that is for longer than SMOOTH_S."""
        turned_at, lag_s, due_at = self._seen
        passed = max(0.0, now - turned_at)
        return lag_s + (max(0.0, now - due_at) - lag_s) * (1 - math.exp(-passed / SMOOTH_S))


class Vitals:
    """Of one process, from ``start`` to ``close``. ``bus`` is the main connection.

    ``late_s``: a main loop that is later than this is *late*, and ``changed`` is called when that begins and ends.
    """

    def __init__(self, bus: Bus, *, late_s: float, changed: Callable[[bool], None] = lambda late: None) -> None:
        self._main_bus = bus
        self._changed = changed
        self._lag = Lag(time.monotonic(), late_s)
        self._late_since = 0.0

    @property
    def late(self) -> bool:
        """Whether the main loop is late, as it found at its last turn."""
        return self._lag.late

    @property
    def late_for_s(self) -> float:
        """For how long it has been late; 0.0 while it is not."""
        return time.monotonic() - self._late_since if self.late else 0.0

    @property
    def lag_ms(self) -> int:
        """How late the main loop is. Any thread may ask."""
        return round(self._lag.at(time.monotonic()) * 1000)

    async def start(self) -> None:
        """Connect once more and begin to look; raises BusError."""
        self._main = asyncio.get_running_loop()
        self._lag.turned(time.monotonic())
        self._timer = self._main.call_later(PULSE_S, self._pulse)
        started: asyncio.Future[None] = self._main.create_future()
        self._ended = self._main.create_future()
        threading.Thread(target=self._run, args=(started,), name="vitals", daemon=True).start()
        await started

    async def close(self) -> None:
        """End the thread, and what it runs."""
        self._timer.cancel()
        self._loop.call_soon_threadsafe(self._stopped.set)
        await self._ended

    async def run(self, work: Callable[[Bus], Coroutine[Any, Any, None]]) -> None:
        """Run ``work`` in the thread, with the thread's connection. When this returns or raises, that has ended."""
        ended: asyncio.Future[None] = self._main.create_future()
        tasks: list[asyncio.Task[None]] = []

        def begin() -> None:
            tasks.append(self._loop.create_task(work(self._bus)))
            tasks[0].add_done_callback(lambda task: self._tell(_settle, ended, task))

        def cancel() -> None:
            tasks[0].cancel()

        self._loop.call_soon_threadsafe(begin)
        try:
            await asyncio.shield(ended)
        except asyncio.CancelledError:
            if not ended.done():
                self._loop.call_soon_threadsafe(cancel)
                await asyncio.wait({ended})
            raise

    def _pulse(self) -> None:
        now = time.monotonic()
        again_s = next_tick_s(PULSE_S, now)
        self._timer = self._main.call_later(again_s, self._pulse)
        if self._lag.turned(now, again_s):
            self._late_since = time.monotonic()
            log.warning("loop_late" if self.late else "loop_on_time", lag_ms=self.lag_ms)
            self._changed(self.late)

    # In the thread --------------------------------------------------------------------------------------------

    def _run(self, started: "asyncio.Future[None]") -> None:
        try:
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                runner.run(self._serve(started))
        except BusError as error:
            self._tell(_settle, started, error)
        except Exception as error:
            log.exception("vitals_failed")
            self._tell(_settle, started, error)
            self._tell(self._main_bus.closed.set)
        finally:
            self._tell(_settle, self._ended, None)

    async def _serve(self, started: "asyncio.Future[None]") -> None:
        """Until ``close``, or until the connection is lost for good: then the process must end, too."""
        self._bus = await self._main_bus.another("vitals")
        self._loop = asyncio.get_running_loop()
        self._stopped = asyncio.Event()
        self._tell(_settle, started, None)
        lost = asyncio.create_task(self._bus.closed.wait())
        stopped = asyncio.create_task(self._stopped.wait())
        await asyncio.wait({lost, stopped}, return_when=asyncio.FIRST_COMPLETED)
        if lost.done():
            self._tell(self._main_bus.closed.set)
        await self._bus.close()

    def _tell(self, what: Callable[..., object], *arguments: object) -> None:
        with contextlib.suppress(RuntimeError):  # The main loop is closed: nobody waits.
            self._main.call_soon_threadsafe(what, *arguments)


def _settle(waiting: "asyncio.Future[None]", how: "asyncio.Task[None] | Exception | None") -> None:
    """``waiting`` ends as a task of the thread did, or with the error given."""
    if waiting.done():
        return
    error = how if not isinstance(how, asyncio.Task) else None if how.cancelled() else how.exception()
    if error is not None:
        waiting.set_exception(error)
    else:
        waiting.set_result(None)
