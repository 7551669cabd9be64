"""One connection of a caller, as an ASGI server: one request at a time, and a bound on every part of it.

What a request is, ``framing`` says. Nothing of a body is taken apart before the application asks for it, and nothing of
a next request before the present one is answered; reading goes on meanwhile, so that a hang-up is seen.
"""

import asyncio
import functools
import http
import time
from collections.abc import Callable, Coroutine, Iterable
from email.utils import formatdate
from typing import Any, Protocol

import msgspec
import structlog
from starlette.types import ASGIApp, Message, Scope

from contracts import errors, ids
from contracts.errors import HeadraceError
from contracts.ticks import EARLY_S
from gateway.http.framing import BadRequest, Chunked, Head, Sized, head_bytes, parse_head, without_empty_lines

KEEP_ALIVE_S = 90.0
"""Longer than proxies and client pools keep an idle connection (60 to 75 s), so that they close it, not we."""
HEAD_S_MAX = 30.0
"""From a head's first byte to its last: far more than any network needs (a guess)."""
BUFFER_BYTES_MAX = 64 << 10
"""Received and not taken yet: of a body, then reading waits; behind a request, then it is thrown away."""
PIPELINE_MAX = 16
"""Requests that are served one after the other without a pause of the caller's; then the connection closes."""
WRITE_S_MAX = 60.0
"""A caller that takes nothing of an answer for so long is gone."""
LINGER_S = 2.0
LINGER_BYTES_MAX = 32 << 20
"""What is not wanted is read for so long, and so far, that the caller sees the answer before its connection breaks."""

_SMALL_PIECES = asyncio.Lock()
"""Of all bodies that come in small pieces one is taken further before everything else has its turn."""

_log = structlog.get_logger()

Headers = Iterable[tuple[bytes, bytes]]


class Owner(Protocol):
    """The server, as its connections know it."""

    app: ASGIApp
    scheme: str

    def waits(self, connection: "Connection") -> None:
        """No request is under way, as at the beginning."""

    def works(self, connection: "Connection", request: Coroutine[Any, Any, None]) -> None:
        """One is, and is served by running ``request``."""

    def lost(self, connection: "Connection") -> None:
        """The connection is closed."""

    def refusal(self, head: Head) -> tuple[int, Headers, bytes] | None:
        """Status, headers and body, when the request gets no further."""


