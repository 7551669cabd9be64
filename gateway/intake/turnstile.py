"""Lets requests in, a few a turn of the event loop and in order: a thousand at once delay no running stream."""

import asyncio
import time
from collections import deque

A_TURN = 4
"""Each takes a millisecond or two until its scheduler is asked, which is all work of the event loop."""


class Turnstile:
    """In front of all work on a request whose body is there."""

    def __init__(self) -> None:
        self._waiting: deque[tuple[float, asyncio.Future[None]]] = deque()
        """With when each came, monotonic."""
        self._turns = False

    def __len__(self) -> int:
        """How many wait."""
        return len(self._waiting)

    def waited_s(self) -> float:
        """For how long the first one has waited. Any thread may ask."""
        try:
            return time.monotonic() - self._waiting[0][0]
        except IndexError:
            return 0.0

    async def enter(self) -> None:
        """Returns when it is one's turn."""
        loop = asyncio.get_running_loop()
        turn: asyncio.Future[None] = loop.create_future()
        self._waiting.append((time.monotonic(), turn))
        if not self._turns:
            self._turns = True
            loop.call_soon(self._turn, loop)
        await turn

    def _turn(self, loop: asyncio.AbstractEventLoop) -> None:
        passed = 0
        while self._waiting and passed < A_TURN:
            if not (turn := self._waiting.popleft()[1]).done():  # Else its caller has left.
                turn.set_result(None)
                passed += 1
        self._turns = bool(self._waiting)
        if self._turns:
            loop.call_soon(self._turn, loop)
