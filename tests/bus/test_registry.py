"""Records of models and versions: what is entered once, what an operator may change, what is refused."""

import asyncio

import msgspec
import pytest

from contracts import registry, subjects, topology
from contracts.bus import Bus
from contracts.errors import HeadraceError
from contracts.messages.records import Artifact, Base, Golden, Manifest
from contracts.messages.rollouts import RolloutPlan

FIRST = Manifest(
    name="Org/M 1",
    version="v1",
    engine="vllm",
    context=100,
    default_output_tokens=16,
    artifacts={"model.safetensors": Artifact(sha256="ab", size=2, parts=["ab"])},
    path="/models/m",
)
SECOND = msgspec.structs.replace(FIRST, version="v2", context=200)


async def test_the_first_version_of_a_model_is_served_and_later_ones_wait(bus: Bus) -> None:
    await registry.put_version(bus, FIRST)
    await registry.put_version(bus, SECOND)
    assert [model.stable for model in await registry.models(bus)] == ["v1"]
    assert [each.version for each in await registry.versions(bus, FIRST.name)] == ["v1", "v2"]
    await registry.change_model(bus, FIRST.name, limits={"queued_requests": 3})
    changed = (await registry.set_stable(bus, FIRST.name, "v2")).after
    assert changed is not None and (changed.stable, changed.limits.queued_requests) == ("v2", 3)


async def test_a_version_never_changes_but_for_where_it_lies_and_what_was_found_of_it(bus: Bus) -> None:
    await registry.put_version(bus, FIRST)
    before = await registry.version(bus, FIRST.name, "v1")
    others = {
        "context": 99,
        "artifacts": {"model.safetensors": Artifact(sha256="cd", size=2, parts=["cd"])},
        "engine_arguments": {"dtype": "float32"},
    }
    for field, value in others.items():
        with pytest.raises(HeadraceError, match="never changes") as refused:
            await registry.put_version(bus, msgspec.structs.replace(FIRST, **{field: value}))
        assert refused.value.code == "conflict"
    assert await registry.version(bus, FIRST.name, "v1") == before
    moved = msgspec.structs.replace(FIRST, path="", store="s3://models", golden=Golden(prompt="p", tokens=[1]))
    moved = msgspec.structs.replace(moved, tokenizer_fingerprint="by another release of a library")
    await registry.put_version(bus, moved)
    assert await registry.version(bus, FIRST.name, "v1") == msgspec.structs.replace(
        moved, created_at_ms=before.created_at_ms
    )


async def test_of_many_that_enter_a_version_with_other_contents_one_wins(bus: Bus) -> None:
    made = [msgspec.structs.replace(FIRST, context=100 + number) for number in range(8)]
    results = await asyncio.gather(*(registry.put_version(bus, each) for each in made), return_exceptions=True)
    won = [result for result in results if not isinstance(result, BaseException)]
    assert len(won) == 1
    assert await registry.versions(bus) == [won[0].after]
    assert all(isinstance(result, HeadraceError) for result in results if result not in won)


async def test_what_is_served_is_not_removed_and_what_is_not_there_not_served(bus: Bus) -> None:
    await registry.put_version(bus, FIRST)
    await registry.put_version(bus, SECOND)
    with pytest.raises(HeadraceError, match="serves v1"):
        await registry.remove_version(bus, FIRST.name, "v1")
    tuned = msgspec.structs.replace(FIRST, name="tuned", version="t1", base=Base(model=FIRST.name, version="v1"))
    await registry.put_version(bus, tuned)
    base = Base(model=FIRST.name, version="v2")
    await registry.put_version(bus, msgspec.structs.replace(tuned, version="t2", base=base))
    with pytest.raises(HeadraceError, match=r"tuned: adapters of .+ v2"):  # Also of one that is not served.
        await registry.remove_version(bus, FIRST.name, "v2")
    await registry.set_stable(bus, "tuned", "t2")
    await registry.remove_version(bus, "tuned", "t1")
    await registry.set_stable(bus, "tuned", "t2")
    with pytest.raises(HeadraceError, match="tuned: adapters of"):
        await registry.remove_model(bus, FIRST.name)
    await registry.remove_model(bus, "tuned")
    await registry.forget_removed(bus, "tuned")
    with pytest.raises(HeadraceError, match="no version v3"):
        await registry.set_stable(bus, FIRST.name, "v3")
    await registry.remove_version(bus, FIRST.name, "v2")
    with pytest.raises(HeadraceError, match="no version v2"):
        await registry.set_stable(bus, FIRST.name, "v2")
    await registry.remove_model(bus, FIRST.name)
    assert await registry.models(bus) == [] and await registry.is_known(bus, FIRST.name)
    await registry.forget_removed(bus, FIRST.name)
    assert not await registry.is_known(bus, FIRST.name) and await registry.versions(bus) == []


