"""The HTTP API as an OpenAPI 3.1 document, made from the structs that check requests and the table of errors.

Pure. The table of operations is the one thing written by hand; tests hold it against the routes, and every status that
a running stack gives against it.
"""

import inspect
from collections.abc import Sequence
from functools import cache
from typing import Any, get_args

import msgspec

from contracts import errors
from contracts.messages.admission import DEADLINE_MS_MAX
from contracts.messages.usage import LatencyDimension, UsageDimension
from gateway.apis import messages
from gateway.apis.api import Api
from gateway.apis.table import APIS
from gateway.management import admin, usage

VERSION = "1"

ALWAYS = (400, 408, 431, 500)
"""A request that is no HTTP, headers that are too slow or too large, a bug."""
BODY = (400, 408, 413, 415)
INFERENCE = (*BODY, 401, 404, 429, 499, 502, 503, 504, 529)
ADMIN = (401, 403, 503)

Schema = dict[str, Any]


class Operation(msgspec.Struct, frozen=True, kw_only=True):
    method: str
    path: str
    tag: str
    summary: str
    body: type[msgspec.Struct] | None = None
    parameters: Sequence[Schema] = ()
    statuses: Sequence[int] = ()
    """Of refusals, beside ALWAYS."""
    success: int = 200
    answer: Schema = msgspec.field(default_factory=lambda: {"type": "object"})
    content_type: str = "application/json"
    streams: bool = False
    """Whether the answer may also be server-sent events."""
    public: bool = False

    @property
    def name(self) -> str:
        words = [part.strip("{}") for part in self.path.split("/") if part]
        return "_".join([self.method, *(words or ["page"])]).replace(".", "_")


def _parameter(where: str, name: str, schema: Schema, description: str, *, required: bool = False) -> Schema:
    return {"in": where, "name": name, "schema": schema, "description": description, "required": required}


_TEXT: Schema = {"type": "string"}
_NAME: Schema = {"type": "string", "minLength": 1}


def _in_path(name: str, description: str) -> Schema:
    return _parameter("path", name, _NAME, description, required=True)


def _list_of(item: Schema) -> Schema:
    properties: Schema = {"object": {"const": "list"}, "data": {"type": "array", "items": item}}
    return {"type": "object", "properties": properties, "required": ["object", "data"]}


_DEADLINE = _parameter(
    "header",
    "X-Headrace-Deadline-Ms",
    {"type": "integer", "minimum": 1, "maximum": DEADLINE_MS_MAX},
    "Time to the first token that the caller accepts; without it the tenant's default holds.",
)
_OBJECT: Schema = {"type": "object"}
_MODEL: Schema = {
    "type": "object",
    "properties": {
        "id": _TEXT,
        "object": {"const": "model"},
        "created": {"type": "integer"},
        "owned_by": _TEXT,
        "max_model_len": {"type": "integer", "description": "Longest prompt and answer together, in tokens."},
    },
    "required": ["id", "object", "created", "owned_by", "max_model_len"],
}
_COUNT: Schema = {"type": "object", "properties": {"input_tokens": {"type": "integer"}}, "required": ["input_tokens"]}


def _range(dimensions: Any, default: str) -> list[Schema]:
    names = get_args(dimensions)
    by = {"type": "array", "items": {"enum": list(names)}}
    instant = "An instant or a day, such as `2026-11-29T12:00:00Z` or `2026-11-29`; UTC without an offset."
    return [
        _parameter("query", "by", by, f"What rows are summed by, also separated by commas; default {default}."),
        _parameter("query", "from", _TEXT, f"First instant; default: start of the UTC month. {instant}"),
        _parameter("query", "to", _TEXT, f"First instant that is left out; default: end of the month. {instant}"),
        _parameter(
            "query", "limit", {"type": "integer", "minimum": 1, "maximum": usage.LIMIT_MAX}, "Rows of the answer."
        ),
        _parameter("query", "after", {"type": "integer", "minimum": 0}, "`next` of the answer before."),
    ]


def _usage(prefix: str, tag: str, statuses: Sequence[int], more: Sequence[Schema]) -> list[Operation]:
    return [
        Operation(
            method="get",
            path=f"{prefix}/usage{path}",
            tag=tag,
            summary=summary,
            parameters=[*_range(dimensions, default), *more],
            statuses=(*statuses, 503),
            answer=_list_of(_OBJECT),
        )
        for path, summary, dimensions, default in (
            ("", "What was used and what it costs", UsageDimension, "day,model,version"),
            ("/latency", "How long requests took: quantiles of each span", LatencyDimension, "model"),
        )
    ]


def _inference(api: Api) -> Operation:
    return Operation(
        method="post",
        path=api.path,
        tag="Inference",
        summary=api.summary,
        body=api.body,
        parameters=[_DEADLINE],
        statuses=INFERENCE,
        answer=_OBJECT,
        streams=api.streams,
    )


