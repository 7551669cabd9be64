"""``/admin/v1``: tenants, keys, models' limits, prices and the trail of it all, for callers with a key for that area.

What is read is read here; what is changed is asked of the admin service together with the caller's key, for a gateway
may write none of it.
"""

from typing import Annotated, Any, TypeVar

import msgspec
from fastapi import APIRouter, Depends, Query, Request
from pydantic import BaseModel, Field

from contracts import audit, operations, registry, subjects
from contracts.administration import MadeKey, Prices, Trail
from contracts.bus import BusError
from contracts.errors import HeadraceError
from contracts.forms import (
    AliasChange,
    Form,
    KeyChange,
    ModelChange,
    NewKey,
    NewPrice,
    NewRollout,
    NewTenant,
    RolloutChange,
    TenantChange,
    TrailQuery,
)
from contracts.messages.administration import AdminAnswer, AdminCall, AuditEntry, Via
from contracts.messages.base import NOTHING, Codec
from contracts.messages.records import Alias, KeyRecord, ModelRecord, Price, Scope, TenantRecord
from contracts.messages.rollouts import RolloutPlan
from contracts.registry import ShownKey, ShownRollout
from gateway.http.exchange import Exchange
from gateway.http.typed import BodyReader, Listed, Name, Services, ServicesDep, TypedRoute, caller_for, refusals
from gateway.intake.auth import secret_of
from gateway.management.usage import Whole

ADMIN_TIMEOUT_S = 15.0
"""Longer than the service takes to store two entries of the audit trail and a record."""

_call = Codec[AdminCall](AdminCall)
_answer = Codec[AdminAnswer](AdminAnswer)

_AREAS: tuple[Scope, ...] = ("admin:tenants", "admin:keys", "admin:models", "admin:prices")

R = TypeVar("R", bound=msgspec.Struct)


class Administrator:
    """Dependency: asks the admin service in the caller's name."""

    def __init__(self, request: Request, services: ServicesDep) -> None:
        self._exchange: Exchange = request.scope["headrace"]
        self._services: Services = services

    async def ask(self, action: str, kind: type[R], *, target: str = "", form: Form | None = None) -> R:
        """What the action gives; raises HeadraceError."""
        call = AdminCall(
            secret=secret_of(self._exchange.scope["headers"]).decode(),
            address=self._exchange.address,
            request_id=self._exchange.request_id,
            via=self._via(),
            target=target,
            form=NOTHING if form is None else msgspec.Raw(msgspec.json.encode(form)),
        )
        try:
            data = await self._services.bus.request(
                subjects.admin_call(action), _call.encode(call), timeout_s=ADMIN_TIMEOUT_S
            )
            answer = _answer.decode(data)
        except (BusError, msgspec.MsgspecError) as error:
            message = "The admin service does not answer; look before you try again, for it may have been done."
            raise HeadraceError("unavailable", message, retry_after_s=2) from error
        if (refused := answer.error) is not None:
            raise HeadraceError(refused.code, refused.message, param=refused.param, retry_after_s=refused.retry_after_s)
        return msgspec.json.decode(answer.result, type=kind)

    def _via(self) -> Via:
        """Browsers say where a request comes from; only pages of this address may call it."""
        names = {name for name, _ in self._exchange.scope["headers"]}
        return "console" if b"sec-fetch-site" in names else "api"


AdministratorDep = Annotated[Administrator, Depends()]
TENANTS, KEYS, MODELS, PRICES = ([Depends(caller_for(scope))] for scope in _AREAS)
"""Asked for before a body is read."""

router = APIRouter(
    prefix="/admin/v1", tags=["Administration"], route_class=TypedRoute, responses=refusals(401, 403, 503)
)


@router.get("/tenants", dependencies=TENANTS)
async def tenants(services: ServicesDep) -> Listed[TenantRecord]:
    """All tenants."""
    return Listed(await registry.tenants(services.bus))


