"""The ledger is killed and away for a while: nobody notices, and all arrives later, once."""

import time

import pytest

from contracts.messages.usage import UsageRow
from tests.support.cluster import Cluster
from tests.support.polling import until

pytestmark = pytest.mark.asyncio(loop_scope="module")
CLUSTER = {"ledger": True, "sim_itl_ms": 1}


async def arrived(cluster: Cluster, requests: int) -> UsageRow:
    async def enough() -> UsageRow | None:
        row = await cluster.usage()
        return row if row.requests >= requests else None

    row: UsageRow = await until(enough, f"{requests} requests are in the ledger")
    return row


async def test_events_wait_and_arrive_once(cluster: Cluster) -> None:
    (ledger,) = cluster.ledgers
    for _ in range(20):
        assert (await cluster.ask(max_tokens=3).done()).complete
    assert (await arrived(cluster, 20)).completion_tokens == 60
    ledger.kill()
    began = time.monotonic()
    slowest = 0.0
    for _ in range(40):
        call = await cluster.ask(max_tokens=3).done()
        assert call.complete, call.story()
        slowest = max(slowest, call.first_at - call.asked_at)
    print(f"\nslowest first token without a ledger {slowest * 1000:.0f} ms")
    ledger.start()
    await arrived(cluster, 60)
    print(f"all is in the ledger {time.monotonic() - began:.1f} s after it was killed")
    row = await cluster.usage()
    assert (row.requests, row.prompt_tokens, row.completion_tokens) == (60, 60 * 5, 180)


async def test_a_ledger_killed_again_and_again_in_its_work_counts_each_event_once(cluster: Cluster) -> None:
    (ledger,) = cluster.ledgers
    before = await cluster.usage()
    for _ in range(3):
        calls = [cluster.ask(max_tokens=2) for _ in range(50)]
        for call in calls:
            await call.done()
        ledger.kill()
        ledger.start()
        await until(ledger.ready, "the ledger is back")
    row = await arrived(cluster, before.requests + 150)
    assert row.requests == before.requests + 150
    assert row.completion_tokens == before.completion_tokens + 300
