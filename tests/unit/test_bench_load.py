"""``headrace bench``: what is planned, and what is made of what was seen."""

import itertools
import json
import math
from pathlib import Path

import pytest

from compose.bench.measure import Seen, is_good, percentile, request_line, summarize, vllm_result
from compose.bench.picture import draw
from compose.bench.workload import BadTrace, Load, plan, replay
from simulator.traces import TRACES, fixed, seeded


def seen(due_s: float, first_s: float, end_s: float, tokens: int, gaps: list[float], error: str = "") -> Seen:
    return Seen(
        number=0, turn=0, tenant=0, due_s=due_s, sent_s=due_s + 0.01, first_s=first_s, end_s=end_s,
        prompt_tokens=10, output_tokens=tokens, gaps=gaps, status=200, error=error,
    )  # fmt: skip


def test_a_plan_is_the_same_for_the_same_seed_and_another_for_another() -> None:
    load = Load(requests=50, lengths=TRACES["azure-conversation"], rate=10, prefixes=3, prefix_tokens=20, turns=2)
    assert list(plan(load)) == list(plan(load))
    assert list(plan(load)) != list(plan(Load(50, TRACES["azure-conversation"], rate=10, seed=1)))


@pytest.mark.parametrize(("burstiness", "variation"), [(1.0, 1.0), (0.25, 2.0), (math.inf, 0.0)])
def test_arrivals_have_the_rate_and_the_variation_that_were_asked_for(burstiness: float, variation: float) -> None:
    times = [each.at_s for each in plan(Load(20_000, fixed(1, 1), rate=50, burstiness=burstiness))]
    gaps = [after - before for before, after in itertools.pairwise(times)]
    mean = sum(gaps) / len(gaps)
    deviation = math.sqrt(sum((gap - mean) ** 2 for gap in gaps) / len(gaps))
    assert mean == pytest.approx(1 / 50, rel=0.05)
    assert deviation / mean == pytest.approx(variation, rel=0.05, abs=1e-6)


@pytest.mark.parametrize(
    ("trace", "prompt", "output"),
    [("azure-conversation", 1155, 211), ("azure-code", 2048, 28), ("mooncake-conversation", 12_035, 343)],
)
def test_lengths_have_the_means_of_the_public_traces(trace: str, prompt: int, output: int) -> None:
    source = seeded("lengths")
    drawn = [(TRACES[trace].prompt.draw(source), TRACES[trace].output.draw(source)) for _ in range(50_000)]
    assert sum(length for length, _ in drawn) / 50_000 == pytest.approx(prompt, rel=0.12)
    assert sum(length for _, length in drawn) / 50_000 == pytest.approx(output, rel=0.12)


def test_prefixes_are_shared_and_turns_and_tenants_are_as_many_as_wanted() -> None:
    planned = list(plan(Load(300, fixed(5, 7), prefixes=3, prefix_tokens=11, turns=4, tenants=2)))
    assert {len(each.system.split()) for each in planned} == {11} and len({each.system for each in planned}) == 3
    assert all([tokens for _, tokens in each.turns] == [7] * 4 for each in planned)
    assert {each.tenant for each in planned} == {0, 1}
    assert {each.at_s for each in planned} == {0.0}, "without a rate all are there from the start"


def test_a_trace_is_replayed_with_the_sharing_that_its_hashes_say(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    lines = [
        {"timestamp": 0, "input_length": 1100, "output_length": 5, "hash_ids": [1, 2, 3]},
        {"timestamp": 2000, "input_length": 1030, "output_length": 6, "hash_ids": [1, 2, 4]},
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    first, second = replay(path, requests=10, speed=2, tenants=1)
    assert (second.at_s, second.turns[0][1]) == (1.0, 6)
    one, other = first.turns[0][0].split(), second.turns[0][0].split()
    assert (len(one), len(other)) == (1100, 1030)
    assert one[:1024] == other[:1024] and one[1024:1030] != other[1024:]


@pytest.mark.parametrize("line", ["{", '{"timestamp": 0}', '{"timestamp":0,"input_length":-1,"output_length":1}'])
def test_a_broken_trace_is_refused_by_its_line(tmp_path: Path, line: str) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text('{"timestamp":0,"input_length":1,"output_length":1}\n' + line + "\n", encoding="utf-8")
    with pytest.raises(BadTrace, match="line 2 of"):
        list(replay(path, requests=10, speed=1, tenants=1))


def test_delays_count_from_when_a_request_was_due() -> None:
    one = seen(1.0, 1.5, 2.5, 11, [0.1] * 10)
    assert (one.ttft, one.e2e, one.tpot) == (0.5, 1.5, 0.1)


def test_a_gap_is_shared_among_the_tokens_of_its_event() -> None:
    assert seen(0, 0, 1, 9, [0.4, 0.4]).itls == pytest.approx([0.1, 0.1])
    assert seen(0, 0, 1, 3, [0.4, 0.4]).itls == [0.4, 0.4]


def test_what_failed_is_not_good_and_counts_in_time() -> None:
    line = [
        seen(0, 0.1, 1.0, 10, [0.1] * 9),
        seen(0, 0.9, 1.8, 10, [0.1] * 9),
        seen(0, 0.1, 4.0, 5, [0.1] * 4, error="worker_lost"),
    ]
    summary = summarize(line, {"ttft": 500})
    assert (summary.completed, summary.failed, summary.errors, summary.good) == (2, 1, {"worker_lost": 1}, 1)
    assert (summary.duration_s, summary.request_goodput, summary.token_goodput) == (4.0, 0.25, 2.5)
    assert summary.send_lag_p99_ms == pytest.approx(10)
    assert is_good(line[1], {"tpot": 100.1, "itl": 100.1}) and not is_good(line[1], {"itl": 99})


def test_percentiles_are_between_the_two_next() -> None:
    assert percentile([1, 2, 3, 4], 0.5) == 2.5 and percentile([5], 0.99) == 5 and math.isnan(percentile([], 0.5))


def test_a_result_has_the_names_of_vllms_and_is_json() -> None:
    line = [seen(0, 0.1, 1.0, 10, [0.1] * 9), seen(0, math.nan, 0.1, 0, [], error="overloaded")]
    summary = summarize(line, {})
    result = json.loads(json.dumps(vllm_result(line, summary, {"model_id": "m"}), allow_nan=False))
    assert (result["completed"], result["failed"], result["median_ttft_ms"]) == (1, 1, pytest.approx(100))
    assert result["itls"] == [[0.1] * 9, []] and result["mean_e2el_ms"] == pytest.approx(1000)
    row = json.loads(json.dumps(request_line(line[1], {}), allow_nan=False))
    assert (row["ttft_ms"], row["error"], row["good"]) == (None, "overloaded", False)


def test_a_picture_shows_each_request_even_when_none_ended_well() -> None:
    failed = seen(0, math.nan, 0.1, 0, [], error="overloaded")
    assert draw([failed], "a < b").count("<circle") == 1 and "a &lt; b" in draw([failed], "a < b")
    assert draw([seen(0, 0.1, 1.0, 10, [0.1] * 9)] * 5, "t").count("<circle") == 5
