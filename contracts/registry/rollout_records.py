"""Records of roll-outs: the plan, which operators write, and the progress, which the model's owner writes.

At most one roll-out of a model is open at a time; the last one stays to be looked at. Progress is read by all, and
written by `keep_progress` alone, which the owner calls.
"""

import math
import secrets
from itertools import pairwise

import msgspec

from contracts import subjects, topology
from contracts.bus import Bus, KvEntry, WrongSequence
from contracts.clock import now_ms
from contracts.errors import HeadraceError
from contracts.messages.base import FEW, Codec
from contracts.messages.records import PRICE_TIERS, Manifest
from contracts.messages.rollouts import OVER, RolloutPlan, RolloutProgress, Wanted
from contracts.registry.base import CHANGES_TRIED_MAX, Changed, at_home, check_name, encoded, readable
from contracts.registry.model_records import model as model_record
from contracts.registry.model_records import version as version_record
from contracts.registry.tenant_records import tenant as tenant_record

_PLAN = Codec[RolloutPlan](RolloutPlan)
_PROGRESS = Codec[RolloutProgress](RolloutProgress)
_PROGRESS_OF = ".progress"

HOLD_MS_MAX = 30 * 86_400_000
"""Longest time of a step: a month."""


class ShownRollout(msgspec.Struct, frozen=True, kw_only=True):
    """A roll-out as operators see it; the progress is missing until the model's owner has seen the plan."""

    plan: RolloutPlan
    progress: RolloutProgress | None = None

    @property
    def open(self) -> bool:
        """Whether it goes on."""
        return self.progress is None or self.progress.phase not in OVER


def read_plan(entry: KvEntry) -> RolloutPlan:
    """The plan of an entry. Raises MsgspecError for what is none, and for a record from another place."""
    plan = _PLAN.decode(entry.value)
    return at_home(plan, subjects.encode_or_empty(plan.model), entry)


def read_progress(entry: KvEntry) -> RolloutProgress:
    """The progress of an entry, likewise."""
    progress = _PROGRESS.decode(entry.value)
    return at_home(progress, subjects.encode_or_empty(progress.model) + _PROGRESS_OF, entry)


def is_progress(key: str) -> bool:
    """Whether a progress lies at the key, and no plan."""
    return key.endswith(_PROGRESS_OF)


async def find_rollout(bus: Bus, model: str) -> ShownRollout | None:
    """The model's last roll-out; None when there was none."""
    key = subjects.encode(check_name("model name", model))
    entry = await bus.kv.get(topology.ROLLOUTS, key)
    plans = readable(read_plan, {} if entry is None else {key: entry})
    if not plans:
        return None
    entry = await bus.kv.get(topology.ROLLOUTS, key + _PROGRESS_OF)
    progress = readable(read_progress, {} if entry is None else {entry.key: entry})
    return ShownRollout(plan=plans[0], progress=next((each for each in progress if each.id == plans[0].id), None))


async def rollout(bus: Bus, model: str) -> ShownRollout:
    """The model's last roll-out; raises HeadraceError (not_found)."""
    found = await find_rollout(bus, model)
    if found is None:
        await model_record(bus, model)
        raise HeadraceError("not_found", f"there was no roll-out of {model} yet")
    return found


async def rollouts(bus: Bus) -> list[ShownRollout]:
    """The last one of each model, by name."""
    entries = await bus.kv.all(topology.ROLLOUTS)
    plans = readable(read_plan, {key: entry for key, entry in entries.items() if not is_progress(key)})
    found = readable(read_progress, {key: entry for key, entry in entries.items() if is_progress(key)})
    progress = {(each.model, each.id): each for each in found}
    shown = [ShownRollout(plan=plan, progress=progress.get((plan.model, plan.id))) for plan in plans]
    return sorted(shown, key=lambda each: each.plan.model)


async def start_rollout(bus: Bus, plan: RolloutPlan) -> Changed[RolloutPlan]:
    """Enter a plan, which gets its id here; raises HeadraceError for one that makes no sense, or beside an open one."""
    record = await model_record(bus, plan.model)
    if record.shards > 1:
        message = f"{plan.model} is split over {record.shards} shards, whose evidence nobody adds up: promote {plan.to}"
        raise HeadraceError("conflict", message)
    new = await version_record(bus, plan.model, plan.to)
    if plan.to == record.stable:
        raise HeadraceError("conflict", f"{plan.model} serves {plan.to} already", param="to")
    old = await version_record(bus, plan.model, record.stable)
    if why := _cannot_share(old, new):
        raise HeadraceError("invalid_request", f"{plan.to} {why}. Publish it as another model", param="to")
    for name in plan.tenants:
        if await tenant_record(bus, name) is None:
            raise HeadraceError("not_found", f"there is no tenant {name}", param="tenants")
    _check(plan)
    plan = msgspec.structs.replace(plan, id=secrets.token_hex(8), created_at_ms=now_ms())
    key = subjects.encode(plan.model)
    shown = await find_rollout(bus, plan.model)
    if shown is not None and shown.open:
        raise HeadraceError("conflict", f"a roll-out of {plan.model} to {shown.plan.to} is open: abort it first")
    entry = await bus.kv.get(topology.ROLLOUTS, key)
    try:
        if entry is None:
            await bus.kv.create(topology.ROLLOUTS, key, encoded(_PLAN, plan))
        else:
            await bus.kv.update(topology.ROLLOUTS, key, encoded(_PLAN, plan), revision=entry.revision)
    except WrongSequence as error:
        raise HeadraceError("conflict", f"somebody else starts a roll-out of {plan.model}") from error
    return Changed(None if shown is None else shown.plan, plan)


