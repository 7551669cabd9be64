"""Two workers, conversations and tenants: who comes back finds its prompt where it was, and finds nobody else's."""

import itertools
import json
import time
from collections.abc import Iterator
from typing import Any

import pytest

from contracts.client import Client
from contracts.errors import HeadraceError
from tests.support.polling import wait_until
from tests.support.stack import Stack

PREFILL_TPS = 4_000
SYSTEM = " ".join(f"word{number}" for number in range(400))


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    options = ("--model", "warm", "--workers", "warm=2", "--sim-prefill-tps", str(PREFILL_TPS))
    made = Stack(tmp_path_factory.mktemp("stack"), "--engine", "simulated", *options)
    made.wait_ready()
    wait_until(lambda: len(made.cli_json("queue", "--model", "warm")[0]["workers"]) == 2)
    yield made
    assert made.stop() == 0


def ask(
    stack: Stack, text: str, *, key: str | None = None, headers: dict[str, str] | None = None, **fields: Any
) -> int:
    """Tokens that were found in a cache, by the answer's usage."""
    body = {"model": "warm", "max_tokens": 2, "messages": [{"role": "user", "content": text}], **fields}
    with stack.client(key) as client:
        answer = client.post("/v1/chat/completions", json=body, headers=headers or {})
    assert answer.status_code == 200, answer.text
    cached: int = answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
    return cached


def test_each_conversation_finds_its_prompt_again(stack: Stack) -> None:
    """With two workers and chance one of two turns would miss."""
    for number in range(8):
        opening = f"conversation {number} {SYSTEM}"
        assert ask(stack, opening) < 300
        assert ask(stack, f"{opening} and more") > 300


def test_who_opts_out_finds_and_leaves_nothing(stack: Stack) -> None:
    text = f"secret {SYSTEM}"
    off = {"x-headrace-prefix-caching": "off"}
    assert [ask(stack, text, headers=off), ask(stack, text, headers=off), ask(stack, text)] == [0, 0, 0]
    assert ask(stack, text, headers=off) == 0
    assert ask(stack, text) > 300


def test_a_salt_of_ones_own_keeps_ones_prompts_apart(stack: Stack) -> None:
    text = f"salted {SYSTEM}"
    assert [ask(stack, text, cache_salt="a"), ask(stack, text), ask(stack, text, cache_salt="b")] == [0, 0, 0]
    assert ask(stack, text, cache_salt="a") > 300


def test_no_tenant_finds_anothers_prompts_nor_is_placed_by_them(stack: Stack) -> None:
    text = f"shared by chance {SYSTEM}"
    stack.cli_json("tenant", "create", "next-door")
    key: str = stack.cli_json("key", "create", "next-door")["key"]
    assert ask(stack, text) == 0 and ask(stack, text) > 300
    before = time.monotonic()
    assert ask(stack, text, key=key) == 0
    # As long as an engine needs for all of it: what the neighbour has asked cannot be told from the time either.
    assert time.monotonic() - before >= 400 / PREFILL_TPS
    assert ask(stack, text, key=key, cache_salt="demo") == 0
    assert ask(stack, text, key=key) > 300


def test_a_tenant_that_opts_out_finds_and_leaves_nothing(stack: Stack) -> None:
    stack.cli_json("tenant", "create", "discreet")
    key: str = stack.cli_json("key", "create", "discreet")["key"]
    texts = (f"discreet {number} {SYSTEM}" for number in itertools.count())

    def twice() -> int:
        text = next(texts)
        ask(stack, text, key=key)
        return ask(stack, text, key=key)

    assert twice() > 300
    stack.cli("tenant", "set", "discreet", "--no-prefix-caching")
    wait_until(lambda: twice() == 0, "the gateway knows")
    stack.cli("tenant", "set", "discreet", "--prefix-caching")
    wait_until(lambda: twice() > 300, "the gateway knows")


async def test_services_find_and_opt_out_as_callers_do(stack: Stack) -> None:
    async with Client(stack.run.nats_url, tenant="demo", credentials=stack.credentials) as client:

        async def cached(text: str, **fields: Any) -> int:
            messages = [{"role": "user", "content": text}]
            answer = await client.chat_once(model="warm", messages=messages, max_tokens=2, **fields)
            found: int = json.loads(bytes(answer.raw))["usage"]["prompt_tokens_details"]["cached_tokens"]
            return found

        text = f"on the bus {SYSTEM}"
        assert [await cached(text, prefix_caching=False), await cached(text)] == [0, 0]
        assert await cached(text, prefix_caching=False) == 0
        assert await cached(text) > 300
        assert ask(stack, text) > 300
        with pytest.raises(HeadraceError, match="economy"):
            await cached(text, price_ceiling="economy")
