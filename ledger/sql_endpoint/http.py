"""ClickHouse's HTTP interface, as far as clients that read need it: an ASGI application and the server that runs it.

The server has a thread and an event loop of its own, so that neither a slow reader nor a large answer stands in the
ledger's way. What may be asked is decided in policy.py, how it is run in session.py.
"""

import asyncio
import base64
import binascii
import contextlib
import functools
import logging
import socket
import threading
import time
from collections.abc import Iterable
from typing import Any, cast

import h11
import structlog
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from contracts.ticks import tick
from ledger import metrics
from ledger.sql_endpoint import formats
from ledger.sql_endpoint.connections import Connections
from ledger.sql_endpoint.formats import Failed, Result
from ledger.sql_endpoint.policy import QUERY_BYTES_MAX
from ledger.sql_endpoint.session import Sessions

log = structlog.get_logger(__name__)

HEAD_BYTES_MAX = 64 << 10
"""Of a head, and of the trailers behind a body: a query may stand in the address."""
STRANGER_BYTES_MAX = HEAD_BYTES_MAX
STRANGER_S = 10.0
"""So much is read, and so long is waited, until a request on a connection is authenticated: a head needs far less."""
IDLE_S = 120.0
"""A known connection without a request, a request that does not come whole, a reader that takes nothing end then."""
BODY_READ_BYTES_MAX = 8 << 20
"""A body that is too long is read up to here, so that its sender reads why; then the connection is closed."""
REFUSAL_S = 0.3
"""How long a wrong password waits for its answer."""
REFUSAL_LOG_S = 10.0
"""Wrong passwords are logged no more often, with the last one's address; all are counted."""
GRACE_S = 2
"""How long queries that run may take when the endpoint closes, and as long their readers."""

_HEADERS = {"X-ClickHouse-Server-Display-Name": "headrace", "X-ClickHouse-Timezone": "UTC"}


class _Server(uvicorn.Server):
    """``awake`` is set when a connection comes, or the server is to end: without either it never wakes."""

    def __init__(self, config: uvicorn.Config, awake: asyncio.Event) -> None:
        super().__init__(config)
        self._awake = awake
        self._loop: asyncio.AbstractEventLoop | None = None

    def end(self) -> None:
        """From another thread."""
        self.should_exit = True
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._awake.set)

    async def main_loop(self) -> None:
        """As often as the date of answers asks for, and only while there may be one."""
        self._loop = asyncio.get_running_loop()
        while not await self.on_tick(0):
            if self.server_state.connections:
                await tick(0.5)
            else:
                self._awake.clear()
                await self._awake.wait()


