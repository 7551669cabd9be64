"""Reasoning tokens: what usage says of them is what the record says, whole, streamed, cut off, at every API."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import pytest_asyncio

from tests.support.asking import VLLM_MARKS, Asker, configuration, running
from tests.support.polling import until
from worker.engines import table
from worker.engines.base import Counts

pytestmark = pytest.mark.asyncio(loop_scope="session")

SCRIPT = ["<think>", "so", " it", " is", "</think>", "Paris", "."]
THOUGHT = "one two three"
FORM = {"regex": f"<think>{THOUGHT}</think>four"}
"""The small model writes no tags of its own accord."""


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def thinker(model_path: Path) -> AsyncIterator[Asker]:
    """vLLM with a reasoning parser that reads the tags as text; constraints hold while it reasons, too."""
    config, manifest = configuration("vllm", str(model_path))
    form = {"backend": "xgrammar", "disable_any_whitespace": True, "enable_in_reasoning": True}
    arguments = {"reasoning_parser": "qwen3", "structured_outputs_config": form}
    config = msgspec.structs.replace(config, vllm_engine_args=arguments)
    async with running(table.build(config, manifest)) as engine:
        yield Asker("vllm", engine)


@pytest.mark.parametrize("stream", [True, False])
async def test_the_simulated_engine_counts_what_stands_between_think_tags(simulated: Asker, stream: bool) -> None:
    usage: dict[str, Any] = {"stream_options": {"include_usage": True}} if stream else {}
    counts = Counts()
    answer = await simulated.ask(simulated.job(stream, simulate={"tokens": SCRIPT}, n=2, **usage), counts)
    assert (counts.completion_tokens, counts.reasoning_tokens) == (14, 6)
    assert answer.usage["completion_tokens_details"] == {"reasoning_tokens": 6}


def reasoning_of(answer: dict[str, Any]) -> int:
    usage = answer.get("usage") or answer["response"]["usage"]
    details = usage.get("completion_tokens_details") or usage["output_tokens_details"]
    return int(details["reasoning_tokens"])


class TestVllm:
    pytestmark = VLLM_MARKS

    @pytest.mark.parametrize("stream", [True, False])
    async def test_chat(self, thinker: Asker, stream: bool) -> None:
        usage: dict[str, Any] = {"stream_options": {"include_usage": True}} if stream else {}
        counts = Counts()
        job = thinker.job(stream, structured_outputs=FORM, max_tokens=60, ignore_eos=False, **usage)
        answer = await thinker.ask(job, counts)
        assert answer.text() == "four"
        assert 3 <= counts.reasoning_tokens < counts.completion_tokens
        assert reasoning_of(answer.chunks[-1]) == counts.reasoning_tokens

    async def test_a_stream_without_usage_and_several_choices(self, thinker: Asker) -> None:
        counts = Counts()
        job = thinker.job(True, structured_outputs=FORM, max_tokens=60, ignore_eos=False, n=3, temperature=1)
        await thinker.ask(job, counts)
        assert 3 * 3 <= counts.reasoning_tokens < counts.completion_tokens

    @pytest.mark.parametrize("stream", [True, False])
    async def test_responses(self, thinker: Asker, stream: bool) -> None:
        counts = Counts()
        job = thinker.job(stream, "responses", input="Count.", structured_outputs=FORM, max_output_tokens=60)
        answer = await thinker.ask(job, counts)
        assert counts.reasoning_tokens >= 3
        assert reasoning_of(answer.chunks[-1]) == counts.reasoning_tokens

    @pytest.mark.parametrize("stream", [True, False])
    async def test_messages(self, thinker: Asker, stream: bool) -> None:
        """Their usage has no word for it: they are part of the output."""
        counts = Counts()
        messages = [{"role": "user", "content": "Count."}]
        job = thinker.job(stream, "messages", messages=messages, structured_outputs=FORM, max_tokens=60)
        await thinker.ask(job, counts)
        assert counts.reasoning_tokens >= 3

    async def test_an_answer_that_is_cut_off(self, thinker: Asker) -> None:
        counts = Counts()
        asking = asyncio.ensure_future(thinker.ask(thinker.job(True, max_tokens=500), counts))
        await until(lambda: counts.completion_tokens >= 10)
        asking.cancel()
        await asyncio.wait({asking})
        assert counts.reasoning_tokens == counts.completion_tokens >= 10, "nothing closed the reasoning that it begins"
