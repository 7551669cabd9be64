"""A listener's HTTP API as an OpenAPI 3.1 document: FastAPI's of the typed routes, and the rows of the table of APIs.

What neither knows is added here: msgspec's schemas, the refusals of contracts.errors, and headers.
"""

import inspect
from collections.abc import Iterable
from functools import cache
from types import UnionType
from typing import Any, Union, get_args, get_origin

import msgspec
from fastapi import FastAPI, Response
from fastapi.openapi.utils import get_openapi
from starlette.routing import Route

from contracts import errors
from contracts.messages.admission import DEADLINE_MS_MAX
from contracts.messages.base import IDEMPOTENCY_KEY_MAX
from contracts.messages.records import PRICE_TIERS
from gateway.apis import rate_limit_headers
from gateway.apis.api import Api
from gateway.apis.response_format import OPENAI, ResponseFormat
from gateway.apis.table import APIS, format_of
from gateway.http.typed import TypedRoute, operation_id

VERSION = "1"
PUBLIC = "Service"
"""Tag of what needs no key."""

ALWAYS = (400, 408, 431, 500)
"""A request that is no HTTP, headers that are too slow or too large, a bug."""
BODY = (413, 415, 429, 529)
INFERENCE = (*BODY, 401, 403, 404, 409, 422, 499, 502, 503, 504)

Schema = dict[str, Any]

_DESCRIPTION = """
    Text from self-hosted language models, by OpenAI's and Anthropic's APIs. Nulls are as if absent; unknown fields are
    ignored, but by the administration, which refuses them. With `"stream": true` an answer is server-sent events: a
    failure before the first event is a plain error with its status, later it is the last event.
"""

_DEADLINE: Schema = {
    "in": "header",
    "name": "X-Headrace-Deadline-Ms",
    "schema": {"type": "integer", "minimum": 1, "maximum": DEADLINE_MS_MAX},
    "description": "Time to the first token that the caller accepts; without it the tenant's default holds.",
}
_CEILING: Schema = {
    "in": "header",
    "name": "X-Headrace-Price-Ceiling",
    "schema": {"enum": list(PRICE_TIERS)},
    "description": "Nothing of a dearer price tier answers; the tenant's own ceiling holds all the same.",
}
_PREFIX_CACHING: Schema = {
    "in": "header",
    "name": "X-Headrace-Prefix-Caching",
    "schema": {"enum": ["on", "off"]},
    "description": "`off`: nothing of this prompt is taken from a cache, kept for others, or used to choose a worker.",
}
_IDEMPOTENCY: Schema = {
    "in": "header",
    "name": "Idempotency-Key",
    "schema": {"type": "string", "minLength": 1, "maxLength": IDEMPOTENCY_KEY_MAX, "pattern": "^[ -~]+$"},
    "description": (
        "The caller's own name for the request, within its tenant and model. The same key with the same body joins the "
        "request that runs, or gives how it ended, and never runs it twice; kept for ten minutes after the end. The "
        "answer of an ended request can be had for a minute, then 409 says that it is gone. With another body: 422. A "
        "refused request does not use up its key. A caller who hangs up and does not ask again within ten seconds has "
        "cancelled."
    ),
}
_TEXT: Schema = {"type": "string"}
_HEADERS: Schema = {
    "x-request-id": {"schema": _TEXT, "description": "Our name of the request; say it when you ask about it."},
    "idempotent-replayed": {
        "schema": {"const": "true"},
        "description": "The answer is that of an earlier request with the same `Idempotency-Key`, whose id this is.",
    },
    "x-headrace-model": {
        "schema": _TEXT,
        "description": "The model that answers and its version, `name@version`; not there where an answer began before "
        "that was known.",
    },
    "x-headrace-choice": {
        "schema": _TEXT,
        "description": "Why that one answers, where an alias was named or a fallback answers.",
    },
    "x-client-request-id": {"schema": _TEXT, "description": "The caller's own `X-Request-Id`."},
    "retry-after": {
        "schema": {"type": "integer", "minimum": 1},
        "description": "Seconds after which a new try makes sense.",
    },
    "x-should-retry": {
        "schema": {"const": "false"},
        "description": "The same request, asked again, is not answered either; the official SDKs obey it.",
    },
    **{
        name: {"schema": schema, "description": text.format(kind=kind.replace("-", " "))}
        for names_by_kind, reset in (
            (rate_limit_headers.OPENAI, "Span after which it is whole again, such as `1m30s`."),
            (rate_limit_headers.ANTHROPIC, "Instant at which it is whole again, in RFC 3339."),
        )
        for kind, names in names_by_kind.items()
        for name, schema, text in zip(
            names,
            ({"type": "integer"}, {"type": "integer"}, _TEXT),
            ("The tenant's limit of {kind} a minute.", "What is left of it.", reset),
            strict=True,
        )
    },
}
_CHOICE = ["x-headrace-model", "x-headrace-choice"]
_SECURITY: Schema = {
    "bearer": {"type": "http", "scheme": "bearer", "description": "An API key, `hr_...`."},
    "apiKey": {"type": "apiKey", "in": "header", "name": "x-api-key", "description": "The same key."},
}


