"""Cases from the field on whole simulated stacks: those that no smaller test covers (tests/README.md lists all)."""

import asyncio
import json
import os
import signal
import time
from collections.abc import Iterator
from contextlib import AsyncExitStack
from typing import Any

import httpx
import msgspec
import pytest

from contracts import operations, topology
from contracts.bus import Bus
from contracts.messages.attempts import AttemptEvent
from tests.support.own_failure import own_failure
from tests.support.polling import wait_until
from tests.support.stack import Stack, StartStack

HELLO = [{"role": "user", "content": "one two three"}]
CHAT = "/v1/chat/completions"


@pytest.fixture(scope="module")
def narrow(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """One worker with one slot."""
    options = ("--engine", "simulated", "--sim-slots", "1", "--sim-itl-ms", "10")
    stack = Stack(tmp_path_factory.mktemp("stack") / "data", *options).wait_ready()
    yield stack
    with own_failure(request.config, "the narrow stack: its end, and what its services were denied"):
        stack.stop()


def keyed(stack: Stack, tenant: str, *limits: str) -> str:
    """The key of a new tenant, once it works."""
    stack.cli_json("tenant", "create", tenant, *limits)
    key: str = stack.cli_json("key", "create", tenant)["key"]
    with stack.client(key) as client:
        wait_until(lambda: client.get("/v1/models").status_code == 200, "the key works")
    return key


async def ends(stack: Stack, tenant: str, count: int) -> list[AttemptEvent]:
    """Terminal events of a tenant, once there are ``count``."""
    bus = await Bus.connect(stack.run.nats_url, name="test", credentials=stack.credentials)
    try:
        async with asyncio.timeout(20):
            while True:
                stored = [message.data async for message in bus.jetstream.read(topology.ATTEMPTS, "attempt.v1.>")]
                events = [msgspec.json.decode(data, type=AttemptEvent) for data in stored]
                if len(found := [event for event in events if event.tenant == tenant]) >= count:
                    return found
                await asyncio.sleep(0.1)
    finally:
        await bus.close()


async def arrived(stack: Stack, requests: list[asyncio.Task[Any]]) -> None:
    """Wait until the scheduler has each of these requests, and no others, or has ended it."""
    bus = await Bus.connect(stack.run.nats_url, name="test", credentials=stack.credentials)
    try:
        async with asyncio.timeout(20):
            while True:
                queue = await operations.queue(bus, "simulated")
                if queue.running + queue.waiting >= len([request for request in requests if not request.done()]):
                    return
                await asyncio.sleep(0.02)
    finally:
        await bus.close()


def chat(**fields: Any) -> dict[str, Any]:
    return {"model": "simulated", "messages": HELLO, **fields}


async def streamed(client: httpx.AsyncClient, body: dict[str, Any], **options: Any) -> tuple[str, list[Any]]:
    """Text and events of a whole stream."""
    text, events = "", []
    async with client.stream("POST", CHAT, json=body | {"stream": True}, **options) as response:
        assert response.status_code == 200, await response.aread()
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                events.append(json.loads(line[6:]))
                for choice in events[-1].get("choices", ()):
                    text += choice["delta"].get("content") or ""
    return text, events


async def test_c08_work_that_waits_and_lasts_is_done_once(narrow: Stack) -> None:
    """Ten jobs for one slot, each longer than any redelivery of an impatient bus would wait."""
    key = keyed(narrow, "c08")
    async with narrow.async_client(key) as client:
        texts = await asyncio.gather(*(streamed(client, chat(max_tokens=60)) for _ in range(10)))
    assert {text for text, _ in texts} == {" ".join(f"t{number}" for number in range(60))}
    events = await ends(narrow, "c08", 10)
    assert [(event.attempt, event.outcome, event.completion_tokens) for event in events] == [(1, "completed", 60)] * 10
    assert len({event.request_id for event in events}) == 10


async def test_c11_what_is_large_disturbs_no_other_stream(stack: Stack) -> None:
    """Prompts and answers beyond a megabyte, in and out, beside 20 streams at any time."""
    prompts = ["x" * 1_500_000, "🦀" * 112_500]
    tokens = ["y" * 1_200_000, "z" * 1_200_000]
    over = False

    async def neighbour(client: httpx.AsyncClient) -> None:
        while not over:
            text, _ = await streamed(client, chat(max_tokens=50))
            assert text == " ".join(f"t{number}" for number in range(50))

    async with stack.async_client(limits=httpx.Limits(max_connections=None)) as client:
        neighbours = [asyncio.create_task(neighbour(client)) for _ in range(20)]
        for prompt in prompts:
            body = json.dumps(chat(messages=[{"role": "user", "content": prompt}], max_tokens=1))
            assert (await client.post(CHAT, content=body)).status_code == 200
        script = chat(simulate={"tokens": tokens, "itl_ms": 1})
        whole = (await client.post(CHAT, json=script)).json()
        assert whole["choices"][0]["message"]["content"] == "".join(tokens)
        assert (await streamed(client, script))[0] == "".join(tokens)
        over = True
        await asyncio.gather(*neighbours)


async def test_c15_keys_stay_out_of_the_logs(stack: Stack) -> None:
    key, wrong = keyed(stack, "c15"), "hr_wrongwrongwrongwrong"
    async with stack.async_client(key) as client:
        assert (await client.post(CHAT, json=chat(max_tokens=1))).status_code == 200
        refused = await client.post(CHAT, json=chat(), headers={"Authorization": f"Bearer {wrong}"})
        assert refused.status_code == 401
    request_id = refused.headers["x-request-id"]
    wait_until(lambda: request_id in (stack.data_dir / "logs/gateway-0.log").read_text(), "it is logged")
    logs = {log.name: log.read_text() for log in (stack.data_dir / "logs").glob("*.log")}
    for name, text in logs.items():
        for secret in (key, wrong):
            assert secret[3:10] not in text, name


async def test_c17_a_failure_counts_as_one(stack: Stack) -> None:
    """In the stream's last event, in the gateway's log and in its metrics; no end is made up."""

    def failures() -> float:
        lines = httpx.get(stack.run.metrics_urls["gateway"][0], trust_env=False).text.splitlines()
        return sum(
            float(line.split()[-1])
            for line in lines
            if line.startswith('headrace_http_errors_total{code="engine_error')
        )

    before = failures()
    body = chat(simulate={"tokens": ["x"] * 50, "fail_after": 10}, stream=True, stream_options={"include_usage": True})
    async with stack.async_client() as client:
        response = await client.post(CHAT, json=body)
        events = [line[6:] for line in response.text.splitlines() if line.startswith("data: ")]
        assert json.loads(events[-1])["error"]["code"] == "engine_error"
        for event in map(json.loads, events[:-1]):
            assert not event.get("usage") and not any(choice["finish_reason"] for choice in event["choices"])
        gathered = await client.post(CHAT, json=body | {"stream": False, "stream_options": None})
        assert gathered.status_code == 500 and gathered.json()["error"]["code"] == "engine_error"
    wait_until(lambda: failures() == before + 2, "both are counted")
    finished = [json.loads(line) for line in (stack.data_dir / "logs/gateway-0.log").read_text().splitlines()]
    [line] = [line for line in finished if line.get("request_id") == response.headers["x-request-id"]]
    assert (line["event"], line["outcome"], line["code"]) == ("request_finished", "failed", "engine_error")


async def test_c20_callers_who_left_the_queue_never_run(narrow: Stack) -> None:
    key = keyed(narrow, "c20")
    limits = httpx.Limits(max_connections=None)
    async with narrow.async_client(key, limits=limits) as client:
        busy = asyncio.create_task(streamed(client, chat(max_tokens=300)))
        await arrived(narrow, [busy])
        queued = [asyncio.create_task(streamed(client, chat(max_tokens=7))) for _ in range(20)]
        await arrived(narrow, [busy, *queued])
        for task in queued[:19]:
            task.cancel()
        started = time.monotonic()
        late = await client.post(CHAT, json=chat(max_tokens=5), headers={"X-Headrace-Deadline-Ms": "1000"})
        assert time.monotonic() - started < 2.5
        assert late.status_code in (504, 529) and late.json()["error"]["code"] in ("deadline_exceeded", "overloaded")
        assert narrow.cli_json("queue")[0]["waiting"] <= 1
        assert (await queued[19])[0] == "t0 t1 t2 t3 t4 t5 t6"
        assert len((await busy)[0].split()) == 300
    events = await ends(narrow, "c20", 21)
    assert sorted(event.completion_tokens for event in events if event.outcome == "completed") == [7, 300]
    left = [event for event in events if event.outcome == "cancelled"]
    assert [(event.attempt, event.completion_tokens, event.billable) for event in left] == [(0, 0, False)] * 19


STOPS = [
    (["AB", "C\nUs", "er:", " x"], ["\nUser:"], "ABC", "stop", 3),
    (["ok\nUs"], ["\nUser:"], "ok\nUs", "stop", 1),
    (["a", "b", "c"], None, "abc", "stop", 3),
    (["a", "b", "c"], [], "abc", "stop", 3),
]


@pytest.mark.parametrize(("tokens", "stop", "text", "reason", "counted"), STOPS)
async def test_c22_stop_strings_neither_leak_nor_eat(
    stack: Stack, tokens: list[str], stop: object, text: str, reason: str, counted: int
) -> None:
    body = chat(simulate={"tokens": tokens, "itl_ms": 1}, stop=stop)
    async with stack.async_client() as client:
        whole = (await client.post(CHAT, json=body)).json()
        parts, events = await streamed(client, body | {"stream_options": {"include_usage": True}})
    assert whole["choices"][0]["message"]["content"] == parts == text
    assert whole["choices"][0]["finish_reason"] == reason
    assert whole["usage"]["completion_tokens"] == events[-1]["usage"]["completion_tokens"] == counted


async def test_c28_two_tenants_with_one_request_id_do_not_meet(stack: Stack) -> None:
    first, second = keyed(stack, "c28a"), keyed(stack, "c28b")
    headers = {"X-Request-Id": "same"}
    async with stack.async_client(first) as one, stack.async_client(second) as two:
        body = chat(simulate={"tokens": ["x"] * 60, "itl_ms": 20}, request_id="same")
        stays = asyncio.create_task(streamed(two, chat(max_tokens=60, request_id="same"), headers=headers))
        async with one.stream("POST", CHAT, json=body | {"stream": True}, headers=headers) as response:
            async for line in response.aiter_lines():
                if '"content":"x"' in line:
                    break
        assert (await stays)[0] == " ".join(f"t{number}" for number in range(60))
    [left], [stayed] = await ends(stack, "c28a", 1), await ends(stack, "c28b", 1)
    assert (left.outcome, stayed.outcome, stayed.completion_tokens) == ("cancelled", "completed", 60)
    assert left.request_id != stayed.request_id
    assert left.client_request_id == stayed.client_request_id == "same"


async def test_c30_no_ending_leaks_a_slot(stack: Stack) -> None:
    """Two slots; after 30 of each kind of ending two requests fit at once, and nothing is open."""
    key = keyed(stack, "c30", "--concurrency", "2")

    async def leave(client: httpx.AsyncClient) -> None:
        async with client.stream("POST", CHAT, json=chat(max_tokens=2000, stream=True)) as response:
            async for line in response.aiter_lines():
                if '"content":' in line:
                    break

    async def answered(client: httpx.AsyncClient, status: int, body: dict[str, Any], **options: Any) -> None:
        assert (await client.post(CHAT, json=body, **options)).status_code == status

    async with stack.async_client(key) as client:
        kinds = {
            "left": lambda: leave(client),
            "unknown model": lambda: answered(client, 404, chat(model="none")),
            "invalid body": lambda: answered(client, 400, chat(temperature=9)),
            "engine error": lambda: answered(client, 500, chat(simulate={"fail_after": 1})),
        }
        for kind, end in kinds.items():
            for _ in range(15):
                await asyncio.gather(end(), end())
            async with asyncio.timeout(3):
                while True:
                    both = await asyncio.gather(*(client.post(CHAT, json=chat(max_tokens=1)) for _ in range(2)))
                    if [response.status_code for response in both] == [200, 200]:
                        break
                    assert {response.status_code for response in both} <= {200, 429}, kind
                    await asyncio.sleep(0.1)
        tenants = stack.cli_json("queue")[0]["tenants"]
        left = {(it["waiting"], it["running"], it["reserved_tokens"]) for it in tenants if it["tenant"] == "c30"}
        assert left <= {(0, 0, 0)}


async def test_c30_time_that_runs_out_in_the_queue_leaks_no_slot(narrow: Stack) -> None:
    key = keyed(narrow, "c30q", "--concurrency", "2")
    async with narrow.async_client() as other, narrow.async_client(key) as client:
        busy = asyncio.create_task(streamed(other, chat(max_tokens=300)))
        await arrived(narrow, [busy])
        impatient = {"X-Headrace-Deadline-Ms": "100"}
        for _ in range(10):
            late = await asyncio.gather(*(client.post(CHAT, json=chat(), headers=impatient) for _ in range(2)))
            assert {answer.status_code for answer in late} <= {504, 529}
        await busy
        both = await asyncio.gather(*(client.post(CHAT, json=chat(max_tokens=1)) for _ in range(2)))
        assert [answer.status_code for answer in both] == [200, 200]


async def test_c31_what_was_produced_is_booked_once(stack: Stack) -> None:
    key = keyed(stack, "c31")
    async with stack.async_client(key) as client:
        async with client.stream("POST", CHAT, json=chat(max_tokens=2000, stream=True)) as response:
            seen = 0
            async for line in response.aiter_lines():
                seen += '"content":"' in line
                if seen > 26:
                    break
        for _ in range(3):
            _, events = await streamed(client, chat(max_tokens=5, stream_options={"include_usage": True}))
            assert events[-1]["usage"]["completion_tokens"] == 5
            await streamed(client, chat(max_tokens=6))
    found = await ends(stack, "c31", 7)
    assert len({event.request_id for event in found}) == 7 == len(found)
    [left] = [event for event in found if event.outcome == "cancelled"]
    assert left.prompt_tokens == 7 and 26 <= left.completion_tokens < 400
    assert sorted(event.completion_tokens for event in found if event is not left) == [5, 5, 5, 6, 6, 6]

    def booked() -> list[dict[str, Any]]:
        rows = stack.usage("--by", "tenant")
        return [row for row in rows if row["tenant"] == "c31" and row["requests"] >= 7]

    [row] = wait_until(booked, "it is booked")
    assert (row["requests"], row["completion_tokens"]) == (7, 33 + left.completion_tokens)


async def test_c32_a_revoked_key_is_out_at_every_gateway_and_its_last_use_is_booked(start_stack: StartStack) -> None:
    stack = start_stack("--gateways", "2")
    key = keyed(stack, "c32")
    [key_id] = [it["id"] for it in stack.cli_json("key", "list", "--tenant", "c32")]
    headers = {"Authorization": f"Bearer {key}"}

    def statuses() -> set[int]:
        urls = [f"{url}/v1/models" for url in stack.run.gateway_urls]
        return {httpx.get(url, headers=headers, trust_env=False).status_code for url in urls}

    async with stack.async_client(key) as client:
        running = asyncio.create_task(streamed(client, chat(max_tokens=200)))
        await asyncio.to_thread(wait_until, lambda: statuses() == {200}, "both know the key")
        await asyncio.to_thread(stack.cli_json, "key", "revoke", key_id)
        await asyncio.to_thread(wait_until, lambda: statuses() == {401}, "both refuse it", 10)
        assert len((await running)[0].split()) == 200
    [event] = await ends(stack, "c32", 1)
    assert (event.key_id, event.outcome, event.completion_tokens) == (key_id, "completed", 200)
    [nats] = stack.run.pids["nats"]
    os.kill(nats, signal.SIGSTOP)
    try:
        assert statuses() == {401}, "not even while the store is away"
    finally:
        os.kill(nats, signal.SIGCONT)


async def test_c33_who_leaves_two_choices_ends_both(stack: Stack) -> None:
    key = keyed(stack, "c33")
    async with stack.async_client(key) as client:
        async with client.stream("POST", CHAT, json=chat(n=2, max_tokens=2000, stream=True)) as response:
            seen = set()
            async for line in response.aiter_lines():
                if line.startswith("data: {"):
                    seen |= {
                        choice["index"] for choice in json.loads(line[6:])["choices"] if choice["delta"].get("content")
                    }
                if len(seen) == 2:
                    break
    [event] = await ends(stack, "c33", 1)
    assert (event.outcome, event.choices, event.prompt_tokens) == ("cancelled", 2, 7)
    assert 2 <= event.completion_tokens < 2000


async def test_c33_two_choices_share_identity_and_end_once_each(stack: Stack) -> None:
    async with stack.async_client() as client:
        body = chat(n=2, max_tokens=4, stream_options={"include_usage": True})
        _, events = await streamed(client, body)
        whole = (await client.post(CHAT, json=chat(n=2, max_tokens=4))).json()
    assert len({(event["id"], event["created"], event["model"]) for event in events}) == 1
    for index in range(2):
        choices = [c for event in events for c in event["choices"] if c["index"] == index]
        assert [c["delta"].get("role") for c in choices if c["delta"].get("role")] == ["assistant"]
        assert [c["finish_reason"] for c in choices if c["finish_reason"] is not None] == ["length"]
        assert "".join(c["delta"].get("content") or "" for c in choices) == "t0 t1 t2 t3"
    assert events[-1]["usage"]["prompt_tokens"] == 7 and events[-1]["usage"]["completion_tokens"] == 8
    assert whole["usage"] == events[-1]["usage"]


async def test_c34_a_character_that_the_limit_cuts_is_the_same_in_both_forms(stack: Stack) -> None:
    script = {"token_hex": ["686920", "f09f", "a791", "e2808d"], "itl_ms": 1}
    async with stack.async_client(keyed(stack, "c34")) as client:
        body = chat(simulate=script, max_tokens=2)
        whole = (await client.post(CHAT, json=body)).json()
        parts, _ = await streamed(client, body)
    assert whole["choices"][0]["message"]["content"] == parts
    assert parts.startswith("hi ") and parts.count("�") <= 1
    assert whole["usage"]["completion_tokens"] == 2
    assert [event.completion_tokens for event in await ends(stack, "c34", 2)] == [2, 2]


async def test_c36_a_full_queue_refuses_the_new_and_keeps_the_old(narrow: Stack) -> None:
    own, other = keyed(narrow, "c36a"), keyed(narrow, "c36b")
    admin = narrow.admin()
    limits = {"queued_requests": 10, "tenant_queued_requests": 8}
    patience = {"X-Headrace-Deadline-Ms": "60000"}
    async with AsyncExitStack() as stack:
        client = await stack.enter_async_context(narrow.async_client(own, limits=httpx.Limits(max_connections=None)))
        neighbour = await stack.enter_async_context(narrow.async_client(other))
        changed = admin.patch("/admin/v1/models/simulated/limits", json=limits)
        assert changed.status_code == 200
        try:
            busy = asyncio.create_task(streamed(client, chat(max_tokens=200)))
            await arrived(narrow, [busy])
            sent = [
                asyncio.create_task(client.post(CHAT, json=chat(max_tokens=2), headers=patience)) for _ in range(15)
            ]
            await arrived(narrow, [busy, *sent])
            theirs = asyncio.create_task(neighbour.post(CHAT, json=chat(max_tokens=2), headers=patience))
            answers = await asyncio.gather(*sent)
            assert (await theirs).status_code == 200
            await busy
        finally:
            back = {"queued_requests": 2000, "tenant_queued_requests": 1000}
            admin.patch("/admin/v1/models/simulated/limits", json=back)
            admin.close()
    refused = [answer for answer in answers if answer.status_code != 200]
    # A worker pulls a little ahead, so that one or two more than the bound are out of the queue at once.
    assert 8 <= len(answers) - len(refused) <= 10
    for answer in refused:
        assert answer.status_code in (429, 529) and answer.json()["error"]["message"]
        assert 1 <= int(answer.headers["retry-after"]) <= 60


async def test_c40_a_body_chooses_neither_who_pays_nor_what_is_seen(stack: Stack) -> None:
    key = keyed(stack, "c40")
    keyed(stack, "c40victim")
    lies = {"user": "c40victim", "metadata": {"tenant_id": "c40victim", "user_api_key_team_id": "c40victim"}}
    async with stack.async_client(key) as client:
        answer = await client.post(CHAT, json=chat(max_tokens=1, **lies), headers={"X-Tenant-Id": "c40victim"})
        assert answer.status_code == 200
        [event] = await ends(stack, "c40", 1)
        assert event.tenant == "c40"
        own = await client.get("/v1/usage", params={"tenant": "c40victim", "tenant_id": "c40victim", "by": "model"})
        assert own.status_code == 200 and all(row.get("tenant") in (None, "c40") for row in own.json()["data"])
    assert not [row for row in stack.usage("--by", "tenant") if row["tenant"] == "c40victim"]


async def test_c46_usage_comes_when_asked_for_once_and_as_it_is_booked(stack: Stack) -> None:
    async with stack.async_client(keyed(stack, "c46")) as client:
        for options in (None, {"include_usage": False}):
            _, events = await streamed(client, chat(max_tokens=5, stream_options=options))
            assert all(event["choices"] and not event.get("usage") for event in events)
        _, events = await streamed(client, chat(max_tokens=5, stream_options={"include_usage": True}))
    *others, last = events
    assert last["choices"] == [] and all(event["choices"] and event.get("usage") is None for event in others)
    usage = last["usage"]
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    booked = {(event.prompt_tokens, event.completion_tokens) for event in await ends(stack, "c46", 3)}
    assert booked == {(usage["prompt_tokens"], usage["completion_tokens"])}


async def test_e08_many_prompts_in_one_body_run_beside_others(start_stack: StartStack) -> None:
    """Fifty prompts of a thousand tokens, two choices each: they occupy what was reserved, not a hundred times that."""
    stack = start_stack("--sim-slots", "256")
    script = {"ttft_ms": 1, "itl_ms": 50}
    many = {"model": "simulated", "prompt": ["one two " * 500] * 50, "n": 2, "max_tokens": 80, "simulate": script}
    key = keyed(stack, "e08")
    async with stack.async_client(key) as client:
        large = asyncio.create_task(client.post("/v1/completions", json=many))
        await arrived(stack, [large])
        bus = await Bus.connect(stack.run.nats_url, name="test", credentials=stack.credentials)
        assert (await operations.queue(bus, "simulated")).reserved_tokens == 58_000
        await bus.close()
        for _ in range(3):
            assert (await client.post(CHAT, json=chat(max_tokens=1))).status_code == 200
        assert not large.done(), "the others ran beside it"
        assert len((await large).json()["choices"]) == 100
    *others, last = sorted(await ends(stack, "e08", 4), key=lambda event: event.reserved_tokens)
    assert [event.reserved_tokens for event in others] == [8] * 3
    assert (last.reserved_tokens, last.prompt_tokens, last.completion_tokens) == (58_000, 50_000, 8000)
    rows = wait_until(lambda: [r for r in stack.usage("--by", "tenant") if r["tenant"] == "e08"], "it is booked")
    assert rows
