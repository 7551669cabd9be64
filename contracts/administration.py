"""What operators do: the one implementation of each action on tenants, keys and models, each with its audit trail.

The admin service (scheduler/administration.py) performs them for who shows a key by way of a gateway, the command line
for who has the operator's credentials of the bus.
"""

from collections.abc import Awaitable, Callable, Iterable
from datetime import UTC, datetime
from typing import Any, get_args

import msgspec

from contracts import audit, clock, currency, ids, operations, registry, topology
from contracts.audit import Actor
from contracts.bus import Bus
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
    RequestCancel,
    RolloutChange,
    TenantChange,
    TrailQuery,
    WorkerChange,
    given,
)
from contracts.keys import ADMIN_SCOPES, SCOPES, Peppers
from contracts.messages.administration import AuditEntry
from contracts.messages.base import Outcome, Priority
from contracts.messages.control import Hold
from contracts.messages.records import Alias, KeyRecord, Manifest, ModelRecord, Price, Scope, TenantRecord
from contracts.messages.rollouts import RolloutPlan


class MadeKey(msgspec.Struct, frozen=True, kw_only=True):
    """A key as its owner sees it, this once."""

    id: str
    key: str


class HeldWorker(msgspec.Struct, frozen=True, kw_only=True):
    """A worker, and whether an operator lets it take nothing."""

    worker: str
    model: str
    held: bool


class CancelledRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A request that an operator ended, and what it ended as; null where that is not known yet."""

    request_id: str
    tenant: str
    model: str
    outcome: Outcome | None


class ShownQuarantined(msgspec.Struct, frozen=True, kw_only=True):
    """A request in quarantine, without its body."""

    request_id: str
    tenant: str
    model: str
    quarantined_at_ms: int
    reason: str


class Prices(msgspec.Struct, frozen=True, kw_only=True):
    """By model, tier and day."""

    data: list[Price]


class QuarantineList(msgspec.Struct, frozen=True, kw_only=True):
    """Oldest first."""

    data: list[ShownQuarantined]


class Trail(msgspec.Struct, frozen=True, kw_only=True):
    """Newest first."""

    data: list[AuditEntry]


class Administration:
    """Actions of one actor, who has been permitted them; ``granted`` are scopes that it may pass on, or take away.

    ``peppers`` are needed where a key is made.
    """

    def __init__(
        self, bus: Bus, actor: Actor, *, granted: Iterable[Scope] = SCOPES, peppers: Peppers | None = None
    ) -> None:
        self._bus = bus
        self._actor = actor
        self._granted = frozenset(granted)
        self._peppers = peppers

    def _recorded(self, action: str, target: str, asked: Any = None) -> Any:
        return audit.recorded(self._bus, self._actor, action, target, asked)

    async def create_tenant(self, form: NewTenant) -> TenantRecord:
        """A new tenant; an existing one with the same settings is returned as it is, another one refused."""
        async with self._recorded("tenants.create", form.name, form) as record:
            record.changed = await registry.create_tenant(self._bus, form.record())
        return record.changed.after

    async def change_tenant(self, name: str, form: TenantChange) -> TenantRecord:
        """Seen by every service within a second."""
        async with self._recorded("tenants.change", name, form) as record:
            record.changed = await registry.change_tenant(self._bus, name, form.apply)
        return record.changed.after

    async def create_key(self, form: NewKey, secret: str = "") -> MadeKey:
        """A new key of an existing tenant; with ``secret`` only when nobody knows that yet."""
        secret = secret or ids.api_key()
        if self._peppers is None:
            raise HeadraceError("invalid_request", "the key pepper is not known")
        async with self._recorded("keys.create", form.tenant, form) as record:
            self._permit(form.scopes)
            registry.check_expiry(form.expires_at_ms)
            await registry.require_tenant(self._bus, form.tenant)
            made = registry.check_key(KeyRecord(id="", **msgspec.structs.asdict(form)))
            record.changed = await registry.keep_key(self._bus, self._peppers, secret, made)
            record.target = record.changed.after.id
        return MadeKey(id=record.target, key=secret)

    async def change_key(self, identifier: str, form: KeyChange) -> KeyRecord:
        """Change where and until when a key holds; seen by every gateway within a second."""
        async with self._recorded("keys.change", identifier, form) as record:
            await self._permit_on(identifier)
            if form.expires_at_ms is not msgspec.UNSET:
                registry.check_expiry(form.expires_at_ms)
            record.changed = await registry.change_key(
                self._bus, identifier, lambda key: msgspec.structs.replace(key, **given(form))
            )
        return record.changed.after

    async def revoke_key(self, identifier: str) -> KeyRecord:
        """Out at every gateway within a second; one that is revoked stays as it is."""
        now_ms = clock.now_ms()
        async with self._recorded("keys.revoke", identifier) as record:
            await self._permit_on(identifier)
            record.changed = await registry.change_key(
                self._bus,
                identifier,
                lambda key: msgspec.structs.replace(key, revoked_at_ms=key.revoked_at_ms or now_ms),
            )
        return record.changed.after

    async def move_key(self, secret: str) -> KeyRecord:
        """Move a key from the previous pepper to the current one, before its next use does."""
        if self._peppers is None or self._peppers.previous is None:
            raise HeadraceError("invalid_request", "there is one pepper, and all keys are under it")
        found = await registry.keys_of_secret(self._bus, self._peppers, secret.encode())
        if not found:
            raise HeadraceError("not_found", "there is no such key")
        async with self._recorded("keys.move", found[0].id) as record:
            await registry.move_key(self._bus, self._peppers, secret.encode())
            record.changed = registry.Changed(found[0], await registry.key(self._bus, found[0].id))
        return record.changed.after

    async def change_model(self, name: str, form: ModelChange) -> ModelRecord:
        """Change the bounds of a model's queue, or its fallbacks."""
        limits = given(form)
        fallbacks = limits.pop("fallbacks", None)
        async with self._recorded("models.change", name, form) as record:
            record.changed = await registry.change_model(self._bus, name, limits=limits, fallbacks=fallbacks)
        return record.changed.after

    async def set_shards(self, name: str, count: int) -> ModelRecord:
        """Split a model over more owners; each needs workers of its own."""
        async with self._recorded("models.set-shards", name) as record:
            shown = await registry.find_rollout(self._bus, name)
            if shown is not None and shown.open:
                raise HeadraceError("conflict", f"a roll-out of {name} is open: wait for its end, or abort it")
            record.changed = await registry.set_shards(self._bus, name, count)
        return record.changed.after

    async def publish(self, manifest: Manifest) -> registry.Changed[Manifest]:
        """Enter a version whose files are where it says; the first of a model is served at once."""
        async with self._recorded("models.publish", _pin(manifest.name, manifest.version)) as record:
            changed = await registry.put_version(self._bus, manifest)
            record.changed = registry.Changed(_bare(changed.before), _bare(changed.after))
        return changed

    async def unpublish(self, name: str, version: str) -> None:
        """Remove a version that is not served."""
        async with self._recorded("models.unpublish", _pin(name, version)) as record:
            manifest = await registry.version(self._bus, name, version)
            shown = await registry.find_rollout(self._bus, name)
            if shown is not None and shown.open and shown.plan.to == version:
                raise HeadraceError("conflict", f"a roll-out to it is open: `headrace rollout abort {name}` first")
            await registry.remove_version(self._bus, name, version)
            record.changed = registry.Changed(_bare(manifest), None)

    async def set_stable(self, name: str, version: str) -> ModelRecord:
        """Serve another version, at once and to everybody; running requests stay where they are."""
        async with self._recorded("models.set-stable", name) as record:
            record.changed = await registry.set_stable(self._bus, name, version)
        return record.changed.after

    async def remove_model(self, name: str) -> None:
        """Take a model out of service: nothing new is admitted, and what was admitted goes on to its end."""
        async with self._recorded("models.remove", name) as record:
            record.changed = await registry.remove_model(self._bus, name)

    async def set_alias(self, name: str, form: AliasChange) -> Alias:
        """Say what an alias stands for; every gateway follows within a second."""
        alias = Alias(name=name, models=form.models, order=form.order)
        async with self._recorded("aliases.set", name, form) as record:
            record.changed = await registry.put_alias(self._bus, alias)
        return record.changed.after

    async def remove_alias(self, name: str) -> Alias:
        """Forget an alias; gives it as it was."""
        async with self._recorded("aliases.remove", name) as record:
            record.changed = await registry.remove_alias(self._bus, name)
        return record.changed.before

    async def start_rollout(self, model: str, form: NewRollout) -> RolloutPlan:
        """Give a new version a growing share of a model's requests."""
        async with self._recorded("rollouts.start", model, form) as record:
            asked = msgspec.structs.asdict(form) | {"steps": list(form.steps), "tenants": list(form.tenants)}
            plan = RolloutPlan(id="", model=model, **asked)
            record.changed = await registry.start_rollout(self._bus, plan)
        return record.changed.after

    async def change_rollout(self, model: str, form: RolloutChange) -> RolloutPlan:
        """Pause, resume, promote or abort the open roll-out."""
        async with self._recorded("rollouts.change", model, form) as record:
            record.changed = await registry.want(self._bus, model, form.wanted)
        return record.changed.after

    async def set_prices(self, form: NewPrice) -> Prices:
        """Set a model's prices from a day on, until a later price begins."""
        now_ms = clock.now_ms()
        made = _prices(form, registry.check_day(form.valid_from or _tomorrow(now_ms), now_ms, backdate=form.backdate))
        for price in made:
            price = msgspec.structs.replace(price, created_at_ms=now_ms)
            async with self._recorded("prices.set", price.model, form) as record:
                record.changed = await registry.put_price(self._bus, price)
        return Prices(data=made)

    async def change_worker(self, name: str, form: WorkerChange) -> HeldWorker:
        """Let a worker take nothing more, or take work again, for the life of its process."""
        async with self._recorded("workers.change", name, form) as record:
            await registry.model(self._bus, form.model)
            beat, queue = await operations.find_worker(self._bus, form.model, name)
            await operations.hold(self._bus, name, Hold(epoch=queue.epoch, held=form.held))
            held = HeldWorker(worker=name, model=form.model, held=form.held)
            record.changed = registry.Changed({"state": beat.state}, {"held": form.held})
        return held

    async def cancel_request(self, request_id: str, form: RequestCancel) -> CancelledRequest:
        """End a request wherever it is; nobody pays for it."""
        async with self._recorded("requests.cancel", request_id, form) as record:
            await registry.model(self._bus, form.model)
            shard, found = await operations.open_request(self._bus, form.model, request_id)
            outcome = await operations.cancel(self._bus, shard, found)
            record.changed = registry.Changed({"tenant": found.tenant, "state": found.state}, {"outcome": outcome})
        return CancelledRequest(request_id=request_id, tenant=found.tenant, model=form.model, outcome=outcome)

    async def drop_quarantined(self, request_id: str) -> ShownQuarantined:
        """Forget a request that is in quarantine; gives it as it was."""
        async with self._recorded("quarantine.drop", request_id) as record:
            found = (await self.quarantined(request_id)).data
            if not found or not await self._bus.jetstream.purge(
                topology.QUARANTINE, operations.quarantine_subject(request_id)
            ):
                raise HeadraceError("not_found", f"request {request_id} is not in quarantine")
            record.changed = registry.Changed(found[-1], None)
        return found[-1]

    async def quarantined(self, request_id: str = "*") -> QuarantineList:
        """What is in quarantine, without bodies."""
        return QuarantineList(
            data=[
                ShownQuarantined(
                    request_id=each.request.request_id,
                    tenant=each.request.tenant,
                    model=each.request.model,
                    quarantined_at_ms=each.quarantined_at_ms,
                    reason=each.reason,
                )
                for each in await operations.quarantined(self._bus, request_id)
            ]
        )

    async def prices(self) -> Prices:
        """All that are kept."""
        return Prices(data=await registry.prices(self._bus))

    async def trail(self, form: TrailQuery) -> Trail:
        """The newest entries of the areas that may be read, ``intended`` ones only where nothing followed."""
        areas = [area for area, scope in AREAS.items() if scope in self._granted]
        return Trail(data=await audit.newest(self._bus, areas, form))

    def _permit(self, scopes: Iterable[Scope]) -> None:
        """Nobody gives away, or manages, what it may not do itself. Raises HeadraceError."""
        beyond = (set(scopes) & set(ADMIN_SCOPES)) - self._granted
        if beyond:
            raise HeadraceError(
                "permission_denied", f"your key is not for {', '.join(sorted(beyond))}, so it manages no key that is"
            )

    async def _permit_on(self, identifier: str) -> None:
        self._permit((await registry.key(self._bus, identifier)).scopes)


