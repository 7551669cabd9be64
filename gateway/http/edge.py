"""The outermost application: CORS, one form of each path, and every failure as an error of contracts.errors.

Pure ASGI: nothing here stands between a streaming response and the caller's disconnect.
"""

from collections.abc import Mapping

import structlog
from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.routing import Match, Route
from starlette.types import ASGIApp, Receive, Scope, Send

from contracts.errors import HeadraceError
from gateway import metrics
from gateway.apis import rate_limit_headers
from gateway.http.caller import CallerLeft
from gateway.http.exchange import Exchange, Headers

_log = structlog.get_logger()

_RATE_LIMITS = [*rate_limit_headers.OPENAI.values(), *rate_limit_headers.ANTHROPIC.values()]
_EXPOSED = ", ".join(
    [
        "x-headrace-model, x-headrace-choice, x-request-id, x-client-request-id",
        "idempotent-replayed, retry-after, x-should-retry",
        *(name for names in _RATE_LIMITS for name in names),
    ]
).encode()
_PREFLIGHT_S = b"7200"
_HSTS = (b"strict-transport-security", b"max-age=31536000")
"""A year, as browsers' preload lists ask for."""


class Edge:
    """Outermost application: wraps each HTTP request in an Exchange, found as ``scope["headrace"]``.

    ``direct``: what is posted to these paths, which are routes of ``app``, too, goes past FastAPI, whose layers would
    keep 5 KB for each stream (measured).
    """

    def __init__(
        self, app: FastAPI, direct: Mapping[str, ASGIApp], *, cors_origins: tuple[str, ...], hsts: bool
    ) -> None:
        self._app = app
        self._direct = direct
        app.exception_handlers = {HTTPException: _leave_to_edge, Exception: _leave_to_edge}
        self._origins = {origin.encode() for origin in cors_origins}
        self._hsts = hsts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return  # No lifespan and no WebSockets here.
        exchange = scope["headrace"] = Exchange(scope, receive, send)
        _normalise_path(scope)
        if self._hsts:
            exchange.answer_headers.append(_HSTS)
        exchange.answer_headers += origin_headers(scope["headers"], self._origins)
        try:
            if self._origins and _is_preflight(scope):
                await self._preflight(exchange)
            else:
                if scope["method"] == "HEAD":
                    scope = {**scope, "method": "GET"}  # The server leaves the answer's body out.
                direct = self._direct.get(scope["path"]) if scope["method"] == "POST" else None
                await (direct or self._app)(scope, exchange.receive, exchange.send)
        except CallerLeft:
            pass
        except Exception as error:
            known, headers = self._known(error, scope)
            if not exchange.status:
                await exchange.fail(known, headers)
        finally:
            route = scope["path"] if scope["path"] in self._direct else getattr(scope.get("route"), "path", "other")
            metrics.http_requests(route, str(exchange.status or 499)).inc()

    def _known(self, error: Exception, scope: Scope) -> tuple[HeadraceError, Headers]:
        """What the application raised as an error of the table, and headers for it."""
        if isinstance(error, HeadraceError):
            return error, []
        if isinstance(error, RequestValidationError):
            first = error.errors()[0]
            name, reason = str(first["loc"][1]), first["msg"].removeprefix("Value error, ")
            return HeadraceError("invalid_request", f"'{name}': {reason}.", param=name), []
        if isinstance(error, HTTPException) and error.status_code == 404:
            return HeadraceError("not_found", f"There is nothing at {scope['path'][:200]!r}."), []
        if isinstance(error, HTTPException) and error.status_code == 405:
            # The router knows the methods of the path's first route alone.
            routes = [route for route in self._app.routes if isinstance(route, Route)]
            matching = [route for route in routes if route.matches(scope)[0] is not Match.NONE]
            methods = sorted({method for route in matching for method in route.methods or ()})
            known = HeadraceError("method_not_allowed", f"{scope['method']} is not allowed here.")
            return known, [(b"allow", ", ".join(methods).encode())]
        _log.error("unhandled", request_id=scope["headrace"].request_id, path=scope["path"], exc_info=error)
        return HeadraceError("internal_error", "Something went wrong inside the service."), []

    async def _preflight(self, exchange: Exchange) -> None:
        """A browser asks, without a key, whether a page may call."""
        given = dict(exchange.scope["headers"])
        headers: Headers = [
            (b"access-control-allow-methods", b"GET, POST, PATCH, DELETE, OPTIONS"),
            (b"access-control-max-age", _PREFLIGHT_S),
        ]
        if asked := given.get(b"access-control-request-headers"):
            headers.append((b"access-control-allow-headers", asked))
        await exchange.send({"type": "http.response.start", "status": 204, "headers": headers})
        await exchange.send({"type": "http.response.body"})


def origin_headers(given: Headers, origins: set[bytes]) -> Headers:
    """What lets the page of an origin that may call read the answer."""
    origin = dict(given).get(b"origin")
    if origin is None or not origins:
        return []
    if b"*" in origins:
        return [(b"access-control-allow-origin", b"*"), (b"access-control-expose-headers", _EXPOSED)]
    if origin not in origins:
        return []
    return [
        (b"vary", b"Origin"),
        (b"access-control-allow-origin", origin),
        (b"access-control-expose-headers", _EXPOSED),
    ]


async def _leave_to_edge(request: Request, error: Exception) -> Response:
    raise error


def _is_preflight(scope: Scope) -> bool:
    names = {name for name, _ in scope["headers"]}
    return scope["method"] == "OPTIONS" and {b"origin", b"access-control-request-method"} <= names


def _normalise_path(scope: Scope) -> None:
    """A trailing slash is as if absent: no redirect, which would lose the key or the scheme."""
    path = scope["path"]
    if len(path) > 1 and path.endswith("/") and not path.endswith("//"):
        scope["path"] = path[:-1]
