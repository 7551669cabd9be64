"""Roll-outs on real processes: versions and workers that fail, schedulers and workers that are killed in the middle."""

import asyncio
import itertools
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import msgspec
import pytest

from compose.stack import records
from compose.stack.data_dir import ComposeError
from compose.stack.manifest import make_manifest
from contracts import registry, subjects, topology
from contracts.administration import Administration
from contracts.audit import Actor
from contracts.bus import BusError
from contracts.errors import HeadraceError
from contracts.forms import NewRollout, RolloutChange
from contracts.messages.attempts import AttemptEvent
from contracts.messages.rollouts import RolloutEvent, RolloutPlan, RolloutProgress, Wanted
from tests.support import failure_table
from tests.support.cluster import MODEL, Call, Cluster
from tests.support.polling import until

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]
CLUSTER = {"schedulers": 2, "workers": 4, "ledger": True, "sim_slots": 16, "sim_itl_ms": 10}
NEW = slice(2, 4)
"""Workers of a new version, while it is rolled out."""
CALLERS = 6
SEEN = ("new version misbehaves", "worker of a new version misbehaves")
"""Rows of the table in compose/OBSERVABILITY.md that are made to happen here."""
LIMIT_S = 60.0


@asynccontextmanager
async def rolled_out(
    cluster: Cluster, version: str, *, bad_worker: bool = False, **wrong: Any
) -> AsyncIterator[RolloutPlan]:
    """A roll-out at 50 % to a new version, which has ``wrong`` with it; afterwards all workers serve the stable one."""
    manifest = make_manifest("simulated", MODEL, 1_048_576)
    async with cluster.bus() as bus:
        await registry.put_version(bus, msgspec.structs.replace(manifest, version=version, engine_arguments=wrong))
    for worker in cluster.workers[NEW]:
        worker.kill()
        worker.settings["HEADRACE_VERSION"] = version
    if bad_worker:
        cluster.workers[3].settings["HEADRACE_SIM_FAILS"] = "0.9"
    for worker in cluster.workers[NEW]:
        worker.start()
    await until(lambda: serve(cluster, version, 2), f"two workers serve {version}", LIMIT_S)
    form = NewRollout(to=version, steps=(50,), hold_ms=3_600_000, shadow=0)
    async with cluster.bus() as bus:
        plan = await Administration(bus, Actor(name="test", address="", via="cli")).start_rollout(MODEL, form)
    try:
        yield plan
    finally:
        with suppress(HeadraceError):
            await want(cluster, "abort")
        for worker in cluster.workers[NEW]:
            worker.kill()
            worker.settings.pop("HEADRACE_VERSION")
            worker.settings.pop("HEADRACE_SIM_FAILS", None)
            worker.start()
        for worker in cluster.workers[NEW]:
            await until(worker.ready, f"{worker.name} is ready", LIMIT_S)


async def want(cluster: Cluster, wanted: Wanted) -> None:
    async with cluster.bus() as bus:
        await Administration(bus, Actor(name="test", address="", via="cli")).change_rollout(
            MODEL, RolloutChange(wanted=wanted)
        )


@asynccontextmanager
async def callers(cluster: Cluster) -> AsyncIterator[list[Call]]:
    """So many at a time, each the next one when the last has ended; those that have ended."""
    ended: list[Call] = []
    going = True

    async def call_again() -> None:
        for number in itertools.count():
            if not going:
                return
            call = cluster.ask(max_tokens=8, words=["one"] * (1 + number % 5))
            await call.done()
            cluster.calls.remove(call)
            ended.append(call)
            await asyncio.sleep(0 if call.status == 200 else 0.3)

    tasks = [asyncio.create_task(call_again()) for _ in range(CALLERS)]
    try:
        yield ended
    finally:
        going = False
        await asyncio.gather(*tasks)


async def serve(cluster: Cluster, version: str, count: int) -> bool:
    queue = await cluster.queue()
    return queue is not None and Counter(it.version for it in queue.workers if it.state == "ready")[version] == count


async def progress(cluster: Cluster) -> RolloutProgress | None:
    async with cluster.bus() as bus:
        shown = await registry.find_rollout(bus, MODEL)
    return shown.progress if shown is not None else None


async def reaches(cluster: Cluster, phase: str) -> RolloutProgress:
    async def look() -> RolloutProgress | None:
        found = await progress(cluster)
        return found if found is not None and found.phase == phase else None

    reached: RolloutProgress = await until(look, f"the roll-out is {phase}", LIMIT_S)
    return reached


async def counted(cluster: Cluster, canary: int) -> RolloutProgress:
    """Once so many requests of the new version were served in the present step."""

    async def look() -> RolloutProgress | None:
        found = await progress(cluster)
        return found if found is not None and found.evidence and found.evidence[-1].canary >= canary else None

    enough: RolloutProgress = await until(look, f"{canary} requests of the new version", LIMIT_S)
    return enough


async def told(cluster: Cluster, plan: RolloutPlan) -> list[RolloutEvent]:
    """What the bus was told of the roll-out."""
    async with cluster.bus() as bus:
        stored = bus.jetstream.read(topology.ROLLOUT_EVENTS, subjects.rollout(MODEL))
        found = [msgspec.json.decode(message.data, type=RolloutEvent) async for message in stored]
    return [event for event in found if event.id == plan.id]


async def ends_of(cluster: Cluster, version: str) -> list[AttemptEvent]:
    return [event for event in await cluster.events() if event.version == version]


