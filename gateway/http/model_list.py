"""The models that a caller may use, as OpenAI lists them, or as Anthropic does for who sends ``anthropic-version``."""

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Annotated, Literal

import msgspec
from fastapi import APIRouter, Depends, Query, Request

from contracts.messages.base import Endpoint
from contracts.messages.records import PRICE_TIERS, Capability, Manifest, PriceTier
from gateway.apis.fields import refuse
from gateway.apis.table import is_anthropics
from gateway.http.typed import CallerDep, Listed, Name, ServicesDep, TypedRoute, refusals

PAGE_MAX = 1000


class Model(msgspec.Struct, kw_only=True):
    """A model as OpenAI lists it."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "headrace"
    max_model_len: int
    """Longest prompt and answer together, in tokens."""
    endpoints: tuple[Endpoint, ...]
    capabilities: tuple[Capability, ...]
    price_tier: PriceTier
    """Of an alias: of the dearest."""
    parent: str | None = None
    """Of a LoRA adapter: the model that it is of."""
    alias_of: tuple[str, ...] = ()
    """Models one of which answers; empty for a model."""

    @classmethod
    def of(cls, manifest: Manifest) -> "Model":
        return cls(
            id=manifest.name,
            created=manifest.created_at_ms // 1000,
            max_model_len=manifest.context,
            endpoints=manifest.endpoints,
            capabilities=manifest.capabilities,
            price_tier=manifest.price_tier,
            parent=manifest.base.model if manifest.base else None,
        )

    @classmethod
    def of_alias(cls, name: str, models: Sequence[Manifest]) -> "Model":
        """What one of them can."""
        return cls(
            id=name,
            created=min(each.created_at_ms for each in models) // 1000,
            max_model_len=max(each.context for each in models),
            endpoints=tuple(dict.fromkeys(endpoint for each in models for endpoint in each.endpoints)),
            capabilities=tuple(dict.fromkeys(ability for each in models for ability in each.capabilities)),
            price_tier=max((each.price_tier for each in models), key=PRICE_TIERS.index),
            alias_of=tuple(each.name for each in models),
        )


class AnthropicModel(msgspec.Struct, kw_only=True):
    """A model as Anthropic lists it."""

    type: Literal["model"] = "model"
    id: str
    display_name: str
    created_at: Annotated[str, msgspec.Meta(extra_json_schema={"format": "date-time"})]
    lifecycle: Literal["active"] = "active"
    max_input_tokens: int
    max_tokens: int

    @classmethod
    def of(cls, model: Model) -> "AnthropicModel":
        return cls(
            id=model.id,
            display_name=model.id,
            created_at=datetime.fromtimestamp(model.created, UTC).isoformat().replace("+00:00", "Z"),
            max_input_tokens=model.max_model_len,
            max_tokens=model.max_model_len,
        )


class AnthropicModels(msgspec.Struct, kw_only=True):
    """A page of them."""

    data: list[AnthropicModel]
    has_more: bool
    first_id: str | None
    last_id: str | None


class Page:
    """Dependency: the part of the list that Anthropic's clients ask for."""

    def __init__(
        self,
        limit: Annotated[int, Query(ge=1, le=PAGE_MAX)] = 20,
        after_id: Annotated[str | None, Query()] = None,
        before_id: Annotated[str | None, Query()] = None,
    ) -> None:
        self._limit, self._after, self._before = limit, after_id, before_id

    def of(self, models: Sequence[Model]) -> AnthropicModels:
        """Raises HeadraceError for an id that is not among them."""
        ids = [model.id for model in models]
        for name, given in (("after_id", self._after), ("before_id", self._before)):
            if given is not None and given not in ids:
                refuse(name, "There is no such model.")
        if self._before is not None:
            end = ids.index(self._before)
            start = max(0, end - self._limit)
            more = start > 0
        else:
            start = 0 if self._after is None else ids.index(self._after) + 1
            end = start + self._limit
            more = end < len(ids)
        page = [AnthropicModel.of(model) for model in models[start:end]]
        first, last = (page[0].id, page[-1].id) if page else (None, None)
        return AnthropicModels(data=page, has_more=more, first_id=first, last_id=last)


async def _is_anthropics(request: Request) -> bool:
    return is_anthropics(request.scope["headers"])


AnthropicDep = Annotated[bool, Depends(_is_anthropics)]

router = APIRouter(prefix="/v1", tags=["Inference"], route_class=TypedRoute, responses=refusals(400, 401))


@router.get("/models")
async def visible_models(
    services: ServicesDep, caller: CallerDep, anthropic: AnthropicDep, page: Annotated[Page, Depends()]
) -> Listed[Model] | AnthropicModels:
    """Models that the caller may use, then aliases of them; for Anthropic's clients in their form, and in pages."""
    models = [Model.of(manifest) for manifest in services.catalog.visible(caller.tenant)]
    aliases = services.catalog.aliases(caller.tenant).items()
    models += [Model.of_alias(name, stands_for) for name, stands_for in aliases]
    return page.of(models) if anthropic else Listed(models)


@router.get("/models/{model:path}", responses=refusals(404))
async def one_model(
    services: ServicesDep, caller: CallerDep, anthropic: AnthropicDep, model: Name
) -> Model | AnthropicModel:
    """One model or alias, whose name may hold slashes."""
    if stands_for := services.catalog.aliases(caller.tenant).get(model):
        found = Model.of_alias(model, stands_for)
    else:
        found = Model.of(services.catalog.resolve(model, caller.tenant).manifest)
    return AnthropicModel.of(found) if anthropic else found
