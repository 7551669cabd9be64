"""``/admin/v1``: tenants, keys, models' limits and live queues, for callers with an admin key.

Same records and same checks as the command line (contracts.registry). Unknown fields are refused here, for a typing
error in a limit would otherwise be silence.
"""

from typing import Any, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from contracts import registry, subjects
from contracts.bus import Bus, Unavailable
from contracts.errors import HeadraceError
from contracts.messages.base import Codec, Priority
from contracts.messages.queues import QueueAnswer
from contracts.messages.records import KeyRecord, Manifest, TenantLimits, TenantRecord
from gateway.apis import fields
from gateway.config import GatewayConfig
from gateway.http import body
from gateway.intake.auth import Directory

B = TypeVar("B")
ASK_TIMEOUT_S = 2.0

_queues = Codec[QueueAnswer](QueueAnswer)


class Strict(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Base of what an operator sends."""


class Limits(Strict, frozen=True, kw_only=True):
    """Null is unlimited; a field that is left out stays as it is (for a new tenant: unlimited)."""

    rpm: int | msgspec.UnsetType | None = msgspec.UNSET
    input_tpm: int | msgspec.UnsetType | None = msgspec.UNSET
    output_tpm: int | msgspec.UnsetType | None = msgspec.UNSET
    concurrency: int | msgspec.UnsetType | None = msgspec.UNSET
    queued_requests: int | msgspec.UnsetType | None = msgspec.UNSET
    queued_tokens: int | msgspec.UnsetType | None = msgspec.UNSET


class TenantChange(Strict, frozen=True, kw_only=True):
    """What is left out stays as it is."""

    limits: Limits = Limits()
    model_limits: dict[str, Limits | None] = {}
    """For one model; null removes the model's own limits."""
    weight: float | msgspec.UnsetType = msgspec.UNSET
    models: list[str] | msgspec.UnsetType | None = msgspec.UNSET
    priorities: list[Priority] | msgspec.UnsetType = msgspec.UNSET
    deadline_ms: int | msgspec.UnsetType = msgspec.UNSET
    monthly_budget_tokens: int | msgspec.UnsetType | None = msgspec.UNSET
    fallback: bool | msgspec.UnsetType = msgspec.UNSET
    prefix_caching: bool | msgspec.UnsetType = msgspec.UNSET
    disabled: bool | msgspec.UnsetType = msgspec.UNSET

    def apply(self, record: TenantRecord) -> TenantRecord:
        given = _given(self, without=("limits", "model_limits"))
        if "priorities" in given:
            given["priorities"] = tuple(given["priorities"])
        own = dict(record.model_limits)
        for model, change in self.model_limits.items():
            if change is None:
                own.pop(model, None)
            else:
                own[model] = msgspec.structs.replace(own.get(model, TenantLimits()), **_given(change))
        limits = msgspec.structs.replace(record.limits, **_given(self.limits))
        return msgspec.structs.replace(record, limits=limits, model_limits=own, **given)


class NewTenant(TenantChange, frozen=True, kw_only=True):
    name: str


class NewKeyRequest(Strict, frozen=True, kw_only=True):
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


class Admin:
    """The routes of the admin API."""

    def __init__(self, directory: Directory, bus: Bus, config: GatewayConfig) -> None:
        self._directory = directory
        self._bus = bus
        self._config = config

    def routes(self) -> list[Route]:
        return [
            Route("/admin/v1/tenants", self.tenants, methods=["GET"]),
            Route("/admin/v1/tenants", self.create_tenant, methods=["POST"]),
            Route("/admin/v1/tenants/{name:path}", self.tenant, methods=["GET"]),
            Route("/admin/v1/tenants/{name:path}", self.change_tenant, methods=["PATCH"]),
            Route("/admin/v1/keys", self.keys, methods=["GET"]),
            Route("/admin/v1/keys", self.create_key, methods=["POST"]),
            Route("/admin/v1/keys/{id}", self.revoke_key, methods=["DELETE"]),
            Route("/admin/v1/models", self.models, methods=["GET"]),
            Route("/admin/v1/models/{model:path}/limits", self.change_model, methods=["PATCH"]),
            Route("/admin/v1/queues", self.queues, methods=["GET"]),
        ]

    async def tenants(self, request: Request) -> Response:
        self._authorize(request)
        return _json({"object": "list", "data": [_whole(record) for record in await registry.tenants(self._bus)]})

    async def create_tenant(self, request: Request) -> Response:
        new = await self._read(request, NewTenant)
        record = new.apply(TenantRecord(name=new.name))
        return _json(_whole(await registry.create_tenant(self._bus, record)), 201)

    async def tenant(self, request: Request) -> Response:
        self._authorize(request)
        record = await registry.tenant(self._bus, request.path_params["name"])
        if record is None:
            raise HeadraceError("not_found", f"There is no tenant {request.path_params['name']!r}.")
        return _json(_whole(record))

    async def change_tenant(self, request: Request) -> Response:
        change = await self._read(request, TenantChange)
        return _json(_whole(await registry.change_tenant(self._bus, request.path_params["name"], change.apply)))

    async def keys(self, request: Request) -> Response:
        self._authorize(request)
        records: list[KeyRecord] = await registry.keys(self._bus)
        return _json({"object": "list", "data": [_whole(record) for record in records]})

    async def create_key(self, request: Request) -> Response:
        """The secret is in this answer and nowhere else."""
        new = await self._read(request, NewKeyRequest)
        made = await registry.create_key(self._bus, self._directory.pepper, new.tenant, admin=new.admin)
        return _json(made, 201)

    async def revoke_key(self, request: Request) -> Response:
        self._authorize(request)
        return _json(_whole(await registry.revoke_key(self._bus, request.path_params["id"])))

    async def models(self, request: Request) -> Response:
        self._authorize(request)
        return _json({"object": "list", "data": [_limits(m) for m in await registry.models(self._bus)]})

    async def change_model(self, request: Request) -> Response:
        change = await self._read(request, ModelChange)
        limits = _given(change, without=("fallbacks",))
        fallbacks = None if change.fallbacks is msgspec.UNSET else change.fallbacks
        name = request.path_params["model"]
        return _json(_limits(await registry.change_model(self._bus, name, limits=limits, fallbacks=fallbacks)))

    async def queues(self, request: Request) -> Response:
        """Live queues of every model; a model whose scheduler does not answer has the reason instead."""
        self._authorize(request)
        data: list[object] = []
        for manifest in await registry.models(self._bus):
            try:
                answer = await self._bus.request(subjects.queues(manifest.name), b"{}", timeout_s=ASK_TIMEOUT_S)
                data.append(_queues.decode(answer))
            except Unavailable:
                data.append({"model": manifest.name, "error": "no scheduler answers at the moment"})
        return _json({"object": "list", "data": data})

    def _authorize(self, request: Request) -> None:
        identity = self._directory.authenticate(request.scope["headers"])
        if not identity.admin:
            raise HeadraceError("permission_denied", "This needs an admin key.")

    async def _read(self, request: Request, kind: type[B]) -> B:
        self._authorize(request)
        data = await body.read(
            request.scope["headers"],
            request.receive,
            bytes_max=self._config.body_bytes_max,
            s_max=self._config.body_s_max,
        )
        try:
            return msgspec.json.decode(data, type=kind)
        except msgspec.ValidationError as error:
            raise fields.invalid(error) from error
        except (msgspec.DecodeError, RecursionError) as error:
            raise HeadraceError("invalid_json", f"The body is not JSON: {error}") from error


def _given(change: msgspec.Struct, without: tuple[str, ...] = ()) -> dict[str, Any]:
    return {
        name: value
        for name, value in msgspec.structs.asdict(change).items()
        if value is not msgspec.UNSET and name not in without and name != "name"
    }


def _whole(record: msgspec.Struct) -> dict[str, Any]:
    """Every field, also those that the wire form leaves out."""
    whole: dict[str, Any] = {}
    for name, value in msgspec.structs.asdict(record).items():
        if isinstance(value, msgspec.Struct):
            whole[name] = _whole(value)
        elif isinstance(value, dict):
            whole[name] = {k: _whole(v) if isinstance(v, msgspec.Struct) else v for k, v in value.items()}
        else:
            whole[name] = value
    return whole


def _limits(manifest: Manifest) -> dict[str, Any]:
    return {
        "name": manifest.name,
        "version": manifest.version,
        "context": manifest.context,
        "limits": _whole(manifest.limits),
        "fallbacks": manifest.fallbacks,
    }


def _json(content: object, status: int = 200) -> Response:
    return Response(msgspec.json.encode(content), status, media_type="application/json")