class SqlEndpoint:
    """Listens from ``start`` to ``close``, which both block. The engine must be open in this process.

    ``listen``: ``host:port``; port 0 takes a free one.
    """

    def __init__(self, sessions: Sessions, listen: str) -> None:
        host, _, port = listen.rpartition(":")
        self._bind = host.strip("[]"), int(port)
        self._sessions = sessions
        self._socket: socket.socket | None = None
        self._thread: threading.Thread | None = None
        application = Starlette(
            routes=[
                Route("/", self._root, methods=["GET", "POST"]),
                Route("/ping", _pong, methods=["GET", "POST"]),
                Route("/replicas_status", _pong, methods=["GET", "POST"]),
            ],
            exception_handlers={Failed: _failure},
        )
        logging.getLogger("uvicorn").setLevel(logging.ERROR)  # a warning for each malformed request would fill the disk
        self._log_at_s = 0.0
        awake = asyncio.Event()
        self._server = _Server(
            uvicorn.Config(
                application,
                http=cast(Any, functools.partial(_Protocol, places=Connections[_Protocol](), awake=awake)),
                h11_max_incomplete_event_size=HEAD_BYTES_MAX,
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=False,  # a query may name a person
                proxy_headers=False,
                server_header=False,
                timeout_keep_alive=int(IDLE_S),
                timeout_graceful_shutdown=2 * GRACE_S,
            ),
            awake,
        )

    @property
    def address(self) -> str:
        """``host:port`` where it listens."""
        if self._socket is None:
            raise RuntimeError("the endpoint was not started")
        host, port, *_ = self._socket.getsockname()
        return f"{host}:{port}"

    def start(self) -> None:
        """Raises OSError when the address cannot be had, Failed when the engine does not answer."""
        self._sessions.open()
        family = socket.AF_INET6 if ":" in self._bind[0] else socket.AF_INET
        self._socket = socket.create_server(self._bind, family=family)
        self._thread = threading.Thread(target=self._server.run, args=([self._socket],), name="sql-http", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """No query runs afterwards."""
        self._server.end()
        self._sessions.close(GRACE_S)
        if self._thread is not None:
            self._thread.join()

    async def _root(self, request: Request) -> ASGIApp:
        if request.method == "GET" and not request.url.query:
            return _pong(request)
        started = time.monotonic_ns()
        parameters = dict(request.query_params)
        await self._authenticate(request, parameters)
        encoding = request.headers.get("Content-Encoding", "identity")
        formats.check_spoken(parameters, request.headers.get("Content-Type", ""), encoding)
        query = formats.query_of(parameters, await _body(request), encoding)
        for name, header in (("default_format", "Format"), ("database", "Database"), ("query_id", "Query-Id")):
            parameters.setdefault(name, request.headers.get(f"X-ClickHouse-{header}", ""))
        result = await self._run(request, query, parameters)
        if result is None:
            return Response()  # for nobody
        headers = formats.headers(parameters, result, time.monotonic_ns() - started)
        zip_wanted = parameters.get("enable_http_compression") == "1"
        if zip_wanted and "gzip" in request.headers.get("Accept-Encoding", "") and request["http_version"] != "1.0":
            return _Answer(headers | {"Content-Encoding": "gzip"}, formats.gzipped(result.data))
        return _Answer(headers | {"Content-Length": str(len(result.data))}, formats.pieces(result.data))

    async def _run(self, request: Request, query: str, parameters: dict[str, str]) -> Result | None:
        """The query's result; None when the client hung up, by which the query ends. Raises Failed."""
        running = asyncio.ensure_future(self._sessions.run(query, parameters))
        hung_up = asyncio.ensure_future(_disconnected(request))
        try:
            await asyncio.wait([running, hung_up], return_when=asyncio.FIRST_COMPLETED)
            return await running if running.done() else None
        finally:
            running.cancel()
            hung_up.cancel()

    async def _authenticate(self, request: Request, parameters: dict[str, str]) -> None:
        """By Basic, by ClickHouse's headers, or by parameters. Raises Failed."""
        user, password = parameters.get("user", ""), parameters.get("password", "")
        if "X-ClickHouse-User" in request.headers:
            user, password = request.headers["X-ClickHouse-User"], request.headers.get("X-ClickHouse-Key", "")
        elif given := request.headers.get("Authorization", ""):
            scheme, _, secret = given.partition(" ")
            try:
                user, _, password = base64.b64decode(secret, validate=True).decode().partition(":")
            except (binascii.Error, UnicodeDecodeError):
                user = ""
            user = user if scheme.lower() == "basic" else ""
        if not self._sessions.admits(user, password):
            self._note_refusal(request)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(_disconnected(request), REFUSAL_S)
            raise _Last(516, "AUTHENTICATION_FAILED", "Authentication failed: user or password is wrong or missing")
        if not request.state.connection.authenticated():
            raise _Last(202, "TOO_MANY_SIMULTANEOUS_QUERIES", "too many connections are open, close some")

    def _note_refusal(self, request: Request) -> None:
        metrics.SQL_REFUSED.inc()
        if (now := time.monotonic()) >= self._log_at_s:
            self._log_at_s = now + REFUSAL_LOG_S
            log.warning("sql_login_failed", address=request.client.host if request.client else "")


class _Answer:
    """An answer that is sent piece by piece, each within IDLE_S; who takes longer is cut off."""

    def __init__(self, headers: dict[str, str], pieces: Iterable[bytes | memoryview]) -> None:
        self._headers = [(name.lower().encode(), text.encode("latin-1")) for name, text in (headers | _HEADERS).items()]
        self._pieces = pieces

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self._headers})
        try:
            for piece in self._pieces:
                async with asyncio.timeout(IDLE_S):
                    await send({"type": "http.response.body", "body": bytes(piece), "more_body": True})
        except TimeoutError:
            log.warning("sql_reader_too_slow")
            return
        await send({"type": "http.response.body"})


