"""The simulated fleet: the same seed gives the same run, every request ends once, and what it shows can be true."""

import json
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import msgspec
import pytest

from simulator.autoscale import RequestCount
from simulator.machine import BLOCK, Job, Machine
from simulator.picture import compare, draw
from simulator.report import Report, simulate
from simulator.scenario import BadScenario, Scenario, Timing, load


def run(**fields: Any) -> Report:
    """A scenario as its file has it."""
    return simulate(msgspec.convert(fields, Scenario), Path())


def model(**fields: Any) -> dict[str, Any]:
    worker = {"slots": 16, "kv_tokens": 100_000, "prefill_tps": 8_000.0, "itl_ms": 20.0, "start_s": 5.0}
    return {"name": "m", "workers": 4, "worker": worker} | fields


EXACT = {"prompt": {"mu": 6.0}, "output": {"mu": 4.0}}
"""403 and 55 tokens, always."""


def test_the_same_seed_gives_the_same_run() -> None:
    scenario = {
        "requests": 400,
        "seed": 7,
        "models": [model(demand={"rate": 8.0, "tenant_skew": 1.0})],
        "failures": [{"at_s": 10.0, "what": "worker", "number": 1}],
    }
    assert run(**scenario) == run(**scenario)
    assert run(**scenario | {"seed": 8}).total != run(**scenario).total


def test_alone_a_request_takes_what_its_engine_takes() -> None:
    report = run(requests=20, models=[model(demand={"rate": 0.05, **EXACT})]).total
    prefill_ms = 403 / 8_000 * 1000
    assert report.ended == {"completed": 20}
    assert report.ttft_ms.p50 == pytest.approx(2 + 1 + 1 + prefill_ms, abs=1)
    assert report.tpot_ms.p50 == pytest.approx(20, abs=0.1)
    assert report.good == 20


def test_a_death_loses_nobody_who_had_seen_nothing() -> None:
    report = run(
        requests=300,
        models=[model(demand={"rate": 12.0, **EXACT})],
        failures=[{"at_s": 8.0, "what": "worker", "number": 0}],
    ).total
    assert report.requests == 300 == sum(report.ended.values())
    assert 0 < report.ended["lost"] <= 16, "those whose callers had seen text, and no more than had slots"
    assert report.ended["completed"] == 300 - report.ended["lost"]
    assert report.lost_workers == 1


def test_a_cell_dies_under_load_and_everything_ends_once() -> None:
    report = run(
        requests=1_500,
        models=[model(name=name, workers=8, demand={"rate": 20.0, "tenants": 30}) for name in ("a", "b")],
        cells=2,
        failures=[{"at_s": 15.0, "what": "cell", "number": 1, "for_s": 20.0}],
    )
    assert report.total.requests == 1_500 == sum(report.total.ended.values())
    assert report.total.lost_workers == 8
    assert report.checked["requests"] == 1_500 <= report.checked["admissions"]
    assert report.checked["tenants"] == 2 * 30
    assert report.checked["workers"] == 2 * 8
    assert {each.model for each in report.models} == {"a", "b"}


def test_the_examples_are_scenarios() -> None:
    files = sorted((Path(__file__).parents[2] / "simulator" / "examples").glob("*.toml"))
    assert files
    for file in files:
        scenario = load(file)
        assert sum(each.workers for each in scenario.models) == 1_000
        assert scenario.requests == 10_000_000


def test_overload_is_refused_and_shared_fairly() -> None:
    report = run(
        requests=2_000,
        models=[model(workers=1, demand={"rate": 40.0, "tenants": 10, "deadline_ms": 5_000, "patience": 0})],
    ).total
    assert report.ended["overloaded"] > 500
    assert report.ttft_ms.p99 < 8_000, "who is admitted has it in time, or nearly"
    assert report.fairness > 0.8


