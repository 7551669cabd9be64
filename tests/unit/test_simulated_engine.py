"""The simulated engine on an event loop: scripts, triggers, limits and endings."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest
import pytest_asyncio

from tests.support.asking import configuration
from tests.support.polling import until
from worker.engines.base import Counts, EngineFailure, Job
from worker.engines.simulated.engine import SimulatedEngine

HELLO = [{"role": "user", "content": "hello"}]


class Exited(Exception):
    """Raised where the process would exit."""


def _exit() -> None:
    raise Exited


class Engine(SimulatedEngine):
    """Gathers answers; small and fast unless told otherwise."""

    def __init__(self, **config: Any) -> None:
        defaults, manifest = configuration("simulated")
        settings = {f"sim_{name}": value for name, value in ({"itl_ms": 1, "context": 100} | config).items()}
        super().__init__(msgspec.structs.replace(defaults, **settings), manifest, exit_process=_exit)

    async def give(self, counts: Counts, chunks: list[bytes], *, stream: bool = True, **body: Any) -> None:
        job = Job(
            request_id="r",
            attempt=1,
            endpoint="chat/completions",
            body=msgspec.json.encode({"messages": HELLO} | body),
            stream=stream,
            cache_salt="",
        )
        await self.generate(job, counts, chunks.append)

    async def ask(self, counts: Counts | None = None, *, stream: bool = True, **body: Any) -> list[dict[str, Any]]:
        chunks: list[bytes] = []
        await self.give(counts or Counts(), chunks, stream=stream, **body)
        return [msgspec.json.decode(chunk) for chunk in chunks]


@pytest_asyncio.fixture
async def engine() -> AsyncIterator[Engine]:
    engine = Engine()
    await engine.start()
    yield engine
    await engine.close()


def text(chunks: list[dict[str, Any]]) -> str:
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    return "".join(it["message"]["content"] if "message" in it else it["delta"]["content"] for it in choices)


def reason(chunks: list[dict[str, Any]]) -> str:
    return str(chunks[-1]["choices"][-1]["finish_reason"])


async def test_without_the_field_it_counts_up_to_the_limit(engine: Engine) -> None:
    plain = await engine.ask()
    assert text(plain) == " ".join(f"t{number}" for number in range(16))
    assert reason(plain) == "length"
    assert text(await engine.ask(max_tokens=3)) == "t0 t1 t2"


@pytest.mark.parametrize("stream", [True, False])
async def test_a_script_is_passed_on_verbatim_and_cut_by_the_limit(engine: Engine, stream: bool) -> None:
    script = {"tokens": ["He", "llo", "", " \n"]}
    counts = Counts()
    whole = await engine.ask(counts, stream=stream, simulate=script)
    assert (text(whole), reason(whole), counts.completion_tokens) == ("Hello \n", "stop", 4)
    exact = await engine.ask(stream=stream, simulate=script, max_tokens=4)
    assert (text(exact), reason(exact)) == ("Hello \n", "stop")
    cut = await engine.ask(stream=stream, simulate=script, max_tokens=9, max_completion_tokens=2)
    assert (text(cut), reason(cut)) == ("Hello", "length")


@pytest.mark.parametrize("stream", [True, False])
async def test_a_cut_character_has_the_same_tail_in_both_modes(engine: Engine, stream: bool) -> None:
    counts = Counts()
    script = {"token_hex": ["6869", "f09f", "9880"]}
    chunks = await engine.ask(counts, stream=stream, simulate=script, max_tokens=2)
    assert (text(chunks), reason(chunks), counts.completion_tokens) == ("hi\ufffd", "length", 2)


async def test_an_empty_script_is_an_empty_answer(engine: Engine) -> None:
    counts = Counts()
    chunks = await engine.ask(counts, simulate={"tokens": []})
    assert (text(chunks), reason(chunks), counts.completion_tokens) == ("", "stop", 0)
    assert counts.prompt_tokens == 5


async def test_each_token_is_one_chunk(engine: Engine) -> None:
    chunks = await engine.ask(max_tokens=20, simulate={"tokens": ["x"] * 20, "ttft_ms": 0, "itl_ms": 0})
    assert len(chunks) == 20


@pytest.mark.parametrize("after", [0, 2, 16])
async def test_a_failing_attempt_gave_exactly_the_tokens_before(engine: Engine, after: int) -> None:
    counts = Counts()
    with pytest.raises(EngineFailure) as failure:
        await engine.ask(counts, simulate={"fail_after": after})
    assert (failure.value.code, failure.value.retryable, failure.value.engine_death) == ("engine_error", True, False)
    assert counts.completion_tokens == after
    assert counts.finish_reason == ""
    assert engine.stats().running == 0


async def test_a_crash_takes_all_that_the_engine_runs_with_it(engine: Engine) -> None:
    beside = asyncio.create_task(engine.ask(max_tokens=90, simulate={"itl_ms": 1000}))
    counts = Counts()
    with pytest.raises(EngineFailure) as failure:
        await engine.ask(counts, simulate={"crash_after": 2})
    assert failure.value.engine_death and counts.completion_tokens == 2
    with pytest.raises(EngineFailure) as failure:
        await beside
    assert failure.value.engine_death
    with pytest.raises(EngineFailure):
        await engine.check()


async def test_the_process_exits_after_the_tokens_before_were_given(engine: Engine) -> None:
    chunks: list[bytes] = []
    with pytest.raises(Exited):
        await engine.give(Counts(), chunks, simulate={"exit_after": 3})
    assert len(chunks) == 3


async def test_a_hanging_attempt_stalls_alone_until_it_is_closed(engine: Engine) -> None:
    counts = Counts()
    hanging = asyncio.create_task(engine.ask(counts, simulate={"hang_after": 2}))
    await engine.ask(max_tokens=30)
    assert counts.completion_tokens == 2
    await engine.check()
    assert engine.stats().running == 1
    hanging.cancel()
    await asyncio.wait({hanging})
    assert engine.stats().running == engine.stats().kv_tokens_used == 0


async def test_the_trigger_that_comes_first_acts(engine: Engine) -> None:
    counts = Counts()
    with pytest.raises(EngineFailure):
        await engine.ask(counts, simulate={"fail_after": 1, "hang_after": 5})
    assert counts.completion_tokens == 1


async def test_a_stop_string_frees_the_slot_though_the_limit_is_far(engine: Engine) -> None:
    counts = Counts()
    chunks = await engine.ask(counts, stop=["t3"], max_tokens=90)
    assert (text(chunks), reason(chunks), counts.completion_tokens) == ("t0 t1 t2 ", "stop", 4)
    assert engine.stats().running == 0


async def test_preempted_answers_are_whole_and_right() -> None:
    engine = Engine(slots=8, kv_tokens=60)
    await engine.start()
    answers = await asyncio.gather(*(engine.ask(max_tokens=20) for _ in range(6)))
    assert {text(answer) for answer in answers} == {" ".join(f"t{number}" for number in range(20))}
    assert engine.stats().preemptions_total > 0
    assert engine.stats().kv_tokens_used == 0
    await engine.close()


async def test_the_context_bounds_prompt_and_output(engine: Engine) -> None:
    room = 100 - 5
    assert len(await engine.ask(max_tokens=room)) == room
    with pytest.raises(EngineFailure) as refusal:
        await engine.ask(max_tokens=room + 1)
    assert refusal.value.code == "context_length_exceeded"
    chunks = await engine.ask(simulate={"tokens": ["x"] * 200, "itl_ms": 0})
    assert (len(chunks), reason(chunks)) == (room, "length")


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_completion_tokens": -1}, "max_completion_tokens"),
        ({"max_tokens": 2.5}, "max_tokens"),
        ({"n": 0}, "n"),
        ({"n": 1000}, "n"),
        ({"stop": ""}, "stop"),
        ({"stop": ["a", ""]}, "stop"),
        ({"stream_options": 7}, "stream_options"),
        ({"simulate": {"tokens": 7}}, "simulate"),
        ({"messages": []}, "messages"),
    ],
)
async def test_a_bad_field_is_refused_by_name(engine: Engine, body: dict[str, Any], param: str) -> None:
    with pytest.raises(EngineFailure) as refusal:
        await engine.ask(**body)
    assert (refusal.value.code, refusal.value.status, refusal.value.param) == ("invalid_request", 400, param)


async def test_a_prompt_of_a_million_words_is_answered() -> None:
    engine = Engine(context=1_048_576, kv_tokens=1_000_000, prefill_tps=1e9)
    await engine.start()
    counts = Counts()
    words = [{"role": "user", "content": "word " * 1_000_000}]
    assert text(await engine.ask(counts, messages=words, max_tokens=2)) == "t0 t1"
    assert counts.prompt_tokens == 1_000_004
    await engine.close()


async def test_closing_ends_open_answers_and_start_begins_again(engine: Engine) -> None:
    chunks: list[bytes] = []
    answer = asyncio.ensure_future(engine.give(Counts(), chunks, max_tokens=90))
    await until(lambda: bool(chunks))
    await engine.close()
    with pytest.raises(EngineFailure) as failure:
        await answer
    assert failure.value.retryable
    with pytest.raises(EngineFailure):
        await engine.ask()
    with pytest.raises(EngineFailure):
        await engine.check()
    await engine.start()
    assert text(await engine.ask(max_tokens=1)) == "t0"
