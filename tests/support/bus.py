"""A link to the test's server that can be cut or clogged."""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress

from contracts.bus import Bus

Connect = Callable[..., Awaitable[Bus]]


class Link:
    """A TCP relay to the server."""

    def __init__(self, target_port: int) -> None:
        self._target_port = target_port
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._flowing: list[asyncio.Event] = []
        self.port = 0

    @property
    def url(self) -> str:
        return f"nats://127.0.0.1:{self.port}"

    async def open(self) -> None:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0, limit=4096)
        self.port = self._server.sockets[0].getsockname()[1]

    async def close(self) -> None:
        assert self._server is not None
        self._server.close()
        for task in tuple(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def clog(self) -> None:
        """Connections that are there stay open and pass nothing on any more; new ones work."""
        for flowing in self._flowing:
            flowing.clear()
        self._flowing.clear()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        server_reader, server_writer = await asyncio.open_connection("127.0.0.1", self._target_port)
        flowing = asyncio.Event()
        flowing.set()
        self._flowing.append(flowing)
        for source, sink in ((reader, server_writer), (server_reader, writer)):
            task = asyncio.get_running_loop().create_task(self._relay(source, sink, flowing))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _relay(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter, flowing: asyncio.Event) -> None:
        try:
            with suppress(OSError):
                while data := await self._next(source, flowing):
                    sink.write(data)
                    await sink.drain()
        finally:
            sink.transport.abort()

    async def _next(self, source: asyncio.StreamReader, flowing: asyncio.Event) -> bytes:
        await flowing.wait()
        data = await source.read(4096)
        await flowing.wait()
        return data
