"""uvicorn as we run it: our sockets, our signals, and a bound on what comes before a request's body."""

import asyncio
import contextlib
import http
import logging
import re
import socket
import sys
from collections.abc import Iterator
from typing import Any

import msgspec
import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from contracts import errors, ids
from gateway.config import GatewayConfig

KEEP_ALIVE_S = 90
"""Longer than proxies and client pools keep an idle connection (60 to 75 s), so that they close it, not we."""
HEAD_BYTES_MAX = 64 << 10
HEAD_S_MAX = 30.0
"""From a head's first byte to its last: far more than any network needs (a guess)."""
BACKLOG = 4096
UNACKED_MS_MAX = 60_000
"""A peer that takes no byte for so long has left (TCP_USER_TIMEOUT; counts a closed window, too)."""


_UPGRADE = re.compile(rb"(?i)\r\nupgrade:")


class _HeadTooLarge(Exception):
    pass


class Protocol(HttpToolsProtocol):
    """HTTP/1.1 with bounds on the size and the time of a request's head, and errors in OpenAI's shape.

    An offer to upgrade is as if absent: Java's client offers HTTP/2 with every first request, and the parser would
    take the body behind such a head for the other protocol.
    """

    _head_bytes = 0
    _in_head = True
    _head_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        # uvicorn sets this only after an answer; a connection that never asks is as idle.
        self.timeout_keep_alive_task = self.loop.call_later(KEEP_ALIVE_S, self.timeout_keep_alive_handler)

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_head_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._in_head:
            self._head_bytes += len(data)
            self._start_head_timer()
            head, end, rest = data.partition(b"\r\n\r\n")
            if _UPGRADE.search(head):
                data = b"%b%b%b" % (_UPGRADE.sub(b"\r\nx-offered-upgrade:", head), end, rest)
        super().data_received(data)
        if self._in_head and self._head_bytes > HEAD_BYTES_MAX and not self.transport.is_closing():
            self._refuse(431, "The request's headers are too large.")

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._in_head = True
        self._start_head_timer()

    def on_headers_complete(self) -> None:
        if len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers) > HEAD_BYTES_MAX:
            raise _HeadTooLarge
        self._in_head = False
        self._head_bytes = 0
        self._stop_head_timer()
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        self._in_head = True  # What comes now belongs to the next request.
        super().on_message_complete()

    def _start_head_timer(self) -> None:
        if self._head_timer is None:
            self._head_timer = self.loop.call_later(HEAD_S_MAX, self._head_is_late)

    def _stop_head_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _head_is_late(self) -> None:
        self._head_timer = None
        if self.cycle is not None and not self.cycle.response_complete:
            self._start_head_timer()  # An answer is under way, and what waits behind it has time.
        elif not self.transport.is_closing():
            self._refuse(408, f"The request's headers did not arrive within {HEAD_S_MAX:g} seconds.")

    def send_400_response(self, msg: str) -> None:
        """Called while the parser's error is handled; ours is its context."""
        error = sys.exc_info()[1]
        if error is not None and isinstance(error.__context__, _HeadTooLarge):
            self._refuse(431, "The request's headers are too large.")
        else:
            self._refuse(400, msg)

    def _refuse(self, status: int, message: str) -> None:
        code = "request_timeout" if status == 408 else "invalid_request"
        body = msgspec.json.encode(errors.body(code, message))
        self.transport.write(
            b"HTTP/1.1 %d %b\r\ncontent-type: application/json\r\ncontent-length: %d\r\nx-request-id: %b\r\n"
            b"connection: close\r\n\r\n%b"
            % (status, http.HTTPStatus(status).phrase.encode(), len(body), ids.request_id().encode(), body)
        )
        self.transport.close()


class Server(uvicorn.Server):
    """Signals are the service's, not uvicorn's. ``serving`` is set once connections are taken."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.serving = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.serving.set()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def make(app: ASGIApp, config: GatewayConfig) -> Server:
    """The server, which serves nothing yet; signals, logs and the event loop stay ours."""
    logging.getLogger("uvicorn").setLevel(logging.WARNING)
    tls: dict[str, Any] = {}
    if config.tls_cert_file:
        tls = {"ssl_certfile": config.tls_cert_file, "ssl_keyfile": config.tls_key_file}
    return Server(
        uvicorn.Config(
            app,
            loop="none",
            http=Protocol,
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            proxy_headers=False,
            server_header=False,
            timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=2,
            backlog=BACKLOG,
            **tls,
        )
    )


def listen(addresses: tuple[str, ...]) -> list[socket.socket]:
    """Bound sockets that other gateways on this host may share; raises OSError."""
    sockets = []
    for address in addresses:
        host, _, port = address.rpartition(":")
        host = host.strip("[]")
        opened = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
        opened.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        opened.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        if hasattr(socket, "TCP_USER_TIMEOUT"):
            opened.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, UNACKED_MS_MAX)
        opened.bind((host, int(port)))
        opened.setblocking(False)
        sockets.append(opened)
    return sockets


def addresses(sockets: list[socket.socket]) -> list[str]:
    """host:port of each."""
    return [f"{opened.getsockname()[0]}:{opened.getsockname()[1]}" for opened in sockets]
