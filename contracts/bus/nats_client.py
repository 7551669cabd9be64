"""nats-py's client, made fit: the only file that imports nats, and the only one that knows its private parts.

A socket of a failed try is not leaked, messages are built as ours, a connection whose tasks died or hang is revived,
credentials are read for each connection, and the library's errors become ours. pyproject bounds the library's version,
and tests/bus/test_nats_client.py says in words which private part a new version has changed.
"""

import asyncio
import re
import socket
import struct
import sys
from collections.abc import Callable
from typing import Any

import structlog

from contracts.bus import types
from contracts.bus.credentials import Credentials
from contracts.bus.types import BusError, Incoming, Sender, TooLarge, Unavailable

# The library imports aiohttp, which it wants for websockets only: 0.2 s less in every process (measured).
_absent = "aiohttp" not in sys.modules
if _absent:
    sys.modules["aiohttp"] = None  # type: ignore[assignment]
try:
    import nats.errors
    from nats.aio.client import Client as LibraryClient
finally:
    if _absent:
        del sys.modules["aiohttp"]

log = structlog.get_logger(__name__)

LibraryError = nats.errors.Error
SlowConsumer = nats.errors.SlowConsumerError

WATCH_INTERVAL_S = 0.5
"""How often the client's own tasks are looked at."""
TICKS_UNTIL_DEAD = 2
_AT_ONCE = struct.pack("ii", 1, 0)
"""SO_LINGER without a time: the kernel drops what it has yet to send."""
_ENDED = re.compile(r"^'(authorization violation|.*authentication|maximum )")
"""Errors upon which the server ends a connection, and may take the next one; the library has them in lower case."""
_DENIED = re.compile(r'permissions violation for subscription to "(?P<subject>[^"]*)"')


class Client(LibraryClient):
    """The library's client for one ``session``."""

    def __init__(self, session: Sender, credentials: Credentials) -> None:
        super().__init__()
        self._session = session
        self._credentials = credentials
        self._stamp = credentials.stamp()

    def _build_message(
        self, sid: int, subject: bytes, reply: bytes, data: bytes, headers: dict[str, str] | None
    ) -> Incoming:
        return Incoming(subject.decode(), reply.decode(), data, headers, self._session)

    async def _connect_to_server(self, s: Any) -> None:
        self.abort()
        self._stamp = self._credentials.stamp()
        try:
            if (tls := self._credentials.tls()) is not None:
                self.options["tls"] = tls
        except BusError as error:  # a file is being replaced: the next try finds it whole
            raise LibraryError(str(error)) from error
        await super()._connect_to_server(s)

    def _connect_command(self) -> bytes:
        """The CONNECT line; a server that may be another one, since it speaks no TLS, gets none."""
        if self._credentials.ca_file and not self._server_info.get("tls_required"):
            raise LibraryError("nats: the server offers no TLS, and HEADRACE_NATS_CA_FILE asks for it")
        if self._credentials.seed_file:
            self._signature_cb = self._sign
        return super()._connect_command()

    def _sign(self, challenge: str) -> bytes:
        """Called before the library reads the public key, so that both come from the file as it is now."""
        try:
            signed = self._credentials.sign(challenge.encode())
        except BusError as error:
            raise LibraryError(str(error)) from error
        self._public_nkey = signed.public_key
        return signed.signature.encode()

    async def _process_err(self, err_msg: str) -> None:
        """The server ends the connection of a user who is no longer known, or has passed a limit. The library would
        close for good; but its credentials may have been replaced, and limits are passed in passing.
        """
        if _ENDED.search(err_msg):
            await self._error_cb(LibraryError(f"nats: {err_msg}"))
            await self._process_op_err(LibraryError(f"nats: {err_msg}"))
        else:
            await super()._process_err(err_msg)

    def abort(self) -> None:
        """Drop the socket at once, with what is buffered, also in the kernel."""
        writer = getattr(self._transport, "_io_writer", None)
        if writer is not None:
            if (sock := writer.get_extra_info("socket")) is not None and sock.fileno() >= 0:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _AT_ONCE)
            writer.transport.abort()

    def drop_unsent(self) -> None:
        """Forget what the lost connection had yet to send, else the next one would send it. The library sends its
        subscriptions anew.
        """
        self._pending: list[bytes] = []
        self._pending_data_size = 0

    async def watch(self, is_up: Callable[[], bool], is_closing: Callable[[], bool]) -> None:
        """Revive a connection whose tasks died or hang, until it is closed: it would stay "connected" and deaf for
        minutes, or for ever.

        A reconnect may also die of an exception that the library does not catch, or hang: it waits for the old
        socket to take what is buffered, which a broken link never does. ``is_up``: the library has not yet told of
        the disconnect.
        """
        dead_ticks = hung_ticks = 0
        while not self.is_closed:
            await asyncio.sleep(WATCH_INTERVAL_S)
            if is_closing():
                continue
            if self.is_connected:
                if self._credentials.stamp() != self._stamp:
                    log.info("bus_credentials_replaced")
                    self._stamp = self._credentials.stamp()
                    await self.force_reconnect()
                    continue
                tasks = (self._reading_task, self._flusher_task, self._ping_interval_task)
                dead_ticks = hung_ticks = 0
                if any(task is None or task.done() for task in tasks):
                    await self._revive("a task of the connection died")
                continue
            task = self._reconnection_task
            dead_ticks = dead_ticks + 1 if task is None or task.done() else 0
            hung_ticks = hung_ticks + 1 if is_up() else 0
            if dead_ticks == TICKS_UNTIL_DEAD and not self.is_closed:
                dead_ticks = 0
                self._status = LibraryClient.CONNECTED  # else nothing is reconnected
                await self._revive("the reconnect died")
            elif hung_ticks == TICKS_UNTIL_DEAD:
                log.warning("bus_socket_aborted", reason="the old socket does not close")
                self.abort()

    async def _revive(self, why: str) -> None:
        types.DEAD_LOOPS.inc()
        log.warning("bus_revived", reason=why)
        await self.force_reconnect()


def denied_subject(error: Exception) -> str | None:
    """The subscription that the server refused, as it names it: in lower case. None: another error."""
    found = _DENIED.search(str(error))
    return None if found is None else found["subject"]


def translated(error: Exception, subject: str, size: int, max_payload: int) -> BusError:
    """Our exception for the library's, about a message of ``size`` bytes to ``subject``."""
    match error:
        case nats.errors.MaxPayloadError():
            return TooLarge(f"{size} bytes; the server takes {max_payload}")
        case nats.errors.ConnectionClosedError() | nats.errors.ConnectionDrainingError():
            return Unavailable("the connection is closed")
        case _:
            return BusError(f"{error!r} for {subject!r}")