def _prices(form: NewPrice, day: str) -> list[Price]:
    texts = {
        "input": form.input,
        "cached_input": form.cached_input or form.input,
        "output": form.output,
        "reasoning": form.reasoning or form.output,
    }
    figures = {}
    for name, text in texts.items():
        try:
            figures[name] = currency.micros(text)
        except ValueError as error:
            raise HeadraceError("invalid_request", f"{name}: {error}", param=name) from error
    tiers: tuple[Priority, ...] = (form.tier,) if form.tier else get_args(Priority)
    return [
        Price(model=form.model, version=form.version, tier=tier, valid_from=day, currency=form.currency, **figures)
        for tier in tiers
    ]


def _tomorrow(now_ms: int) -> str:
    return datetime.fromtimestamp(now_ms / 1000 + 86_400, UTC).date().isoformat()


def _pin(name: str, version: str) -> str:
    return f"{name}@{version}"


def _bare(manifest: Manifest | None) -> Manifest | None:
    """Without the digests of parts, which would fill the trail."""
    if manifest is None:
        return None
    files = {path: msgspec.structs.replace(each, parts=[]) for path, each in manifest.artifacts.items()}
    return msgspec.structs.replace(manifest, artifacts=files)


class Action(msgspec.Struct, frozen=True):
    """An action that may be asked for with a key of ``scope``; None: with one of any area."""

    scope: Scope | None
    form: type[Form]
    perform: Callable[[Administration, str, Any], Awaitable[msgspec.Struct]]


