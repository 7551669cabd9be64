"""Between a job and vLLM's HTTP: the body that vLLM gets, what its errors mean, how each API's stream reads.

Nothing of vLLM is imported. A form that is not known raises: an event that nobody understands must not be lost.
"""

import re
from typing import Any, Literal

import msgspec

from contracts import template_variables
from contracts.errors import HeadraceError
from contracts.messages.base import Endpoint
from worker.engines.base import Counts, EngineFailure, Job
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


class VllmRequest(msgspec.Struct, frozen=True):
    """A job as vLLM gets it, and what is done here beside it."""

    body: bytes
    usage_on_chunks: bool
    """Each chunk tells the usage so far: over all choices and prompts, where vLLM has it by choice."""
    only_scores: bool
    """The caller wants its prompt back and no token more; vLLM makes one all the same."""


def vllm_request(job: Job, model: str) -> VllmRequest:
    """Values are passed on undecoded. Raises EngineFailure."""
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
    options = _json_object(fields.get("stream_options"))
    usage_on_chunks = options.pop("continuous_usage_stats", None) is True
    if usage_on_chunks:
        ours["stream_options"] = options
    only_scores = job.endpoint == "completions" and bytes(fields.get("max_tokens", b"")) == b"0"
    return VllmRequest(msgspec.json.encode(fields | ours), usage_on_chunks, only_scores)


def with_usage(chunk: bytes, counts: Counts) -> bytes:
    """The chunk of a stream with the usage so far; the one that tells the final usage has it already."""
    if b'"choices":[]' in chunk:  # In a text its quotes would be escaped.
        return chunk
    return b'%b,"usage":%b}' % (chunk[:-1], msgspec.json.encode(counts.usage()))


def with_own_id(data: bytes, job: Job) -> bytes:
    """An answer by Anthropic's API, or its first event, with an id of that API; vLLM gives it chat's."""
    if job.endpoint != "messages" or b'"id":"chatcmpl-' not in data:
        return data
    request_id = job.request_id.encode()
    return data.replace(b'"id":"chatcmpl-%b"' % request_id, b'"id":"msg_%b"' % request_id, 1)


def _json_object(given: msgspec.Raw | None) -> dict[str, Any]:
    found = msgspec.json.decode(given) if given is not None else None
    return found if isinstance(found, dict) else {}


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


def failure_of(body: bytes, status: int, request_id: str) -> EngineFailure:
    """vLLM's error answer as a failure; a status of 0 is read from the body, as for an error inside a stream."""
    try:
        error = msgspec.json.decode(body, type=_ErrorBody).error
    except msgspec.MsgspecError:
        error = _Error()
    status = status or (error.code if isinstance(error.code, int) else 500)
    if not 400 <= status < 500:
        return failed(request_id, status)
    return refusal(error.message, error.param, request_id, status)


def failed(request_id: str, status: int = 500) -> EngineFailure:
    """What went wrong inside vLLM, of which nothing is told: its words name paths, addresses and prompts."""
    text = f"The engine failed (request {request_id})."
    return EngineFailure("engine_error", text, status=status, retryable=status != 501)


_KNOWN: tuple[tuple[re.Pattern[str], str, str], ...] = (
    (
        re.compile(r"(?:context length is |context length \(|max_model_len\D{0,40}?)(\d+)"),
        "context_length_exceeded",
        "This model's maximum context length is {} tokens, and the request is longer.",
    ),
    (
        re.compile(r"features not supported by xgrammar"),
        "invalid_request",
        "The JSON schema uses keywords that the engine cannot hold an answer to.",
    ),
    (re.compile(r"'type': '([a-z_]{1,40})'"), "invalid_request", "The engine finds a value of the wrong form: {}."),
)
"""vLLM's words, our code, and ours. Its own are never passed on: they repeat prompts, patterns and paths, and a message
goes to the caller, to logs and to the ledger."""
_FIELD = re.compile(r"(?:body\.)?([a-z_]{1,64})")


def refusal(message: str, param: str | None, request_id: str, status: int = 400) -> EngineFailure:
    """What vLLM finds wrong with a request: in our words, with the body's field."""
    field = _FIELD.match(param or "")
    for words, code, text in _KNOWN:
        if found := words.search(message):
            return EngineFailure(code, text.format(*found.groups()), param=field and field[1], status=status)
    text = f"The engine refuses this request as it is (request {request_id})."
    return EngineFailure("invalid_request", text, param=field and field[1], status=status)


_CONSTRAINTS = ("structured_outputs", "response_format", "text", "output_config", "tools")
"""Fields that constrain an answer, the more specific first."""


def constraint_refusal(job: Job, kind: str, outcome: str) -> EngineFailure:
    """A constraint that could not be compiled, by the field of the body that it is from. Repeats nothing of it."""
    fields = msgspec.json.decode(job.body, type=dict[str, msgspec.Raw])
    field = next((name for name in _CONSTRAINTS if name in fields), None)
    what = f"{field}: This constraint ({kind.replace('_', ' ')})" if field else "This constraint"
    if outcome == "invalid":
        message = f"{what} is not valid, or uses what the engine does not know."
    else:
        message = f"{what} takes too long or too much memory to compile: give it fewer counted repetitions and parts."
    return EngineFailure("invalid_request", message, param=field, status=400)