def _cannot_share(old: Manifest, new: Manifest) -> str:
    """Why a request cannot be given to either version; empty when it can.

    A request is checked and counted once, as the stable version wants it, before it is given its version.
    """
    if new.tokenizer_fingerprint != old.tokenizer_fingerprint:
        return f"counts tokens otherwise than {old.version}: its tokenizer or its chat template is another one"
    if new.context < old.context:
        return f"takes {new.context} tokens, and requests are checked against the {old.context} of {old.version}"
    if missing := sorted({*old.endpoints, *old.capabilities} - {*new.endpoints, *new.capabilities}):
        return f"has no {', no '.join(missing)}, which {old.version} has"
    if PRICE_TIERS.index(new.price_tier) > PRICE_TIERS.index(old.price_tier):
        return f"is of the price tier {new.price_tier}, above the {old.price_tier} of {old.version}"
    return ""


async def want(bus: Bus, model: str, wanted: Wanted) -> Changed[RolloutPlan]:
    """Change what is wanted of the open roll-out; what is wanted already stays so."""
    key = subjects.encode(check_name("model name", model))
    for _ in range(CHANGES_TRIED_MAX):
        shown = await rollout(bus, model)
        plan = shown.plan
        ending = plan.wanted if plan.wanted in ("promote", "abort") else ""
        if not shown.open or ending:
            became = shown.progress.phase if shown.progress and not shown.open else f"on its way: {ending}"
            if ending == wanted:
                return Changed(plan, plan)
            raise HeadraceError("conflict", f"the roll-out of {model} to {plan.to} is over ({became})")
        if plan.wanted == wanted:
            return Changed(plan, plan)
        entry = await bus.kv.get(topology.ROLLOUTS, key)
        changed = msgspec.structs.replace(plan, wanted=wanted)
        if entry is None or read_plan(entry) != plan:
            continue
        try:
            await bus.kv.update(topology.ROLLOUTS, key, encoded(_PLAN, changed), revision=entry.revision)
        except WrongSequence:
            continue
        return Changed(plan, changed)
    raise HeadraceError("conflict", f"the roll-out of {model} is being changed by others; try again")


async def keep_progress(bus: Bus, progress: RolloutProgress) -> None:
    """Write how far it is; only the model's owner does."""
    key = subjects.encode(progress.model) + _PROGRESS_OF
    await bus.kv.put(topology.ROLLOUTS, key, encoded(_PROGRESS, progress))


async def forget_rollout(bus: Bus, model: str) -> None:
    """Delete what is kept of a removed model's roll-outs."""
    key = subjects.encode(model)
    for each in (key, key + _PROGRESS_OF):
        await bus.kv.delete(topology.ROLLOUTS, each)


def _check(plan: RolloutPlan) -> None:
    """Raises HeadraceError for a plan that cannot be followed."""

    def refuse(message: str, param: str) -> None:
        raise HeadraceError("invalid_request", message, param=param)

    steps = plan.steps
    if not steps or len(steps) > (FEW.max_length or 0):
        refuse(f"steps must be 1 to {FEW.max_length} shares in percent, such as 1,5,25,50,100", "steps")
    if any(not math.isfinite(step) or not 0 < step <= 100 for step in steps):
        refuse("every step must be above 0 and at most 100 percent", "steps")
    if any(following <= step for step, following in pairwise(steps)):
        refuse("every step must be larger than the one before", "steps")
    if steps[0] >= 100:
        refuse("the first step must be below 100: with everybody at once nothing can be compared", "steps")
    if not 0 <= plan.hold_ms <= HOLD_MS_MAX:
        refuse("hold must be from 0 to 30 days", "hold_ms")
    if not math.isfinite(plan.shadow) or not 0 <= plan.shadow <= 100:
        refuse("shadow must be from 0 to 100 percent", "shadow")
    if len(set(plan.tenants)) != len(plan.tenants):
        refuse("tenants names one twice", "tenants")
