"""NATS restarted, wiped or cut off, its consumers deleted: what is published survives, texts are exact or end in an
error, and every service finds its way back by itself.
"""

import asyncio
import time
from typing import Any

import pytest

from tests.support.cluster import Call, Cluster, Service, counted
from tests.support.polling import until

pytestmark = pytest.mark.asyncio(loop_scope="module")
CLUSTER = {"gateways": 2, "schedulers": 2, "workers": 2, "sim_slots": 3, "sim_itl_ms": 20}


async def streams(cluster: Cluster, count: int, tokens: int, **fields: Any) -> list[Call]:
    """Streams that have begun."""
    calls = [cluster.ask(max_tokens=tokens, **fields) for _ in range(count)]
    for call in calls:
        await call.shows(5)
    return calls


async def all_exact(cluster: Cluster, calls: list[Call]) -> None:
    for call in calls:
        await call.done()
        assert call.complete and call.text == counted(call.body["max_tokens"]), call.story()
        events = await cluster.events(call.request_id)
        assert [event.billable for event in events].count(True) == 1


def pause(calls: list[Call]) -> float:
    """The longest time without a token that a caller saw, in seconds."""
    return max(gap for call in calls for gap in call.gaps)


async def nobody_lost(cluster: Cluster, since: int) -> None:
    assert not [event for event in await cluster.events_since(since) if event.outcome == "lost"]


async def test_nats_away_for_4_s_with_its_store_loses_nothing(cluster: Cluster) -> None:
    before = await cluster.newest()
    calls = await streams(cluster, 6, 250)
    queued = [cluster.ask(max_tokens=5) for _ in range(3)]
    gathered = cluster.ask(max_tokens=10, stream=False)
    await cluster.runs(6, 4)
    cluster.nats.stop()
    await until(lambda: _none_ready(cluster), "no service says that it is ready", 5)
    await asyncio.sleep(3.5)
    cluster.nats.start()
    began = time.monotonic()
    await cluster.all_ready(5)
    print(f"\nall ready {time.monotonic() - began:.2f} s after the server was back; pause {pause(calls):.1f} s")
    await all_exact(cluster, [*calls, *queued, gathered])
    await nobody_lost(cluster, before)


async def _none_ready(cluster: Cluster) -> bool:
    return not any([await service.ready() for service in cluster.services])


@pytest.mark.parametrize("role", ["gateway", "worker", "scheduler"])
async def test_a_cut_of_2_s_in_mid_stream_costs_no_token(cluster: Cluster, role: str) -> None:
    before = await cluster.newest()
    calls = await streams(cluster, 4, 200)
    services: dict[str, list[Service]] = {
        "gateway": [cluster.gateways[0]],
        "worker": list(cluster.workers),
        "scheduler": [await cluster.owner()],
    }
    cut = services[role]
    for service in cut:
        service.link.cut()
    await asyncio.sleep(2)
    for service in cut:
        service.link.heal()
    await all_exact(cluster, calls)
    print(f"\n{role} cut off for 2 s: longest pause {pause(calls):.1f} s")
    await nobody_lost(cluster, before)


@pytest.mark.slow
async def test_a_cut_of_30_s_ends_streams_with_an_error_and_everybody_comes_back(cluster: Cluster) -> None:
    """One gateway's link is dead though open; one worker's link is cut. The others go on."""
    calls = await streams(cluster, 4, 6000)
    beyond = await streams(cluster, 1, 6000, gateway=1)
    runner = await cluster.worker_of(beyond[0].request_id)
    (cut,) = [worker for worker in cluster.workers if worker is not runner]
    evictions = cut.says("evicted")
    cut.link.cut()
    cluster.gateways[1].link.stall()
    began = time.monotonic()
    await until(lambda: any(call.over for call in calls), "the cut worker's streams end", 12)
    print(f"\nstreams of the cut worker ended after {time.monotonic() - began:.1f} s")
    others = [cluster.ask(max_tokens=3) for _ in range(2)]
    await all_exact(cluster, others)
    assert not await cut.ready()
    assert not await cluster.gateways[1].ready()
    (event,) = await cluster.ended(beyond[0].request_id)
    assert event.outcome == "cancelled", "the generation of a gateway that is not heard is cancelled"
    await asyncio.sleep(max(0.0, 30 - (time.monotonic() - began)))
    cut.link.heal()
    cluster.gateways[1].link.heal()
    healed = time.monotonic()
    await cluster.all_ready(10)
    await beyond[0].done(20)
    took_s = time.monotonic() - healed
    print(f"the stalled gateway's stream ended {took_s:.1f} s after the cut: {beyond[0].error['code']}")
    assert beyond[0].error["code"] == "cancelled"
    ended = [call for call in calls if call.over]
    for call in ended:
        assert call.endings == 1 and call.error["code"] == "worker_lost", call.story()
        assert counted(6000).startswith(call.text)
    assert 0 < len(ended) < len(calls), "the other worker's streams go on"
    for call in calls:
        await call.leave()
    await cluster.whole()
    assert cut.says("evicted") == evictions + 1
    again = await streams(cluster, 1, 10, gateway=1)
    await all_exact(cluster, again)


async def test_deleted_consumers_are_made_again(cluster: Cluster) -> None:
    calls = await streams(cluster, 2, 150)
    async with cluster.bus() as bus:
        for stream in ("REQUESTS", "WORK", "ATTEMPTS", "KV_keys", "KV_models", "KV_tenants"):
            names = (await bus.jetstream.api(f"CONSUMER.NAMES.{stream}")).get("consumers") or []
            for name in names:
                await bus.jetstream.api(f"CONSUMER.DELETE.{stream}.{name}")
    began = time.monotonic()
    new = [cluster.ask(max_tokens=5) for _ in range(4)]
    await all_exact(cluster, new)
    print(f"\nrequests after the deletion were answered within {time.monotonic() - began:.1f} s")
    await all_exact(cluster, calls)


async def test_a_wiped_store_ends_streams_and_the_system_serves_again(cluster: Cluster) -> None:
    """The operator restores records; services mend themselves, or exit non-zero and are started again."""
    calls = await streams(cluster, 3, 500)
    cluster.nats.wipe()
    await cluster.keep_records()
    began = time.monotonic()
    exits: list[str] = []

    async def served() -> bool:
        for service in cluster.services:
            if not service.alive:
                assert service.exit_code != 0, f"{service.name} ended with 0"
                exits.append(service.name)
                service.start()
        call = cluster.ask(max_tokens=2)
        await call.done()
        return call.complete

    await until(served, "requests are answered again", 40)
    print(f"\nserves again {time.monotonic() - began:.1f} s after the wipe; exited: {exits}")
    for call in calls:
        await call.done(60)
        assert call.endings == 1 and counted(500).startswith(call.text), call.story()
        assert call.complete == (call.text == counted(500)), call.story()
    print(f"streams: {[call.error.get('code', 'complete') for call in calls]}")
