"""Very many streams at once through a whole stack."""

import asyncio
import json
from typing import Any

import httpx

from tests.support.stack import Stack


async def test_c16_a_thousand_instant_answers_miss_no_token(stack: Stack) -> None:
    body: dict[str, Any] = {"model": "simulated", "messages": [{"role": "user", "content": "hi"}], "stream": True}
    body["simulate"] = {"tokens": ["a", "b", "c", "d"], "ttft_ms": 0, "itl_ms": 0}

    async def text(client: httpx.AsyncClient) -> str:
        answer = await client.post("/v1/chat/completions", json=body)
        data = [line[6:] for line in answer.text.splitlines() if line.startswith("data: ")]
        assert data.pop() == "[DONE]", answer.text
        choices = [choice for event in data for choice in json.loads(event)["choices"]]
        return "".join(choice["delta"].get("content") or "" for choice in choices)

    async with stack.async_client(limits=httpx.Limits(max_connections=100)) as client:
        client.timeout = httpx.Timeout(120)
        assert set(await asyncio.gather(*(text(client) for _ in range(1000)))) == {"abcd"}
