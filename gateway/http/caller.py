"""Whether the caller is still there: its hang-up ends the work that is done for it."""

import asyncio
from types import TracebackType
from typing import Self

from starlette.types import Receive


class CallerLeft(Exception):
    """The caller hung up; nobody is there to be answered."""


class CallerWatch:
    """Watches for the hang-up of an HTTP caller: inside the block it becomes CallerLeft."""

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._ends = False
        self._left = False

    def __enter__(self) -> Self:
        task = asyncio.current_task()
        if task is None:
            raise RuntimeError("only a task can be told that its caller left")
        self._task = task
        self._watcher = asyncio.create_task(self._watch())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.let_go()
        self._watcher.cancel()
        if self._left:
            self._task.uncancel()
            if kind is asyncio.CancelledError:
                raise CallerLeft from None

    def let_go(self) -> None:
        """What comes now ends the answer; a disconnect is no longer of interest."""
        self._ends = True

    async def _watch(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        if not self._ends:
            self._left = True
            self._task.cancel()
