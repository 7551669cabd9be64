"""A prompt of a million tokens through the whole stack, beside a stream; tests/bench/bench_long_context measures it."""

import asyncio
import json

import httpx

from contracts import topology
from contracts.bus import Bus
from contracts.bus.objects import PIECE_BYTES
from tests.support.stack import StartStack

TOKENS = 1_000_000
SETTINGS = ("--sim-context", "1048576", "--sim-kv-tokens", "2097152", "--sim-prefill-tps", "1000000")


async def test_a_million_tokens_are_counted_carried_and_answered(start_stack: StartStack) -> None:
    stack = start_stack(*SETTINGS)
    text = " ".join(f"w{number % 99991}" for number in range(TOKENS - 4))
    message = {"model": stack.model, "messages": [{"role": "user", "content": text}], "max_tokens": 3}
    beside = {"model": stack.model, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 150, "stream": True}
    bus = await Bus.connect(stack.run.nats_url, name="test", credentials=stack.credentials)
    async with stack.async_client() as client:
        client.timeout = httpx.Timeout(90)

        async def listen() -> str:
            words = ""
            async with client.stream("POST", "/v1/chat/completions", json=beside) as response:
                async for line in response.aiter_lines():
                    if line.startswith("data: {"):
                        words += json.loads(line[6:])["choices"][0]["delta"].get("content") or ""
            return words

        listener = asyncio.create_task(listen())
        answer = await client.post("/v1/chat/completions", json=message)
        assert answer.status_code == 200, answer.text[:500]
        assert answer.json()["usage"]["prompt_tokens"] == TOKENS
        assert answer.json()["choices"][0]["message"]["content"] == "t0 t1 t2"
        assert await listener == " ".join(f"t{number}" for number in range(150))
        refused = await client.post("/v1/chat/completions", json=message | {"max_tokens": 50_000})
        assert refused.json()["error"]["code"] == "context_length_exceeded"
        # By claim check: the bus carried a reference, and the body was an object in pieces, gone with its request.
        state = (await bus.jetstream.api(f"STREAM.INFO.{topology.BODIES}"))["state"]
        assert state["last_seq"] * PIECE_BYTES > len(text) and state["messages"] == 0
    await bus.close()
