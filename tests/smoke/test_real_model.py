"""The main job with the real vLLM through a whole stack: a chat, a stream, a caller that leaves, and what is booked."""

import json
from typing import Any

from tests.support.polling import wait_until
from tests.support.stack import Stack
from tests.support.vllm import FRANCE, GREEDY, MODEL, post


def test_a_chat_and_a_stream_of_it_say_paris_with_the_same_usage(real_stack: Stack) -> None:
    with real_stack.sdk() as client:
        whole = client.chat.completions.create(**GREEDY)
        chunks = list(client.chat.completions.create(**GREEDY, stream=True, stream_options={"include_usage": True}))
    text = whole.choices[0].message.content or ""
    assert "Paris" in text and whole.choices[0].finish_reason == "stop"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == text
    assert whole.usage is not None and chunks[-1].usage is not None and len(chunks) > 5
    assert chunks[-1].usage.total_tokens == whole.usage.total_tokens > whole.usage.prompt_tokens > 0


def test_a_caller_that_leaves_ends_the_generation_and_pays_what_was_made(real_stack: Stack) -> None:
    """A tenant with one slot: the next request passes once the engine has stopped, and usage has both."""
    tenant = real_stack.cli_json("tenant", "create", "smoke", "--concurrency", "1")["name"]
    key = real_stack.cli_json("key", "create", tenant)["key"]
    endless: dict[str, Any] = {"model": MODEL, "messages": FRANCE, "max_tokens": 4000, "ignore_eos": True}
    short = GREEDY | {"max_tokens": 3, "ignore_eos": True}
    with real_stack.client(key) as client:
        wait_until(lambda: client.get("/v1/models").status_code == 200, "the key works")
        with client.stream("POST", "/v1/chat/completions", json=endless | {"stream": True}) as response:
            lines = (line for line in response.iter_lines() if line.startswith("data: "))
            seen = [json.loads(next(lines)[6:]) for _ in range(5)]
            assert client.post("/v1/chat/completions", json=short).status_code == 429
        assert all(chunk["choices"][0]["finish_reason"] is None for chunk in seen)
        wait_until(lambda: client.post("/v1/chat/completions", json=short).status_code == 200, "the slot is free again")
    prompt_tokens = post(real_stack, **short)["usage"]["prompt_tokens"]

    def row() -> dict[str, Any] | None:
        rows = real_stack.usage("--by", "tenant")
        return next((it for it in rows if it["tenant"] == tenant and it["requests"] == 2), None)

    booked = wait_until(row, "both requests are booked")
    assert booked["prompt_tokens"] == 2 * prompt_tokens
    assert 3 + 4 <= booked["completion_tokens"] < 3 + 4000