@cache
def document(app: FastAPI) -> Schema:
    """The whole document of an application, as JSON values."""
    routes = [route for route in app.routes if isinstance(route, TypedRoute)]
    served = {route.path for route in app.routes if isinstance(route, Route)}
    apis = [api for api in APIS.values() if api.path in served]
    made = get_openapi(
        title="Headrace",
        version=VERSION,
        description=inspect.cleandoc(_DESCRIPTION),
        license_info={"name": "Apache-2.0"},
        routes=routes,
    )
    paths: dict[str, Schema] = made["paths"]
    schemas = _Schemas(
        [
            OPENAI.error,
            *(kind for route in routes for kind in (route.body, route.answer)),
            *(kind for api in apis for kind in (api.body, api.answer, api.format.error)),
        ]
    )
    for route in routes:
        [method] = route.methods
        _complete(paths[route.path_format][method.lower()], route, schemas)
    inference = {api.path: {"post": _inference(api, schemas)} for api in apis}
    return made | {
        "paths": inference | paths,
        "security": [{name: []} for name in _SECURITY],
        "components": {"schemas": schemas.components, "headers": _HEADERS, "securitySchemes": _SECURITY},
    }


class _Schemas:
    """msgspec's schemas of all types at once, so that no two share a name."""

    def __init__(self, kinds: Iterable[Any]) -> None:
        every = [each for kind in kinds if _is_json(kind) for each in _either(kind)]
        types = list(dict.fromkeys(every))
        found, self.components = msgspec.json.schema_components(types, ref_template="#/components/schemas/{name}")
        self._found = dict(zip(types, found, strict=True))

    def content(self, kind: Any) -> Schema:
        found = [self._found[each] for each in _either(kind)]
        return {"application/json": {"schema": found[0] if len(found) == 1 else {"anyOf": found}}}


def _either(kind: Any) -> tuple[Any, ...]:
    """The forms that an answer may have."""
    return get_args(kind) if get_origin(kind) in (UnionType, Union) else (kind,)


def _is_json(kind: Any) -> bool:
    """Whether a route takes or gives ``kind`` as JSON."""
    return kind is not None and not (isinstance(kind, type) and issubclass(kind, Response))


def _complete(operation: Schema, route: TypedRoute, schemas: _Schemas) -> None:
    """What FastAPI has left open in an operation."""
    success = operation["responses"].pop(str(route.status_code or 200))
    stated = [int(status) for status in operation["responses"] if status != "422"]
    if PUBLIC not in route.tags:
        stated.append(429)  # too many failed logins
    if route.body is not None:
        stated += BODY
        operation["requestBody"] = {"required": True, "content": schemas.content(route.body)}
    content = success["content"]
    if _is_json(route.answer):
        others = {kind: each for kind, each in content.items() if kind != "application/json"}
        content = schemas.content(route.answer) | others
    operation["responses"] = {str(route.status_code or 200): _success(content)} | _refusals(
        route.path_format, stated, schemas
    )
    if PUBLIC in route.tags:
        operation["security"] = []


def _inference(api: Api, schemas: _Schemas) -> Schema:
    content = schemas.content(api.answer)
    if api.streams:
        content["text/event-stream"] = {"schema": _TEXT}
    return {
        "operationId": operation_id("post", api.path),
        "tags": ["Inference"],
        "summary": api.summary,
        "parameters": [_DEADLINE, _IDEMPOTENCY, _CEILING],
        "requestBody": {"required": True, "content": schemas.content(api.body)},
        "responses": {"200": _success(content, [*_CHOICE, "idempotent-replayed", *_limits(api.format)])}
        | _refusals(api.path, INFERENCE, schemas, _limits(api.format)),
    }


def _success(content: Schema, headers: Iterable[str] = ()) -> Schema:
    return {"description": "Done.", "headers": _headers("x-request-id", *headers), "content": content}


def _refusals(path: str, statuses: Iterable[int], schemas: _Schemas, limits: Iterable[str] = ()) -> Schema:
    """By status; ``limits`` are headers of what a caller is told whose key is known."""
    answers: Schema = {}
    for status in sorted({*ALWAYS, *statuses}):
        entries = {code: entry for code, entry in errors.TABLE.items() if entry.status == status}
        # What is refused before there is a request has no id, and OpenAI's form.
        names = [] if status in (400, 408, 431) else ["x-request-id"]
        if any(entry.retry_after for entry in entries.values()):
            names.append("retry-after")
        if not all(errors.may_mend(code) for code in entries):
            names.append("x-should-retry")
        if status not in (401, 408, 431):
            names += limits
        codes = " or ".join(f"`{code}`" for code in entries)
        answers[str(status)] = {
            "description": f"Code {codes}." if codes else "The request's headers are too large.",
            "headers": _headers(*names),
            "content": schemas.content((OPENAI if status == 431 else format_of(path)).error),
        }
    return answers


def _limits(format: ResponseFormat) -> list[str]:
    """Names of the rate limits' headers in an API's form."""
    names = (
        rate_limit_headers.ANTHROPIC
        if format.limit_headers is rate_limit_headers.anthropic
        else rate_limit_headers.OPENAI
    )
    return [name for of_kind in names.values() for name in of_kind]


def _headers(*names: str) -> Schema:
    return {name: {"$ref": f"#/components/headers/{name}"} for name in names}