def test_long_prompts_have_their_first_token_by_the_deadline_or_are_refused() -> None:
    """Twice as many prompts of 27,000 tokens as the workers can compute, and slots for all of them."""
    worker = {"slots": 64, "kv_tokens": 4_000_000, "prefill_tps": 8_000.0, "itl_ms": 20.0}
    demand = {"rate": 1.2, "deadline_ms": 30_000, "patience": 0, "prompt": {"mu": 10.2}, "output": {"mu": 4.0}}
    report = run(requests=400, models=[model(workers=2, worker=worker, demand=demand)]).total
    assert report.ttft_ms.p99 <= 30_500
    assert report.ended["completed"] > 150
    assert report.ended["overloaded"] > 4 * report.ended.get("expired", 0), "who came later may go first by fairness"


def test_limits_are_never_passed() -> None:
    """The simulator checks at each admission; here that refusals come of them."""
    report = run(
        requests=500,
        models=[model(demand={"rate": 30.0, "tenants": 2, "patience": 0})],
        tenant_limits={"concurrency": 3},
    ).total
    assert report.refusals["rate_limit_exceeded"] > 100


def test_conversations_find_their_prompts_again() -> None:
    demand = {
        "rate": 0.5,
        "turns": 5,
        "think_s": 1.0,
        "system_prompts": 1,
        "system_tokens": 2_048,
        "tenants": 1,
        **EXACT,
    }
    one = run(requests=200, models=[model(workers=1, demand=demand)]).total
    assert one.hit_rate > 0.6
    none = run(requests=200, models=[model(workers=1, demand={"rate": 0.5, **EXACT})]).total
    assert none.hit_rate == 0


def test_workers_come_and_go() -> None:
    demand = {"rate": 4.0, "steps": [(0, 1.0), (60, 3.0), (180, 0.2)], **EXACT}
    limits = {"replicas_hold_s": 60, "replicas_spare": 0}
    report = run(requests=1_800, models=[model(workers=1, autoscale=(1, 8), demand=demand, limits=limits)])
    counts = [workers for _, workers, _ in report.replicas["m"]]
    assert max(counts) > 1
    assert counts[-1] < max(counts)
    assert report.total.ended["completed"] > 1_700


def test_several_kinds_of_callers_come_independently() -> None:
    long = {"rate": 0.5, "steps": [(0, 0.0), (50, 1.0)], "prompt": {"mu": 8.0}, "output": {"mu": 1.0}, "tenants": 20}
    chat = {"rate": 4.0, **EXACT}
    both = run(requests=400, models=[model(demand=[chat, long])])
    assert both.total.ended == {"completed": 400}
    alone = run(requests=200, models=[model(demand=chat)])
    assert [it.asked_per_s for it in both.series[:5]] != [0.0] * 5
    assert both.total.ttft_ms.p99 > alone.total.ttft_ms.p99 + 200, "a prompt of 2,981 tokens takes 373 ms"


@pytest.mark.parametrize("scale_by", ["in_flight", "queued"])
def test_workers_by_counts_of_requests_come_and_go(scale_by: str) -> None:
    demand = {"rate": 6.0, "steps": [(0, 1.0), (60, 3.0), (140, 0.5)], **EXACT}
    scaled = model(workers=1, autoscale=(1, 8), scale_by=scale_by, requests_per_worker=8.0, demand=demand)
    report = run(requests=2_900, models=[scaled])
    counts = [workers for _, workers, _ in report.replicas["m"]]
    assert 1 < max(counts) <= 8
    assert counts[-1] < max(counts)


def test_counting_requests_follows_the_rule_of_kubernetes() -> None:
    count = RequestCount(10.0, 1, 100)
    assert count.desired(0, 0, 3) == 3, "down to the most that was wanted lately: nothing yet"
    count = RequestCount(10.0, 1, 100)
    assert count.desired(15_000, 32, 3) == 3, "within a tenth"
    assert count.desired(30_000, 200, 3) == 7, "four more at most"
    assert count.desired(31_000, 900, 7) == 7, "looks every 15 s"
    assert count.desired(45_000, 900, 7) == 14, "or twice as many"
    assert count.desired(60_000, 10, 14) == 14, "what was wanted five minutes ago holds"
    assert count.desired(400_000, 10, 14) == 1


def test_prompts_are_computed_one_after_the_other_and_counted_as_they_are() -> None:
    machine = Machine("w", 0, Timing(slots=4, kv_tokens=100_000, prefill_tps=1_000, itl_ms=10), 0)
    for number in range(3):
        machine.add(Job((f"r{number}", 1), 500, 10, ()), 0)
    assert [machine.computed(now_ms) for now_ms in (0, 250, 1_000, 1_500, 9_000)] == [0, 250, 1_000, 1_500, 1_500]