@router.post("/tenants", status_code=201, responses=refusals(409), dependencies=TENANTS)
async def create_tenant(
    do: AdministratorDep, new: Annotated[NewTenant, Depends(BodyReader(NewTenant))]
) -> TenantRecord:
    """Make a tenant."""
    return await do.ask("tenants.create", TenantRecord, form=new)


@router.get("/tenants/{name:path}", responses=refusals(404), dependencies=TENANTS)
async def tenant(services: ServicesDep, name: Name) -> TenantRecord:
    """One tenant."""
    record = await registry.tenant(services.bus, name)
    if record is None:
        raise HeadraceError("not_found", f"There is no tenant {name!r}.")
    return record


@router.patch("/tenants/{name:path}", responses=refusals(404, 409), dependencies=TENANTS)
async def change_tenant(
    do: AdministratorDep, name: Name, change: Annotated[TenantChange, Depends(BodyReader(TenantChange))]
) -> TenantRecord:
    """Change a tenant; seen by every service within a second."""
    return await do.ask("tenants.change", TenantRecord, target=name, form=change)


@router.get("/keys", dependencies=KEYS)
async def keys(services: ServicesDep) -> Listed[ShownKey]:
    """All API keys, without their secrets; when each was last used, to the minute."""
    return Listed(await registry.keys(services.bus))


@router.post("/keys", status_code=201, responses=refusals(404), dependencies=KEYS)
async def create_key(do: AdministratorDep, new: Annotated[NewKey, Depends(BodyReader(NewKey))]) -> MadeKey:
    """Make an API key; its secret is in this answer and nowhere else."""
    return await do.ask("keys.create", MadeKey, form=new)


@router.patch("/keys/{id}", responses=refusals(404, 409), dependencies=KEYS)
async def change_key(
    do: AdministratorDep, id: Name, change: Annotated[KeyChange, Depends(BodyReader(KeyChange))]
) -> KeyRecord:
    """Change from where and until when an API key may be used."""
    return await do.ask("keys.change", KeyRecord, target=id, form=change)


@router.delete("/keys/{id}", responses=refusals(404), dependencies=KEYS)
async def revoke_key(do: AdministratorDep, id: Name) -> KeyRecord:
    """Revoke an API key everywhere, within a second."""
    return await do.ask("keys.revoke", KeyRecord, target=id)


@router.get("/models", dependencies=MODELS)
async def models(services: ServicesDep) -> Listed[ModelRecord]:
    """All models: the version that each serves, the bounds of its queue, and where its requests may go."""
    return Listed(await registry.models(services.bus))


class ShownVersion(msgspec.Struct, kw_only=True):
    """A version of a model that is published."""

    model: str
    version: str
    engine: str
    context: int
    """Longest sequence in tokens, prompt and output."""
    base: str
    """Whose LoRA adapter it is, `model@version`; empty: it stands alone."""
    bytes: int
    """Of its files."""
    created_at_ms: int


@router.get("/versions", dependencies=MODELS)
async def versions(services: ServicesDep) -> Listed[ShownVersion]:
    """All versions that are published, by model and age."""
    return Listed(
        [
            ShownVersion(
                model=each.name,
                version=each.version,
                engine=each.engine,
                context=each.context,
                base=f"{each.base.model}@{each.base.version}" if each.base else "",
                bytes=sum(artifact.size for artifact in each.artifacts.values()),
                created_at_ms=each.created_at_ms,
            )
            for each in await registry.versions(services.bus)
        ]
    )


@router.patch("/models/{model:path}/limits", responses=refusals(404, 409), dependencies=MODELS)
async def change_model(
    do: AdministratorDep, model: Name, change: Annotated[ModelChange, Depends(BodyReader(ModelChange))]
) -> ModelRecord:
    """Change the bounds of a model's queue, or its fallbacks."""
    return await do.ask("models.change", ModelRecord, target=model, form=change)


@router.get("/aliases", dependencies=MODELS)
async def aliases(services: ServicesDep) -> Listed[Alias]:
    """Names that stand for one of several models, those that are built in among them."""
    return Listed(await registry.aliases(services.bus))


