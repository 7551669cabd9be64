"""One HTTP request and its answer: ids, the error body, and what becomes of a body that was not read.

Pure ASGI: nothing here stands between a streaming response and the caller's disconnect.
"""

import asyncio
import time

import msgspec
from starlette.types import Message, Receive, Scope, Send

from contracts import errors, ids
from contracts.errors import HeadraceError
from gateway import metrics
from gateway.apis.table import format_of_path

Headers = list[tuple[bytes, bytes]]

CLIENT_ID_CHARS_MAX = 128
LEFTOVER_BYTES_MAX = 1 << 20
"""An unread rest of a body up to this size is swallowed by the server and the connection lives on."""
LINGER_S = 2.0
LINGER_BYTES_MAX = 32 << 20
"""A larger rest is read for so long, so that the caller sees the answer before its connection breaks."""


class Exchange:
    """``receive`` and ``send`` are what the application is given."""

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.scope = scope
        self._receive = receive
        self._send = send
        self.request_id = ids.request_id()
        self.client_request_id = _client_request_id(scope["headers"])
        self.started_at = time.monotonic()
        self.status = 0
        """0 until the answer has begun."""
        self.body_read = False
        self.answer_headers: Headers = [(b"x-request-id", self.request_id.encode())]
        if self.client_request_id:
            self.answer_headers.append((b"x-client-request-id", self.client_request_id.encode()))
        self.format = format_of_path(scope["path"])
        if self.format.request_id_header:
            self.answer_headers.append((self.format.request_id_header, self.request_id.encode()))
        self._linger = False

    async def receive(self) -> Message:
        """The next part of the body, or the disconnect."""
        message = await self._receive()
        if message["type"] == "http.request" and not message.get("more_body", False):
            self.body_read = True
        return message

    async def send(self, message: Message) -> None:
        """Part of the answer; the first one gets our headers."""
        if message["type"] == "http.response.start":
            if self.status:
                return  # An error handler behind an answer that has begun.
            self.status = message["status"]
            headers = [*message.get("headers", ()), *self.answer_headers]
            if self._unread_bytes() > LEFTOVER_BYTES_MAX:
                self._linger = True
                headers.append((b"connection", b"close"))
            message = {**message, "headers": headers}
        elif self._linger and not message.get("more_body", False):
            await self._send({**message, "more_body": True})
            await self._read_rest()
            message = {"type": "http.response.body"}
        await self._send(message)

    @property
    def send_body(self) -> Send:
        """Sends further parts of an answer that has begun, past all layers: streams send thousands of them."""
        return self._send

    async def respond(self, status: int, body: bytes, content_type: bytes, headers: Headers | None = None) -> None:
        """A whole answer."""
        await self.send(
            {
                "type": "http.response.start",
                "status": status,
                "headers": [
                    (b"content-type", content_type),
                    (b"content-length", str(len(body)).encode()),
                    *(headers or ()),
                ],
            }
        )
        await self.send({"type": "http.response.body", "body": body})

    async def fail(self, error: HeadraceError, headers: Headers | None = None, *, status: int = 0) -> None:
        """Answer with the API's error body; ``status`` when it is not the code's own."""
        metrics.ERRORS.labels(error.code).inc()
        body = msgspec.json.encode(self.format.error_body(error.code, error.message, error.param, self.request_id))
        extra = list(headers or ())
        if errors.TABLE[error.code].retry_after:
            extra.append((b"retry-after", str(max(1, error.retry_after_s or 1)).encode()))
        if error.code == "invalid_api_key":
            extra.append((b"www-authenticate", b"Bearer"))
        if error.code == "shutting_down":
            extra.append((b"connection", b"close"))
        await self.respond(status or error.status, body, b"application/json", extra)

    def _unread_bytes(self) -> int:
        """Of the body, as far as can be said; unbounded for a chunked one."""
        if self.body_read:
            return 0
        given = dict(self.scope["headers"])
        if b"transfer-encoding" in given:
            return LEFTOVER_BYTES_MAX + 1
        length = given.get(b"content-length", b"0")
        return int(length) if length.isdigit() else 0

    async def _read_rest(self) -> None:
        size = 0
        try:
            async with asyncio.timeout(LINGER_S):
                while not self.body_read and size < LINGER_BYTES_MAX:
                    message = await self.receive()
                    if message["type"] == "http.disconnect":
                        return
                    size += len(message.get("body", b""))
        except TimeoutError:
            pass


def _client_request_id(headers: Headers) -> str:
    """The caller's own id, when it is fit to be echoed and recorded."""
    for name, value in headers:
        if name == b"x-request-id":
            value = value.strip()  # The parser leaves white space that stands behind a value.
            if 0 < len(value) <= CLIENT_ID_CHARS_MAX and all(0x20 < byte < 0x7F for byte in value):
                return value.decode("ascii")
    return ""
