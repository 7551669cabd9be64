"""The FastAPI application: routes, and the OpenAI error body on whatever goes wrong."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import msgspec
from fastapi import FastAPI, Request, Response
from starlette.exceptions import HTTPException
from starlette.routing import Match, Route

from contracts.bus import Bus
from contracts.errors import HeadraceError
from contracts.messages.records import Manifest
from gateway.apis.table import APIS
from gateway.http import pages
from gateway.http.exchange import Edge, Exchange
from gateway.http.inference import Completions
from gateway.intake.auth import Directory, Identity
from gateway.intake.catalog import Catalog
from gateway.management.admin import Admin
from gateway.management.usage import PAGE_HEADERS, Usage

PAGE = Path(__file__).parent / "static" / "index.html"
_CODES = {404: "not_found", 405: "method_not_allowed"}


class Json(Response):
    media_type = "application/json"

    def render(self, content: object) -> bytes:
        return msgspec.json.encode(content)


def build(
    *,
    directory: Directory,
    catalog: Catalog,
    completions: Completions,
    admin: Admin,
    bus: Bus,
    not_ready: Callable[[], str],
    cors_origins: tuple[str, ...],
) -> Edge:
    """The whole HTTP application."""
    app = FastAPI(openapi_url=None, docs_url=None, redoc_url=None, redirect_slashes=False)
    handlers = _Pages(directory, catalog, not_ready)
    app.router.routes += [
        *(Route(api.path, partial(completions, api), methods=["POST"]) for api in APIS.values()),
        Route("/v1/messages/count_tokens", completions.count_tokens, methods=["POST"]),
        Route("/v1/models", handlers.models, methods=["GET"]),
        Route("/v1/models/{model:path}", handlers.model, methods=["GET"]),
        Route("/health/live", handlers.live, methods=["GET"]),
        Route("/health/ready", handlers.ready, methods=["GET"]),
        Route("/", handlers.index, methods=["GET"]),
        *admin.routes(),
        *Usage(directory, bus).routes(),
        *pages.routes(),
    ]
    app.add_exception_handler(HeadraceError, _on_error)
    app.add_exception_handler(HTTPException, _on_http_exception)
    app.add_exception_handler(Exception, _on_bug)
    return Edge(app, cors_origins=cors_origins)


class _Pages:
    """Everything but inference."""

    def __init__(self, directory: Directory, catalog: Catalog, not_ready: Callable[[], str]) -> None:
        self._directory = directory
        self._catalog = catalog
        self._not_ready = not_ready
        self._page = PAGE.read_bytes()

    def _caller(self, request: Request) -> Identity:
        return self._directory.authenticate(request.scope["headers"])

    async def index(self, request: Request) -> Response:
        return Response(self._page, media_type="text/html; charset=utf-8", headers=PAGE_HEADERS)

    async def live(self, request: Request) -> Response:
        return Json({"status": "ok"})

    async def ready(self, request: Request) -> Response:
        if reason := self._not_ready():
            raise HeadraceError("unavailable", f"Not ready: {reason}.", retry_after_s=1)
        return Json({"status": "ok"})

    async def models(self, request: Request) -> Response:
        manifests = self._catalog.visible(self._caller(request).tenant)
        return Json({"object": "list", "data": [_model(manifest) for manifest in manifests]})

    async def model(self, request: Request) -> Response:
        tenant = self._caller(request).tenant
        return Json(_model(self._catalog.resolve(request.path_params["model"], tenant).manifest))


def _model(manifest: Manifest) -> dict[str, object]:
    return {
        "id": manifest.name,
        "object": "model",
        "created": manifest.created_at_ms // 1000,
        "owned_by": "headrace",
        "max_model_len": manifest.context,
        "endpoints": manifest.endpoints,
    }


# Errors ----------------------------------------------------------------------------------------------------


class _Sent(Response):
    """Stands for an answer that the exchange has sent already."""

    async def __call__(self, *_: object) -> None:
        pass


async def _on_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HeadraceError)
    exchange: Exchange = request.scope["headrace"]
    await exchange.fail(error)
    return _Sent()


async def _on_http_exception(request: Request, error: Exception) -> Response:
    """The router's own refusals: no such path, no such method."""
    assert isinstance(error, HTTPException)
    exchange: Exchange = request.scope["headrace"]
    path, method = request.scope["path"][:200], request.scope["method"]
    known = HeadraceError(
        _CODES.get(error.status_code, "invalid_request"),
        f"{method} is not allowed here." if error.status_code == 405 else f"There is nothing at {path!r}.",
    )
    headers = [(b"allow", ", ".join(_allowed(request)).encode())] if error.status_code == 405 else []
    await exchange.fail(known, headers, status=error.status_code)
    return _Sent()


def _allowed(request: Request) -> list[str]:
    """Methods of the path; the router knows those of its first route alone."""
    routes = [route for route in request.app.router.routes if isinstance(route, Route)]
    methods = [route.methods or () for route in routes if route.matches(request.scope)[0] is not Match.NONE]
    return sorted({method for found in methods for method in found})


async def _on_bug(request: Request, error: Exception) -> Response:
    """Answers; the edge logs it, to whom it is raised once more."""
    exchange: Exchange = request.scope["headrace"]
    await exchange.fail(HeadraceError("internal_error", "Something went wrong inside the service."))
    return _Sent()
