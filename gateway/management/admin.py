"""``/admin/v1``: tenants, keys, models' limits and live queues, for callers with an admin key.

Same records and same checks as the command line (contracts.registry). Unknown fields are refused here, for a typing
error in a limit would otherwise be silence.
"""

from typing import Annotated, Any

import msgspec
from fastapi import APIRouter, Depends

from contracts import registry, subjects
from contracts.bus import Unavailable
from contracts.errors import HeadraceError
from contracts.messages.base import Codec, Priority
from contracts.messages.queues import QueueAnswer
from contracts.messages.records import KeyRecord, Manifest, PoolLimits, TenantLimits, TenantRecord
from gateway.http.typed import BodyReader, Listed, Name, ServicesDep, TypedRoute, administrator, refusals

ASK_TIMEOUT_S = 2.0

_queues = Codec[QueueAnswer](QueueAnswer)


class Strict(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Base of what an operator sends."""


class LimitsChange(Strict, frozen=True, kw_only=True):
    """Null is unlimited; a field that is left out stays as it is (for a new tenant: unlimited)."""

    rpm: int | msgspec.UnsetType | None = msgspec.UNSET
    input_tpm: int | msgspec.UnsetType | None = msgspec.UNSET
    output_tpm: int | msgspec.UnsetType | None = msgspec.UNSET
    concurrency: int | msgspec.UnsetType | None = msgspec.UNSET
    queued_requests: int | msgspec.UnsetType | None = msgspec.UNSET
    queued_tokens: int | msgspec.UnsetType | None = msgspec.UNSET


class TenantChange(Strict, frozen=True, kw_only=True):
    """What is left out stays as it is."""

    limits: LimitsChange = LimitsChange()
    model_limits: dict[str, LimitsChange | None] = {}
    """For one model; null removes the model's own limits."""
    weight: float | msgspec.UnsetType = msgspec.UNSET
    models: list[str] | msgspec.UnsetType | None = msgspec.UNSET
    priorities: tuple[Priority, ...] | msgspec.UnsetType = msgspec.UNSET
    deadline_ms: int | msgspec.UnsetType = msgspec.UNSET
    monthly_budget_tokens: int | msgspec.UnsetType | None = msgspec.UNSET
    fallback: bool | msgspec.UnsetType = msgspec.UNSET
    prefix_caching: bool | msgspec.UnsetType = msgspec.UNSET
    disabled: bool | msgspec.UnsetType = msgspec.UNSET

    def apply(self, record: TenantRecord) -> TenantRecord:
        """The record with what is given."""
        own = dict(record.model_limits)
        for model, change in self.model_limits.items():
            if change is None:
                own.pop(model, None)
            else:
                own[model] = msgspec.structs.replace(own.get(model, TenantLimits()), **_given(change))
        given = _given(self) | {
            "limits": msgspec.structs.replace(record.limits, **_given(self.limits)),
            "model_limits": own,
        }
        return msgspec.structs.replace(record, **given)


class NewTenant(TenantChange, frozen=True, kw_only=True):
    """A tenant that there is not yet."""

    name: str


class NewKeyRequest(Strict, frozen=True, kw_only=True):
    """Whose key it will be."""

    tenant: str
    admin: bool = False


class ModelChange(Strict, frozen=True, kw_only=True):
    """What is left out stays as it is."""

    queued_requests: int | msgspec.UnsetType = msgspec.UNSET
    queued_tokens: int | msgspec.UnsetType = msgspec.UNSET
    tenant_queued_requests: int | msgspec.UnsetType = msgspec.UNSET
    tenant_queued_tokens: int | msgspec.UnsetType = msgspec.UNSET
    kv_overbooking: float | msgspec.UnsetType = msgspec.UNSET
    fallbacks: list[str] | msgspec.UnsetType = msgspec.UNSET


class ModelLimits(msgspec.Struct):
    """A model, the bounds of its queue, and where its requests may go when it is overloaded."""

    name: str
    version: str
    context: int
    limits: PoolLimits
    fallbacks: list[str]

    @classmethod
    def of(cls, manifest: Manifest) -> "ModelLimits":
        return cls(manifest.name, manifest.version, manifest.context, manifest.limits, manifest.fallbacks)


def _given(change: Strict) -> dict[str, Any]:
    return {name: value for name, value in msgspec.structs.asdict(change).items() if value is not msgspec.UNSET}


router = APIRouter(
    prefix="/admin/v1",
    tags=["Administration"],
    route_class=TypedRoute,
    dependencies=[Depends(administrator)],
    responses=refusals(401, 403, 503),
)


@router.get("/tenants")
async def tenants(services: ServicesDep) -> Listed[TenantRecord]:
    """All tenants."""
    return Listed(await registry.tenants(services.bus))


@router.post("/tenants", status_code=201, responses=refusals(409))
async def create_tenant(
    services: ServicesDep, new: Annotated[NewTenant, Depends(BodyReader(NewTenant))]
) -> TenantRecord:
    """Make a tenant."""
    return await registry.create_tenant(services.bus, new.apply(TenantRecord(name=new.name)))


@router.get("/tenants/{name:path}", responses=refusals(404))
async def tenant(services: ServicesDep, name: Name) -> TenantRecord:
    """One tenant."""
    record = await registry.tenant(services.bus, name)
    if record is None:
        raise HeadraceError("not_found", f"There is no tenant {name!r}.")
    return record


@router.patch("/tenants/{name:path}", responses=refusals(404, 409))
async def change_tenant(
    services: ServicesDep, name: Name, change: Annotated[TenantChange, Depends(BodyReader(TenantChange))]
) -> TenantRecord:
    """Change a tenant; seen by every service within a second."""
    return await registry.change_tenant(services.bus, name, change.apply)


@router.get("/keys")
async def keys(services: ServicesDep) -> Listed[KeyRecord]:
    """All API keys, without their secrets."""
    return Listed(await registry.keys(services.bus))


@router.post("/keys", status_code=201, responses=refusals(404))
async def create_key(
    services: ServicesDep, new: Annotated[NewKeyRequest, Depends(BodyReader(NewKeyRequest))]
) -> registry.NewKey:
    """Make an API key; its secret is in this answer and nowhere else."""
    return await registry.create_key(services.bus, services.directory.peppers, new.tenant, admin=new.admin)


@router.delete("/keys/{id}", responses=refusals(404))
async def revoke_key(services: ServicesDep, id: Name) -> KeyRecord:
    """Revoke an API key everywhere, within a second."""
    return await registry.revoke_key(services.bus, id)


@router.get("/models")
async def models(services: ServicesDep) -> Listed[ModelLimits]:
    """All models and the bounds of their queues."""
    return Listed([ModelLimits.of(manifest) for manifest in await registry.models(services.bus)])


@router.patch("/models/{model:path}/limits", responses=refusals(404, 409))
async def change_model(
    services: ServicesDep, model: Name, change: Annotated[ModelChange, Depends(BodyReader(ModelChange))]
) -> ModelLimits:
    """Change the bounds of a model's queue, or its fallbacks."""
    limits = _given(change)
    fallbacks = limits.pop("fallbacks", None)
    return ModelLimits.of(await registry.change_model(services.bus, model, limits=limits, fallbacks=fallbacks))


@router.get("/queues")
async def queues(services: ServicesDep) -> Listed[Any]:
    """Live queues of every model.

    A model whose scheduler does not answer has the reason instead.
    """
    data: list[Any] = []
    for manifest in await registry.models(services.bus):
        try:
            answer = await services.bus.request(subjects.queues(manifest.name), b"{}", timeout_s=ASK_TIMEOUT_S)
            data.append(_queues.decode(answer))
        except Unavailable:
            data.append({"model": manifest.name, "error": "no scheduler answers at the moment"})
    return Listed(data)
