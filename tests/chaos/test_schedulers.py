"""Schedulers that die or freeze: what was admitted goes on, a standby takes over, a deposed owner can do nothing."""

import time

import pytest

from contracts.messages.queues import QueueAnswer
from tests.support.cluster import Call, Cluster, counted
from tests.support.polling import until

pytestmark = pytest.mark.asyncio(loop_scope="module")
CLUSTER = {"schedulers": 2, "sim_slots": 2, "sim_itl_ms": 20}


async def busy(cluster: Cluster) -> tuple[list[Call], QueueAnswer]:
    """Two requests that run on for 6 s and four that wait, and the queue as its owner sees it."""
    calls = [cluster.ask(max_tokens=300) for _ in range(2)]
    for call in calls:
        await call.shows(2)
    calls += [cluster.ask(stream=False, max_tokens=20) for _ in range(4)]
    await cluster.runs(2, 4)
    queue = await cluster.queue()
    assert queue is not None
    return calls, queue


async def taken_over(cluster: Cluster, before: QueueAnswer) -> QueueAnswer:
    """The queue as the next owner sees it."""

    async def other() -> QueueAnswer | None:
        queue = await cluster.queue()
        return queue if queue and queue.owner != before.owner else None

    after: QueueAnswer = await until(other, "the standby owns the model", 15)
    assert after.epoch > before.epoch
    return after


async def all_answered_once(cluster: Cluster, calls: list[Call]) -> None:
    for call in calls:
        await call.done()
        assert call.complete and call.text == counted(call.body["max_tokens"]), call.story()
        (event,) = await cluster.ended(call.request_id)
        assert (event.attempt, event.outcome, event.billable) == (1, "completed", True)


async def test_queued_and_running_requests_survive_the_death_of_their_scheduler(cluster: Cluster) -> None:
    calls, before = await busy(cluster)
    killed_at = time.monotonic()
    (await cluster.owner()).kill()
    await taken_over(cluster, before)
    print(f"\nthe standby answered {time.monotonic() - killed_at:.1f} s after the kill")
    await all_answered_once(cluster, calls)


async def test_a_frozen_owner_that_wakes_up_has_no_say(cluster: Cluster) -> None:
    """It wakes when another owns the model, with what it had not yet done: owner and epoch stay, attempts are first."""
    calls, before = await busy(cluster)
    frozen = await cluster.owner()
    released = frozen.says("model_released")
    frozen.freeze()
    after = await taken_over(cluster, before)
    calls.append(cluster.ask(max_tokens=3))
    frozen.thaw()
    await until(lambda: frozen.says("model_released") > released, "it knows that it is deposed")
    await all_answered_once(cluster, calls)
    now = await cluster.queue()
    assert now is not None and (now.owner, now.epoch) == (after.owner, after.epoch)
    assert await cluster.owner() is not frozen
