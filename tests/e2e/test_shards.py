"""A model split over two owners on a whole stack: one model for its callers, one limit for each tenant, two owners."""

import asyncio
import os
import signal
import time
import uuid
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from contracts import operations
from contracts.bus import Bus
from contracts.client import Client
from contracts.messages.queues import QueueAnswer
from scheduler.core.quota_leases import LEASE_SHARE
from tests.e2e.test_admin import new_key
from tests.support.polling import until, wait_until
from tests.support.stack import Stack

CHAT = "/v1/chat/completions"
HOT, SECOND = "simulated", "simulated#1"
PROMPT_TOKENS = 7


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """It begins as every stack does, and is split while it runs."""
    made = Stack(tmp_path_factory.mktemp("shards") / "data", "--engine", "simulated", "--schedulers", "2")
    made.wait_ready()
    record = made.cli_json("model", "shards", HOT, "2")
    assert record["shards"] == 2
    [added] = made.cli_json("worker", "add", HOT)
    assert added["model"] == SECOND
    wait_until(lambda: len(set(asyncio.run(owners(made)).values())) == 2, "each shard has its owner", 30)
    yield made
    assert made.stop() == 0


async def owners(stack: Stack) -> dict[str, str]:
    return {name: answer.owner for name, answer in (await queues(stack)).items()}


async def queues(stack: Stack) -> dict[str, QueueAnswer]:
    bus = await Bus.connect(stack.run.nats_url, name="operator", credentials=stack.credentials)
    try:
        return {name: await operations.shard_queue(bus, name) for name in (HOT, SECOND)}
    finally:
        await bus.close()


def chat(number: int, **fields: Any) -> dict[str, Any]:
    """Another conversation for each number; about half of them on each shard."""
    said = f"conversation {number:04}"
    return {"model": HOT, "messages": [{"role": "user", "content": said}], "max_tokens": 3, **fields}


def ask_all(stack: Stack, key: str, count: int, **fields: Any) -> list[httpx.Response]:
    with stack.client(key) as client, ThreadPoolExecutor(8) as pool:
        return list(pool.map(lambda number: client.post(CHAT, json=chat(number, **fields)), range(count)))


def tenant(stack: Stack, name: str, *limits: str) -> str:
    """The key of a new tenant with these limits."""
    stack.cli_json("tenant", "create", name, *limits)
    return new_key(stack, name)


def test_callers_and_operators_see_one_model(stack: Stack) -> None:
    key = tenant(stack, "sees-one")
    answers = ask_all(stack, key, 30)
    assert Counter(answer.status_code for answer in answers) == {200: 30}
    assert {answer.json()["model"] for answer in answers} == {HOT}
    assert {answer.headers["x-headrace-model"].partition("@")[0] for answer in answers} == {HOT}
    with stack.client(key) as client:
        assert [each["id"] for each in client.get("/v1/models").json()["data"] if each["id"].startswith(HOT)] == [HOT]
        assert client.post(CHAT, json=chat(1) | {"model": SECOND}).status_code == 404
    [queue] = stack.cli_json("queue", "--model", HOT)
    assert queue["model"] == HOT and len(queue["workers"]) == 2
    [pool] = stack.cli_json("pools", "--model", HOT)
    assert (pool["model"], pool["ready"]) == (HOT, 2)
    with stack.admin() as admin:
        assert [each["model"] for each in admin.get("/admin/v1/queues").json()["data"]] == [HOT]
        assert admin.get(f"/admin/v1/pools/{HOT}").json()["ready"] == 2
        [live] = admin.get("/admin/v1/live").json()["models"]
        assert live["model"] == HOT and not live["error"]
    served = {worker["worker"]: worker["decode_tokens_total"] for worker in queue["workers"]}
    assert len(served) == 2 and all(served.values()), "both shards have served"

    def booked() -> bool:
        rows = stack.usage("--tenant", "sees-one", "--by", "model")
        return [(row["model"], row["requests"]) for row in rows] == [(HOT, 30)]

    wait_until(booked, "the ledger knows one model", 30)


def test_a_tenant_is_held_to_its_rate_over_both(stack: Stack) -> None:
    limit = 20
    key = tenant(stack, "rated", "--rpm", str(limit))
    began = time.monotonic()
    answers = ask_all(stack, key, 60)
    refilled = (time.monotonic() - began) * limit / 60
    assert {answer.status_code for answer in answers} == {200, 429}
    assert all(int(answer.headers["x-ratelimit-limit-requests"]) == limit for answer in answers)
    served = sum(answer.status_code == 200 for answer in answers)
    assert limit - 1 <= served <= limit * (1 + LEASE_SHARE) + refilled


