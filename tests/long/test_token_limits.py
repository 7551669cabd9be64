"""The limit is on tokens, not on requests: at the same request rate longer prompts admit fewer, and latency holds."""

import asyncio
import time

import httpx

from tests.support.stack import Stack, StartStack

DEADLINE_MS = 2_000
PER_SECOND = 12
SECONDS = 8
PREFILL_TPS = 2_000
"""With prompts of 200 tokens the offered load is 1.2 times what the pool can prefill, with 400 it is 2.4 times."""


async def offer(stack: Stack, words: int) -> tuple[int, int, int]:
    """Requests offered, admitted, and of those the ones that met their first-token deadline."""
    body = {"model": stack.model, "messages": [{"role": "user", "content": ""}], "max_tokens": 1, "stream": True}
    outcomes: list[tuple[int, float]] = []

    async def one(client: httpx.AsyncClient, number: int) -> None:
        # Each prompt differs from its start, so that nothing comes from the prefix cache.
        prompt = f"{number} " * words
        asked = time.monotonic()
        answer = await client.post(
            "/v1/chat/completions",
            json=body | {"messages": [{"role": "user", "content": prompt}]},
            headers={"X-Headrace-Deadline-Ms": str(DEADLINE_MS)},
        )
        outcomes.append((answer.status_code, (time.monotonic() - asked) * 1000))

    async with stack.async_client() as client, asyncio.TaskGroup() as group:
        for number in range(PER_SECOND * SECONDS):
            group.create_task(one(client, words * 10_000 + number))
            await asyncio.sleep(1 / PER_SECOND)
    admitted = [(status, span) for status, span in outcomes if status in (200, 504)]
    assert {status for status, _ in outcomes} <= {200, 504, 529}, outcomes
    met = sum(status == 200 for status, _ in admitted)
    return len(outcomes), len(admitted), met


def test_longer_prompts_admit_fewer_and_latency_holds(start_stack: StartStack) -> None:
    stack = start_stack("--sim-prefill-tps", str(PREFILL_TPS), "--sim-slots", "4", "--sim-itl-ms", "1")
    asyncio.run(offer(stack, 200))  # The pool's speed is measured on live work.
    short = asyncio.run(offer(stack, 200))
    long = asyncio.run(offer(stack, 400))
    print(f"offered, admitted, in time: prompts of 200 tokens {short}, of 400 tokens {long}")
    assert short[1] >= 0.5 * short[0], "offered is 1.2 times what can be served"
    assert 0.25 * short[1] <= long[1] <= 0.75 * short[1], "half the requests carry the same tokens"
    assert short[2] >= 0.8 * short[1]
    assert long[2] >= 0.8 * long[1]