def _public(path: str, summary: str, **fields: Any) -> Operation:
    return Operation(method="get", path=path, tag="Service", summary=summary, public=True, **fields)


def _page(path: str, summary: str) -> Operation:
    return _public(path, summary, answer=_TEXT, content_type="text/html; charset=utf-8")


def _admin(method: str, path: str, summary: str, **fields: Any) -> Operation:
    statuses = (*ADMIN, *fields.pop("statuses", ()), *(BODY if "body" in fields else ()))
    return Operation(
        method=method, path=f"/admin/v1/{path}", tag="Administration", summary=summary, statuses=statuses, **fields
    )


_STATUS: Schema = {"type": "object", "properties": {"status": {"const": "ok"}}, "required": ["status"]}
_TENANT = _in_path("name", "The tenant's name.")

OPERATIONS: tuple[Operation, ...] = (
    *map(_inference, APIS.values()),
    Operation(
        method="post",
        path="/v1/messages/count_tokens",
        tag="Inference",
        summary="Anthropic: input tokens of a message; nothing is charged",
        body=messages.CountBody,
        statuses=(*BODY, 401, 404, 503),
        answer=_COUNT,
    ),
    Operation(
        method="get",
        path="/v1/models",
        tag="Inference",
        summary="Models that the caller may use",
        statuses=(401,),
        answer=_list_of(_MODEL),
    ),
    Operation(
        method="get",
        path="/v1/models/{model}",
        tag="Inference",
        summary="One model",
        parameters=[_in_path("model", "Its name, which may hold slashes.")],
        statuses=(401, 404),
        answer=_MODEL,
    ),
    *_usage("/v1", "Usage", (401,), ()),
    *_usage(
        "/admin/v1", "Administration", (401, 403), [_parameter("query", "tenant", _NAME, "Only this tenant's usage.")]
    ),
    _admin("get", "tenants", "All tenants", answer=_list_of(_OBJECT)),
    _admin("post", "tenants", "Make a tenant", body=admin.NewTenant, statuses=(409,), success=201),
    _admin("get", "tenants/{name}", "One tenant", parameters=[_TENANT], statuses=(404,)),
    _admin(
        "patch",
        "tenants/{name}",
        "Change a tenant; seen by every service within a second",
        parameters=[_TENANT],
        body=admin.TenantChange,
        statuses=(404, 409),
    ),
    _admin("get", "keys", "All API keys, without their secrets", answer=_list_of(_OBJECT)),
    _admin(
        "post",
        "keys",
        "Make an API key; its secret is in this answer and nowhere else",
        body=admin.NewKeyRequest,
        statuses=(404,),
        success=201,
    ),
    _admin(
        "delete",
        "keys/{id}",
        "Revoke an API key everywhere, within a second",
        parameters=[_in_path("id", "The key's id.")],
        statuses=(404,),
    ),
    _admin("get", "models", "All models and the bounds of their queues", answer=_list_of(_OBJECT)),
    _admin(
        "patch",
        "models/{model}/limits",
        "Change the bounds of a model's queue, or its fallbacks",
        parameters=[_in_path("model", "The model's name.")],
        body=admin.ModelChange,
        statuses=(404, 409),
    ),
    _admin("get", "queues", "Live queues of every model", answer=_list_of(_OBJECT)),
    _public("/health/live", "The process lives", answer=_STATUS),
    _public("/health/ready", "A request would be served", answer=_STATUS, statuses=(503,)),
    _page("/", "A page to chat on"),
    _page("/usage", "A page about usage"),
    _page("/docs", "This document, readable"),
    _public("/openapi.json", "This document"),
    _page("/asyncapi", "The bus, readable"),
    _public("/asyncapi.json", "The bus as an AsyncAPI document"),
)


@cache
def document() -> Schema:
    """The whole document, as JSON values."""
    schemas = _Schemas()
    paths: dict[str, Schema] = {}
    for operation in OPERATIONS:
        paths.setdefault(operation.path, {})[operation.method] = _operation(operation, schemas)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Headrace",
            "version": VERSION,
            "description": inspect.cleandoc(_DESCRIPTION),
            "license": {"name": "Apache-2.0"},
        },
        "security": [{"bearer": []}, {"apiKey": []}],
        "paths": paths,
        "components": {
            "schemas": {"Error": _ERROR, "AnthropicError": _ANTHROPIC_ERROR, **schemas.found},
            "headers": _HEADERS,
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer", "description": "An API key, `hr_...`."},
                "apiKey": {"type": "apiKey", "in": "header", "name": "x-api-key", "description": "The same key."},
            },
        },
    }


_DESCRIPTION = """
    Text from self-hosted language models, by OpenAI's and Anthropic's APIs. Nulls are as if absent; unknown fields are
    ignored, but by the administration, which refuses them. With `"stream": true` an answer is server-sent events: a
    failure before the first event is a plain error with its status, later it is the last event.
"""

