"""Mutated request bodies against a whole stack: no 5xx, no hang, and nothing is published for what is refused.

HEADRACE_FUZZ sets how many (the long form: 10000), HEADRACE_FUZZ_SEED where they begin.
"""

import asyncio
import copy
import json
import os
import random
from collections import Counter
from typing import Any

import httpx
import pytest

from contracts import topology
from contracts.bus import Bus
from tests.support.stack import Stack, StartStack

COUNT = int(os.environ.get("HEADRACE_FUZZ", "1000"))
SEED = int(os.environ.get("HEADRACE_FUZZ_SEED", "1"))
AT_ONCE = 16
ANSWER_S = 30.0

MESSAGES = [
    {"role": "system", "content": "S"},
    {"role": "user", "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}], "name": "n"},
    {"role": "assistant", "content": None, "tool_calls": [{"id": "c", "function": {"name": "f", "arguments": "{}"}}]},
    {"role": "tool", "tool_call_id": "c", "content": "3"},
]
TOOL = {"type": "function", "function": {"name": "f", "description": "d", "parameters": {"type": "object"}}}
COMMON = {"max_tokens": 4, "temperature": 0.5, "top_p": 0.9, "n": 1, "seed": 1, "stop": ["x"], "logit_bias": {"5": 1}}
CORPUS: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", {"model": "simulated", "messages": MESSAGES, "stream": False, **COMMON}),
    (
        "/v1/chat/completions",
        {
            "model": "simulated",
            "messages": MESSAGES[:2],
            "stream": True,
            "stream_options": {"include_usage": True},
            "tools": [TOOL],
            "tool_choice": {"type": "function", "function": {"name": "f"}},
            "response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": {"type": "object"}}},
            **COMMON,
        },
    ),
    ("/v1/completions", {"model": "simulated", "prompt": ["a b", "c"], "echo": False, "logprobs": 1, **COMMON}),
    ("/v1/completions", {"model": "simulated", "prompt": [1, 2, 3], "stream": True, "suffix": None, **COMMON}),
    ("/v1/responses", {"model": "simulated", "input": "one", "max_output_tokens": 4, "instructions": "i"}),
    ("/v1/messages", {"model": "simulated", "max_tokens": 4, "system": "S", "messages": MESSAGES[1:2]}),
    ("/v1/messages/count_tokens", {"model": "simulated", "max_tokens": 4, "messages": MESSAGES[1:2]}),
    ("/v1/responses/input_tokens", {"model": "simulated", "input": "hi"}),
    ("/v1/embeddings", {"model": "simulated", "input": ["one", "two"]}),
]
ODD: list[Any] = [
    *(None, True, False, 0, -1, 1, 2, 0.5, 1e308, -1e-320, 2**31, 2**63, 2**64, -(2**63) - 1, 10**400),
    *("", " ", "x", "null", "5", "\x00", "\ud83d", "\udc00x", "é" * 50, "🧑‍🚀", "a" * 5000, "__proto__", "{{ x }}"),
    *([], {}, [[]], [None], {"": None}, [{}], {"a": {"b": [1, {"c": "d"}]}}, ["x"] * 300, {"x": 1e999}),
]
NAMES = [
    *("model", "messages", "prompt", "stream", "n", "max_tokens", "stop", "logit_bias", "tools", "tool_choice", "user"),
    *("seed", "priority", "request_id", "cache_salt", "min_tokens", "best_of", "top_k", "response_format", "simulate"),
    *(
        "max_completion_tokens",
        "stream_options",
        "stop_token_ids",
        "chat_template_kwargs",
        "structured_outputs",
        "input",
    ),
]


def mutated(chance: random.Random) -> tuple[str, bytes]:
    """Path and body: a valid one with one to four changes in its values, and sometimes in its bytes."""
    path, body = chance.choice(CORPUS)
    body = copy.deepcopy(body)
    for _ in range(chance.choice((1, 1, 1, 2, 4))):
        change(body, chance)
    data = json.dumps(body, ensure_ascii=chance.random() < 0.7).encode("utf-8", "surrogatepass")
    return path, broken(data, chance) if chance.random() < 0.15 else data


def change(body: dict[str, Any], chance: random.Random) -> None:
    place: Any = body
    while True:
        keys = list(place) if isinstance(place, dict) else list(range(len(place)))
        if not keys:
            return
        key = chance.choice(keys)
        if not isinstance(place[key], dict | list) or not place[key] or chance.random() < 0.4:
            break
        place = place[key]
    match chance.randrange(6):
        case 0 | 1:
            place[key] = copy.deepcopy(chance.choice(ODD))
        case 2:
            del place[key]
        case 3:
            body[chance.choice(NAMES)] = copy.deepcopy(chance.choice(ODD))
        case 4:
            for _ in range(chance.choice((1, 10, 60, 70, 100))):
                place[key] = [place[key]] if chance.random() < 0.5 else {"a": place[key]}
        case _ if isinstance(place, list):
            place += copy.deepcopy(place) * chance.choice((1, 50))
        case _:
            place[str(chance.choice(ODD))[:100]] = place[key]


def broken(data: bytes, chance: random.Random) -> bytes:
    at = chance.randrange(len(data))
    match chance.randrange(4):
        case 0:
            return data[:at]
        case 1:
            return data[:at] + bytes([chance.randrange(256)]) + data[at + 1 :]
        case 2:
            return data[:at] + chance.choice((b"NaN", b"\xff", b"\x00", b'"', b"}", b",", b"\\ud800")) + data[at:]
        case _:
            return data + data


async def published(stack: Stack) -> int:
    bus = await Bus.connect(stack.run.nats_url, name="test", credentials=stack.credentials)
    try:
        return int((await bus.jetstream.api(f"STREAM.INFO.{topology.REQUESTS}"))["state"]["last_seq"])
    finally:
        await bus.close()


async def test_mutated_bodies(start_stack: StartStack) -> None:
    stack = start_stack("--sim-itl-ms", "0", "--sim-context", "512", "--sim-prefill-tps", "1000000")
    chance = random.Random(SEED)
    print(f"seed {SEED}")
    cases = iter([mutated(chance) for _ in range(COUNT)])
    seen: Counter[int] = Counter()
    before = await published(stack)

    async def send(client: httpx.AsyncClient) -> None:
        for path, data in cases:
            try:
                async with asyncio.timeout(ANSWER_S):
                    answer = await client.post(path, content=data)
            except (TimeoutError, httpx.HTTPError) as error:
                pytest.fail(f"{error!r} for {path} {data[:2000]!r}")
            seen[answer.status_code] += 1
            assert answer.status_code < 500, f"{answer.text} for {path} {data[:2000]!r}"
            if answer.status_code != 200:
                assert answer.json()["error"]["message"], (path, data)
            elif "event-stream" in answer.headers["content-type"]:
                assert answer.text.endswith("data: [DONE]\n\n"), f"{answer.text[-500:]} for {path} {data[:2000]!r}"
            if answer.status_code == 200 and path.endswith(("count_tokens", "input_tokens")):
                seen[0] += 1

    async with stack.async_client() as client:
        await asyncio.gather(*(send(client) for _ in range(AT_ONCE)))
    print(dict(seen))
    assert seen[200] > COUNT / 50, "hardly anything was valid: the fuzz never passes validation"
    assert await published(stack) - before == seen[200] - seen[0]
