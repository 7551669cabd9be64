"""One idempotency key, one run and one bill: over HTTP, over the bus, while it runs and after it has ended."""

import asyncio
import uuid
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from contracts.client import Client
from contracts.errors import HeadraceError
from tests.support.polling import until
from tests.support.stack import Stack

HELLO: list[Any] = [{"role": "user", "content": "one two three"}]
SLOW: dict[str, Any] = {"tokens": [f"{number} " for number in range(30)], "itl_ms": 60}
SCRIPT = "".join(SLOW["tokens"])


@pytest.fixture
async def caller(stack: Stack) -> AsyncIterator[httpx.AsyncClient]:
    async with stack.async_client() as client:
        yield client


def asked(stack: Stack, **fields: Any) -> dict[str, Any]:
    return {"model": stack.model, "messages": HELLO, "simulate": SLOW} | fields


async def post(caller: httpx.AsyncClient, body: dict[str, Any], key: str) -> httpx.Response:
    return await caller.post("/v1/chat/completions", json=body, headers={"Idempotency-Key": key})


def text_of(response: httpx.Response) -> str:
    assert response.status_code == 200, response.text
    return str(response.json()["choices"][0]["message"]["content"])


async def billed(stack: Stack, request_id: str) -> list[str]:
    """The request's story in the ledger once it is booked."""

    async def told() -> str:
        done = await asyncio.to_thread(stack.cli, "explain", request_id)
        return done.stdout if done.returncode == 0 else ""

    return (await until(told, "the request is booked")).splitlines()


@pytest.mark.parametrize("stream", [True, False])
async def test_who_asks_twice_reads_the_same_run(stack: Stack, caller: httpx.AsyncClient, stream: bool) -> None:
    """Both callers get all of it from its start, and the ledger holds one request."""
    key = uuid.uuid4().hex
    body = asked(stack, stream=stream)
    first = asyncio.create_task(post(caller, body, key))
    await asyncio.sleep(0.5)
    again = await post(caller, body, key)
    answers = [await first, again]
    assert [answer.headers.get("idempotent-replayed") for answer in answers] == [None, "true"]
    for name in ("x-request-id", "x-headrace-model", "content-type"):
        assert answers[0].headers[name] == answers[1].headers[name], "the replay is that request's answer"
    assert answers[0].text.replace(": keep-alive\n", "") == answers[1].text.replace(": keep-alive\n", "")
    if not stream:
        assert text_of(again) == SCRIPT


async def test_who_hangs_up_may_come_back_for_the_answer(stack: Stack, caller: httpx.AsyncClient) -> None:
    key = uuid.uuid4().hex
    with pytest.raises(httpx.ReadTimeout):
        await caller.post(
            "/v1/chat/completions", json=asked(stack), headers={"Idempotency-Key": key}, timeout=httpx.Timeout(0.7)
        )
    again = await post(caller, asked(stack), key)
    assert text_of(again) == SCRIPT
    last = await post(caller, asked(stack), key)
    assert (text_of(last), last.headers["x-request-id"]) == (SCRIPT, again.headers["x-request-id"])
    story = await billed(stack, again.headers["x-request-id"])
    assert sum("completed" in line for line in story) == 1, story


async def test_two_at_once_are_one(stack: Stack, caller: httpx.AsyncClient) -> None:
    """Whichever gateway they reach, in whatever order they are admitted."""
    key = uuid.uuid4().hex
    body = asked(stack, simulate={"tokens": ["a", "b"], "ttft_ms": 300})
    answers = await asyncio.gather(*(post(caller, body, key) for _ in range(10)))
    assert {text_of(answer) for answer in answers} == {"ab"}
    assert len({answer.headers["x-request-id"] for answer in answers}) == 1
    assert sum("idempotent-replayed" not in answer.headers for answer in answers) == 1


async def test_another_body_under_the_key_is_refused(stack: Stack, caller: httpx.AsyncClient) -> None:
    key = uuid.uuid4().hex
    await post(caller, asked(stack, simulate={"tokens": ["a"]}), key)
    other = await post(caller, asked(stack, simulate={"tokens": ["b"]}), key)
    assert (other.status_code, other.json()["error"]["code"]) == (422, "idempotency_key_reused")
    reordered = dict(reversed(asked(stack, simulate={"tokens": ["a"]}).items()))
    assert text_of(await post(caller, reordered, key)) == "a", "the same, written in another order"


@pytest.mark.parametrize("key", ["", "k" * 256, "kä"])
async def test_a_key_that_is_none_is_refused(stack: Stack, caller: httpx.AsyncClient, key: str) -> None:
    headers = [(b"idempotency-key", key.encode("latin-1"))]
    refused = await caller.post("/v1/chat/completions", json=asked(stack), headers=headers)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "Idempotency-Key")


async def test_a_refused_request_does_not_use_up_its_key(stack: Stack, caller: httpx.AsyncClient) -> None:
    key = uuid.uuid4().hex
    body = asked(stack, simulate={"tokens": ["a"]})
    assert (await post(caller, body | {"model": "none"}, key)).status_code == 404
    assert text_of(await post(caller, body, key)) == "a"


async def test_a_failure_stays_one(stack: Stack, caller: httpx.AsyncClient) -> None:
    """It was told to the caller; another try is another request."""
    key = uuid.uuid4().hex
    body = asked(stack, simulate={"tokens": ["a", "b"], "fail_after": 1})
    answers = [await post(caller, body, key) for _ in range(2)]
    assert [answer.status_code for answer in answers] == [500, 500]
    assert answers[0].json()["error"]["message"] == answers[1].json()["error"]["message"]


async def test_services_join_each_other_and_callers_over_http(stack: Stack, caller: httpx.AsyncClient) -> None:
    key = uuid.uuid4().hex
    model, nats_url = stack.model, stack.run.nats_url
    async with (
        Client(nats_url, tenant="demo", credentials=stack.credentials) as one,
        Client(nats_url, tenant="demo", credentials=stack.credentials) as two,
    ):
        fields: dict[str, Any] = {"model": model, "messages": HELLO, "simulate": SLOW, "idempotency_key": key}
        streams = [one.chat(**fields), two.chat(**fields)]

        async def read(number: int) -> str:
            return "".join([chunk.text async for chunk in streams[number]])

        first = asyncio.create_task(read(0))
        await until(lambda: streams[0].request_id)
        assert await read(1) == await first == SCRIPT
        assert streams[0].request_id == streams[1].request_id
        over_http = await post(caller, asked(stack, stream=True), key)
        assert over_http.headers["x-request-id"] == streams[0].request_id
        with pytest.raises(HeadraceError) as refused:
            await one.chat_once(**fields | {"max_tokens": 3})
        assert refused.value.code == "idempotency_key_reused"


async def test_who_leaves_a_joined_request_ends_it_for_nobody_else(stack: Stack) -> None:
    key = uuid.uuid4().hex
    model, nats_url = stack.model, stack.run.nats_url
    async with (
        Client(nats_url, tenant="demo", credentials=stack.credentials) as one,
        Client(nats_url, tenant="demo", credentials=stack.credentials) as two,
    ):
        fields: dict[str, Any] = {"model": model, "messages": HELLO, "simulate": SLOW, "idempotency_key": key}
        stream = one.chat(**fields)
        texts: list[str] = []

        async def read() -> None:
            async for chunk in stream:
                texts.append(chunk.text)

        first = asyncio.create_task(read())
        await until(lambda: texts)
        async with two.chat(**fields) as joined:
            async for _ in joined:
                break
        await first
        assert "".join(texts) == SCRIPT and stream.usage is not None and stream.usage.outcome == "completed"
