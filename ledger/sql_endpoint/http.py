"""ClickHouse's HTTP interface, as far as clients that read need it: an ASGI application and the server that runs it.

The server has a thread and an event loop of its own, so that neither a slow reader nor a large answer stands in the
ledger's way. What may be asked is decided in policy.py, how it is run in session.py.
"""

import asyncio
import base64
import binascii
import logging
import socket
import threading
import time
from collections.abc import Iterable
from typing import ClassVar, cast

import structlog
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from ledger.sql_endpoint import formats
from ledger.sql_endpoint.formats import Failed, Result
from ledger.sql_endpoint.policy import QUERY_BYTES_MAX
from ledger.sql_endpoint.session import Sessions

log = structlog.get_logger(__name__)

CONNECTIONS_MAX = 64
HEAD_BYTES_MAX = 64 << 10
IDLE_S = 120.0
"""A connection without a request, a request that does not come whole, and a reader that takes nothing end then."""
BODY_READ_BYTES_MAX = 8 << 20
"""A body that is too long is read up to here, so that its sender reads why; then the connection is closed."""
REFUSAL_S = 0.3
"""How long a wrong password waits for its answer."""
GRACE_S = 2
"""How long queries that run may take when the endpoint closes, and as long their readers."""

_HEADERS = {"X-ClickHouse-Server-Display-Name": "headrace", "X-ClickHouse-Timezone": "UTC"}


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
        logging.getLogger("uvicorn").setLevel(logging.WARNING)
        self._server = uvicorn.Server(
            uvicorn.Config(
                application,
                http=_Protocol,
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=False,  # a query may name a person
                proxy_headers=False,
                server_header=False,
                timeout_keep_alive=int(IDLE_S),
                timeout_graceful_shutdown=2 * GRACE_S,
            )
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
        self._server.should_exit = True
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
            await asyncio.sleep(REFUSAL_S)
            raise Failed(516, "AUTHENTICATION_FAILED", "Authentication failed: user or password is wrong or missing")


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


class _Incomplete(Failed):
    """The request's body was not read to its end."""


def _pong(_request: Request) -> Response:
    return PlainTextResponse("Ok.\n", headers=_HEADERS)


async def _failure(request: Request, error: Exception) -> Response:
    """As drivers read it: code in a header, text in the body. Starlette hands it Failed alone."""
    error = cast(Failed, error)
    status, headers = formats.STATUS.get(error.code, 500), {"X-ClickHouse-Exception-Code": str(error.code), **_HEADERS}
    if error.code == 516 and "Authorization" not in request.headers:
        status, headers["WWW-Authenticate"] = 401, 'Basic realm="headrace"'
    if isinstance(error, _Incomplete):
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
        raise _Incomplete(159, "TIMEOUT_EXCEEDED", "the query did not come in time") from error
    if size > QUERY_BYTES_MAX:
        raise _Incomplete(62, "SYNTAX_ERROR", "the query is too long")
    return bytes(data)


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


class _Protocol(HttpToolsProtocol):
    """uvicorn's HTTP/1.1 with bounds on connections, and on the bytes and the time of a request's head.

    Only callbacks of asyncio and of the parser are overridden, nothing of uvicorn's own.
    """

    _connections: ClassVar[int] = 0
    _head_timer: asyncio.TimerHandle | None = None
    """Set while a head is awaited: from the connection on, then from each further head's first byte on."""
    _head_bytes = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn has it
        super().connection_made(transport)
        self._peer = transport
        _Protocol._connections += 1
        if _Protocol._connections > CONNECTIONS_MAX:
            transport.abort()
        self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        _Protocol._connections -= 1
        self._head_came()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._head_bytes += len(data)
        super().data_received(data)
        if self._head_timer is not None and self._head_bytes > HEAD_BYTES_MAX:
            self._peer.close()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._await_head()

    def on_headers_complete(self) -> None:
        self._head_came()
        super().on_headers_complete()

    def _await_head(self) -> None:
        if self._head_timer is None:
            self._head_bytes = 0
            self._head_timer = asyncio.get_running_loop().call_later(IDLE_S, self._peer.close)

    def _head_came(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None
