"""What every engine must do (worker.engines.base), asked of the simulated one and of vLLM."""

import asyncio
from typing import Any

import pytest

from contracts.messages.base import Endpoint
from tests.support.asking import MODEL, SLOTS, Answer, Asker
from tests.support.polling import until
from worker.engines.base import Counts, EngineFailure, PromptMiscounted

pytestmark = pytest.mark.asyncio(loop_scope="session")

PROMPT = "one two three four five six"
LONG_PROMPT = "the same words again and again " * 30


@pytest.mark.parametrize("endpoint", ["chat/completions", "completions"])
async def test_streamed_and_whole_text_are_equal_and_counts_are_the_usage(asker: Asker, endpoint: Endpoint) -> None:
    body: dict[str, Any] = {"max_tokens": 9} | ({"prompt": PROMPT} if endpoint == "completions" else {})
    streamed = await asker.ask(asker.job(True, endpoint, **body, stream_options={"include_usage": True}))
    whole = await asker.ask(asker.job(False, endpoint, **body))
    assert streamed.text() == whole.text() != ""
    assert len(whole.chunks) == 1
    for answer in (streamed, whole):
        counts, usage = answer.counts, answer.usage
        assert answer.finish_reasons() == [counts.finish_reason] == ["length"]
        assert usage["completion_tokens"] == counts.completion_tokens == 9
        assert usage["prompt_tokens"] == counts.prompt_tokens > 0
        assert usage["total_tokens"] == counts.prompt_tokens + 9
        assert counts.first_token_at_ms > 0


async def test_chunks_share_identity_and_the_role_comes_once(asker: Asker) -> None:
    job = asker.job(True, max_tokens=4)
    answer = await asker.ask(job)
    assert {chunk["id"] for chunk in answer.chunks} == {f"chatcmpl-{job.request_id}"}
    assert {chunk["model"] for chunk in answer.chunks} == {MODEL}
    (created,) = {chunk["created"] for chunk in answer.chunks}
    assert isinstance(created, int)
    roles = [choice["delta"].get("role") for choice in answer.choices]
    assert roles[0] == "assistant"
    assert not any(roles[1:])


