"""Work on bodies that would hold up the event loop runs on a few threads instead, tenants in turn.

Three lanes by the size of what is worked on, so that nothing short waits behind anything long: on the spot, short,
long. In a lane each tenant has a share of the threads, so that one that asks for much waits behind itself. What runs
there must release the GIL or be short: see each caller.
"""

import asyncio
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")

LONG_BYTES = 64 << 10
"""From here on work is long: 16,000 tokens take 30 ms (measured: 1.8 ms per 1,000)."""
_NICE = 5
"""Of threads that work for long: the event loop's thread goes first where cores are few."""


class Lane:
    """Threads of which one tenant has a ``share`` at most; who waits for one gets it as the tenants' turns come."""

    def __init__(self, name: str, *, threads: int, share: int, nice: int = 0) -> None:
        self._pool = ThreadPoolExecutor(threads, name, lambda: _be_nice(nice))
        self._share = share
        self._tenants: dict[str, tuple[asyncio.Semaphore, int]] = {}
        """The tenant's share, and how many use it or wait for it."""

    async def run(self, tenant: str, work: Callable[[], R]) -> R:
        """``work`` on a thread of the lane. The pool's own queue holds each tenant's share at most."""
        turns, users = self._tenants.get(tenant) or (asyncio.Semaphore(self._share), 0)
        self._tenants[tenant] = turns, users + 1
        try:
            async with turns:
                return await start(work, self._pool)
        finally:
            turns, users = self._tenants.pop(tenant)
            if users > 1:
                self._tenants[tenant] = turns, users - 1


def _be_nice(by: int) -> None:
    if by:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), os.getpriority(os.PRIO_PROCESS, 0) + by)


_SHORT = Lane("gateway-short", threads=4, share=2)
_LONG = Lane("gateway-long", threads=2, share=1, nice=_NICE)


async def run(tenant: str, size: int, on_the_spot: int, work: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    """``work`` on something of ``size`` bytes: at once up to ``on_the_spot`` bytes, else in a lane.

    A thread may wait longer for the GIL than what is small takes.
    """
    if size <= on_the_spot:
        return work(*args, **kwargs)
    return await (_SHORT if size <= LONG_BYTES else _LONG).run(tenant, lambda: work(*args, **kwargs))


def start(work: Callable[[], R], pool: ThreadPoolExecutor | None = None) -> "asyncio.Future[R]":
    """``work`` on a thread, of ours or of the event loop's; what it raises is raised by the future."""
    return asyncio.get_running_loop().run_in_executor(pool, work)