class Connection(asyncio.Protocol):
    """What ``owner`` has accepted from ``client``."""

    def __init__(self, owner: Owner, client: tuple[str, int]) -> None:
        self.owner = owner
        self.client = client
        self.made = False
        """False while both sides shake hands; then there is a transport."""
        self.transport: asyncio.Transport
        self.write_paused = False
        self.loop = asyncio.get_running_loop()
        self._buffer = bytearray()
        self._seen = 0
        """Bytes of the buffer in which no head ends."""
        self._request: Request | None = None
        """The one under way."""
        self._behind = 0
        """Requests that had come before the one before them was answered."""
        self._discards: int | None = None
        """Bytes that may still come to be thrown away, before the connection closes; None: they are taken."""
        self._reading = True
        self._timer: asyncio.TimerHandle | None = None
        self._due_at = 0.0
        self._when_due: Callable[[], object] | None = None
        """What is to be done then, by the loop's time."""
        self._write_timer: asyncio.TimerHandle | None = None
        self._writable: asyncio.Future[None] | None = None

    # What the transport says ----------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self.transport = transport
        self.made = True
        self._wait()

    def data_received(self, data: bytes) -> None:
        if self._discards is not None:
            self._discards -= len(data)
            if self._discards < 0:
                self.transport.abort()
            return
        self._buffer += data
        if self._request is None:
            self._behind = 0
            self._next()
        else:
            self._request.changed.set()
        self._balance()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        self._disarm()
        self._buffer.clear()
        if self._request is not None:
            self._request.gone = True
            self._request.changed.set()
        self.resume_writing()
        self.owner.lost(self)

    def pause_writing(self) -> None:
        self.write_paused = True
        self._write_timer = self.loop.call_later(WRITE_S_MAX, self.transport.abort)

    def resume_writing(self) -> None:
        self.write_paused = False
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None
        if self._writable is not None and not self._writable.done():
            self._writable.set_result(None)
        if self._request is not None:
            self._request.on_writable()

    # What the request under way asks --------------------------------------------------------------------------

    def take(self, body: Sized | Chunked) -> bytes:
        """What is there of the body; raises BadRequest."""
        data = body.take(self._buffer)
        self._balance()
        return data

    def skip(self, body: Sized | Chunked) -> None:
        """Done with a body that nobody has asked for, when the rest of it is there."""
        if isinstance(body, Sized) and body.left <= len(self._buffer):
            self.take(body)

    async def writable(self) -> None:
        """Returns when the caller has taken most of what was written, or is gone."""
        while self.write_paused:
            if self._writable is None or self._writable.done():
                self._writable = self.loop.create_future()
            await self._writable

    def answered(self, request: "Request") -> None:
        """The answer is written: now the next request."""
        if not request.keep_alive or self._discards is not None:
            if self._discards is None and request.body.done:
                self.close()
            else:
                self._linger()
            return
        self._request = None
        self._go_on()

    # What the server asks -------------------------------------------------------------------------------------

    def close(self) -> None:
        """What is written still goes out, within WRITE_S_MAX."""
        self._start_timer(WRITE_S_MAX, self.transport.abort)
        self.transport.close()

    def abort(self) -> None:
        """At once."""
        if self.made:
            self.transport.abort()

    def shut_down(self) -> None:
        """Close, after the answer that is under way."""
        if self._request is not None and not self._request.complete:
            self._request.keep_alive = False
        elif self.made:
            self.close()

    # ----------------------------------------------------------------------------------------------------------

    def _wait(self) -> None:
        """No request is under way."""
        self._start_timer(KEEP_ALIVE_S, self.close)
        self.owner.waits(self)

    def _go_on(self) -> None:
        self._wait()
        if not self._buffer:
            return
        self._behind += 1
        if self._behind >= PIPELINE_MAX:
            self._linger()
        else:
            self._next()

    def _answer(self, head: Head, status: int, headers: Headers, body: bytes) -> None:
        """To a request that gets no further; its body is not waited for."""
        expected = Chunked() if head.length is None else Sized(head.length)
        self.skip(expected)
        again = head.keep_alive and expected.done
        closing = () if again else ((b"connection", b"close"),)
        self.transport.write(answer_head(status, (*headers, *closing)) + body)
        if again:
            self._go_on()
        else:
            self._linger()

    def _next(self) -> None:
        """Begin the next request, when its head is whole."""
        if without_empty_lines(self._buffer):
            self._seen = 0
        if not self._buffer or self._buffer == b"\r":
            return  # Half an empty line begins nothing: its time is that of an idle connection.
        try:
            size = head_bytes(self._buffer, self._seen)
            head = parse_head(bytes(self._buffer[:size])) if size else None
        except BadRequest as error:
            self._refuse(error.status, str(error))
            return
        if head is None:
            if not self._seen:
                self._start_timer(HEAD_S_MAX, self._head_is_late)
            self._seen = len(self._buffer)
            return
        del self._buffer[:size]
        self._seen = 0
        self._stop_timer()
        if (refusal := self.owner.refusal(head)) is not None:
            self._answer(head, *refusal)
            return
        self._request = Request(self, head)
        self.owner.works(self, self._request.run())

    def _balance(self) -> None:
        """Bound what is received and not taken."""
        enough = len(self._buffer) > BUFFER_BYTES_MAX
        request = self._request
        if enough and request is not None and request.body.done:
            self._discard()
        reading = not enough or request is None or request.body.done
        if reading != self._reading and not self.transport.is_closing():
            self._reading = reading
            if reading:
                self.transport.resume_reading()
            else:
                self.transport.pause_reading()

    def _discard(self) -> None:
        """Take nothing more; the connection closes behind the answer that is under way."""
        self._buffer.clear()
        self._discards = LINGER_BYTES_MAX

    def _linger(self) -> None:
        self._discard()
        self._balance()
        if self.transport.can_write_eof() and not self.transport.is_closing():
            self.transport.write_eof()  # Who reads an answer to its end has it now. TLS cannot be half closed.
        self._start_timer(LINGER_S, self.close)

    def _head_is_late(self) -> None:
        self._refuse(408, f"The request's headers did not arrive within {HEAD_S_MAX:g} seconds.")

    def _refuse(self, status: int, message: str) -> None:
        """Answer what is no request, in OpenAI's shape."""
        code = "request_timeout" if status == 408 else "invalid_request"
        body = msgspec.json.encode(errors.body(code, message))
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", b"%d" % len(body)),
            (b"x-request-id", ids.request_id().encode()),
            (b"connection", b"close"),
        ]
        if not errors.may_mend(code):
            headers.append((b"x-should-retry", b"false"))
        self.transport.write(answer_head(status, headers) + body)
        self._linger()

    def _start_timer(self, seconds: float, what: Callable[[], object]) -> None:
        """In the place of the one before. The loop's own timer is left where it ends no later: a request costs none."""
        self._due_at, self._when_due = self.loop.time() + seconds, what
        if self._timer is None or self._due_at < self._timer.when():
            self._arm()

    def _arm(self) -> None:
        self._disarm()
        self._timer = self.loop.call_at(self._due_at, self._look)

    def _look(self) -> None:
        self._timer = None
        if self._when_due is None:
            return
        if self.loop.time() < self._due_at - EARLY_S:
            self._arm()
        else:
            self._when_due()

    def _stop_timer(self) -> None:
        self._when_due = None

    def _disarm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