async def test_usage_comes_last_and_only_when_asked_for(asker: Asker) -> None:
    plain = await asker.ask(asker.job(True, max_tokens=3))
    assert not any(chunk.get("usage") or not chunk["choices"] for chunk in plain.chunks)
    asked = await asker.ask(asker.job(True, max_tokens=3, stream_options={"include_usage": True}))
    assert asked.chunks[-1]["choices"] == []
    assert asked.usage == asked.chunks[-1]["usage"]


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("endpoint", ["chat/completions", "completions"])
async def test_d25_usage_so_far_is_in_every_chunk(asker: Asker, endpoint: Endpoint, n: int) -> None:
    """Over all choices, the prompt once, never falling, and at the end what is booked."""
    body: dict[str, Any] = {"prompt": LONG_PROMPT} if endpoint == "completions" else {}
    options = {"include_usage": True, "continuous_usage_stats": True}
    for _ in range(2):  # The second time the prompt may be cached.
        asked: dict[str, Any] = {"max_tokens": 5, "n": n, "temperature": 1, "stream_options": options}
        job = asker.job(True, endpoint, salt=f"usage-{n}", **body, **asked)
        answer = await asker.ask(job)
        usages = [chunk["usage"] for chunk in answer.chunks]
        told = [usage["completion_tokens"] for usage in usages]
        assert told == sorted(told) and told[-1] == answer.counts.completion_tokens == 5 * n
        assert {usage["prompt_tokens"] for usage in usages} == {answer.counts.prompt_tokens}
        assert all(usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"] for usage in usages)
        assert usages[-1]["prompt_tokens_details"]["cached_tokens"] == answer.counts.cached_tokens


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("prompt", ["one two three", [5, 6, 7], ["one two", "three four"], [[5, 6], [7, 8, 9]]])
async def test_e02_a_prompt_is_scored_without_output(asker: Asker, prompt: Any, stream: bool) -> None:
    fields: dict[str, Any] = {"prompt": prompt, "max_tokens": 0, "echo": True, "logprobs": 1, "ignore_eos": False}
    if stream:
        fields["stream_options"] = {"include_usage": True}
    answer = await asker.ask(asker.job(stream, "completions", **fields))
    assert answer.counts.completion_tokens == answer.usage["completion_tokens"] == 0
    assert answer.usage["prompt_tokens"] == answer.counts.prompt_tokens > 0
    if asker.kind == "vllm":
        scores = [choice["logprobs"]["token_logprobs"] for choice in answer.choices]
        assert sum(map(len, scores)) == answer.counts.prompt_tokens
        assert all(first is None and None not in rest for first, *rest in scores)


async def test_prompts_are_scored_beside_others(asker: Asker) -> None:
    """In steps of several requests, in which the tokens that are scored and those that are sampled differ in number."""
    fields: dict[str, Any] = {"max_tokens": 0, "echo": True, "logprobs": 1, "ignore_eos": False}
    neighbours = [asyncio.ensure_future(asker.ask(asker.job(True, max_tokens=20))) for _ in range(3)]
    prompts: list[Any] = [["one two", "three four"], "one two three", [[5, 6], [7, 8, 9]], [5, 6, 7]]
    jobs = [asker.job(False, "completions", prompt=prompt, **fields) for prompt in prompts * 2]
    answers = await asyncio.gather(*(asker.ask(job) for job in jobs))
    assert all(answer.counts.completion_tokens == 0 < answer.counts.prompt_tokens for answer in answers)
    assert [(await it).counts.completion_tokens for it in neighbours] == [20] * 3


@pytest.mark.parametrize("stream", [True, False])
async def test_a_stop_string_ends_the_answer_and_stays_out(asker: Asker, stream: bool) -> None:
    text = (await asker.ask(asker.job(False, max_tokens=16))).text()
    stop = text[len(text) // 2 :][:3]
    answer = await asker.ask(asker.job(stream, max_tokens=16, stop=[stop]))
    assert answer.text() == text[: text.index(stop)]
    assert answer.finish_reasons() == [answer.counts.finish_reason] == ["stop"]
    assert 0 < answer.counts.completion_tokens < 16


@pytest.mark.parametrize("stream", [True, False])
async def test_choices_end_once_each_and_the_prompt_counts_once(asker: Asker, stream: bool) -> None:
    one = await asker.ask(asker.job(stream, max_tokens=5, temperature=1))
    two = await asker.ask(asker.job(stream, max_tokens=5, temperature=1, n=2))
    assert {choice["index"] for choice in two.choices} == {0, 1}
    assert [two.finish_reasons(0), two.finish_reasons(1)] == [["length"], ["length"]]
    assert two.counts.prompt_tokens == one.counts.prompt_tokens
    assert two.counts.completion_tokens == 10


@pytest.mark.parametrize("stream", [True, False])
async def test_several_prompts_have_their_own_choices(asker: Asker, stream: bool) -> None:
    single = [await asker.ask(asker.job(False, "completions", prompt=it, max_tokens=4)) for it in (PROMPT, "once upon")]
    both = await asker.ask(asker.job(stream, "completions", prompt=[PROMPT, "once upon"], max_tokens=4))
    assert both.counts.prompt_tokens == sum(answer.counts.prompt_tokens for answer in single)
    assert both.counts.completion_tokens == 8
    assert [both.text(0), both.text(1)] == [answer.text() for answer in single]


async def test_a_prompt_of_token_ids_counts_each(asker: Asker) -> None:
    answer = await asker.ask(asker.job(True, "completions", prompt=[11, 22, 33, 44, 55], max_tokens=2))
    assert (answer.counts.prompt_tokens, answer.counts.completion_tokens) == (5, 2)


async def test_unknown_fields_and_nulls_change_nothing(asker: Asker) -> None:
    plain = await asker.ask(asker.job(True, max_tokens=6))
    odd = await asker.ask(
        asker.job(True, max_tokens=6, stop=None, n=None, user=None, foo={"a": 1}, service_tier="auto")
    )
    assert odd.text() == plain.text()


@pytest.mark.parametrize("stream", [True, False])
async def test_closing_frees_everything_at_once(asker: Asker, stream: bool) -> None:
    await asker.until_idle()
    counts = Counts()
    chunks: list[bytes] = []
    running = asyncio.ensure_future(asker.engine.generate(asker.job(stream, max_tokens=4000), counts, chunks.append))
    await until(lambda: counts.completion_tokens > 0 and asker.engine.stats().running == 1)
    if stream:
        await until(lambda: bool(chunks))
    running.cancel()
    await asyncio.wait({running})
    given, received = counts.completion_tokens, len(chunks)
    await asker.until_idle()
    assert counts.completion_tokens == given < 4000
    assert len(chunks) == received
    assert counts.prompt_tokens > 0


@pytest.mark.parametrize("stream", [True, False])
async def test_what_exceeds_the_context_is_refused(asker: Asker, stream: bool) -> None:
    context = asker.engine.context
    too_long: dict[str, Any] = {"messages": [{"role": "user", "content": "word " * (context + 10)}]}
    for body in (too_long | {"max_tokens": 1}, {"max_tokens": context + 1}):
        counts = Counts()
        with pytest.raises(EngineFailure) as refusal:
            await asker.ask(asker.job(stream, **body), counts)
        failure = refusal.value
        assert (failure.code, failure.status) == ("context_length_exceeded", 400)
        assert str(context) in failure.message
        assert not failure.retryable
        assert counts == Counts()


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("wrong", [{"messages": "a secret word"}, {"max_tokens": "many"}])
async def test_a_malformed_body_is_the_callers_fault(asker: Asker, stream: bool, wrong: dict[str, Any]) -> None:
    with pytest.raises(EngineFailure) as refusal:
        await asker.ask(asker.job(stream, **wrong))
    failure = refusal.value
    assert (failure.code, failure.status, failure.retryable) == ("invalid_request", 400, False)
    assert failure.param == next(iter(wrong))
    assert "secret" not in failure.message


async def test_an_error_inside_a_stream_is_a_failure(asker: Asker) -> None:
    if asker.kind == "vllm":
        schema = {"name": "wrong", "schema": {"type": "no-such-type"}}
        job = asker.job(True, response_format={"type": "json_schema", "json_schema": schema})
    else:
        job = asker.job(True, simulate={"tokens": ["a", "b", "c"], "fail_after": 2})
    chunks: list[bytes] = []
    with pytest.raises(EngineFailure):
        await asker.engine.generate(job, Counts(), chunks.append)
    assert not any(b'"error"' in chunk for chunk in chunks)


async def test_more_than_the_slots_wait_and_all_are_answered(asker: Asker) -> None:
    await asker.until_idle()
    jobs = [asker.job(True, max_tokens=60) for _ in range(SLOTS + 3)]
    answers = [asyncio.ensure_future(asker.ask(job)) for job in jobs]
    await until(lambda: asker.engine.stats().running == SLOTS and asker.engine.stats().waiting == 3)
    done: list[Answer] = await asyncio.gather(*answers)
    assert {answer.counts.completion_tokens for answer in done} == {60}
    await asker.until_idle()


async def test_a_prompt_is_cached_under_its_salt_alone(asker: Asker) -> None:
    async def cached(salt: str) -> int:
        job = asker.job(False, "completions", prompt=LONG_PROMPT, max_tokens=1, salt=salt)
        return (await asker.ask(job)).counts.cached_tokens

    assert await cached("tenant-a") == 0
    assert await cached("tenant-a") > 100
    assert await cached("tenant-b") == 0


async def test_totals_grow_by_what_was_computed(asker: Asker) -> None:
    await asker.until_idle()
    before = asker.engine.stats()
    answer = await asker.ask(asker.job(True, max_tokens=7))
    await asker.until_idle()
    after = asker.engine.stats()
    computed = answer.counts.prompt_tokens - answer.counts.cached_tokens
    assert after.prefill_tokens_total - before.prefill_tokens_total == computed
    assert after.decode_tokens_total - before.decode_tokens_total == 7


async def test_a_living_engine_passes_its_check(asker: Asker) -> None:
    await asker.engine.check()
    assert asker.engine.kv_tokens > asker.engine.slots


BODIES: list[tuple[Endpoint, dict[str, Any]]] = [
    ("chat/completions", {"messages": [{"role": "user", "content": PROMPT}], "n": 2, "temperature": 1}),
    ("completions", {"prompt": PROMPT}),
    ("completions", {"prompt": [PROMPT, "seven"], "n": 2, "temperature": 1}),
    ("completions", {"prompt": [[1, 2, 3], [4, 5]]}),
]


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(("endpoint", "body"), BODIES)
async def test_a_prompt_other_than_admitted_is_never_computed(
    asker: Asker, endpoint: Endpoint, body: dict[str, Any], stream: bool
) -> None:
    body |= {"max_tokens": 2}
    found = (await asker.ask(asker.job(stream, endpoint, **body))).counts.prompt_tokens
    await asker.ask(asker.job(stream, endpoint, prompt_tokens=found, **body))
    before = asker.engine.stats()
    for admitted in (found - 1, found + 1):
        counts = Counts()
        with pytest.raises(PromptMiscounted) as caught:
            await asker.ask(asker.job(stream, endpoint, prompt_tokens=admitted, **body), counts)
        assert (caught.value.admitted, caught.value.found) == (admitted, found)
        assert caught.value.retryable and not caught.value.engine_death
        assert counts == Counts()
    with pytest.raises(PromptMiscounted):
        await asker.ask(asker.job(stream, endpoint, prompt_tokens=found, prompt_digest="other ids", **body), Counts())
    await asker.until_idle()
    after = asker.engine.stats()
    assert (after.prefill_tokens_total, after.decode_tokens_total) == (
        before.prefill_tokens_total,
        before.decode_tokens_total,
    )
