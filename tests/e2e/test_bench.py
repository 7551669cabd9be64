"""``headrace bench`` against a stack: what it prints and writes, and what it says when there is nothing to measure."""

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest

from tests.support.stack import Stack, headrace


def bench(stack: Stack, *arguments: str, key: str = "") -> tuple[int, str, str]:
    options = ("--model", stack.model, "--key", key or stack.run.key, *arguments)
    done = headrace("bench", stack.run.url, *options)
    return done.returncode, done.stdout, done.stderr


def test_a_run_is_told_to_people_and_written_for_programs(stack: Stack, tmp_path: Path) -> None:
    result, lines, picture = tmp_path / "r.json", tmp_path / "r.jsonl", tmp_path / "r.svg"
    code, said, _ = bench(
        stack, "--requests", "12", "--rate", "50", "--lengths", "20,5", "--prefixes", "2", "--prefix-tokens", "30",
        "--turns", "2", "--goodput", "e2e:60000",
        "--result", str(result), "--per-request", str(lines), "--picture", str(picture),
    )  # fmt: skip
    assert code == 0 and "time to first token, ms" in said and "service level" in said
    found = json.loads(result.read_text(encoding="utf-8"))
    assert (found["completed"], found["failed"], found["output_lens"]) == (24, 0, [5] * 24)
    assert found["total_output_tokens"] == 120 and found["request_goodput"] == found["request_throughput"]
    assert all(length > 50 for length in found["input_lens"]), "each prompt has its prefix"
    rows = [json.loads(line) for line in lines.read_text(encoding="utf-8").splitlines()]
    assert {row["turn"] for row in rows} == {0, 1} and all(row["good"] and row["request_id"] for row in rows)
    first = {row["number"]: row["prompt_tokens"] for row in rows if row["turn"] == 0}
    assert all(row["prompt_tokens"] > first[row["number"]] for row in rows if row["turn"] == 1), "turns add up"
    drawn = ElementTree.fromstring(picture.read_text(encoding="utf-8"))  # noqa: S314  # our own file
    assert len(drawn.findall("{http://www.w3.org/2000/svg}circle")) == 24


def test_a_closed_loop_has_as_many_open_as_it_was_told(stack: Stack, tmp_path: Path) -> None:
    lines = tmp_path / "r.jsonl"
    code, _, _ = bench(stack, "--requests", "9", "--concurrency", "3", "--lengths", "5,5", "--per-request", str(lines))
    rows = [json.loads(line) for line in lines.read_text(encoding="utf-8").splitlines()]
    spans = sorted((row["due_ms"], row["due_ms"] + row["e2e_ms"]) for row in rows)
    open_at = [sum(begins <= begin < end for begins, end in spans) for begin, _ in spans]
    assert code == 0 and max(open_at) == 3


def test_refusals_are_counted_by_their_code_and_nothing_measured_is_a_failure(stack: Stack) -> None:
    code, said, why = bench(stack, "--requests", "3", key="hr_wrong")
    assert code == 1 and "3 x invalid_api_key" in said and "no request ended well" in why


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--rate", "0"], "--rate must be above 0"),
        (["--burstiness", "nan"], "--burstiness must be above 0"),
        (["--lengths", "5"], "neither PROMPT,OUTPUT"),
        (["--lengths", "0,5"], "must be from 1"),
        (["--goodput", "ttft"], "none of ttft:MS"),
        (["--trace", "/no/such/file"], "No such file"),
    ],
)
def test_what_makes_no_sense_is_refused(arguments: list[str], reason: str) -> None:
    done = headrace("bench", "http://127.0.0.1:9", "--model", "m", *arguments)
    assert (done.returncode, done.stdout) == (1, "") and reason in done.stderr