def _nothing() -> None:
    pass


class Request:
    """A request under way: its ASGI application's ``receive`` and ``send``.

    It is the scope's extension ``headrace.writer``, too: who has sent an answer's head may write its body here, without
    a turn of the event loop for each part.
    """

    def __init__(self, connection: Connection, head: Head) -> None:
        self.body = Chunked() if head.length is None else Sized(head.length)
        self.keep_alive = head.keep_alive
        self.gone = False
        """The caller has hung up."""
        self.complete = False
        """The answer is written."""
        self.changed = asyncio.Event()
        """Something came, or the caller is gone, or the answer is complete."""
        self.on_writable: Callable[[], None] = _nothing
        """Called when ``write`` may be tried again."""
        self._connection = connection
        self._head = head
        self._continue_due = head.continues
        self._body_told = False
        self._started = False
        self._unsent = b""
        """The answer's head, until something of the body goes with it, or this turn of the event loop ends."""
        self._chunked = False
        self._bodiless = head.method == "HEAD"

    async def run(self) -> None:
        """The application, to its end."""
        head, connection = self._head, self._connection
        scope: Scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": head.version,
            "method": head.method,
            "scheme": connection.owner.scheme,
            "path": head.path,
            "raw_path": head.raw_path,
            "query_string": head.query,
            "root_path": "",
            "headers": head.headers,
            "client": connection.client,
            "server": None,
            "extensions": {"headrace.writer": self},
        }
        try:
            await connection.owner.app(scope, self.receive, self.send)
        except Exception:
            _log.exception("application_failed", path=self._head.path[:200])
        finally:
            self.on_writable = _nothing
            if not self.complete and not self.gone:
                self._send_head()
                connection.close()

    async def receive(self) -> Message:
        """The next part of the body, then the hang-up or the end of the answer. Raises HeadraceError."""
        if self.body.more:
            async with _SMALL_PIECES:
                await asyncio.sleep(0)
        while not self.gone and not self.complete:
            if not self._body_told:
                data = self._take()
                if data or self.body.done:
                    self._body_told = self.body.done
                    return {"type": "http.request", "body": data, "more_body": not self.body.done}
                self._tell_to_continue()
            self.changed.clear()
            await self.changed.wait()
        return {"type": "http.disconnect"}

    def _take(self) -> bytes:
        try:
            return self._connection.take(self.body)
        except BadRequest as error:
            self.keep_alive = False
            raise HeadraceError("invalid_request", str(error)) from error

    def _tell_to_continue(self) -> None:
        if self._continue_due and not self._started:
            self._continue_due = False
            self._connection.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    async def send(self, message: Message) -> None:
        """Part of the answer; waits while the caller does not read."""
        connection = self._connection
        if connection.write_paused:
            await connection.writable()
        if self.gone:
            return
        if message["type"] == "http.response.start":
            self._start(message["status"], message["headers"])
            return
        data = message.get("body", b"")
        if message.get("more_body", False):
            self.write(data)
            return
        if data := self._last(data):
            connection.transport.write(data)
        self.complete = True
        self.changed.set()
        connection.answered(self)

    def write(self, data: bytes) -> bool:
        """Part of the body, at once; False where the caller must first read, and then nothing is written.

        What nobody can read any more is dropped.
        """
        connection = self._connection
        if self.gone or self.complete or self._bodiless or not data:
            return True
        if connection.write_paused:
            return False
        framed = b"%x\r\n%b\r\n" % (len(data), data) if self._chunked else data
        connection.transport.write(self._behind_head(framed) if self._unsent else framed)
        return True

    def _last(self, data: bytes) -> bytes:
        """All that is still to be written, of which ``data`` is the end of the body: its caller is woken once."""
        if self._bodiless:
            data = b""
        elif self._chunked:
            data = b"%x\r\n%b\r\n0\r\n\r\n" % (len(data), data) if data else b"0\r\n\r\n"
        return self._behind_head(data)

    def _behind_head(self, data: bytes) -> bytes:
        head, self._unsent = self._unsent, b""
        return head + data

    def _send_head(self) -> None:
        if self._unsent and not self.gone:
            self._connection.transport.write(self._behind_head(b""))

    def _start(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        if self._started:
            raise RuntimeError("the answer has begun already")
        self._started = True
        self._connection.skip(self.body)
        given = {name.lower(): value for name, value in headers}
        self._bodiless |= status in (204, 304)
        if not self.body.done or given.get(b"connection") == b"close":
            self.keep_alive = False
        headers = list(headers)
        if not self._bodiless and b"content-length" not in given:
            if self._head.version == "1.1":
                self._chunked = True
                headers.append((b"transfer-encoding", b"chunked"))
            else:
                self.keep_alive = False  # The answer ends where the connection ends.
        if not self.keep_alive and b"connection" not in given:
            headers.append((b"connection", b"close"))
        self._unsent = answer_head(status, headers)
        self._connection.loop.call_soon(self._send_head)


def answer_head(status: int, headers: Headers) -> bytes:
    """Status line and headers; raises ValueError when a header would become several."""
    lines = [b"%b: %b" % header for header in headers]
    lines.append(_date(int(time.time())))
    text = b"\r\n".join(lines)
    if not text.count(b"\r") == text.count(b"\n") == len(lines) - 1:
        raise ValueError("a header of the answer holds a line end")
    return b"HTTP/1.1 %d %b\r\n%b\r\n\r\n" % (status, _phrase(status), text)


@functools.lru_cache(1)
def _date(at_s: int) -> bytes:
    return b"date: " + formatdate(at_s, usegmt=True).encode()


@functools.cache
def _phrase(status: int) -> bytes:
    try:
        return http.HTTPStatus(status).phrase.encode()
    except ValueError:
        return b""
