"""Lets requests in, a few a turn of the event loop and in order: a thousand at once delay no running stream."""

import asyncio
import time
from collections import deque

A_TURN = 4
"""Each takes a millisecond or two until its scheduler is asked, which is all work of the event loop."""
PASS_S = 0.001
"""How long one takes, before any was seen."""
MEMORY = 0.1
"""Weight of the last turn in how long one takes."""


class Turnstile:
    """In front of all work on a request whose body is there."""

    def __init__(self) -> None:
        self._waiting: deque[tuple[float, asyncio.Future[None]]] = deque()
        """With when each came, monotonic."""
        self._turns = False
        self._turned_at = 0.0
        """While some wait: when the last ones were let in."""
        self._each_s = PASS_S
        self._coming = 0

    def __len__(self) -> int:
        """How many wait."""
        return len(self._waiting)

    def waited_s(self) -> float:
        """For how long the first one has waited. Any thread may ask."""
        try:
            return time.monotonic() - self._waiting[0][0]
        except IndexError:
            return 0.0

    def expected_s(self) -> float:
        """For how long who comes now would wait, by how fast the others before it are let in. Any thread may ask."""
        return (len(self._waiting) + self._coming) * self._each_s

    def comes(self) -> None:
        """A request was let past its head: most come here within this turn of the event loop."""
        if not self._coming:
            asyncio.get_running_loop().call_soon(self._came)
        self._coming += 1

    def _came(self) -> None:
        self._coming = 0

    async def enter(self) -> None:
        """Returns when it is one's turn."""
        loop = asyncio.get_running_loop()
        turn: asyncio.Future[None] = loop.create_future()
        now = time.monotonic()
        self._waiting.append((now, turn))
        if not self._turns:
            self._turns, self._turned_at = True, now
            loop.call_soon(self._turn, loop)
        await turn

    def _turn(self, loop: asyncio.AbstractEventLoop) -> None:
        passed = 0
        while self._waiting and passed < A_TURN:
            if not (turn := self._waiting.popleft()[1]).done():  # Else its caller has left.
                turn.set_result(None)
                passed += 1
        now = time.monotonic()
        if passed:
            self._each_s += MEMORY * ((now - self._turned_at) / passed - self._each_s)
            self._turned_at = now
        self._turns = bool(self._waiting)
        if self._turns:
            loop.call_soon(self._turn, loop)
