"""Roll-outs on a real bus: what operators may ask for, what the owner writes and tells, and who goes on after it."""

from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest

from contracts import registry, subjects, topology
from contracts.administration import Administration
from contracts.audit import Actor
from contracts.bus import Bus
from contracts.errors import HeadraceError
from contracts.forms import NewRollout, NewTenant, RolloutChange
from contracts.messages.rollouts import SHADOW_TENANT, RolloutEvent
from contracts.registry import ShownRollout
from scheduler import recovery
from scheduler.service import Scheduler
from tests.support.polling import metric, until
from tests.support.scheduler_shell import MANIFEST, MODEL, Shell

V2 = msgspec.structs.replace(MANIFEST, version="v2")
HALF = NewRollout(to="v2", steps=(50,), hold_ms=600_000, shadow=0)


@pytest.fixture
async def shell(bus: Bus, nats_url: str, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Shell]:
    monkeypatch.setattr(recovery, "HEARD_WITHIN_S", 0.4)
    made = Shell(bus, nats_url)
    await made.open()
    await registry.put_version(bus, V2)
    yield made
    await made.close()


@pytest.fixture
def do(bus: Bus) -> Administration:
    return Administration(bus, Actor(name="operator", address="test", via="cli"))


async def serving(shell: Shell) -> Scheduler:
    """A scheduler that owns the model, with a worker of either version."""
    scheduler = await shell.start()
    term = await shell.owner(scheduler)
    for version in ("v1", "v2"):
        await shell.worker(slots=200, version=version)
    await until(lambda: term.core.pool.slots("v1") and term.core.pool.slots("v2"), "both are ready")
    return scheduler


async def shown(bus: Bus, phase: str) -> ShownRollout:
    """The roll-out, once its owner says that it is in that phase."""

    async def found() -> ShownRollout | None:
        rollout = await registry.find_rollout(bus, MODEL)
        return rollout if rollout and rollout.progress and rollout.progress.phase == phase else None

    rollout: ShownRollout = await until(found, f"the roll-out is {phase}")
    return rollout


async def told(bus: Bus) -> list[RolloutEvent]:
    stored = bus.jetstream.read(topology.ROLLOUT_EVENTS, subjects.rollout(MODEL))
    return [msgspec.json.decode(message.data, type=RolloutEvent) async for message in stored]


async def admitted(shell: Shell, count: int) -> list[str]:
    """Versions that so many new requests get."""
    return [(await shell.admit()).version for _ in range(count)]


async def test_requests_get_their_version_by_share_and_an_owner_goes_on_for_another(
    shell: Shell, do: Administration
) -> None:
    first = await serving(shell)
    assert set(await admitted(shell, 5)) == {"v1"}
    plan = await do.start_rollout(MODEL, HALF)
    before = (await shown(shell.bus, "live")).progress
    assert before is not None and before.share == 0.5
    versions = await admitted(shell, 60)
    assert 12 <= versions.count("v2") <= 48
    item = await shell.item(await shell.submit())
    assert item.version == item.request.version

    second = await shell.start()
    await shell.stop(first)
    term = await shell.owner(second)
    await until(lambda: term.core.pool.slots("v2"), "the new owner knows the workers")
    rollout = term.core.versions.rollout
    assert rollout is not None and rollout.plan.id == plan.id
    assert rollout.held_ms >= before.held_ms
    assert set(await admitted(shell, 40)) == {"v1", "v2"}

    await do.change_rollout(MODEL, RolloutChange(wanted="abort"))
    progress = (await shown(shell.bus, "aborted")).progress
    assert progress is not None and (progress.share, progress.reason) == (0, "the operator aborted it")
    assert set(await admitted(shell, 20)) == {"v1"}
    events = await until(lambda: _told(shell.bus, 2), "both events are stored")
    assert [event.news for event in events] == ["started", "aborted"]
    assert {event.id for event in events} == {plan.id}


async def _told(bus: Bus, count: int) -> list[RolloutEvent]:
    events = await told(bus)
    return events if len(events) >= count else []


async def test_promotion_makes_the_version_stable_and_is_audited(shell: Shell, do: Administration) -> None:
    await serving(shell)
    await do.start_rollout(MODEL, HALF)
    await shown(shell.bus, "live")
    before = metric("headrace_rollout_news_total", model=MODEL, news="promoted")
    await do.change_rollout(MODEL, RolloutChange(wanted="promote"))
    await shown(shell.bus, "promoted")
    assert (await registry.model(shell.bus, MODEL)).stable == "v2"
    assert set(await admitted(shell, 10)) == {"v2"}
    assert [event.news for event in await until(lambda: _told(shell.bus, 2), "both are stored")] == [
        *("started", "promoted")
    ]
    assert metric("headrace_rollout_news_total", model=MODEL, news="promoted") == before + 1
    with pytest.raises(HeadraceError, match="serves v2 already"):
        await do.start_rollout(MODEL, HALF)


async def test_copies_run_on_the_new_version_and_are_nobodys(shell: Shell, do: Administration) -> None:
    await serving(shell)
    await do.start_rollout(MODEL, NewRollout(to="v2", steps=(5,), hold_ms=600_000, shadow=100))
    await shown(shell.bus, "shadow")
    request_id = await shell.submit(b'{"messages":[{"role":"user","content":"copy me"}]}')

    async def copied() -> Any:
        return next((item for item in await shell.work() if item.request.arm == "shadow"), None)

    copy = await until(copied, "the copy is in WORK")
    original = await shell.item(request_id)
    assert (original.version, copy.version) == ("v1", "v2")
    assert bytes(copy.request.body) == bytes(original.request.body)
    assert (copy.request.tenant, copy.request.key_id, copy.request.priority) == (SHADOW_TENANT, "", "batch")
    assert copy.request.reply.subject == ""


