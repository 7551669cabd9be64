"""How a command reaches the ``headrace up`` of a data directory: by a socket there, which only its user can open.

One call a connection: a line of JSON there, a line back. The bus is not asked, for a bus may carry several stacks.
"""

import asyncio
import contextlib
import os
import socket
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from compose.stack.data_dir import ComposeError

WORKERS_MAX = 64
"""Added by one call: more are a typing error on one machine."""
WITHIN_S, WITHIN_S_MAX = 600.0, 86_400.0
"""What runs on a worker that leaves has so long to end; a guess above the longest usual answers."""
LINE_BYTES_MAX = 64 * 1024
READ_S = 5.0
CALLS_MAX = 16


class AddWorkers(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Start workers of a model in the registry; answered once they are ready."""

    model: str
    count: Annotated[int, Meta(ge=1, le=WORKERS_MAX)]
    version: str = ""
    """Empty: whichever is the stable one when a worker starts."""


class RemoveWorker(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Stop a worker, once what runs there has ended; answered then."""

    name: str
    within_s: Annotated[float, Meta(ge=0, le=WITHIN_S_MAX)]


class RemoveModel(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Take a model out of service; its workers stop once its last request has ended."""

    name: str
    within_s: Annotated[float, Meta(ge=0, le=WITHIN_S_MAX)]


class ListWorkers(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Which workers there are."""


Call = AddWorkers | RemoveWorker | RemoveModel | ListWorkers


class ShownWorker(msgspec.Struct, frozen=True):
    """A worker process of the stack."""

    name: str
    model: str
    version: str
    """That it was started with; empty: whichever was the stable one."""
    pid: int | None
    """None between two lives."""
    state: str
    """``ready``, ``leaving``, or why it is not ready."""


class Answer(msgspec.Struct, frozen=True):
    """The workers that the call was about, as they are now; or why it was not done."""

    workers: list[ShownWorker] = []
    notes: list[str] = []
    error: str = ""


_CALL = msgspec.json.Decoder(Call)
_ANSWER = msgspec.json.Decoder(Answer)


class ControlServer:
    """Serves between ``start`` and ``close``.

    ``perform`` may take minutes, and goes on when who asked has left; it raises ComposeError.
    """

    def __init__(self, path: Path, perform: Callable[[Call], Awaitable[Answer]]) -> None:
        self._path = path
        self._perform = perform
        self._calls: set[asyncio.Task[Answer]] = set()
        self._server: asyncio.Server | None = None

    async def start(self) -> None:
        self._path.unlink(missing_ok=True)  # of a stack that was killed; the directory's lock says so
        listening = socket.socket(socket.AF_UNIX)
        with _short(self._path) as name:
            listening.bind(name)
        self._path.chmod(0o600)
        self._server = await asyncio.start_unix_server(self._serve, sock=listening, limit=LINE_BYTES_MAX)

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
            self._path.unlink(missing_ok=True)
        for call in self._calls:
            call.cancel()
        await asyncio.gather(*self._calls, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            answer = await self._answer(reader)
            writer.write(msgspec.json.encode(answer) + b"\n")
            await writer.drain()
        except (OSError, asyncio.CancelledError):
            pass  # who asked has left, or the stack stops
        finally:
            writer.close()

    async def _answer(self, reader: asyncio.StreamReader) -> Answer:
        try:
            call = _CALL.decode(await asyncio.wait_for(reader.readline(), READ_S))
        except (msgspec.MsgspecError, ValueError, TimeoutError) as error:
            return Answer(error=f"this call cannot be read: {error}")
        if len(self._calls) >= CALLS_MAX:
            return Answer(error=f"{CALLS_MAX} calls are under way; wait for them")
        task = asyncio.ensure_future(self._perform(call))
        self._calls.add(task)
        task.add_done_callback(self._calls.discard)
        try:
            return await asyncio.shield(task)
        except ComposeError as error:
            return Answer(error=str(error))


def call(path: Path, asked: Call) -> Answer:
    """What the stack answers. Raises ComposeError when there is none, or it refuses."""
    with socket.socket(socket.AF_UNIX) as connection:
        try:
            with _short(path) as name:
                connection.connect(name)
            connection.sendall(msgspec.json.encode(asked) + b"\n")
            data = b"".join(iter(lambda: connection.recv(65536), b""))
        except OSError as error:
            message = f"no stack is running in {path.parent} (start one with: headrace up)"
            raise ComposeError(message) from error
    if not data:
        raise ComposeError("the stack stopped before it answered")
    answer = _ANSWER.decode(data)
    if answer.error:
        raise ComposeError(answer.error)
    return answer


@contextlib.contextmanager
def _short(path: Path) -> Iterator[str]:
    """A name of the socket that is short enough for the kernel (107 bytes), however deep its directory lies."""
    directory = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{directory}/{path.name}"
    finally:
        os.close(directory)
