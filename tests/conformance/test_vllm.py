"""What only vLLM does, and what it does when it dies. The last test leaves the engine closed."""

import asyncio
import logging
import os
import signal
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.support.asking import VLLM_MARKS, Asker
from tests.support.polling import until
from worker.engines.base import Counts, EngineFailure

pytestmark = [pytest.mark.asyncio(loop_scope="session"), *VLLM_MARKS]

QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
CITY: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 20}, "people": {"type": "integer"}},
    "required": ["city", "people"],
    "additionalProperties": False,
}


async def test_the_answer_names_paris(vllm: Asker) -> None:
    answer = await vllm.ask(vllm.job(True, messages=QUESTION, max_tokens=40, ignore_eos=False))
    assert "Paris" in answer.text()


async def test_the_level_of_our_own_logs_is_as_it_was(vllm: Asker) -> None:
    """What vLLM's application imports sets it to ERROR."""
    assert vllm.engine.slots and logging.getLogger().level <= logging.WARNING


async def test_the_field_simulate_is_refused(vllm: Asker) -> None:
    with pytest.raises(EngineFailure) as refusal:
        await vllm.ask(vllm.job(True, messages=QUESTION, simulate={"tokens": ["x"]}))
    assert (refusal.value.code, refusal.value.param) == ("invalid_request", "simulate")


@pytest.mark.parametrize("stream", [True, False])
async def test_structured_output_obeys_its_schema(vllm: Asker, stream: bool) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "city", "schema": CITY}}
    answer = await vllm.ask(
        vllm.job(stream, messages=QUESTION, response_format=form, max_tokens=200, ignore_eos=False, temperature=1)
    )
    value = msgspec.json.decode(answer.text())
    assert answer.finish_reasons() == ["stop"]
    assert set(value) == {"city", "people"}
    assert isinstance(value["people"], int)


@pytest.mark.parametrize("stream", [True, False])
async def test_a_named_tool_is_called_with_valid_arguments(vllm: Asker, stream: bool) -> None:
    tool = {"type": "function", "function": {"name": "remember_city", "parameters": CITY}}
    choice = {"type": "function", "function": {"name": "remember_city"}}
    answer = await vllm.ask(
        vllm.job(stream, messages=QUESTION, tools=[tool], tool_choice=choice, max_tokens=200, ignore_eos=False)
    )
    calls = [
        call["function"]
        for it in answer.choices
        for call in it.get("delta", it.get("message", {})).get("tool_calls") or []
    ]
    assert "".join(call.get("name") or "" for call in calls) == "remember_city"
    arguments = msgspec.json.decode("".join(call.get("arguments") or "" for call in calls))
    assert set(arguments) == {"city", "people"}


WILD = " ".join(f'(([a-z]{{{i + 300}}} "x"){{2,40}}[^a]{{{i + 200}}})' for i in range(25))
"""Compiles for minutes, and CANARY stands for what nobody else may read."""
WILD_SCHEMA = {"type": "object", "properties": {"CANARY": {"type": "string", "pattern": WILD.replace('"', "")}}}
WILD_BODIES: list[dict[str, Any]] = [
    {"structured_outputs": {"grammar": f"root ::= {WILD} # CANARY"}},
    {"structured_outputs": {"regex": WILD.replace('"', "").replace(" ", "") + "CANARY"}},
    {"structured_outputs": {"grammar": 'root ::= ("CANARY'}},
    {"structured_outputs": {"regex": "(CANARY"}},
    {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": WILD_SCHEMA}}},
    {"tools": [{"type": "function", "function": {"name": "f", "parameters": WILD_SCHEMA}}], "tool_choice": "required"},
]


async def test_no_constraint_costs_an_engine(vllm: Asker) -> None:
    """Streams go on beside them, and each is told which field it is."""
    processes = {it.pid for it in _processes()}
    neighbour = asyncio.ensure_future(vllm.ask(vllm.job(True, max_tokens=60)))
    for body in WILD_BODIES:
        for stream in (True, False):
            with pytest.raises(EngineFailure) as refused:
                await vllm.ask(vllm.job(stream, messages=QUESTION, max_tokens=5, **body))
            failure = refused.value
            assert (failure.code, failure.status, failure.param) == ("invalid_request", 400, next(iter(body)))
            assert not failure.retryable and not failure.engine_death and "CANARY" not in failure.message
    assert (await neighbour).counts.completion_tokens == 60
    await vllm.engine.check()
    assert {it.pid for it in _processes()} == processes


def _processes() -> list[Any]:
    """The engine's processes; psutil comes with vLLM."""
    import psutil

    return [it for it in psutil.Process().children(recursive=True) if it.is_running() and "VLLM" in it.name()]


async def _ends(vllm: Asker, stream: bool) -> EngineFailure:
    """The failure that a long answer ends with."""
    with pytest.raises(EngineFailure) as end:
        await vllm.ask(vllm.job(stream, max_tokens=4000))
    return end.value


async def test_a_dead_engine_fails_what_it_ran_and_can_be_rebuilt(vllm: Asker) -> None:
    running = [asyncio.ensure_future(_ends(vllm, stream)) for stream in (True, False)]
    await until(lambda: vllm.engine.stats().running == 2)
    (core,) = [it for it in _processes() if "EngineCore" in it.name()]
    core.send_signal(signal.SIGKILL)
    for failure in await asyncio.wait_for(asyncio.gather(*running), 30):
        assert failure.engine_death
        assert failure.retryable
    with pytest.raises(EngineFailure) as failed:
        await vllm.engine.check()
    assert failed.value.engine_death
    await vllm.engine.close()
    with pytest.raises(EngineFailure):
        await vllm.ask(vllm.job(True, max_tokens=1))

    await vllm.engine.start()
    answer = await vllm.ask(vllm.job(True, max_tokens=5))
    assert answer.counts.completion_tokens == 5
    await vllm.engine.check()


async def test_a_hanging_engine_fails_its_check_and_is_killed_by_close(vllm: Asker) -> None:
    counts = Counts()
    running = asyncio.ensure_future(_ends(vllm, True))
    await until(lambda: vllm.engine.stats().running == 1)
    processes = _processes()
    for process in processes:
        process.send_signal(signal.SIGSTOP)
    with pytest.raises(EngineFailure) as failed:
        await vllm.engine.check()
    assert failed.value.engine_death
    await vllm.engine.close()
    failure = await asyncio.wait_for(running, 30)
    assert failure.engine_death
    assert counts == Counts()
    assert not any(it.is_running() for it in processes)


_STARTER = """
import asyncio, sys
from tests.support.asking import configuration
from worker.engines import table

if __name__ == "__main__":
    asyncio.run(table.build(*configuration("vllm", sys.argv[1])).start())
"""


async def test_the_engines_processes_end_with_a_killed_worker(vllm: Asker, model_path: Path, tmp_path: Path) -> None:
    """Also while it starts; ``vllm`` is asked for only so that this comes last, with no engine beside it."""
    import psutil

    script = tmp_path / "starter.py"
    script.write_text(_STARTER)
    path = os.pathsep.join([str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")])
    worker = psutil.Popen([sys.executable, str(script), str(model_path)], env=os.environ | {"PYTHONPATH": path})
    started: list[Any] = []

    def engine_is_there() -> bool:
        started[:] = worker.children(recursive=True)
        return any("EngineCore" in it.name() for it in started)

    await until(engine_is_there, limit_s=300)
    worker.kill()
    worker.wait()
    await until(lambda: not any(it.is_running() for it in started), limit_s=60)