@pytest.mark.parametrize(
    ("model", "fields", "code", "param"),
    [
        ("none", {}, "not_found", None),
        ("", {}, "invalid_request", "name"),
        ("x" * 65, {}, "invalid_request", "name"),
        (MODEL, {"to": "v9"}, "not_found", "version"),
        (MODEL, {"to": "v1"}, "conflict", "to"),
        (MODEL, {"to": "v@2"}, "invalid_request", "version"),
        (MODEL, {"to": ""}, "invalid_request", "name"),
        (MODEL, {"steps": ()}, "invalid_request", "steps"),
        (MODEL, {"steps": (0, 50)}, "invalid_request", "steps"),
        (MODEL, {"steps": (-1,)}, "invalid_request", "steps"),
        (MODEL, {"steps": (5, 5)}, "invalid_request", "steps"),
        (MODEL, {"steps": (50, 5)}, "invalid_request", "steps"),
        (MODEL, {"steps": (5, 101)}, "invalid_request", "steps"),
        (MODEL, {"steps": (100,)}, "invalid_request", "steps"),
        (MODEL, {"steps": (float("nan"),)}, "invalid_request", "steps"),
        (MODEL, {"steps": tuple(range(1, 90))}, "invalid_request", "steps"),
        (MODEL, {"hold_ms": -1}, "invalid_request", "hold_ms"),
        (MODEL, {"hold_ms": 10**12}, "invalid_request", "hold_ms"),
        (MODEL, {"shadow": -1}, "invalid_request", "shadow"),
        (MODEL, {"shadow": float("inf")}, "invalid_request", "shadow"),
        (MODEL, {"tenants": ("nobody",)}, "not_found", "tenants"),
    ],
)
async def test_a_plan_that_makes_no_sense_is_refused_and_nothing_is_kept(
    shell: Shell, do: Administration, model: str, fields: dict[str, Any], code: str, param: str | None
) -> None:
    form = NewRollout(**({"to": "v2"} | fields))
    with pytest.raises(HeadraceError) as refused:
        await do.start_rollout(model, form)
    assert (refused.value.code, refused.value.param) == (code, param)
    assert await registry.rollouts(shell.bus) == []


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"tokenizer_fingerprint": "another"}, "counts tokens otherwise than v0"),
        ({"context": 999}, "takes 999 tokens, and requests are checked against the 1000 of v0"),
        ({"endpoints": ("completions",)}, "has no chat/completions"),
        ({"capabilities": ("json",)}, "has no tools, which v0 has"),
        ({"price_tier": "premium"}, "is of the price tier premium, above the standard of v0"),
    ],
)
async def test_versions_of_which_one_cannot_do_what_the_other_can_share_no_requests(
    shell: Shell, do: Administration, fields: dict[str, Any], why: str
) -> None:
    """For a request is checked and counted once, before it is given its version."""
    stable = msgspec.structs.replace(MANIFEST, version="v0", capabilities=("json", "tools"))
    await registry.put_version(shell.bus, stable)
    await registry.set_stable(shell.bus, MODEL, "v0")
    await registry.put_version(shell.bus, msgspec.structs.replace(stable, **{"version": "v3"} | fields))
    with pytest.raises(HeadraceError, match=f"v3 {why}.*Publish it as another model"):
        await do.start_rollout(MODEL, NewRollout(to="v3"))
    assert await registry.rollouts(shell.bus) == []


async def test_what_is_kept_of_a_roll_out_goes_with_its_model(shell: Shell, do: Administration) -> None:
    await serving(shell)
    await do.start_rollout(MODEL, HALF)
    await shown(shell.bus, "live")
    await registry.remove_model(shell.bus, MODEL)

    async def forgotten() -> bool:
        return not await shell.bus.kv.all(topology.ROLLOUTS)

    await until(forgotten, "nothing is kept")
    await registry.put_version(shell.bus, MANIFEST)
    with pytest.raises(HeadraceError, match="no roll-out of"):
        await registry.rollout(shell.bus, MODEL)


async def test_one_roll_out_at_a_time_and_none_to_change_afterwards(shell: Shell, do: Administration) -> None:
    with pytest.raises(HeadraceError, match="no roll-out"):
        await do.change_rollout(MODEL, RolloutChange(wanted="pause"))
    await do.start_rollout(MODEL, HALF)
    with pytest.raises(HeadraceError, match="is open: abort it first"):
        await do.start_rollout(MODEL, HALF)
    with pytest.raises(HeadraceError, match="a roll-out to it is open"):
        await do.unpublish(MODEL, "v2")
    assert (await do.change_rollout(MODEL, RolloutChange(wanted="pause"))).wanted == "pause"
    assert (await do.change_rollout(MODEL, RolloutChange(wanted="pause"))).wanted == "pause"
    await do.change_rollout(MODEL, RolloutChange(wanted="abort"))
    for wanted in ("run", "pause", "promote"):
        with pytest.raises(HeadraceError, match="is over"):
            await do.change_rollout(MODEL, msgspec.convert({"wanted": wanted}, RolloutChange))
    assert (await registry.rollout(shell.bus, MODEL)).plan.wanted == "abort"


async def test_no_tenant_has_the_name_of_copies(do: Administration) -> None:
    with pytest.raises(HeadraceError, match="the service's own name"):
        await do.create_tenant(NewTenant(name=SHADOW_TENANT))
