"""Calling handlers so that nothing escapes into the client library, and ending tasks within a time limit."""

import asyncio
import contextlib
import inspect
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

import structlog

from contracts.bus import types
from contracts.bus.complaints import seldom
from contracts.bus.types import Handler, Incoming

log = structlog.get_logger(__name__)

Deliver = Callable[[Incoming], Awaitable[None]]
"""Takes a message and never raises."""


def is_plain(handler: Handler) -> bool:
    """Whether ``handler`` is done when it returns."""
    return not inspect.iscoroutinefunction(handler)


def contained(handler: Handler) -> Callable[[Incoming], None]:
    """A plain ``handler``; what it raises is contained."""

    def take(message: Incoming) -> None:
        try:
            handler(message)
        except (Exception, asyncio.CancelledError) as error:
            contain(message.subject, error)

    return take


def in_order(handler: Handler) -> Deliver:
    """``handler``, awaited before the next message; what it raises is contained."""

    async def deliver(message: Incoming) -> None:
        try:
            running = handler(message)
            if running is not None:
                await running
        except asyncio.CancelledError as error:
            # The library would silently end the subscription. Only when its task is really being cancelled
            # is that right.
            task = asyncio.current_task()
            if task is not None and task.cancelling() > 0:
                raise
            contain(message.subject, error)
        except Exception as error:
            contain(message.subject, error)

    return deliver


def at_once(handler: Handler, limit: int, spawn: Callable[[Coroutine[Any, Any, None]], object]) -> Deliver:
    """``handler`` in a task of its own for each message, at most ``limit`` at a time."""
    call = in_order(handler)
    free = asyncio.Semaphore(limit)

    async def run(message: Incoming) -> None:
        try:
            await call(message)
        finally:
            free.release()

    async def deliver(message: Incoming) -> None:
        await free.acquire()
        spawn(run(message))

    return deliver


def contain(about: str, error: BaseException) -> None:
    """Count what a handler raised, and tell it with its traceback once in a while; the bus goes on."""
    types.HANDLER_ERRORS.inc()
    if times := seldom(f"bus_handler_failed {type(error).__name__} {'.'.join(about.split('.')[:2])}"):
        log.error("bus_handler_failed", subject=about, times=times, exc_info=error)


async def stop(*tasks: asyncio.Task[Any]) -> None:
    """Cancel ``tasks`` and wait for them; again where the library swallowed it, but not for ever."""
    for _ in range(10):
        waiting = [task for task in tasks if not task.done() and task is not asyncio.current_task()]
        if not waiting:
            return
        for task in waiting:
            task.cancel()
        await asyncio.wait(waiting, timeout=0.5)


async def within(timeout_s: float, *works: Awaitable[None]) -> None:
    """Await ``works`` at once, for at most ``timeout_s``; what fails on the way out is of no interest."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(timeout_s):
            await asyncio.gather(*works, return_exceptions=True)
