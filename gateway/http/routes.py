"""The FastAPI applications of both listeners, put together; and the routes of models and of health."""

from collections.abc import Iterable
from functools import partial
from typing import Annotated, Literal

import msgspec
from fastapi import APIRouter, Depends, FastAPI
from starlette.routing import Route

from contracts.errors import HeadraceError
from gateway.apis import messages
from gateway.apis.responses import ResponsesBody
from gateway.apis.table import APIS
from gateway.http import model_list, openapi, pages
from gateway.http.edge import Edge
from gateway.http.inference import Inference
from gateway.http.typed import BodyReader, Services, ServicesDep, TypedRoute, caller_for, refusals
from gateway.intake.auth import Identity


def public(services: Services, inference: Inference, routers: Iterable[APIRouter]) -> Edge:
    """What callers reach; ``routers`` have what is beside inference and health."""
    app = _application(services)
    apis = {api.path: partial(inference, api) for api in APIS.values()}
    app.router.routes += [Route(path, serve, methods=["POST"]) for path, serve in apis.items()]
    for router in (model_list.router, counting, health, pages.public, pages.documents, *routers):
        app.include_router(router)
    return Edge(app, apis, cors_origins=services.config.cors_origins, hsts=bool(services.config.tls_cert_file))


def private(services: Services, routers: Iterable[APIRouter]) -> Edge:
    """What operators reach, on an address of its own: no page of another origin may call it."""
    app = _application(services)
    for router in (health, pages.private, pages.documents, *routers):
        app.include_router(router)
    return Edge(app, {}, cors_origins=(), hsts=bool(services.config.tls_cert_file))


def _application(services: Services) -> FastAPI:
    app = FastAPI(openapi_url=None, docs_url=None, redoc_url=None, redirect_slashes=False)
    app.state.services = services
    app.mount("/static", pages.files)
    return app


class TokenCount(msgspec.Struct):
    """Answer to ``/v1/messages/count_tokens``."""

    input_tokens: int


class ResponseTokenCount(TokenCount):
    """Answer to ``/v1/responses/input_tokens``."""

    object: Literal["response.input_tokens"] = "response.input_tokens"


counting = APIRouter(prefix="/v1", tags=["Inference"], route_class=TypedRoute, responses=refusals(401))


@counting.post("/messages/count_tokens", responses=refusals(404, 429, 503))
async def count_tokens(
    services: ServicesDep,
    caller: Annotated[Identity, Depends(caller_for("inference"))],
    body: Annotated[bytes, Depends(BodyReader(messages.CountBody, raw=True))],
) -> TokenCount:
    """Anthropic: input tokens of a message; nothing is billed, and only a flood of it is refused."""
    return TokenCount(await services.intake.count(messages.COUNT, caller.tenant, body))


@counting.post("/responses/input_tokens", responses=refusals(404, 429, 503))
async def count_input_tokens(
    services: ServicesDep,
    caller: Annotated[Identity, Depends(caller_for("inference"))],
    body: Annotated[bytes, Depends(BodyReader(ResponsesBody, raw=True))],
) -> ResponseTokenCount:
    """OpenAI: input tokens of a response; nothing is billed, and only a flood of it is refused."""
    return ResponseTokenCount(await services.intake.count(APIS["responses"], caller.tenant, body))


class Health(msgspec.Struct):
    """It is well."""

    status: Literal["ok"] = "ok"


health = APIRouter(prefix="/health", tags=[openapi.PUBLIC], route_class=TypedRoute)


@health.get("/live")
async def live() -> Health:
    """The process lives."""
    return Health()


@health.get("", responses=refusals(503))
async def healthy(services: ServicesDep) -> Health:
    """As ``/health/ready``; load generators ask vLLM's servers here."""
    return await ready(services)


@health.get("/ready", responses=refusals(503))
async def ready(services: ServicesDep) -> Health:
    """A request would be served."""
    if reason := services.not_ready():
        raise HeadraceError("unavailable", f"Not ready: {reason}.", retry_after_s=1)
    return Health()
