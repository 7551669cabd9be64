"""Hosts whose wall clocks differ and step: nothing waits, expires or is billed by them, and whose is off is shown."""

import pytest

from contracts.messages.attempts import AttemptEvent
from tests.support import failure_table
from tests.support.cluster import Cluster, Service
from tests.support.polling import until

pytestmark = pytest.mark.asyncio(loop_scope="module")
CLUSTER = {"stepping_clocks": True, "sim_itl_ms": 5, "sim_slots": 1}
HOUR_S = 3600.0


def step(service: Service, ahead_s: float) -> None:
    service.clock_ahead.write_text(str(ahead_s))


async def answered(cluster: Cluster) -> list[AttemptEvent]:
    """Ends of a few requests, all of them answered."""
    calls = [cluster.ask(stream=number % 2 == 0, max_tokens=4) for number in range(4)]
    for call in calls:
        await call.done()
        assert call.complete, call.story()
    return [event for call in calls for event in await cluster.ended(call.request_id)]


def in_order(event: AttemptEvent, began_ms: int) -> bool:
    times = (event.admitted_at_ms, event.dispatched_at_ms, event.first_token_at_ms, event.ended_at_ms)
    return began_ms - 1_000 <= times[0] and list(times) == sorted(times) and times[-1] < began_ms + 60_000


async def bus_time_ms(cluster: Cluster) -> int:
    async with cluster.bus() as bus:
        return (await bus.kv.times_ns("leases"))[1] // 1_000_000


@pytest.mark.parametrize("ahead_s", [30.0, -30.0])
async def test_d20_hosts_with_other_clocks_serve_and_are_named(cluster: Cluster, ahead_s: float) -> None:
    gateway, worker, scheduler = cluster.gateways[0], cluster.workers[0], cluster.schedulers[0]
    try:
        for service, by_s in ((gateway, ahead_s), (worker, -ahead_s), (scheduler, 2 * ahead_s)):
            step(service, by_s)
        began_ms = await bus_time_ms(cluster)
        for event in await answered(cluster):
            assert (event.outcome, event.attempt) == ("completed", 1)
            assert in_order(event, began_ms), event

        async def named() -> bool:
            queue = await cluster.queue()
            found = {} if queue is None else {clock.process: round(clock.ahead_ms / 1000) for clock in queue.clocks}
            theirs = {round(ahead_s), round(-ahead_s), round(2 * ahead_s)}
            return theirs == set(found.values()) and found[worker.joined_as] == round(-ahead_s)

        await until(named, "all three clocks are told", 20)
        row = failure_table.table()["a host's clock differs"]
        await until(lambda: gateway.says(row.log), "the gateway says it of itself", 20)
        assert any([row.figure(await each.page()) for each in cluster.schedulers])
    finally:
        for service in (gateway, worker, scheduler):
            step(service, 0)


async def test_a_clock_that_steps_ahead_and_back_stops_no_time(cluster: Cluster) -> None:
    """An hour ahead for a moment used to stand the scheduler's time still for that hour: no deadline, no bucket."""
    scheduler = cluster.schedulers[0]
    before = await cluster.queue()
    try:
        step(scheduler, HOUR_S)
        await answered(cluster)
        step(scheduler, 0)
        runs = cluster.ask(max_tokens=4000)
        await runs.shows(1)
        waits = cluster.ask(stream=False, max_tokens=4, headers={"x-headrace-deadline-ms": "700"})
        await waits.done(20)
        assert waits.error["code"] in ("deadline_exceeded", "overloaded"), waits.story()
        await runs.leave()
    finally:
        step(scheduler, 0)
    after = await cluster.queue()
    assert before is not None and after is not None and after.epoch == before.epoch, "nobody was deposed by it"