@pytest.mark.parametrize("version", ["", "v@1", "a\nb", "x" * 129])
async def test_a_version_has_a_name_that_a_pin_can_say(bus: Bus, version: str) -> None:
    with pytest.raises(HeadraceError):
        await registry.put_version(bus, msgspec.structs.replace(FIRST, version=version))
    assert await registry.models(bus) == []


async def test_a_copy_at_another_key_is_no_version(bus: Bus) -> None:
    await registry.put_version(bus, FIRST)
    entry = (await bus.kv.all(topology.VERSIONS)).popitem()[1]
    await bus.kv.put(topology.VERSIONS, f"stolen.{subjects.encode('v1')}", entry.value)
    assert [each.name for each in await registry.versions(bus)] == [FIRST.name]


@pytest.mark.parametrize(
    ("engine", "reason"), [("vllm", "may not state these"), ("simulated", "unknown field `speed`")]
)
async def test_arguments_that_no_engine_has_are_not_entered(bus: Bus, engine: str, reason: str) -> None:
    manifest = msgspec.structs.replace(FIRST, engine=engine, engine_arguments={"speed": "high"})
    with pytest.raises(HeadraceError, match=reason):
        await registry.put_version(bus, manifest)
    assert await registry.models(bus) == []


# Shards -----------------------------------------------------------------------------------------------------


async def test_a_model_gets_more_shards_and_never_fewer(bus: Bus) -> None:
    await registry.put_version(bus, FIRST)
    assert (await registry.set_shards(bus, FIRST.name, 2)).after.shards == 2  # type: ignore[union-attr]
    for count in (1, 17):
        with pytest.raises(HeadraceError, match="has 2 shards"):
            await registry.set_shards(bus, FIRST.name, count)
    assert (await registry.model(bus, FIRST.name)).shards == 2


async def test_what_a_shard_could_not_do_is_refused(bus: Bus) -> None:
    """A name that is another's shard; an adapter; a name too long to be numbered; a roll-out, judged by one owner."""
    await registry.put_version(bus, FIRST)
    await registry.put_version(bus, SECOND)
    with pytest.raises(HeadraceError, match="as a shard's does"):
        await registry.put_version(bus, msgspec.structs.replace(FIRST, name=f"{FIRST.name}#1"))
    tuned = msgspec.structs.replace(FIRST, name="tuned", version="t1", base=Base(model=FIRST.name, version="v1"))
    await registry.put_version(bus, tuned)
    with pytest.raises(HeadraceError, match="is an adapter"):
        await registry.set_shards(bus, "tuned", 2)
    long = "m" * subjects.MAX_NAME_CHARACTERS
    await registry.put_version(bus, msgspec.structs.replace(FIRST, name=long))
    with pytest.raises(HeadraceError, match="shard's name"):
        await registry.set_shards(bus, long, 2)
    await registry.set_shards(bus, FIRST.name, 2)
    with pytest.raises(HeadraceError, match="no adapter can have"):
        await registry.put_version(bus, msgspec.structs.replace(tuned, name=FIRST.name))
    with pytest.raises(HeadraceError, match="2 shards"):
        await registry.start_rollout(bus, RolloutPlan(id="", model=FIRST.name, to="v2", steps=[100.0], hold_ms=1_000))


async def test_a_removed_model_goes_with_its_first_shard_and_that_is_the_last(bus: Bus) -> None:
    await registry.put_version(bus, FIRST)
    await registry.set_shards(bus, FIRST.name, 2)
    await registry.remove_model(bus, FIRST.name)
    assert not await registry.forget_removed(bus, FIRST.name), "the other one has not ended"
    assert not await registry.forget_removed(bus, f"{FIRST.name}#1")
    assert not await registry.forget_removed(bus, f"{FIRST.name}#1"), "it has gone already"
    assert await registry.forget_removed(bus, FIRST.name)
    assert not await registry.is_known(bus, FIRST.name)