class NoForm(Form, frozen=True, kw_only=True):
    """Where there is nothing to say."""


ACTIONS: dict[str, Action] = {
    "tenants.create": Action("admin:tenants", NewTenant, lambda do, _, form: do.create_tenant(form)),
    "tenants.change": Action("admin:tenants", TenantChange, lambda do, name, form: do.change_tenant(name, form)),
    "keys.create": Action("admin:keys", NewKey, lambda do, _, form: do.create_key(form)),
    "keys.change": Action("admin:keys", KeyChange, lambda do, id, form: do.change_key(id, form)),
    "keys.revoke": Action("admin:keys", NoForm, lambda do, id, _: do.revoke_key(id)),
    "aliases.set": Action("admin:models", AliasChange, lambda do, name, form: do.set_alias(name, form)),
    "aliases.remove": Action("admin:models", NoForm, lambda do, name, _: do.remove_alias(name)),
    "rollouts.start": Action("admin:models", NewRollout, lambda do, name, form: do.start_rollout(name, form)),
    "rollouts.change": Action("admin:models", RolloutChange, lambda do, name, form: do.change_rollout(name, form)),
    "models.change": Action("admin:models", ModelChange, lambda do, name, form: do.change_model(name, form)),
    "workers.change": Action("admin:models", WorkerChange, lambda do, name, form: do.change_worker(name, form)),
    "requests.cancel": Action("admin:models", RequestCancel, lambda do, id, form: do.cancel_request(id, form)),
    "quarantine.list": Action("admin:models", NoForm, lambda do, _, __: do.quarantined()),
    "quarantine.drop": Action("admin:models", NoForm, lambda do, id, _: do.drop_quarantined(id)),
    "prices.list": Action("admin:prices", NoForm, lambda do, _, __: do.prices()),
    "prices.set": Action("admin:prices", NewPrice, lambda do, _, form: do.set_prices(form)),
    "audit.list": Action(None, TrailQuery, lambda do, _, form: do.trail(form)),
}
"""What the admin service does; the rest is for who has the operator's credentials. Lists are of what no gateway may
read."""

AREAS: dict[str, Scope] = {
    **{name.partition(".")[0]: action.scope for name, action in ACTIONS.items() if action.scope is not None},
    "logins": "admin:keys",
}
"""Areas of the audit trail, and the scope that reads each."""