def test_a_full_cache_preempts_the_youngest() -> None:
    machine = Machine("w", 0, Timing(slots=4, kv_tokens=1_000, prefill_tps=1e6, itl_ms=10), 0)
    for number in range(3):
        machine.add(Job((str(number), 1), 300, 200, []), 0)
    assert len(machine.running) == 3
    machine.remove(("0", 1), 900)
    machine.add(Job(("3", 1), 300, 200, []), 900)
    assert machine.preemptions or machine.waiting
    assert ("1", 1) in machine.running


def test_the_least_recently_used_blocks_go() -> None:
    machine = Machine("w", 0, Timing(slots=4, kv_tokens=10 * BLOCK), 0)
    first, second = list(range(8)), list(range(100, 108))
    for number, blocks in enumerate((first, first, second, first)):
        machine.add(Job((str(number), 1), 8 * BLOCK + 1, 1, blocks), 0)
        [job] = machine.running.values()
        assert job.cached == (8 * BLOCK if number == 1 else 0), number
        machine.remove(job.key, 0)
        machine.begun.clear()


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("models = []", "models"),
        ("[[models]]\nname = 'm'\nworker = 3", "worker"),
        ("[[models]]\nname = 'm'\nworkres = 3", "workres"),
        ("[[models]]\nname = 'm'\n[[models]]\nname = 'm'", "two models"),
        ("[[models]]\nname = 'm'\nautoscale = [3, 1]", "autoscale"),
        ("[[models]]\nname = 'm'\n[[failures]]\nat_s = 1.0\nwhat = 'worker'\nmodel = 'x'", "none of the models"),
        ("[[models]]\nname = 'm'\ndemand = {rate = 0.0}", "rate"),
        ("[[models]]\nname = 'm'\ndemand = {rate = inf}", "rate"),
        ("[[models]]\nname = 'm'\ndemand = {rate = nan}", "rate"),
        ("[[models]]\nname = 'm'\ndemand = {prompt = {mu = 800.0}}", "mu"),
        ("[[models]]\nname = 'm'\ndemand = {steps = [[5.0, 1.0], [0.0, 2.0]]}", "order"),
        ("[[models]]\nname = 'm'\ndemand = {steps = [[0.0, 1.0], [5.0, 0.0]]}", "never end"),
        ("[[models]]\nname = 'm'\ndemand = []", "demand"),
        ("[[models]]\nname = 'm'\nautoscale = [1, 0]", "autoscale"),
        ("[[models]]\nname = 'm'\nscale_by = 'moon'", "scale_by"),
        ("models = [", "Invalid"),
    ],
)
def test_what_makes_no_sense_is_named(tmp_path: Path, text: str, reason: str) -> None:
    file = tmp_path / "s.toml"
    file.write_text(text)
    with pytest.raises(BadScenario, match=reason):
        load(file)


def test_a_trace_is_replayed_with_what_its_prompts_share(tmp_path: Path) -> None:
    lines = (
        {"timestamp": 500 * number, "input_length": 1100, "output_length": 5, "hash_ids": [1, 2, number + 10]}
        for number in range(10)
    )
    (tmp_path / "t.jsonl").write_text("\n".join(map(json.dumps, lines)))
    scenario = msgspec.convert({"models": [model(workers=1, demand={"trace": "t.jsonl", "tenants": 1})]}, Scenario)
    report = simulate(scenario, tmp_path).total
    assert report.ended == {"completed": 10}
    assert report.hit_rate == pytest.approx(0.9 * 1024 / 1100, abs=0.01)


def test_a_run_is_drawn_and_its_names_are_text_only() -> None:
    report = run(requests=50, models=[model(demand={"rate": 5.0, **EXACT})])
    for picture in (draw(report, "<script>"), compare({"<script>": report, "b": report}, "<script>")):
        assert ElementTree.fromstring(picture).tag.endswith("svg")  # noqa: S314 (our own)
        assert "<script>" not in picture