class _Last(Failed):
    """After this answer the connection is closed: its caller is a stranger, or the rest of a body was not read."""


def _pong(_request: Request) -> Response:
    return PlainTextResponse("Ok.\n", headers=_HEADERS)


async def _failure(request: Request, error: Exception) -> Response:
    """As drivers read it: code in a header, text in the body. Starlette hands it Failed alone."""
    error = cast(Failed, error)
    status, headers = formats.STATUS.get(error.code, 500), {"X-ClickHouse-Exception-Code": str(error.code), **_HEADERS}
    if error.code == 516 and "Authorization" not in request.headers:
        status, headers["WWW-Authenticate"] = 401, 'Basic realm="headrace"'
    if isinstance(error, _Last):
        headers["Connection"] = "close"
    return PlainTextResponse(f"{error}\n", status, headers)


async def _body(request: Request) -> bytes:
    """The whole body; raises Failed when it is too long or too late."""
    data, size = bytearray(), 0
    try:
        async with asyncio.timeout(IDLE_S):
            async for piece in request.stream():
                size += len(piece)
                if size <= QUERY_BYTES_MAX:
                    data += piece
                elif size > BODY_READ_BYTES_MAX:
                    break
    except TimeoutError as error:
        raise _Last(159, "TIMEOUT_EXCEEDED", "the query did not come in time") from error
    if size > QUERY_BYTES_MAX:
        raise _Last(62, "SYNTAX_ERROR", "the query is too long")
    return bytes(data)


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


class _Protocol(H11Protocol):
    """uvicorn's HTTP/1.1 with bounds on the connections, bytes and time of whoever is not authenticated.

    h11 bounds heads and trailers, and leaves as bytes what waits behind a request. A stranger's connection is read up
    to STRANGER_BYTES_MAX and ends after STRANGER_S. Only callbacks of asyncio are overridden, nothing of uvicorn's own.
    """

    def __init__(self, *arguments: Any, places: Connections["_Protocol"], awake: asyncio.Event, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._awake = awake
        self.app_state = {**self.app_state, "connection": self}
        self._places = places
        self._stranger = True
        self._read_bytes = 0
        self._kept = b""
        """What a stranger sent beyond its bound; read when it is authenticated."""
        self._timer: asyncio.TimerHandle | None = None

    def authenticated(self) -> bool:
        """The present request is; whether there is a place for it."""
        if not self._places.authenticated(self):
            return False
        if self._stranger:
            self._stranger = False
            self._stop_timer()
            kept, self._kept = self._kept, b""
            if kept:
                self.data_received(kept)
                if not self.flow.read_paused:
                    self.transport.resume_reading()
        return True

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn has it
        super().connection_made(transport)
        self._awake.set()
        self._timer = self.loop.call_later(STRANGER_S, transport.abort)
        other = self._places.opened(self, self.client[0] if self.client else "")
        if other is not None:
            other.transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._places.closed(self)
        self._stop_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._stranger:
            if self._kept:
                self.transport.abort()
                return
            room = STRANGER_BYTES_MAX - self._read_bytes
            data, self._kept = data[:room], data[room:]
            self._read_bytes += len(data)
            if self._kept:
                self.transport.pause_reading()
        if data:
            super().data_received(data)
        if not self._stranger:
            self._watch_head()

    def _watch_head(self) -> None:
        """A head that has begun comes within IDLE_S."""
        begun = self.conn.their_state is h11.IDLE and self.conn.trailing_data[0]
        if not begun:
            self._stop_timer()
        elif self._timer is None:
            self._timer = self.loop.call_later(IDLE_S, self.transport.close)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