@router.put("/aliases/{name:path}", responses=refusals(404, 409), dependencies=MODELS)
async def set_alias(
    do: AdministratorDep, name: Name, change: Annotated[AliasChange, Depends(BodyReader(AliasChange))]
) -> Alias:
    """Say what an alias stands for; seen by every gateway within a second."""
    return await do.ask("aliases.set", Alias, target=name, form=change)


@router.delete("/aliases/{name:path}", responses=refusals(404), dependencies=MODELS)
async def remove_alias(do: AdministratorDep, name: Name) -> Alias:
    """Forget an alias, which is given as it was; one that is built in stands for all models again."""
    return await do.ask("aliases.remove", Alias, target=name)


@router.get("/rollouts", dependencies=MODELS)
async def rollouts(services: ServicesDep) -> Listed[ShownRollout]:
    """The last roll-out of every model that had one."""
    return Listed(await registry.rollouts(services.bus))


@router.get("/models/{model:path}/rollout", responses=refusals(404), dependencies=MODELS)
async def rollout(services: ServicesDep, model: Name) -> ShownRollout:
    """The model's last roll-out: its plan, how far it is, and the evidence by criterion."""
    return await registry.rollout(services.bus, model)


@router.post("/models/{model:path}/rollout", status_code=201, responses=refusals(404, 409), dependencies=MODELS)
async def start_rollout(
    do: AdministratorDep, model: Name, new: Annotated[NewRollout, Depends(BodyReader(NewRollout))]
) -> RolloutPlan:
    """Give a new version of a model a growing share of its requests, as long as it is not worse."""
    return await do.ask("rollouts.start", RolloutPlan, target=model, form=new)


@router.patch("/models/{model:path}/rollout", responses=refusals(404, 409), dependencies=MODELS)
async def change_rollout(
    do: AdministratorDep, model: Name, change: Annotated[RolloutChange, Depends(BodyReader(RolloutChange))]
) -> RolloutPlan:
    """Pause, resume (`run`), promote or abort the open roll-out."""
    return await do.ask("rollouts.change", RolloutPlan, target=model, form=change)


@router.get("/prices", dependencies=PRICES)
async def prices(do: AdministratorDep) -> Listed[Price]:
    """All prices, in whole millionths of the currency's unit for a million tokens; by model, tier and day."""
    return Listed((await do.ask("prices.list", Prices)).data)


@router.post("/prices", status_code=201, dependencies=PRICES)
async def set_prices(do: AdministratorDep, new: Annotated[NewPrice, Depends(BodyReader(NewPrice))]) -> Listed[Price]:
    """Set a model's prices from a day on, until a later price begins."""
    return Listed((await do.ask("prices.set", Prices, form=new)).data)


class TrailRange(BaseModel, extra="forbid"):
    """Of ``/admin/v1/audit``."""

    action: str = Field("", max_length=64, description="Only this action, `keys.create`, or area, `keys`.")
    actor: str = Field("", max_length=64, description="Only what this key did, or `operator`.")
    target: str = Field("", max_length=512, description="Only what was done to this tenant, key or model.")
    limit: Whole = Field(100, ge=1, le=audit.NEWEST_MAX, description="Entries of the answer.")


@router.get("/audit")
async def trail(do: AdministratorDep, asked: Annotated[TrailRange, Query()]) -> Listed[AuditEntry]:
    """Who did what, and failed logins, the newest first: of the areas that the asking key is for."""
    form = TrailQuery(action=asked.action, actor=asked.actor, target=asked.target, limit=asked.limit)
    return Listed((await do.ask("audit.list", Trail, form=form)).data)


@router.get("/queues", dependencies=MODELS)
async def queues(services: ServicesDep) -> Listed[Any]:
    """Live queues of every model.

    A model whose scheduler does not answer has the reason instead.
    """
    data: list[Any] = []
    for record in await registry.models(services.bus):
        try:
            data.append(await operations.queue(services.bus, record.name))
        except HeadraceError:
            data.append({"model": record.name, "error": "no scheduler answers at the moment"})
    return Listed(data)
