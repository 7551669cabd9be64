"""What events and errors look like on the wire, by API: OpenAI's chat, its Responses, Anthropic's Messages."""

from collections.abc import Callable

import msgspec

from contracts import errors
from contracts.messages.base import Endpoint
from contracts.messages.frames import ErrorData

Json = dict[str, object]


class _Typed(msgspec.Struct):
    type: str


_type_of = msgspec.json.Decoder(_Typed).decode


class Wire(msgspec.Struct, frozen=True):
    """One API's forms."""

    event: Callable[[bytes | msgspec.Raw], bytes]
    """A chunk as a server-sent event."""
    done: bytes
    """What follows the last chunk of a whole answer."""
    error_body: Callable[[str, str, str | None, str], Json]
    """Of code, message, field and request id."""
    error_event: Callable[[ErrorData, str, int, int], bytes]
    """The last event of a stream that failed; of the error, request id, attempt and number of events before it."""


def _data_event(data: bytes | msgspec.Raw) -> bytes:
    return b"data: %b\n\n" % data


def _named_event(data: bytes | msgspec.Raw) -> bytes:
    """The event's name is the chunk's type, in both APIs that have names."""
    return b"event: %b\ndata: %b\n\n" % (_type_of(data).type.encode(), data)


def _openai_body(code: str, message: str, param: str | None, request_id: str) -> Json:
    return errors.body(code, message, param)


def _openai_error(error: ErrorData, request_id: str, attempt: int) -> Json:
    content = errors.body(error.code, error.message, error.param)
    content["error"] |= {"request_id": request_id, "attempt": attempt}  # type: ignore[operator]
    return content


def _chat_error(error: ErrorData, request_id: str, attempt: int, number: int) -> bytes:
    return _data_event(msgspec.json.encode(_openai_error(error, request_id, attempt)))


def _responses_error(error: ErrorData, request_id: str, attempt: int, number: int) -> bytes:
    """OpenAI's event, and the ``error`` object by which its SDKs raise: they only pass the event on."""
    event = {
        "type": "error",
        "code": error.code,
        "message": error.message,
        "param": error.param,
        "sequence_number": number,
        **_openai_error(error, request_id, attempt),
    }
    return _named_event(msgspec.json.encode(event))


_ANTHROPIC_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    504: "timeout_error",
    529: "overloaded_error",
}


def _anthropic_body(code: str, message: str, param: str | None, request_id: str) -> Json:
    status = errors.TABLE[code].status
    kind = _ANTHROPIC_TYPES.get(status, "api_error" if status >= 500 else "invalid_request_error")
    return {"type": "error", "error": {"type": kind, "message": message}, "request_id": request_id}


def _anthropic_error(error: ErrorData, request_id: str, attempt: int, number: int) -> bytes:
    return _named_event(msgspec.json.encode(_anthropic_body(error.code, error.message, error.param, request_id)))


CHAT = Wire(_data_event, b"data: [DONE]\n\n", _openai_body, _chat_error)
RESPONSES = Wire(_named_event, b"", _openai_body, _responses_error)
MESSAGES = Wire(_named_event, b"", _anthropic_body, _anthropic_error)


def of(endpoint: Endpoint) -> Wire:
    return {"responses": RESPONSES, "messages": MESSAGES}.get(endpoint, CHAT)


def of_path(path: str) -> Wire:
    """For answers that are given before, or without, knowing the endpoint."""
    return MESSAGES if path.startswith("/v1/messages") else CHAT
