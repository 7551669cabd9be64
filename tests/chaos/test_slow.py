"""Workers that are stopped for a moment, or whose event loop stands still: slow is not lost."""

import asyncio

import pytest

from tests.support.cluster import Call, Cluster, Service, counted
from tests.support.polling import until

pytestmark = pytest.mark.asyncio(loop_scope="module")
GIVEN_UP_S = 10
CLUSTER = {"workers": 2, "sim_slots": 4, "sim_itl_ms": 20, "stall_s": 60, "given_up_after_s": GIVEN_UP_S}
TOKENS = 250
"""Five seconds of them."""


async def busy(cluster: Cluster) -> tuple[list[Call], Service, int]:
    """Streams on both workers; one of those, and how many evictions its log has."""
    streams = [cluster.ask(max_tokens=TOKENS) for _ in range(4)]
    for stream in streams:
        await stream.shows(10)
    worker = await cluster.busy_worker()
    return streams, worker, worker.says("evicted")


async def test_a_worker_that_is_stopped_for_2_s_ends_what_it_runs(cluster: Cluster) -> None:
    streams, worker, evicted = await busy(cluster)
    worker.freeze()
    await asyncio.sleep(2)
    worker.thaw()
    for stream in streams:
        await stream.done()
        assert stream.complete and stream.text == counted(TOKENS), stream.story()
    assert worker.says("evicted") == evicted


async def test_a_worker_that_stands_still_for_5_s_ends_what_it_runs_and_gets_nothing_new(cluster: Cluster) -> None:
    streams, _, _ = await busy(cluster)
    evicted = [worker.says("evicted") for worker in cluster.workers]
    blocking = cluster.ask(simulate={"tokens": ["a"], "block_ms": 5000})
    await asyncio.sleep(1.5)
    meanwhile = [cluster.ask(stream=False, max_tokens=5) for _ in range(4)]
    for call in meanwhile:
        await call.done()
        assert call.complete and call.text == counted(5), call.story()
    assert not blocking.over, "they were answered by the other worker, though that had no more room than this one"
    for stream in (*streams, blocking):
        await stream.done()
        assert stream.complete, stream.story()
    assert all(stream.text == counted(TOKENS) for stream in streams)
    assert [worker.says("evicted") for worker in cluster.workers] == evicted


async def test_a_worker_that_stands_still_for_too_long_is_given_up(cluster: Cluster) -> None:
    evicted = sum(worker.says("evicted") for worker in cluster.workers)
    blocking = cluster.ask(stream=False, simulate={"tokens": ["a"], "block_ms": (GIVEN_UP_S + 8) * 1000})
    await asyncio.sleep(1)
    await blocking.leave()  # Else it would stop the next worker.

    async def given_up() -> bool:
        queue = await cluster.queue()
        return queue is not None and len(queue.workers) == 1

    await until(given_up, "its work is taken from it", GIVEN_UP_S + 8)
    told = lambda: sum(worker.says("evicted") for worker in cluster.workers) > evicted  # noqa: E731
    await until(told, "it is told so when it goes on", 30)