_ERROR: Schema = {
    "type": "object",
    "properties": {
        "error": {
            "type": "object",
            "properties": {
                "message": _TEXT,
                "type": {"enum": sorted({entry.type for entry in errors.TABLE.values()})},
                "param": {"type": ["string", "null"], "description": "The field at fault."},
                "code": {"enum": sorted(errors.TABLE)},
            },
            "required": ["message", "type", "param", "code"],
            "additionalProperties": False,
        }
    },
    "required": ["error"],
    "additionalProperties": False,
}

_ANTHROPIC_ERROR: Schema = {
    "type": "object",
    "properties": {
        "type": {"const": "error"},
        "error": {
            "type": "object",
            "properties": {"type": _TEXT, "message": _TEXT},
            "required": ["type", "message"],
        },
        "request_id": _TEXT,
    },
    "required": ["type", "error"],
}

_HEADERS: Schema = {
    "x-request-id": {"schema": _TEXT, "description": "Our name of the request; say it when you ask about it."},
    "x-client-request-id": {"schema": _TEXT, "description": "The caller's own `X-Request-Id`."},
    "retry-after": {
        "schema": {"type": "integer", "minimum": 1},
        "description": "Seconds after which a new try makes sense.",
    },
    **{
        f"x-ratelimit-{what}-{kind}": {"schema": schema, "description": text}
        for kind in ("requests", "tokens")
        for what, schema, text in (
            ("limit", {"type": "integer"}, f"The tenant's limit of {kind} a minute."),
            ("remaining", {"type": "integer"}, "What is left of it."),
            ("reset", _TEXT, "Span after which it is whole again, such as `1m30s`."),
        )
    },
}
_RATE_LIMITS = [name for name in _HEADERS if name.startswith("x-ratelimit")]


class _Schemas:
    """Components of all operations. Modules name their structs alike, so each family has a prefix of its own."""

    def __init__(self) -> None:
        self.found: Schema = {}

    def of(self, kind: type[msgspec.Struct]) -> Schema:
        """A reference to the schema of ``kind``."""
        family = kind.__module__.rpartition(".")[2].capitalize()
        [root], components = msgspec.json.schema_components(
            [kind], ref_template=f"#/components/schemas/{family}.{{name}}"
        )
        for name, schema in components.items():
            self.found[f"{family}.{name.lstrip('_')}"] = _renamed(schema)
        return dict(_renamed(root))


def _renamed(schema: Any) -> Any:
    """Without the underscores by which modules mark their structs as their own."""
    if isinstance(schema, dict):
        return {
            name: value.replace("._", ".")
            if name == "$ref"
            else value.lstrip("_")
            if name == "title"
            else _renamed(value)
            for name, value in schema.items()
        }
    return [_renamed(item) for item in schema] if isinstance(schema, list) else schema


def _operation(operation: Operation, schemas: _Schemas) -> Schema:
    described: Schema = {
        "operationId": operation.name,
        "tags": [operation.tag],
        "summary": operation.summary,
        "responses": {str(operation.success): _success(operation)},
    }
    for status in sorted({*ALWAYS, *operation.statuses}):
        described["responses"][str(status)] = _failure(operation, status)
    if operation.parameters:
        described["parameters"] = list(operation.parameters)
    if operation.body is not None:
        content = {"application/json": {"schema": schemas.of(operation.body)}}
        described["requestBody"] = {"required": True, "content": content}
    if operation.public:
        described["security"] = []
    return described


def _success(operation: Operation) -> Schema:
    content: Schema = {operation.content_type: {"schema": operation.answer}}
    if operation.streams:
        content["text/event-stream"] = {"schema": _TEXT}
    limits = _RATE_LIMITS if operation.statuses is INFERENCE else ()
    return {"description": "Done.", "headers": _headers("x-request-id", *limits), "content": content}


def _failure(operation: Operation, status: int) -> Schema:
    entries = {code: entry for code, entry in errors.TABLE.items() if entry.status == status}
    named = "Anthropic" if operation.path.startswith("/v1/messages") else ""
    if status == 431:
        return {"description": "The request's headers are too large.", "content": _error("")}
    # What is refused before there is a request has no id.
    names = [] if status in (400, 408) else ["x-request-id"]
    if any(entry.retry_after for entry in entries.values()):
        names.append("retry-after")
    if operation.statuses is INFERENCE and status in (429, 529):
        names += _RATE_LIMITS
    described = f"Code {' or '.join(f'`{code}`' for code in entries)}."
    return {"description": described, "headers": _headers(*names), "content": _error(named)}


def _error(kind: str) -> Schema:
    schema: Schema = {"$ref": f"#/components/schemas/{kind}Error"}
    return {"application/json": {"schema": schema}}


def _headers(*names: str) -> Schema:
    return {name: {"$ref": f"#/components/headers/{name}"} for name in names}
