"""One HTTP request to an ASGI application in this process, without a socket."""

import asyncio
import contextvars
from collections.abc import AsyncIterator, Awaitable, Callable, MutableMapping
from typing import Any

import structlog

Message = MutableMapping[str, Any]
Application = Callable[..., Awaitable[None]]
"""Called with its scope, ``receive`` and ``send``."""

CLOSE_TIMEOUT_S = 2.0
"""How long an application may take to notice that its caller is gone before its task is cancelled. A guess: vLLM
takes milliseconds, and for ever once its engine is gone."""

_log = structlog.get_logger()


class UnknownForm(Exception):
    """The application sent something in a form that this reader does not know. Repeats nothing of an answer."""


class AsgiCall:
    """A POST of JSON. It starts at once; ``close`` it in the end.

    What the application sends is kept until it is read; it is bounded by the request's own maximum output.
    """

    def __init__(
        self, application: Application, path: str, body: bytes, *, headers: dict[str, str], context: contextvars.Context
    ) -> None:
        self._body: bytes | None = body
        self._sent: asyncio.Queue[Message | Exception] = asyncio.Queue()
        self._gone = asyncio.Event()
        fields = {"content-type": "application/json", "content-length": str(len(body)), **headers}
        scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1",
            "method": "POST",
            "scheme": "http",
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "root_path": "",
            "headers": [(name.encode(), value.encode()) for name, value in fields.items()],
            "client": ("127.0.0.1", 0),
            "server": ("127.0.0.1", 0),
        }
        self._task = asyncio.get_running_loop().create_task(self._run(application, scope), context=context)

    async def status(self) -> int:
        """Status of the response; raises what the application raised, or what ``fail`` was given."""
        return int((await self._next("http.response.start"))["status"])

    async def pieces(self) -> AsyncIterator[bytes]:
        """The response's body as it was sent; call after ``status``. Raises as ``status`` does."""
        more = True
        while more:
            message = await self._next("http.response.body")
            more = message.get("more_body", False)
            yield message.get("body", b"")

    async def body(self) -> bytes:
        return b"".join([piece async for piece in self.pieces()])

    async def events(self) -> AsyncIterator[tuple[bytes, bytes]]:
        """Name (or nothing) and data of each server-sent event; comments are left out.

        Raises UnknownForm for anything else that is sent: other fields, data of several lines, an unfinished event.
        """
        rest = b""
        async for piece in self.pieces():
            *blocks, rest = (rest + piece).split(b"\n\n")
            for block in blocks:
                if (event := _parsed(block)) is not None:
                    yield event
        if rest.strip():
            raise UnknownForm("a body that ends inside an event")

    def fail(self, error: Exception) -> None:
        """Make the reader raise ``error`` after what was already sent."""
        self._sent.put_nowait(error)

    async def close(self) -> None:
        """Tell the application that the caller is gone, and wait until it has ended."""
        self._gone.set()
        await asyncio.wait({self._task}, timeout=CLOSE_TIMEOUT_S)
        if not self._task.done():
            self._task.cancel()
            await asyncio.wait({self._task}, timeout=CLOSE_TIMEOUT_S)
        if not self._task.done():
            _log.error("asgi_call_not_closed", limit_s=2 * CLOSE_TIMEOUT_S)

    async def _next(self, kind: str) -> Message:
        message = await self._sent.get()
        if isinstance(message, Exception):
            raise message
        if message["type"] != kind:
            raise UnknownForm(f"an ASGI message {message['type']!r} in place of {kind!r}")
        return message

    async def _run(self, application: Application, scope: Message) -> None:
        try:
            await application(scope, self._receive, self._send)
            self.fail(EOFError("the application ended without a whole response"))
        except Exception as error:
            self.fail(error)

    async def _receive(self) -> Message:
        if self._body is not None:
            body, self._body = self._body, None
            return {"type": "http.request", "body": body, "more_body": False}
        await self._gone.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Message) -> None:
        self._sent.put_nowait(message)


def _parsed(block: bytes) -> tuple[bytes, bytes] | None:
    """Name and data of one event; None for comments alone."""
    name, data = b"", None
    for line in block.split(b"\n"):
        if line.startswith(b"data: ") and data is None:
            data = line[6:]
        elif line.startswith(b"event: ") and not name:
            name = line[7:]
        elif line and not line.startswith(b":"):
            raise UnknownForm("an event with a line that is neither its name, nor its one line of data, nor a comment")
    if data is None:
        if name:
            raise UnknownForm(f"an event named {name[:40].decode(errors='replace')!r} without data")
        return None
    return name, data