def test_a_tenant_is_held_to_its_concurrency_over_both(stack: Stack) -> None:
    key = tenant(stack, "few-at-once", "--concurrency", "3")
    with stack.client(key) as client, ThreadPoolExecutor(8) as pool:
        slow = {"simulate": {"tokens": ["a"], "ttft_ms": 60_000}}
        asked = [pool.submit(client.post, CHAT, json=chat(number, **slow), timeout=3) for number in range(8)]
        statuses = [each.result().status_code for each in asked if not each.exception()]
    assert statuses == [429] * 5, "three wait for their answers"
    wait_until(lambda: ask_all(stack, key, 1)[0].status_code == 200, "what ended makes room", 20)


def test_a_tenant_is_held_to_its_budget_over_both(stack: Stack) -> None:
    cost, budget = PROMPT_TOKENS + 3, 300
    key = tenant(stack, "budgeted")
    stack.cli_json("tenant", "set", "budgeted", "--monthly-budget", str(budget))
    answers = ask_all(stack, key, 60)
    used = [answer.json()["usage"]["total_tokens"] for answer in answers if answer.status_code == 200]
    assert {answer.status_code for answer in answers} == {200, 429}
    assert budget - 2 * cost <= sum(used) < budget + max(used)


def test_a_key_names_one_request_whoever_owns_it(stack: Stack) -> None:
    key = tenant(stack, "names-its-own")
    with stack.client(key) as client:
        for number in range(6):
            name = {"Idempotency-Key": uuid.uuid4().hex}
            first, again = (client.post(CHAT, json=chat(number), headers=name) for _ in range(2))
            assert first.status_code == again.status_code == 200
            assert first.headers["x-request-id"] == again.headers["x-request-id"]


async def test_services_and_operators_find_what_runs_on_either(stack: Stack) -> None:
    """A service submits, and an operator ends it, or it leaves: the shard that owns the request hears of it."""
    slow = {"tokens": ["a "] * 400, "itl_ms": 50}
    shards = Counter[str]()
    async with Client(stack.run.nats_url, tenant="demo", credentials=stack.credentials) as client:
        for number in range(100):  # To which shard one goes is chance.
            if len(shards) == 2 and min(shards.values()) > 1:
                break
            async with client.chat(model=HOT, messages=chat(number)["messages"], simulate=slow) as stream:
                chunks = aiter(stream)  # Kept: dropping it would cancel.
                await anext(chunks)
                shards[stream.model] += 1
                if shards[stream.model] == 1:
                    done = await asyncio.to_thread(stack.cli, "cancel", stream.request_id)
                    assert done.returncode == 0 and "cancelled" in done.stdout, done.stderr
    assert min(shards.values()) > 1 and len(shards) == 2

    async def none_open() -> bool:
        return not any(answer.running for answer in (await queues(stack)).values())

    await until(none_open, "who left ended them", 20)


async def new_ones_are_served_by(stack: Stack, shard: str, *, unless: QueueAnswer) -> None:
    """All of them, as long as nobody owns the other shard after its owner of ``unless``."""
    async with Client(stack.run.nats_url, tenant="demo", credentials=stack.credentials) as client:

        async def ask(number: int) -> str:
            async with client.chat(**chat(number)) as stream:
                assert [chunk async for chunk in stream]
            return stream.model

        served = set(await asyncio.gather(*map(ask, range(20))))
    if served != {shard}:
        assert (await queues(stack))[unless.model].epoch > unless.epoch


def test_the_death_of_one_owner_is_nothing_to_the_other_and_is_taken_over(stack: Stack) -> None:
    key = tenant(stack, "outlives", "--concurrency", "32", "--rpm", "1000")
    before = asyncio.run(queues(stack))
    victim = int(before[SECOND].owner.split("-")[1])
    slow = {"tokens": ["a "] * 100, "itl_ms": 60}
    with stack.client(key) as client, ThreadPoolExecutor(16) as pool:
        running = [
            pool.submit(client.post, CHAT, json=chat(number, max_tokens=100, simulate=slow)) for number in range(16)
        ]

        def both_run() -> bool:
            return all(answer.running for answer in asyncio.run(queues(stack)).values())

        wait_until(both_run, "both shards run something", 20)
        os.kill(stack.run.pids["scheduler"][victim], signal.SIGKILL)
        asyncio.run(new_ones_are_served_by(stack, HOT, unless=before[SECOND]))
        answers = [each.result() for each in running]
    assert [answer.status_code for answer in answers] == [200] * 16, "what ran goes on"
    assert all(answer.json()["usage"]["completion_tokens"] == 100 for answer in answers)

    def taken_over() -> bool:
        after = asyncio.run(queues(stack))
        return after[SECOND].epoch > before[SECOND].epoch

    wait_until(taken_over, "the dead one's shard has another owner", 30)
    answers = ask_all(stack, key, 20)
    assert Counter(answer.status_code for answer in answers) == {200: 20}


def test_a_removed_model_goes_shard_after_shard(stack: Stack) -> None:
    done = stack.cli("model", "remove", HOT)
    assert done.returncode == 0 and "had not ended" not in done.stderr, done.stderr
    assert stack.cli_json("model", "list") == [] and stack.cli_json("worker", "list") == []
