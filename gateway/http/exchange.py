"""One HTTP request and its answer: ids and the error body.

Pure ASGI: nothing here stands between a streaming response and the caller's disconnect.
"""

import time
from collections.abc import Callable

import msgspec
from starlette.types import Message, Receive, Scope, Send

from contracts import errors, ids
from contracts.clock import now_ms
from contracts.errors import HeadraceError
from contracts.messages.admission import RateLimits
from contracts.traceparent import checked
from gateway import metrics
from gateway.apis.response_format import one_line
from gateway.apis.table import format_of
from gateway.streams.stream import Writer

Headers = list[tuple[bytes, bytes]]

CLIENT_ID_CHARS_MAX = 128


class Exchange:
    """``receive`` and ``send`` are what the application is given."""

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.scope = scope
        self.receive = receive
        """The next part of the body, or the disconnect."""
        self._send = send
        self.request_id = ids.request_id()
        self.client_request_id = _client_request_id(scope["headers"])
        self.traceparent = next(
            (checked(value.decode("latin-1")) for name, value in scope["headers"] if name == b"traceparent"), ""
        )
        """The caller's, for tracing; empty when it gave none."""
        self.address: str = (scope.get("client") or ("", 0))[0]
        """The caller's IP address."""
        self.started_at = time.monotonic()
        self.upload_s = 0.0
        """How long the body was waited for."""
        self.tenant = ""
        """The caller's, once it is known."""
        self.rate_limits: Callable[[], RateLimits] | None = None
        """Gives the limits that the answer's headers tell of; None for a caller that is not known, or has none."""
        self.status = 0
        """0 until the answer has begun."""
        self.answer_headers: Headers = [(b"x-request-id", self.request_id.encode())]
        if self.client_request_id:
            self.answer_headers.append((b"x-client-request-id", self.client_request_id.encode()))
        self.format = format_of(scope["path"], scope["headers"])
        if self.format.request_id_header:
            self.answer_headers.append((self.format.request_id_header, self.request_id.encode()))

    def answer_as(self, request_id: str) -> None:
        """The answer is that of another request, which this one joined."""
        ours, self.request_id = self.request_id.encode(), request_id
        self.answer_headers = [
            (name, request_id.encode() if value == ours else value) for name, value in self.answer_headers
        ]
        self.answer_headers.append((b"idempotent-replayed", b"true"))

    async def send(self, message: Message) -> None:
        """Part of the answer; the first one gets our headers."""
        if message["type"] == "http.response.start":
            if self.status:
                return  # An error handler behind an answer that has begun.
            self.status = message["status"]
            limits = () if self.rate_limits is None else self.format.limit_headers(self.rate_limits(), now_ms())
            message = {**message, "headers": [*message.get("headers", ()), *self.answer_headers, *limits]}
        await self._send(message)

    @property
    def writer(self) -> Writer:
        """Takes further parts of an answer that has begun, past all layers: streams have thousands of them."""
        writer: Writer = self.scope["extensions"]["headrace.writer"]
        return writer

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
        content = self.format.error_body(error.code, error.message, error.param, self.request_id)
        body = one_line(msgspec.json.encode(content))
        extra = list(headers or ())
        if errors.TABLE[error.code].retry_after and error.retry_after_s is not None:
            extra.append((b"retry-after", str(max(1, error.retry_after_s)).encode()))
        if not errors.may_mend(error.code, status):
            extra.append((b"x-should-retry", b"false"))
        if error.code == "invalid_api_key":
            extra.append((b"www-authenticate", b"Bearer"))
        if error.code == "shutting_down":
            extra.append((b"connection", b"close"))
        await self.respond(status or error.status, body, b"application/json", extra)


def _client_request_id(headers: Headers) -> str:
    """The caller's own id, when it is fit to be echoed and recorded."""
    given = next((value for name, value in headers if name == b"x-request-id"), b"")
    fit = len(given) <= CLIENT_ID_CHARS_MAX and all(0x20 < byte < 0x7F for byte in given)
    return given.decode("ascii") if fit else ""
