"""Sockets and who may connect to them: bounds on connections in all and by address, TLS, and the orderly end."""

import asyncio
import contextlib
import errno
import ipaddress
import resource
import socket
from collections import Counter
from collections.abc import Callable, Coroutine
from typing import Any

import msgspec
import structlog
from starlette.types import ASGIApp

from contracts import errors
from contracts.bus.complaints import seldom
from gateway import metrics
from gateway.config import GatewayConfig
from gateway.http.certificate import Certificate
from gateway.http.connection import Connection, Headers, answer_head
from gateway.http.framing import Head

BACKLOG = 4096
ACCEPT_AT_ONCE = 64
"""Connections that are taken before others have their turn: some 7 ms, and few enough turns until the last of thousands
that come at once is refused."""
NO_DESCRIPTOR_S = 0.1
"""Pause of accepting when there is no file descriptor left."""
HANDSHAKE_S = 10.0
UNACKED_MS_MAX = 60_000
"""A peer that takes no byte for so long has left (TCP_USER_TIMEOUT; counts a closed window, too)."""
END_S = 2.0
"""Connections whose answers should have ended have so long to write them out."""

_FULL_BODY = msgspec.json.encode(errors.body("unavailable", "Too many connections are open; use them again."))
_FULL = (
    answer_head(
        503,
        [
            (b"content-type", b"application/json"),
            (b"content-length", b"%d" % len(_FULL_BODY)),
            (b"retry-after", b"1"),
            (b"connection", b"close"),
        ],
    )
    + _FULL_BODY
)

_log = structlog.get_logger()


class Server:
    """Serves one application at ``sockets`` from ``start`` to ``close``."""

    def __init__(
        self,
        app: ASGIApp,
        sockets: list[socket.socket],
        config: GatewayConfig,
        refusal: Callable[[Head], tuple[int, Headers, bytes] | None] = lambda head: None,
    ) -> None:
        self.app = app
        self.refusal = refusal
        self._sockets = sockets
        self._tls = Certificate(config.tls_cert_file, config.tls_key_file) if config.tls_cert_file else None
        self.scheme = "https" if self._tls else "http"
        self._max = config.connections_max
        self._address_max = config.connections_per_address_max
        self._open: dict[Connection, str] = {}
        """With the addresses that they count for."""
        self._waiting: dict[Connection, None] = {}
        """Those without a request under way, the longest waiting first."""
        self._empty = asyncio.Event()
        self._by_address: Counter[str] = Counter()
        self._tasks: set[asyncio.Task[None]] = set()
        """Handshakes and requests; the event loop alone would forget them."""

    @property
    def addresses(self) -> list[str]:
        """host:port of each socket."""
        return [f"{opened.getsockname()[0]}:{opened.getsockname()[1]}" for opened in self._sockets]

    def start(self) -> None:
        """Take connections."""
        _allow_descriptors(self._max)
        if self._tls:
            self._run(self._tls.follow())
        for listening in self._sockets:
            listening.listen(BACKLOG)
            self._watch(listening)

    async def close(self) -> None:
        """Take no more connections; returns when all are closed: those without an answer under way, at once."""
        for listening in self._sockets:
            asyncio.get_running_loop().remove_reader(listening)
            listening.close()
        for connection in list(self._open):
            connection.shut_down()
        if self._open:
            self._empty.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._empty.wait(), END_S)
        for connection in list(self._open):
            connection.abort()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _watch(self, listening: socket.socket) -> None:
        if listening.fileno() >= 0:  # not closed meanwhile
            asyncio.get_running_loop().add_reader(listening, self._accept, listening)

    def _accept(self, listening: socket.socket) -> None:
        for _ in range(ACCEPT_AT_ONCE):
            try:
                opened, address = listening.accept()
            except (BlockingIOError, ConnectionAbortedError):
                return
            except OSError as error:
                if error.errno not in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM):
                    raise
                if times := seldom("connections_cannot_be_taken"):
                    _log.error("connections_cannot_be_taken", reason=str(error), times=times)
                loop = asyncio.get_running_loop()
                loop.remove_reader(listening)
                loop.call_later(NO_DESCRIPTOR_S, self._watch, listening)
                return
            opened.setblocking(False)
            self._admit(opened, address[:2])

    def _admit(self, opened: socket.socket, client: tuple[str, int]) -> None:
        address = _counted_as(client[0])
        reason = ""
        if self._by_address[address] >= self._address_max:
            reason = "address"
        elif len(self._open) >= self._max and not self._make_room():
            reason = "all"
        if reason:
            metrics.CONNECTIONS_REFUSED.labels(reason).inc()
            with contextlib.suppress(OSError):
                if self._tls is None:
                    opened.send(_FULL)
            opened.close()
            return
        connection = Connection(self, client)
        self._open[connection] = address
        self._by_address[address] += 1
        metrics.CONNECTIONS.inc()
        self._run(self._connect(connection, opened))

    async def _connect(self, connection: Connection, opened: socket.socket) -> None:
        """Until the connection can be read: with TLS, until both sides have shaken hands."""
        tls = {"ssl": self._tls.context, "ssl_handshake_timeout": HANDSHAKE_S} if self._tls else {}
        try:
            await asyncio.get_running_loop().connect_accepted_socket(lambda: connection, opened, **tls)  # type: ignore[arg-type]
        except OSError:  # of TLS, too; the caller's affair
            self.lost(connection)
            opened.close()

    def _make_room(self) -> bool:
        """Close the connection that has waited the longest for a request; whether there is one."""
        if not self._waiting:
            return False
        connection = next(iter(self._waiting))
        connection.abort()  # To close it would wait for a caller that reads nothing.
        self.lost(connection)
        return True

    def _run(self, coroutine: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # What connections say -------------------------------------------------------------------------------------

    def waits(self, connection: Connection) -> None:
        if connection in self._open:
            self._waiting[connection] = None

    def works(self, connection: Connection, request: Coroutine[Any, Any, None]) -> None:
        self._waiting.pop(connection, None)
        self._run(request)

    def lost(self, connection: Connection) -> None:
        self._waiting.pop(connection, None)
        address = self._open.pop(connection, None)
        if address is not None:
            metrics.CONNECTIONS.dec()
            self._by_address[address] -= 1
            if not self._by_address[address]:
                del self._by_address[address]
        if not self._open:
            self._empty.set()


def _counted_as(host: str) -> str:
    """The address that a connection counts for: of IPv6 the network of 64 bits, which one caller has to itself."""
    if ":" not in host:
        return host
    address = ipaddress.IPv6Address(host.partition("%")[0])
    if address.ipv4_mapped:
        return str(address.ipv4_mapped)
    return str(ipaddress.ip_network((address, 64), strict=False))


def _allow_descriptors(connections: int) -> None:
    """As many file descriptors as the system lets us have: its usual soft limit is for processes without callers."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    if most != resource.RLIM_INFINITY and most < connections + 100:
        _log.warning("few_file_descriptors", most=most, connections_max=connections)


def listen(addresses: tuple[str, ...]) -> list[socket.socket]:
    """Bound sockets that other gateways on this host may share; raises OSError."""
    sockets = []
    for address in addresses:
        host, _, port = address.rpartition(":")
        host = host.strip("[]")
        opened = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
        opened.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        opened.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        opened.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # What it accepts inherits it.
        if hasattr(socket, "TCP_USER_TIMEOUT"):
            opened.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, UNACKED_MS_MAX)
        opened.bind((host, int(port)))
        opened.setblocking(False)
        sockets.append(opened)
    return sockets