async def moved(cluster: Cluster, what: str, before: float) -> None:
    """The row's metric has risen at some scheduler, and its log line is written."""
    row = failure_table.table()[what]

    async def look() -> bool:
        return await figure(cluster, what) > before and any(it.says(row.log) for it in cluster.schedulers)

    await until(look, f"{row} moves")


async def figure(cluster: Cluster, what: str) -> float:
    row = failure_table.table()[what]
    return sum([row.figure(await scheduler.page()) for scheduler in cluster.schedulers])


async def test_a_version_that_fails_is_stopped_told_of_and_left(cluster: Cluster) -> None:
    before = await figure(cluster, SEEN[0])
    async with rolled_out(cluster, "failing", fails=0.7) as plan, callers(cluster) as calls:
        stopped = await reaches(cluster, "stopped")
        assert f"failing is worse than {stopped.stable} by errors" in stopped.reason
        assert [event.news for event in await told(cluster, plan)] == ["started", "stopped"]
        await moved(cluster, SEEN[0], before)
        await until(lambda: serve(cluster, stopped.stable, 4), "its workers serve the stable one", LIMIT_S)
        settled = len(calls)
        await until(lambda: len(calls) > settled + 2 * CALLERS, "more calls end", LIMIT_S)
        assert all(call.complete for call in calls[settled + CALLERS :])
    ends = await ends_of(cluster, "failing")
    late = [event for event in ends if event.admitted_at_ms > stopped.ended_at_ms]
    assert ends and not late, "nothing new goes there once it is stopped"
    failed = next(event for event in ends if event.outcome == "failed")
    assert failed.arm == "canary"
    text = await until(lambda: explained(cluster, failed.request_id), "the ledger has its row")
    assert any("failing is worse than" in line for line in text), text


async def explained(cluster: Cluster, request_id: str) -> list[str]:
    async with cluster.bus() as bus:
        with suppress(ComposeError, BusError):
            return (await records.explain(bus, request_id)).text
    return []


async def test_one_bad_worker_is_not_a_bad_version(cluster: Cluster) -> None:
    before = await figure(cluster, SEEN[1])
    async with rolled_out(cluster, "sound", bad_worker=True) as plan, callers(cluster) as calls:
        bad = cluster.workers[3].joined_as
        await until(lambda: has_told(cluster, plan, "bad_worker"), "the bad worker is told of", LIMIT_S)
        found = [event for event in await told(cluster, plan) if event.news == "bad_worker"]
        assert len(found) == 1 and bad in found[0].reason and "replace it" in found[0].reason
        await moved(cluster, SEEN[1], before)
        now = await progress(cluster)
        assert now is not None and (now.phase, now.bad_workers) == ("live", [bad])
        seen = (await counted(cluster, now.evidence[-1].canary + 10)).evidence[-1].workers
        assert bad not in seen
        settled = len(calls)
        await until(lambda: len(calls) > settled + 2 * CALLERS, "more calls end", LIMIT_S)
        assert all(call.complete for call in calls[settled + CALLERS :]), "it gets nothing more"


async def has_told(cluster: Cluster, plan: RolloutPlan, news: str) -> bool:
    return any(event.news == news for event in await told(cluster, plan))


async def test_a_scheduler_killed_in_the_middle_of_a_step_leaves_it_to_the_next(cluster: Cluster) -> None:
    async with rolled_out(cluster, "kept") as plan, callers(cluster) as calls:
        before = await counted(cluster, 10)
        owner = await cluster.owner()
        owner.kill()
        after = await counted(cluster, before.evidence[0].canary + 10)
        assert (after.id, after.phase, after.step, after.share) == (plan.id, "live", 0, 0.5)
        assert after.held_ms >= before.held_ms and len(after.evidence) == 1
        assert [event.news for event in await told(cluster, plan)] == ["started"]
    answered = [call for call in calls if call.status == 200]
    assert all(call.complete for call in answered), "no stream breaks"
    versions: dict[str, set[str]] = {}
    for event in await cluster.events():
        versions.setdefault(event.request_id, set()).add(event.version)
    assert all(len(versions[call.request_id]) == 1 for call in answered), "or changes its version"


async def test_a_worker_killed_in_the_middle_of_a_load_comes_back_and_loads(cluster: Cluster) -> None:
    async with rolled_out(cluster, "slow", starts_after_ms=4_000), callers(cluster) as calls:
        switched = {worker: worker.says("version_switched") for worker in cluster.workers[:2]}
        await want(cluster, "promote")
        await reaches(cluster, "promoted")

        def loading() -> Any:
            return next((it for it in cluster.workers[:2] if it.says("version_switched") > switched[it]), None)

        worker = await until(loading, "one of the others loads it", LIMIT_S)
        worker.kill()
        worker.start()
        await until(lambda: serve(cluster, "slow", 4), "all serve it", LIMIT_S)
        assert all(call.complete for call in calls if call.status == 200)


async def test_when_the_workers_of_both_versions_die_it_waits_for_others_and_goes_on(cluster: Cluster) -> None:
    async with rolled_out(cluster, "patient") as plan:
        async with callers(cluster):
            before = await counted(cluster, 5)
            for worker in cluster.workers:
                worker.kill()
            await until(lambda: nobody(cluster), "they are lost", LIMIT_S)
            now = await progress(cluster)
            assert now is not None and (now.id, now.phase) == (plan.id, "live")
            for worker in cluster.workers:
                worker.start()
            after = await counted(cluster, before.evidence[0].canary + 10)
        assert (after.phase, after.share) == ("live", 0.5)
        assert [event.news for event in await told(cluster, plan)] == ["started"]


async def nobody(cluster: Cluster) -> bool:
    queue = await cluster.queue()
    return queue is not None and not queue.workers
