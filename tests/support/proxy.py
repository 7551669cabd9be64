"""TCP links that can be cut: a proxy between one service and the NATS server.

All links live in one thread with an event loop of its own, so that they go on while a test waits or blocks.
"""

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any


class Links:
    """The thread; ``open`` gives a link, ``close`` ends all."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, name="links", daemon=True)
        self._thread.start()
        self._links: list[Link] = []

    def open(self, target_port: int) -> "Link":
        link = Link(self, target_port)
        link.listen()
        self._links.append(link)
        return link

    def call(self, work: Callable[[], Any]) -> Any:
        """Run ``work`` in the thread and wait for it."""
        done: Future[Any] = Future()

        def run() -> None:
            try:
                done.set_result(work())
            except BaseException as error:
                done.set_exception(error)

        self.loop.call_soon_threadsafe(run)
        return done.result(10)

    def close(self) -> None:
        for link in self._links:
            self.call(link.end)
        self.call(lambda: self.loop.call_soon(self.loop.stop))
        self._thread.join(10)
        self.loop.close()


class Link:
    """One port that leads to ``target_port``. ``cut``: connections end and new ones are refused; ``stall``: they
    stay open and nothing passes, in either direction; ``clog``: so it is with those that are there, and new ones work;
    ``heal``: all is well again.
    """

    def __init__(self, links: Links, target_port: int) -> None:
        self._links = links
        self._target_port = target_port
        self._ends: set[_End] = set()
        self._connecting: set[asyncio.Task[None]] = set()
        self._is_cut = False
        self._is_stalled = False
        self.port = 0

    @property
    def url(self) -> str:
        """For a nats-server behind it."""
        return f"nats://127.0.0.1:{self.port}"

    def listen(self) -> None:
        work = self._links.loop.create_server(lambda: _End(self), "127.0.0.1", 0)
        self._server = asyncio.run_coroutine_threadsafe(work, self._links.loop).result(10)
        self.port = int(self._server.sockets[0].getsockname()[1])

    def end(self) -> None:
        """In the thread: no connection, no port."""
        self._is_cut = True
        self._server.close()
        for end in list(self._ends):
            end.abort()

    def cut(self) -> None:
        def work() -> None:
            self._is_cut = True
            for end in list(self._ends):
                end.abort()

        self._links.call(work)

    def stall(self) -> None:
        def work() -> None:
            self._is_stalled = True
            for end in self._ends:
                end.hold()

        self._links.call(work)

    def clog(self) -> None:
        def work() -> None:
            for end in self._ends:
                end.hold()

        self._links.call(work)

    def heal(self) -> None:
        def work() -> None:
            self._is_cut = self._is_stalled = False
            for end in self._ends:
                end.release()

        self._links.call(work)

    # Called by the connections, in the thread --------------------------------------------------------------

    def joined(self, end: "_End") -> bool:
        """Whether the new connection may stay."""
        if self._is_cut:
            return False
        self._ends.add(end)
        if self._is_stalled:
            end.hold()
        return True

    def left(self, end: "_End") -> None:
        self._ends.discard(end)

    def connect(self, near: "_End") -> None:
        task = self._links.loop.create_task(self._connect(near))
        self._connecting.add(task)
        task.add_done_callback(self._connecting.discard)

    async def _connect(self, near: "_End") -> None:
        try:
            _, far = await self._links.loop.create_connection(lambda: _End(self, near), "127.0.0.1", self._target_port)
        except OSError:
            near.abort()
            return
        near.pair(far)


class _End(asyncio.Protocol):
    """One side of a connection; what it reads is written to the other side."""

    def __init__(self, link: Link, other: "_End | None" = None) -> None:
        self._link = link
        self._other = other
        self._is_near = other is None
        self._early: list[bytes] = []
        self._transport: asyncio.Transport | None = None
        self._held = False
        self._full = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        if not self._link.joined(self):
            transport.abort()
        elif self._is_near:
            self._link.connect(self)

    def pair(self, other: "_End") -> None:
        self._other = other
        if self._transport is None or self._transport.is_closing():
            other.abort()
        for data in self._early:
            other.write(data)
        self._early.clear()

    def data_received(self, data: bytes) -> None:
        if self._other is None:
            self._early.append(data)
        else:
            self._other.write(data)

    def write(self, data: bytes) -> None:
        if self._transport is not None:
            self._transport.write(data)

    def connection_lost(self, error: Exception | None) -> None:
        self._link.left(self)
        if self._other is not None:
            self._other.abort()

    def abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def hold(self) -> None:
        self._held = True
        self._flow()

    def release(self) -> None:
        self._held = False
        self._flow()

    def pause_writing(self) -> None:
        if self._other is not None:
            self._other._full = True
            self._other._flow()

    def resume_writing(self) -> None:
        if self._other is not None:
            self._other._full = False
            self._other._flow()

    def _flow(self) -> None:
        if self._transport is not None and not self._transport.is_closing():
            if self._held or self._full:
                self._transport.pause_reading()
            else:
                self._transport.resume_reading()
