"""Chats through the whole stack on the simulated engine, by HTTP and over the bus."""

import asyncio
import json
from typing import Any

import httpx
import pytest

from contracts import topology
from contracts.bus import Bus
from contracts.client import Client
from tests.support.polling import wait_until
from tests.support.stack import Stack

HELLO: list[Any] = [{"role": "user", "content": "one two three"}]


async def stored_requests(stack: Stack) -> int:
    """Requests ever published: the newest sequence number of REQUESTS."""
    bus = await Bus.connect(stack.run.nats_url, name="test", credentials=stack.credentials)
    try:
        info = json.loads(await bus.request(f"$JS.API.STREAM.INFO.{topology.REQUESTS}", b""))
        return int(info["state"]["last_seq"])
    finally:
        await bus.close()


def test_openai_sdk_streaming(stack: Stack) -> None:
    with stack.sdk() as client:
        stream = client.chat.completions.create(
            model=stack.model, messages=HELLO, max_tokens=5, stream=True, stream_options={"include_usage": True}
        )
        chunks = list(stream)
    assert len({(chunk.id, chunk.created, chunk.model) for chunk in chunks}) == 1
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == "t0 t1 t2 t3 t4"
    assert [c.choices[0].finish_reason for c in chunks if c.choices and c.choices[0].finish_reason] == ["length"]
    assert chunks[-1].choices == [] and chunks[-1].usage is not None
    assert (chunks[-1].usage.prompt_tokens, chunks[-1].usage.completion_tokens) == (7, 5)
    assert all(chunk.usage is None for chunk in chunks[:-1])


def test_openai_sdk_gathered_and_completions(stack: Stack) -> None:
    with stack.sdk() as client:
        chat = client.chat.completions.create(model=stack.model, messages=HELLO, max_tokens=3)
        assert chat.choices[0].message.content == "t0 t1 t2"
        assert chat.usage is not None and chat.usage.total_tokens == 10
        completion = client.completions.create(model=stack.model, prompt="a b", max_tokens=2)
        assert completion.choices[0].text == "t0 t1"
        listed = client.models.list().data
        assert [model.id for model in listed][:1] == [stack.model], "aliases come after it"
        assert listed[0].model_dump()["max_model_len"] == 1_048_576


def test_scripted_tokens_keep_split_characters_whole(stack: Stack) -> None:
    script = {"token_hex": ["686920", "f09f", "a791", "e2808d", "f09f9a", "80"], "itl_ms": 1}
    with stack.client() as client:
        body: dict[str, Any] = {"model": stack.model, "messages": HELLO, "simulate": script}
        whole = client.post("/v1/chat/completions", json=body).json()
        assert whole["choices"][0]["message"]["content"] == "hi 🧑‍🚀"
        assert whole["usage"]["completion_tokens"] == 6
        with client.stream("POST", "/v1/chat/completions", json=body | {"stream": True}) as response:
            lines = [line[6:] for line in response.iter_lines() if line.startswith("data: ")]
    assert lines[-1] == "[DONE]"
    deltas = [json.loads(line)["choices"][0]["delta"].get("content") or "" for line in lines[:-1]]
    assert "".join(deltas) == "hi 🧑‍🚀"


BAD_REQUESTS: dict[str, tuple[int, str, dict[str, Any]]] = {
    "not JSON": (400, "invalid_json", {"content": b"{bad"}),
    "no key": (401, "invalid_api_key", {"headers": {"Authorization": ""}}),
    "unknown model": (404, "model_not_found", {"json": {"model": "none", "messages": HELLO}}),
    "too long": (
        400,
        "context_length_exceeded",
        {"json": {"model": "simulated", "messages": HELLO, "max_tokens": 2_000_000}},
    ),
    "too large": (413, "request_too_large", {"content": b" " * (17 * 1024 * 1024)}),
}


