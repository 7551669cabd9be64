"""How an API's events and errors look to its caller, and the form that chat, completions and embeddings share."""

from collections.abc import Callable
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from contracts import errors
from contracts.messages.admission import RateLimits
from contracts.messages.frames import ErrorData
from gateway.apis import rate_limit_headers

Json = dict[str, Any]


class _Typed(msgspec.Struct):
    type: str


_type_of = msgspec.json.Decoder(_Typed).decode


class ResponseFormat(msgspec.Struct, frozen=True, kw_only=True):
    """One API's forms."""

    event: Callable[[bytes | msgspec.Raw], bytes]
    """A chunk as a server-sent event."""
    done: bytes = b""
    """What follows the last chunk of a whole answer."""
    error_body: Callable[[str, str, str | None, str], Json]
    """Of code, message, field and request id."""
    error_event: Callable[[ErrorData, str, int, int], bytes]
    """The last event of a stream that failed; of the error, request id, attempt and number of events before it."""
    error: type[msgspec.Struct]
    """The error body, for the OpenAPI document."""
    limit_headers: Callable[[RateLimits, int], rate_limit_headers.Headers] = rate_limit_headers.openai
    """How the tenant's rate limits read at an instant (Unix ms)."""
    request_id_header: bytes = b""
    """The API's own name for ``x-request-id``, sent beside it."""


_LINE_ENDS = ((b"\xe2\x80\xa8", rb"\u2028"), (b"\xe2\x80\xa9", rb"\u2029"), (b"\xc2\x85", rb"\u0085"))


def one_line(data: bytes | msgspec.Raw) -> bytes:
    """JSON without what some languages take for the end of a line: their clients would cut it there.

    Outside ASCII there are three such characters, which stand in texts alone; others JSON always escapes.
    """
    data = bytes(data)
    if not data.isascii():
        for end, escaped in _LINE_ENDS:
            data = data.replace(end, escaped)
    return data


def data_event(data: bytes | msgspec.Raw) -> bytes:
    """OpenAI's plain event."""
    return b"data: %b\n\n" % one_line(data)


def named_event(data: bytes | msgspec.Raw) -> bytes:
    """The event's name is the chunk's ``type``."""
    return b"event: %b\ndata: %b\n\n" % (_type_of(data).type.encode(), one_line(data))


def openai_error_body(code: str, message: str, param: str | None, request_id: str) -> Json:
    """See ResponseFormat.error_body."""
    return errors.body(code, message, param)


def openai_error(error: ErrorData, request_id: str, attempt: int) -> Json:
    """An error inside a stream, whose headers are long gone: with the ids."""
    content: Json = errors.body(error.code, error.message, error.param)
    content["error"] |= {"request_id": request_id, "attempt": attempt}
    return content


def _error_event(error: ErrorData, request_id: str, attempt: int, number: int) -> bytes:
    return data_event(msgspec.json.encode(openai_error(error, request_id, attempt)))


class ErrorDetail(msgspec.Struct, forbid_unknown_fields=True):
    """Kind, words, field and code."""

    message: str
    type: Annotated[str, Meta(extra_json_schema={"enum": sorted({entry.type for entry in errors.TABLE.values()})})]
    param: Annotated[str | None, Meta(description="The field at fault.")]
    code: Annotated[str, Meta(extra_json_schema={"enum": sorted(errors.TABLE)})]


class Error(msgspec.Struct, forbid_unknown_fields=True):
    """OpenAI's error body."""

    error: ErrorDetail


OPENAI = ResponseFormat(
    event=data_event, done=b"data: [DONE]\n\n", error=Error, error_body=openai_error_body, error_event=_error_event
)
