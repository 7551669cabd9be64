"""Two workers with the real vLLM: a conversation's next turn comes to where its first one is in memory."""

import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from compose.stack import models
from contracts.prefix import BLOCK_TOKENS
from tests.support.polling import wait_until
from tests.support.stack import Stack
from tests.support.vllm import MODEL, VLLM_START_LIMIT_S, post

CONVERSATIONS = 6
"""Three on each worker."""
ANSWER_TOKENS = BLOCK_TOKENS + 32
"""Adds a block to each prompt."""
ENGINE_BLOCK = 32
"""vLLM's on a CPU, by the worker's arguments: what is not whole is computed again."""


@pytest.fixture(scope="module", params=["false", "true"], ids=["events off", "events on"])
def warm(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Stack, bool]]:
    options = ("--model", models.DEFAULT_MODEL, "--workers", f"{MODEL}=2")
    stack = Stack(tmp_path_factory.mktemp("warm") / "data", *options, HEADRACE_VLLM_KV_EVENTS=request.param)
    try:
        stack.wait_ready(VLLM_START_LIMIT_S)
        wait_until(lambda: len(workers(stack)) == 2, limit_s=VLLM_START_LIMIT_S)
        yield stack, request.param == "true"
    finally:
        stack.stop(signal.SIGTERM)


def workers(stack: Stack) -> list[str]:
    """Those that are ready."""
    return [
        each["worker"] for each in stack.cli_json("queue", "--model", MODEL)[0]["workers"] if each["state"] == "ready"
    ]


def figure(stack: Stack, name: str) -> float:
    """Of the scheduler, for the model."""
    lines = httpx.get(stack.run.metrics_urls["scheduler"][0], trust_env=False).text.splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(f'{name}{{model="{MODEL}"'))


def test_a_second_turn_finds_the_first_one(warm: tuple[Stack, bool]) -> None:
    """By what the engine reports. With its events the scheduler knows of answers, too, which it cannot foresee.

    The first turns come at once, so that both workers have some; each second one comes when nobody has anything to do.
    """
    stack, events = warm
    asked: dict[str, Any] = {"model": MODEL, "max_tokens": ANSWER_TOKENS, "ignore_eos": True, "temperature": 0}
    openings = [
        [{"role": "user", "content": f"Conversation {number}. " + " ".join(f"word{number}{n}" for n in range(40))}]
        for number in range(CONVERSATIONS)
    ]
    with ThreadPoolExecutor(CONVERSATIONS) as pool:
        answers = list(pool.map(lambda messages: post(stack, messages=messages, **asked), openings))
    prompts = [answer["usage"]["prompt_tokens"] for answer in answers]
    prompt_blocks = sum((tokens - 1) // BLOCK_TOKENS for tokens in prompts)
    if events:
        wait_until(lambda: figure(stack, "headrace_prefix_blocks") >= prompt_blocks + CONVERSATIONS)
    else:
        assert figure(stack, "headrace_prefix_blocks") <= prompt_blocks
    for messages, answer, tokens in zip(openings, answers, prompts, strict=True):
        said = [*messages, answer["choices"][0]["message"], {"role": "user", "content": "Go on."}]
        usage = post(stack, messages=said, **asked | {"max_tokens": 2})["usage"]
        assert usage["prompt_tokens_details"]["cached_tokens"] >= tokens - tokens % ENGINE_BLOCK - ENGINE_BLOCK
    assert figure(stack, "headrace_prefix_gaps_total") == 0
