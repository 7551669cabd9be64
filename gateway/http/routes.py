"""The FastAPI application: its routes, and the API's own error body on whatever goes wrong."""

from collections.abc import Iterable
from functools import partial
from typing import Annotated, Any, Literal

import msgspec
from fastapi import APIRouter, Depends, FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.routing import Match, Route

from contracts.errors import HeadraceError
from contracts.messages.base import Endpoint
from contracts.messages.records import Manifest
from gateway.apis import messages
from gateway.apis.table import APIS
from gateway.http import openapi, pages
from gateway.http.body import CallerLeft
from gateway.http.exchange import Edge, Exchange
from gateway.http.inference import Inference
from gateway.http.typed import BodyReader, Caller, Gateway, Listed, Name, Services, TypedRoute, refusals


def build(services: Services, inference: Inference, routers: Iterable[APIRouter]) -> Edge:
    """The whole HTTP application; ``routers`` have what is beside inference and health."""
    app = FastAPI(openapi_url=None, docs_url=None, redoc_url=None, redirect_slashes=False)
    app.state.services = services
    app.router.routes += [Route(api.path, partial(inference, api), methods=["POST"]) for api in APIS.values()]
    for router in (models, health, pages.router, *routers):
        app.include_router(router)
    app.add_exception_handler(HeadraceError, _on_error)
    app.add_exception_handler(RequestValidationError, _on_invalid_parameter)
    app.add_exception_handler(HTTPException, _on_http_exception)
    app.add_exception_handler(CallerLeft, _on_caller_left)
    app.add_exception_handler(Exception, _on_bug)
    return Edge(app, cors_origins=services.config.cors_origins)


# Models ----------------------------------------------------------------------------------------------------


class Model(msgspec.Struct, kw_only=True):
    """A model as OpenAI lists it."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "headrace"
    max_model_len: int
    """Longest prompt and answer together, in tokens."""
    endpoints: tuple[Endpoint, ...]

    @classmethod
    def of(cls, manifest: Manifest) -> "Model":
        return cls(
            id=manifest.name,
            created=manifest.created_at_ms // 1000,
            max_model_len=manifest.context,
            endpoints=manifest.endpoints,
        )


class TokenCount(msgspec.Struct):
    input_tokens: int


models = APIRouter(prefix="/v1", tags=["Inference"], route_class=TypedRoute, responses=refusals(401))


@models.get("/models", summary="Models that the caller may use")
async def visible_models(gateway: Gateway, caller: Caller) -> Listed[Model]:
    return Listed([Model.of(manifest) for manifest in gateway.catalog.visible(caller.tenant)])


@models.get("/models/{model:path}", summary="One model, whose name may hold slashes", responses=refusals(404))
async def one_model(gateway: Gateway, caller: Caller, model: Name) -> Model:
    return Model.of(gateway.catalog.resolve(model, caller.tenant).manifest)


@models.post(
    "/messages/count_tokens",
    summary="Anthropic: input tokens of a message; nothing is charged",
    responses=refusals(404, 503),
)
async def count_tokens(
    gateway: Gateway, caller: Caller, body: Annotated[bytes, Depends(BodyReader(messages.CountBody, raw=True))]
) -> TokenCount:
    return TokenCount(await gateway.admission.count(messages.COUNT, caller.tenant, body))


# Health ----------------------------------------------------------------------------------------------------


class Health(msgspec.Struct):
    status: Literal["ok"] = "ok"


health = APIRouter(prefix="/health", tags=[openapi.PUBLIC], route_class=TypedRoute)


@health.get("/live", summary="The process lives")
async def live() -> Health:
    return Health()


@health.get("/ready", summary="A request would be served", responses=refusals(503))
async def ready(gateway: Gateway) -> Health:
    if reason := gateway.not_ready():
        raise HeadraceError("unavailable", f"Not ready: {reason}.", retry_after_s=1)
    return Health()


# Errors ----------------------------------------------------------------------------------------------------

_CODES = {404: "not_found", 405: "method_not_allowed"}


class _Sent(Response):
    """Stands for an answer that the exchange has sent already."""

    async def __call__(self, *_: object) -> None:
        pass


async def _failed(request: Request, error: HeadraceError, **options: Any) -> Response:
    exchange: Exchange = request.scope["headrace"]
    await exchange.fail(error, **options)
    return _Sent()


async def _on_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HeadraceError)
    return await _failed(request, error)


async def _on_invalid_parameter(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    name = str(first["loc"][1])
    reason = first["msg"].removeprefix("Value error, ")
    return await _failed(request, HeadraceError("invalid_request", f"'{name}': {reason}.", param=name))


async def _on_http_exception(request: Request, error: Exception) -> Response:
    """The router's own refusals: no such path, no such method."""
    assert isinstance(error, HTTPException)
    path, method = request.scope["path"][:200], request.scope["method"]
    known = HeadraceError(
        _CODES.get(error.status_code, "invalid_request"),
        f"{method} is not allowed here." if error.status_code == 405 else f"There is nothing at {path!r}.",
    )
    headers = [(b"allow", ", ".join(_allowed(request)).encode())] if error.status_code == 405 else []
    return await _failed(request, known, headers=headers, status=error.status_code)


def _allowed(request: Request) -> list[str]:
    """Methods of the path; the router knows those of its first route alone."""
    routes = [route for route in request.app.router.routes if isinstance(route, Route)]
    methods = [route.methods or () for route in routes if route.matches(request.scope)[0] is not Match.NONE]
    return sorted({method for found in methods for method in found})


async def _on_caller_left(request: Request, error: Exception) -> Response:
    return Response(status_code=499)


async def _on_bug(request: Request, error: Exception) -> Response:
    """Answers; the edge logs it, to whom it is raised once more."""
    return await _failed(request, HeadraceError("internal_error", "Something went wrong inside the service."))
