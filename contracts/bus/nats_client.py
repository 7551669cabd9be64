"""nats-py's client, made fit: the only file that imports nats, and the only one that knows its private parts.

Connecting, TLS, subscriptions and reconnecting are the library's. Messages are read and written by ``wire``, built as
ours and handed on at once. A socket of a failed try is not leaked, a connection whose tasks died or hang is revived,
credentials are read for each connection, and the library's errors become ours. pyproject bounds the library's version,
and tests/bus/test_nats_client.py says in words which private part a new version has changed.
"""

import asyncio
import itertools
import json
import re
import socket
import struct
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

import structlog

from contracts.bus import types, wire
from contracts.bus.credentials import Credentials
from contracts.bus.pace import Pace
from contracts.bus.types import BusError, Incoming, Sender, TooLarge, Unavailable
from contracts.ticks import tick

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

WATCH_INTERVAL_S = 0.5
"""How often the client's own tasks are looked at."""
TICKS_UNTIL_DEAD = 2
CREDENTIALS_TICKS = 4
"""Between two looks at the files of the credentials."""
UNTAKEN_BYTES_MAX = 64 << 10
"""Written and not taken by the socket; what is more waits with us, and is dropped when the connection is lost."""
_AT_ONCE = struct.pack("ii", 1, 0)
"""SO_LINGER without a time: the kernel drops what it has yet to send."""
_ENDED = re.compile(r"^'(authorization violation|.*authentication|maximum )")
"""Errors upon which the server ends a connection, and may take the next one; the library has them in lower case."""
_DENIED = re.compile(r'permissions violation for subscription to "(?P<subject>[^"]*)"')


