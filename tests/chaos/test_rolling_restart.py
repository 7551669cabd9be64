"""SIGTERM to each process in turn, under load, each started again: nothing is lost and nothing is repeated."""

import asyncio
import random
import signal
import time

import pytest

from tests.support.cluster import Call, Cluster, Service, counted

pytestmark = pytest.mark.asyncio(loop_scope="module")
CLUSTER = {
    "gateways": 2,
    "schedulers": 2,
    "workers": 2,
    "ledger": True,
    "sim_slots": 16,
    "sim_itl_ms": 10,
    "grace_s": 10,
}


async def test_a_rolling_restart_of_everything_loses_and_repeats_nothing(cluster: Cluster) -> None:
    source = random.Random(1)
    calls: list[Call] = []
    stopping = False

    async def caller() -> None:
        """One request after the other, at a gateway that says it is ready, as a load balancer would send them."""
        while not stopping:
            ready = [index for index, gateway in enumerate(cluster.gateways) if await gateway.ready()]
            if not ready:
                await asyncio.sleep(0.05)
                continue
            call = cluster.ask(
                gateway=source.choice(ready), stream=source.random() < 0.7, max_tokens=source.randint(1, 120)
            )
            calls.append(call)
            await call.done()

    callers = [asyncio.create_task(caller()) for _ in range(8)]
    for service in cluster.services:
        await restart(cluster, service)
    stopping = True
    await asyncio.gather(*callers)
    refused = [call for call in calls if call.status == 503 or (call.broke and not call.status)]
    wrong = [call for call in calls if call not in refused and not exact(call)]
    print(
        f"\n{len(calls)} requests during {len(cluster.services)} restarts; {len(refused)} refused, {len(wrong)} wrong"
    )
    assert not wrong, "\n".join(call.story() for call in wrong)
    # Between a gateway's last answer to a probe and its draining: refused at once, nothing ran.
    assert len(refused) <= 4, "\n".join(call.story() for call in refused)
    for call in calls:
        if call not in refused:
            billable = [event.billable for event in await cluster.events(call.request_id)]
            assert billable.count(True) == 1, call.story()


def exact(call: Call) -> bool:
    return call.complete and call.endings == 1 and call.text == counted(call.body["max_tokens"])


async def restart(cluster: Cluster, service: Service) -> None:
    began = time.monotonic()
    service.signal(signal.SIGTERM)
    assert await service.exited(15) == 0, service.name
    stopped_s = time.monotonic() - began
    service.start()
    await cluster.all_ready()
    await cluster.whole()
    print(f"{service.name}: stopped in {stopped_s:.1f} s, back after {time.monotonic() - began:.1f} s")
