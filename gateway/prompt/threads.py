"""Work that would hold up the event loop runs on a few threads instead."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")

_pool = ThreadPoolExecutor(max_workers=4, thread_name_prefix="gateway")


async def run(on_thread: bool, work: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    """``work`` on a thread, or on the spot when it is small: a thread may wait longer for the GIL than it works."""
    if not on_thread:
        return work(*args, **kwargs)
    return await start(lambda: work(*args, **kwargs))


def start(work: Callable[[], R]) -> "asyncio.Future[R]":
    """``work`` on a thread; what it raises is raised by the future."""
    return asyncio.get_running_loop().run_in_executor(_pool, work)
