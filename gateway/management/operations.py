"""``/admin/v1``: what runs now, and what an operator does about it. Watched live as JSON or as server-sent events."""

from collections.abc import AsyncIterator
from typing import Annotated, Any, cast

import msgspec
from fastapi import APIRouter, Depends, Query, Request
from fastapi.responses import StreamingResponse
from pydantic import BaseModel, Field

from contracts import operations
from contracts.administration import CancelledRequest, HeldWorker, QuarantineList, ShownQuarantined
from contracts.errors import HeadraceError
from contracts.forms import Form, RequestCancel, WorkerChange
from contracts.live import LiveView
from contracts.messages.queues import REQUESTS_MAX, OpenRequest, Replicas
from gateway.http.exchange import Exchange
from gateway.http.typed import BodyReader, CallerDep, Listed, Name, Services, ServicesDep, TypedRoute, refusals
from gateway.management.admin import MODELS, AdministratorDep
from gateway.management.usage import Whole

EVENTS = "text/event-stream"
_HEADERS = {"cache-control": "no-store", "x-accel-buffering": "no"}

router = APIRouter(
    prefix="/admin/v1", tags=["Administration"], route_class=TypedRoute, responses=refusals(401, 403, 503)
)


class OwnKey(msgspec.Struct, kw_only=True):
    """The key that asks."""

    id: str
    tenant: str
    scopes: tuple[str, ...]


@router.get("/key")
async def own_key(caller: CallerDep) -> OwnKey:
    """What the key that asks is for."""
    return OwnKey(id=caller.key_id, tenant=caller.tenant.name, scopes=caller.scopes)


@router.get("/live", dependencies=MODELS, responses={200: {"content": {EVENTS: {"schema": {"type": "string"}}}}})
async def live(request: Request, services: ServicesDep) -> LiveView:
    """Everything that runs now: pools, workers, queues.

    With `Accept: text/event-stream` an event `live` about once a second, each with the whole of it, until the caller
    leaves or its key is no longer good.
    """
    exchange: Exchange = request.scope["headrace"]
    if any(EVENTS.encode() in value for name, value in exchange.scope["headers"] if name == b"accept"):
        events = StreamingResponse(_events(exchange, services), media_type=EVENTS, headers=_HEADERS)
        return cast(Any, events)
    return services.live.snapshot()


async def _events(exchange: Exchange, services: Services) -> AsyncIterator[bytes]:
    async with services.live.following() as snapshots:
        async for data in snapshots:
            try:
                services.directory.authenticate(exchange.scope["headers"], exchange.address, "admin:models")
            except HeadraceError as error:
                yield b"event: error\ndata: " + msgspec.json.encode({"error": {"code": error.code}}) + b"\n\n"
                return
            yield b"event: live\ndata: " + data + b"\n\n"


@router.get("/pools", dependencies=MODELS)
async def pools(services: ServicesDep) -> Listed[Replicas]:
    """How many workers each model should have, and why; a model whose owner does not answer is left out."""
    data = []
    for model in services.catalog.names():
        try:
            data.append((await operations.queue(services.bus, model)).replicas)
        except HeadraceError:
            continue
    return Listed(data)


@router.get("/pools/{model:path}", dependencies=MODELS, responses=refusals(404))
async def pool(services: ServicesDep, model: Name) -> Replicas:
    """How many workers a model should have: for an autoscaler, which must hold where the answer is no 200."""
    if model not in services.catalog.names():
        raise HeadraceError("not_found", f"There is no model {model!r}.")
    found = (await operations.queue(services.bus, model)).replicas
    if not found.known:
        raise HeadraceError("unavailable", "The model's owner has just come, and knows nothing yet.", retry_after_s=2)
    return found


class OpenRange(BaseModel, extra="forbid"):
    """Of ``/admin/v1/models/{model}/requests``."""

    limit: Whole = Field(50, ge=1, le=REQUESTS_MAX, description="Requests of the answer, the oldest first.")


@router.get("/models/{model:path}/requests", dependencies=MODELS, responses=refusals(404))
async def open_requests(
    services: ServicesDep, model: Name, asked: Annotated[OpenRange, Query()]
) -> Listed[OpenRequest]:
    """Requests of a model that have not ended, without any text: who asks, how far it is, and where it runs."""
    if model not in services.catalog.names():
        raise HeadraceError("not_found", f"There is no model {model!r}.")
    answer = await operations.queue(services.bus, model, requests=asked.limit)
    return Listed(answer.requests)


@router.delete("/models/{model:path}/requests/{request_id}", dependencies=MODELS, responses=refusals(404))
async def cancel_request(do: AdministratorDep, model: Name, request_id: Name) -> CancelledRequest:
    """End a request wherever it is, for all who read it; nobody pays for it."""
    return await do.ask("requests.cancel", CancelledRequest, target=request_id, form=RequestCancel(model=model))


class Held(Form, frozen=True, kw_only=True):
    """What a worker is to do."""

    held: bool
    """Take nothing more, and let what runs end; or take work again."""


@router.patch("/models/{model:path}/workers/{worker}", dependencies=MODELS, responses=refusals(404, 409))
async def change_worker(
    do: AdministratorDep, model: Name, worker: Name, change: Annotated[Held, Depends(BodyReader(Held))]
) -> HeldWorker:
    """Drain a worker, or let it take work again; for the life of its process."""
    form = WorkerChange(model=model, held=change.held)
    return await do.ask("workers.change", HeldWorker, target=worker, form=form)


@router.get("/quarantine", dependencies=MODELS)
async def quarantine(do: AdministratorDep) -> Listed[ShownQuarantined]:
    """Requests that ended engines and are not tried again, without bodies; oldest first."""
    return Listed((await do.ask("quarantine.list", QuarantineList)).data)


@router.delete("/quarantine/{request_id}", dependencies=MODELS, responses=refusals(404))
async def drop_quarantined(do: AdministratorDep, request_id: Name) -> ShownQuarantined:
    """Forget a request that is in quarantine."""
    return await do.ask("quarantine.drop", ShownQuarantined, target=request_id)