class Client(LibraryClient):
    """The library's client for one ``session``."""

    _pending: list[bytes]
    """What is yet to be written."""
    _pending_data_size: int

    def __init__(self, session: Sender, credentials: Credentials) -> None:
        super().__init__()
        self._session = session
        self._credentials = credentials
        self._stamp = credentials.stamp()
        self._direct: dict[int, Callable[[Incoming], None]] = {}
        """What takes the messages of a subscription without a queue, by the subscription's number."""
        self._ps = _Parser(self)
        self._pace = Pace()
        self._write_due = False

    async def subscribe_direct(self, subject: str, queue: str, take: Callable[[Incoming], None]) -> Any:
        """A subscription of the library's whose messages are handed to ``take`` as they are read; it must not raise."""
        number = self._sid + 1
        self._direct[number] = take
        try:
            return await self.subscribe(subject, queue=queue)
        except BaseException:
            self._direct.pop(number, None)
            raise

    def _remove_sub(self, sid: int, max_msgs: int = 0) -> None:
        self._direct.pop(sid, None)
        super()._remove_sub(sid, max_msgs)

    def hand_on(self, number: int, subject: bytes, reply: bytes, headers: bytes, data: bytes) -> None:
        """A message came."""
        if (take := self._direct.get(number)) is not None:
            take(Incoming(subject.decode(), reply.decode(), data, headers, self._session))
        elif (waiting := self._subs.get(number)) is not None:
            self._queue_up(waiting, subject, reply, headers, data)

    def _queue_up(self, waiting: Any, subject: bytes, reply: bytes, headers: bytes, data: bytes) -> None:
        """For a handler that is awaited, within the library's bounds."""
        size = waiting._pending_size + len(data)
        if size >= waiting._pending_bytes_limit or waiting._pending_queue.full():
            self._session.dropped(waiting)
            return
        waiting._pending_size = size
        waiting._pending_queue.put_nowait(Incoming(subject.decode(), reply.decode(), data, headers, self._session))

    def send(self, subject: str, data: bytes, reply: str, headers: Mapping[str, str] | None) -> None:
        """Publish: written at the end of this turn of the loop, or a moment later when much is published (``Pace``).

        Raises the library's errors.
        """
        if self.is_closed:
            raise nats.errors.ConnectionClosedError
        if len(data) > self._max_payload:
            raise nats.errors.MaxPayloadError
        try:
            command = wire.publication(subject, data, reply, headers)
        except ValueError as error:
            raise nats.errors.BadSubjectError from error
        self._pending.append(command)
        self._pending_data_size += len(command)
        if not self._write_due:
            self._write_due = True
            loop = asyncio.get_running_loop()
            if wait_s := self._pace.wait_s(time.monotonic()):
                loop.call_later(wait_s, self._write)
            else:
                loop.call_soon(self._write)

    @property
    def server_alone(self) -> bool:
        """Whether the server belongs to no cluster."""
        return "cluster" not in self._server_info

    @property
    def full(self) -> bool:
        """More waits to be written than is well: ``make_room`` before more is sent."""
        return self._pending_data_size > self._max_pending_size

    async def make_room(self) -> None:
        """Until the socket has taken what waits, for at most the flush timeout."""
        await self._flush_pending(force_flush=True)

    def _write(self) -> None:
        self._write_due = False
        if not self._pending or not self.is_connected:
            return
        if self._transport._io_writer.transport.get_write_buffer_size() > UNTAKEN_BYTES_MAX:
            if self._flush_queue.empty():  # The library's task waits for the socket, and then writes.
                self._flush_queue.put_nowait(asyncio.get_running_loop().create_future())
            return
        pending, self._pending, self._pending_data_size = self._pending, [], 0
        self._transport.writelines(pending)

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
        self._pending = []
        self._pending_data_size = 0

    async def _ping_interval(self) -> None:
        """In the place of the library's: a server that has just sent something is not asked whether it lives."""
        heard = -1
        while True:
            await tick(self.options["ping_interval"])
            if not self.is_connected:
                continue
            if self._ps.heard != heard:
                heard = self._ps.heard
                self._pings_outstanding = 0
                continue
            self._pings_outstanding += 1
            if self._pings_outstanding > self.options["max_outstanding_pings"]:
                await self._process_op_err(nats.errors.StaleConnectionError())
                return
            await self._send_ping()

    async def watch(self, is_up: Callable[[], bool], is_closing: Callable[[], bool]) -> None:
        """Revive a connection whose tasks died or hang, until it is closed: it would stay "connected" and deaf for
        minutes, or for ever.

        A reconnect may also die of an exception that the library does not catch, or hang: it waits for the old
        socket to take what is buffered, which a broken link never does. ``is_up``: the library has not yet told of
        the disconnect.
        """
        dead_ticks = hung_ticks = 0
        for number in itertools.count():
            await tick(WATCH_INTERVAL_S)
            if self.is_closed:
                return
            if is_closing():
                continue
            if self.is_connected:
                if number % CREDENTIALS_TICKS == 0 and self._credentials.stamp() != self._stamp:
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
            if dead_ticks == TICKS_UNTIL_DEAD:
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


class _Parser:
    """In the place of the library's."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._reader = wire.Reader(client.hand_on)
        self.heard = 0
        """How often something came."""
        self.reset = self._reader.reset

    async def parse(self, data: bytes = b"") -> None:
        """What came in, taken apart; raises the library's ProtocolError."""
        client = self._client
        self.heard += 1
        try:
            lines = self._reader.feed(data)
        except wire.Malformed as error:
            raise nats.errors.ProtocolError(f"nats: {error}") from error
        for line in lines:
            word, _, rest = line.strip().partition(b" ")
            if word == b"PING":
                await client._process_ping()
            elif word == b"PONG":
                await client._process_pong()
            elif word == b"-ERR":
                await client._process_err(rest.strip().decode("utf-8", "replace").lower())
            elif word == b"INFO":
                await client._process_info(json.loads(rest))
            elif word != b"+OK":
                raise nats.errors.ProtocolError("nats: unknown protocol")


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