@pytest.mark.parametrize("kind", list(BAD_REQUESTS))
async def test_bad_requests_are_told_and_nothing_is_published(stack: Stack, kind: str) -> None:
    status, code, request = BAD_REQUESTS[kind]
    before = await stored_requests(stack)
    headers = {"Content-Type": "application/json"} | request.get("headers", {})
    fields = {name: value for name, value in request.items() if name != "headers"}
    async with stack.async_client() as client:
        response = await client.post("/v1/chat/completions", headers=headers, **fields)
    error = response.json()["error"]
    assert (response.status_code, error["code"]) == (status, code), response.text
    assert set(error) == {"message", "type", "param", "code"} and error["message"]
    assert response.headers["x-request-id"]
    assert await stored_requests(stack) == before


async def test_200_concurrent_streams_keep_every_token_in_order(stack: Stack) -> None:
    expected = " ".join(f"t{number}" for number in range(64))
    body = {"model": stack.model, "messages": HELLO, "max_tokens": 64, "stream": True}

    async def one(client: httpx.AsyncClient) -> str:
        text = ""
        async with client.stream("POST", "/v1/chat/completions", json=body) as response:
            assert response.status_code == 200
            async for line in response.aiter_lines():
                if line.startswith("data: {"):
                    for choice in json.loads(line[6:])["choices"]:
                        text += choice["delta"].get("content") or ""
        return text

    limits = httpx.Limits(max_connections=200)
    async with stack.async_client(limits=limits) as client:
        client.timeout = httpx.Timeout(60)
        texts = await asyncio.gather(*(one(client) for _ in range(200)))
    assert set(texts) == {expected}


async def test_the_bus_gives_the_same_text_usage_and_refusals_as_http(stack: Stack) -> None:
    async with stack.async_client() as http:
        body = {"model": stack.model, "messages": HELLO, "max_tokens": 4}
        answer = (await http.post("/v1/chat/completions", json=body)).json()
        refused = await http.post("/v1/chat/completions", json=body | {"temperature": 9})
    async with Client(stack.run.nats_url, tenant="demo", credentials=stack.credentials) as client:
        stream = client.chat(model=stack.model, messages=HELLO, max_tokens=4)
        text = "".join([chunk.text async for chunk in stream])
        assert text == answer["choices"][0]["message"]["content"]
        assert stream.usage is not None
        assert stream.usage.prompt_tokens == answer["usage"]["prompt_tokens"]
        assert stream.usage.completion_tokens == answer["usage"]["completion_tokens"]
        with pytest.raises(Exception) as error:
            await client.chat_once(model=stack.model, messages=HELLO, temperature=9)
        assert error.value.code == refused.json()["error"]["code"]  # type: ignore[attr-defined]
        assert error.value.message == refused.json()["error"]["message"]  # type: ignore[attr-defined]


def test_a_client_that_leaves_frees_its_slot_and_is_booked_once(stack: Stack) -> None:
    made = stack.cli_json("tenant", "create", "leaver", "--concurrency", "1")
    key = stack.cli_json("key", "create", made["name"])["key"]
    body = {"model": stack.model, "messages": HELLO, "max_tokens": 2000, "stream": True}
    with stack.client(key) as client:
        wait_until(lambda: client.get("/v1/models").status_code == 200, "the key works")
        with client.stream("POST", "/v1/chat/completions", json=body) as response:
            seen = 0
            for line in response.iter_lines():
                seen += line.startswith("data: ")
                if seen > 20:
                    break

        def served() -> bool:
            return client.post("/v1/chat/completions", json=body | {"max_tokens": 1}).status_code == 200

        wait_until(served, "the slot is free again", 3)
        with pytest.raises(httpx.TimeoutException):
            client.post("/v1/chat/completions", json=body | {"stream": False}, timeout=1)
        wait_until(served, "the slot of a gathered answer is free again", 3)

    def booked() -> list[dict[str, Any]]:
        rows = stack.usage("--by", "tenant")
        return [row for row in rows if row["tenant"] == "leaver" and row["requests"] == 4]

    row = wait_until(booked, "all four requests are booked")[0]
    assert row["prompt_tokens"] == 4 * 7
    assert 20 + 20 + 2 <= row["completion_tokens"] <= 400
