"""Between a job and vLLM's HTTP: the body that vLLM gets, what its errors mean, how each API's stream reads.

Nothing of vLLM is imported. A form that is not known raises: an event that nobody understands must not be lost.
"""

import re
from typing import Any, Literal

import msgspec

from contracts import template_variables
from contracts.errors import HeadraceError
from contracts.messages.base import Endpoint
from worker.engines.base import EngineFailure, Job
from worker.engines.vllm.asgi import UnknownForm

EventKind = Literal["chunk", "last", "done", "error"]
"""``last``: a chunk, and the answer is whole. ``done``: the same, and nothing to send."""


class StreamForm(msgspec.Struct, frozen=True, kw_only=True):
    """How one API's stream of server-sent events reads."""

    names: re.Pattern[bytes]
    """Of the events that are chunks; empty where events have no names."""
    last: bytes = b""
    """Name of the event that ends an answer; without one ``[DONE]`` does."""


_UNNAMED = StreamForm(names=re.compile(b""))

STREAM_FORMS: dict[Endpoint, StreamForm] = {
    "chat/completions": _UNNAMED,
    "completions": _UNNAMED,
    "responses": StreamForm(names=re.compile(rb"response\.[a-z_.]+"), last=b"response.completed"),
    "messages": StreamForm(names=re.compile(rb"(message|content_block)_(start|delta|stop)|ping"), last=b"message_stop"),
}
"""One row for each API that streams."""

_ERROR_NAMES = (b"error", b"response.failed")


def event_kind(endpoint: Endpoint, name: bytes, data: bytes) -> EventKind:
    """What an event of an API's stream is; raises UnknownForm for one that does not belong there."""
    form = STREAM_FORMS[endpoint]
    if name in _ERROR_NAMES or (not name and data.startswith(b'{"error"')):
        return "error"
    if data == b"[DONE]" and not name and not form.last:
        return "done"
    if not form.names.fullmatch(name):
        raise UnknownForm(f"an event named {name[:40].decode(errors='replace')!r} in the stream of {endpoint}")
    if not data.startswith(b"{") or not data.endswith(b"}"):
        raise UnknownForm(f"an event of {endpoint} that is no JSON object")
    return "last" if form.last and name == form.last else "chunk"


def request_body(job: Job, model: str) -> bytes:
    """The body for vLLM; values are passed on undecoded. Raises EngineFailure."""
    try:
        fields = msgspec.json.decode(job.body, type=dict[str, msgspec.Raw])
    except msgspec.MsgspecError as error:
        raise EngineFailure("invalid_request", f"the body is no JSON object: {error}", status=400) from error
    if bytes(fields.pop("simulate", b"null")) != b"null":
        raise EngineFailure(
            "invalid_request", "only the simulated engine takes this field", param="simulate", status=400
        )
    if template_variables.FIELD in fields:
        _check_template_variables(fields[template_variables.FIELD])
    ours: dict[str, Any] = {"model": model}
    if job.endpoint != "embeddings":
        ours["stream"] = job.stream
    if job.endpoint == "responses":
        ours["request_id"] = f"resp_{job.request_id}"  # the others take it from the header
    if job.cache_salt:
        ours["cache_salt"] = job.cache_salt
    return msgspec.json.encode(fields | ours)


def _check_template_variables(given: msgspec.Raw) -> None:
    """What the gateway lets through already: on a worker it would be a prompt of any size. Raises EngineFailure."""
    try:
        template_variables.check(msgspec.json.decode(given, type=dict[str, Any]))
    except (HeadraceError, msgspec.MsgspecError, RecursionError) as error:
        param = template_variables.FIELD
        raise EngineFailure("invalid_request", "this sets what no caller may", param=param, status=400) from error


def checked_answer(body: bytes) -> bytes:
    """A whole answer as it came; raises UnknownForm for anything but a JSON object."""
    if not body.startswith(b"{") or not body.rstrip().endswith(b"}"):
        raise UnknownForm("an answer that is no JSON object")
    return body


class _Error(msgspec.Struct, frozen=True):
    message: str = ""
    code: int | str | None = None
    param: str | None = None


class _ErrorBody(msgspec.Struct, frozen=True):
    error: _Error = _Error()


def failure_of(body: bytes, status: int) -> EngineFailure:
    """vLLM's error answer as a failure; a status of 0 is read from the body, as for an error inside a stream."""
    try:
        error = msgspec.json.decode(body, type=_ErrorBody).error
    except msgspec.MsgspecError:
        error = _Error(message="vLLM gave an error that is no JSON")
    status = status or (error.code if isinstance(error.code, int) else 500)
    if not 400 <= status < 500:
        return EngineFailure("engine_error", _without_input(error.message), status=status, retryable=status != 501)
    return refusal(error.message, error.param, status)


def refusal(message: str, param: str | None, status: int = 400) -> EngineFailure:
    """What vLLM finds wrong with a request."""
    too_long = re.search("maximum context length|(greater than|exceeds the) max_model_len", message)
    code = "context_length_exceeded" if too_long else "invalid_request"
    return EngineFailure(code, _without_input(message), param=param and param.removeprefix("body."), status=status)


def _without_input(message: str) -> str:
    """Messages go to logs and the ledger: what the caller sent stays out."""
    return re.sub(r", 'input': .*", "}", message)
