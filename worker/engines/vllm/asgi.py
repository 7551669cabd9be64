"""One HTTP request to an ASGI application in this process, without a socket."""

import asyncio
import contextvars
from collections import deque
from collections.abc import Awaitable, Callable, MutableMapping
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
        self._sent: deque[Message | Exception] = deque()
        self._came = asyncio.Event()
        self._deliver: Callable[[Message | Exception], None] = self._keep
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

    async def pieces(self, take: Callable[[bytes], None]) -> None:
        """Have ``take`` called with each piece of the response's body as it is sent, until its end; call after
        ``status``. Raises as ``status`` does, and what ``take`` raises.
        """
        ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def deliver(message: Message | Exception) -> None:
            if ended.done():
                return
            try:
                message = _checked(message, "http.response.body")
                take(message.get("body", b""))
            except Exception as error:
                ended.set_exception(error)
                return
            if not message.get("more_body", False):
                ended.set_result(None)

        for message in self._sent:
            deliver(message)
        self._sent.clear()
        self._deliver = deliver
        await ended

    async def body(self) -> bytes:
        pieces: list[bytes] = []
        await self.pieces(pieces.append)
        return b"".join(pieces)

    async def events(self, take: Callable[[bytes, bytes], None]) -> None:
        """Have ``take`` called with name (or nothing) and data of each server-sent event; comments are left out.

        Raises UnknownForm for anything else that is sent: other fields, data of several lines, an unfinished event.
        """
        rest = b""

        def cut(piece: bytes) -> None:
            nonlocal rest
            *blocks, rest = (rest + piece).split(b"\n\n")
            for block in blocks:
                if (event := _parsed(block)) is not None:
                    take(*event)

        await self.pieces(cut)
        if rest.strip():
            raise UnknownForm("a body that ends inside an event")

    def fail(self, error: Exception) -> None:
        """Make the reader raise ``error`` after what was already sent."""
        self._deliver(error)

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
        while not self._sent:
            self._came.clear()
            await self._came.wait()
        return _checked(self._sent.popleft(), kind)

    def _keep(self, message: Message | Exception) -> None:
        self._sent.append(message)
        self._came.set()

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
        self._deliver(message)


def _checked(message: Message | Exception, kind: str) -> Message:
    if isinstance(message, Exception):
        raise message
    if message["type"] != kind:
        raise UnknownForm(f"an ASGI message {message['type']!r} in place of {kind!r}")
    return message


def _parsed(block: bytes) -> tuple[bytes, bytes] | None:
    """Name and data of one event; None for comments alone."""
    if block.startswith(b"data: ") and b"\n" not in block:
        return b"", block[6:]
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
