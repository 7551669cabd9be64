"""Constraints are compiled in a process of their own, which is stopped at its bounds: no engine is there to be lost."""

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from tests.support.asking import VLLM_MARKS
from tests.support.polling import until
from worker.engines.base import EngineFailure
from worker.engines.vllm.grammar_process import Kind
from worker.engines.vllm.grammars import Grammars

pytestmark = [pytest.mark.asyncio(loop_scope="session"), *VLLM_MARKS]

REPEATED = " ".join(f'(([a-z]{{{i + 300}}} "x"){{2,40}}[^a]{{{i + 200}}})' for i in range(25))
"""Compiles for minutes."""
SCHEMA = {"type": "object", "properties": {"a": {"type": "string", "pattern": REPEATED.replace('"', "")}}}
KILLERS: list[tuple[Kind, str]] = [
    ("ebnf", f"root ::= {REPEATED}"),
    ("regex", REPEATED.replace('"', "").replace(" ", "")),
    ("json", json.dumps(SCHEMA)),
    (
        "structural_tag",
        json.dumps({"structures": [{"begin": "<a>", "schema": SCHEMA, "end": "</a>"}], "triggers": ["<"]}),
    ),
]


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def grammars(model_path: Path) -> AsyncIterator[Grammars]:
    import xgrammar
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model_path)
    grammars = Grammars(xgrammar.TokenizerInfo.from_huggingface(tokenizer).serialize_json(), any_whitespace=False)
    await grammars.start()
    yield grammars
    await grammars.close()


def children(grammars: Grammars) -> list[int]:
    import psutil

    assert grammars._process is not None
    return [it.pid for it in psutil.Process(grammars._process.pid).children()]


@pytest.mark.parametrize(
    ("kind", "good", "bad"),
    [
        ("ebnf", 'root ::= "a" [0-9]{1,3}', "root ::= ("),
        ("lark", 'start: "a" | "b"', "start: ("),
        ("regex", r"\\d{3}-\\d{4}", "("),
        ("json", '{"type": "object", "properties": {"a": {"type": "string", "maxLength": 20}}}', '{"type": 1}'),
        ("json", '{"anyOf": [{"$ref": "#"}, {"type": "null"}]}', '{"$ref": "#"}'),
        ("ebnf", 'root ::= "a" | root "b"', "root ::= root"),
        ("regex", "a?", "[^\\x00-\\U0010ffff]"),
        ("structural_tag", '{"type": "structural_tag", "format": {"type": "const_string", "value": "a"}}', "{}"),
    ],
)
async def test_what_is_well_formed_compiles_and_what_is_not_is_told(
    grammars: Grammars, kind: Kind, good: str, bad: str
) -> None:
    for _ in range(2):
        assert await grammars.check("t", kind, good) == "compiled"
        assert await grammars.check("t", kind, bad) == "invalid"


@pytest.mark.parametrize(("kind", "text"), KILLERS, ids=[kind for kind, _ in KILLERS])
async def test_what_would_compile_for_minutes_is_stopped_and_remembered(
    grammars: Grammars, kind: Kind, text: str
) -> None:
    assert await grammars.check("bad", kind, text) == "too_complex"
    assert not children(grammars)
    assert await grammars.check("other", kind, text) == "too_complex"


async def test_one_tenants_killers_hold_nobody_up_and_leave_with_their_child_only(grammars: Grammars) -> None:
    flood = [asyncio.create_task(grammars.check("bad", "ebnf", f"root ::= {REPEATED} # {i}")) for i in range(20)]
    await until(lambda: children(grammars))
    [child] = children(grammars)
    assert await grammars.check("good", "regex", "a+b") == "compiled"
    assert children(grammars) == [child]
    for task in flood:
        task.cancel()
    await asyncio.gather(*flood, return_exceptions=True)
    # The child of the one who left keeps its place until it is stopped.
    assert await grammars.check("bad", "regex", "a+c") == "compiled"
    assert not children(grammars)


async def test_the_process_is_made_again_when_it_died(grammars: Grammars) -> None:
    asked = asyncio.create_task(grammars.check("bad", "ebnf", f"root ::= {REPEATED} # again"))
    await until(lambda: children(grammars))
    assert grammars._process is not None
    os.kill(grammars._process.pid, signal.SIGKILL)
    with pytest.raises(EngineFailure) as failed:
        await asked
    assert failed.value.retryable and not failed.value.engine_death
    assert await grammars.check("t", "regex", "b+c") == "compiled"
