"""Requests that kill workers and engines, and those beside them: three workers, whose dead are started again."""

import asyncio
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import openai
import pytest

from contracts.messages.attempts import AttemptEvent
from tests.support.cluster import Call, Cluster, chat
from tests.support.polling import until

pytestmark = pytest.mark.asyncio(loop_scope="module")
CLUSTER = {"schedulers": 2, "workers": 3, "sim_slots": 24, "sim_itl_ms": 20}
ENGINES_MAX = 3
KILLERS = {"the worker dies": "exit_after", "the engine dies": "crash_after"}


@asynccontextmanager
async def kept_up(cluster: Cluster) -> AsyncIterator[list[str]]:
    """Whoever dies is started again, as by a supervisor; gives the names of the dead."""
    dead: list[str] = []

    async def keep() -> None:
        while True:
            for service in [*cluster.workers, *cluster.schedulers]:
                if not service.alive:
                    dead.append(service.name)
                    service.start()
            await asyncio.sleep(0.1)

    keeper = asyncio.create_task(keep())
    try:
        yield dead
    finally:
        keeper.cancel()


async def engine_losses(cluster: Cluster) -> float:
    return sum([await worker.metric("headrace_worker_engine_losses_total") for worker in cluster.workers])


def neighbours(cluster: Cluster, count: int) -> list[Call]:
    """Half of them stream; their first token takes 2.5 s, so that a killer finds them without any.

    Nobody has asked for the same before: what an earlier test put down to a body does not count here.
    """
    once = uuid.uuid4().hex
    return [
        cluster.ask(
            stream=number % 2 == 0, words=[f"{once}.{number}"], simulate={"tokens": ["a", "b"], "ttft_ms": 2500}
        )
        for number in range(count)
    ]


async def answered(calls: list[Call]) -> None:
    for call in calls:
        await call.done()
        assert call.complete and call.text == "ab", call.story()


async def deaths_of(cluster: Cluster, since: int) -> list[AttemptEvent]:
    return [event for event in await cluster.events_since(since) if event.engine_death]


async def test_e05_those_who_waited_on_a_killed_worker_are_tried_again_together(cluster: Cluster) -> None:
    """None of them waits for another's first token."""
    calls = [cluster.ask(simulate={"tokens": ["a", "b"], "ttft_ms": 4000}) for _ in range(20)]
    await cluster.runs(20, 0)
    cluster.workers[0].kill()
    await answered(calls)
    events = [await cluster.events(call.request_id) for call in calls]
    again = [of_one[1] for of_one in events if len(of_one) == 2]
    assert len(again) >= 5 and all(event.outcome == "completed" for event in again)
    assert max(event.dispatched_at_ms for event in again) < min(event.first_token_at_ms for event in again)


@pytest.mark.parametrize("killer", KILLERS.values(), ids=KILLERS)
async def test_an_sdk_that_repeats_a_killer_ends_three_engines_and_no_neighbour(cluster: Cluster, killer: str) -> None:
    before, losses = await cluster.newest(), await engine_losses(cluster)
    calls = neighbours(cluster, 20)
    await cluster.runs(20, 0)
    url = f"{cluster.gateways[0].url}/v1"
    async with kept_up(cluster) as dead, openai.AsyncOpenAI(base_url=url, api_key=cluster.key) as sdk:
        body = {"simulate": {killer: 0, "ttft_ms": 200, "tokens": ["x"]}}
        for _ in range(3):
            with pytest.raises(openai.InternalServerError) as failed:
                await sdk.chat.completions.create(model="simulated", messages=chat([killer]), extra_body=body)  # type: ignore[arg-type]
            assert failed.value.code == "request_quarantined", failed.value
            assert failed.value.response.headers["x-should-retry"] == "false"
        await answered(calls)
        engines = len(dead) if killer == "exit_after" else await engine_losses(cluster) - losses
    assert 2 <= engines <= ENGINES_MAX
    known = {call.request_id for call in calls}
    killers = {event.request_id for event in await deaths_of(cluster, before)} - known
    assert len(killers) == 1, "it was asked three times, and run under the first id only"


@pytest.mark.parametrize("killer", KILLERS.values(), ids=KILLERS)
async def test_a_takeover_between_deaths_counts_on(cluster: Cluster, killer: str) -> None:
    before = await cluster.newest()
    calls = neighbours(cluster, 20)
    await cluster.runs(20, 0)
    simulate = {killer: 0, "ttft_ms": 1000, "tokens": ["x"]}
    async with kept_up(cluster):
        poison = cluster.ask(stream=False, words=["bad", killer], simulate=simulate)

        async def died() -> bool:
            known = {call.request_id for call in calls}
            return any(event.request_id not in known for event in await deaths_of(cluster, before))

        await until(died, "it has killed once", 30)
        (await cluster.owner()).kill()
        await poison.done()
        assert poison.status == 500 and '"request_quarantined"' in poison.data[0], poison.story()
        await answered(calls)
    ends = await cluster.events(poison.request_id)
    assert 2 <= sum(event.engine_death for event in ends) <= ENGINES_MAX
    again = await cluster.ask(stream=False, words=["bad", killer], simulate=simulate).done()
    assert '"request_quarantined"' in again.data[0] and not await cluster.events(again.request_id)
