"""How many workers a load needs: each bound where it binds, the tail against known queues, and what cannot be."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from compose.cli.main import app
from compose.stack.data_dir import ComposeError
from simulator.capacity import (
    Level,
    Size,
    Speeds,
    Unreachable,
    _erlang_c,
    _tail_s,
    _wait,
    least_by,
    need,
    sample,
    sensitivity,
)
from simulator.traces import fixed

LEVEL = Level(ttft_ms=2_000, tpot_ms=100)


def speeds(**fields: Any) -> Speeds:
    return Speeds(**{"prefill_tps": 8_000, "itl_ms": 20, "slots": 64, "kv_tokens": 500_000} | fields)


def test_erlangs_c_is_the_known_one() -> None:
    """Tables: two servers at an offered load of 1 wait with 1/3; ten at 8 with 0.4092."""
    assert _erlang_c(1.0, 2) == pytest.approx(1 / 3)
    assert _erlang_c(8.0, 10) == pytest.approx(0.4092, abs=1e-4)
    assert _erlang_c(10.0, 5_000) == 0


def test_the_tail_of_one_server_with_exponential_times_is_exact() -> None:
    """M/M/1: P(wait > t) = rho exp(-(mu - lambda) t); here with a sample whose variation is 1."""
    spans = [-math.log(1 - (index + 0.5) / 20_000) for index in range(20_000)]
    waits, decay = _wait(0.5, spans, 1)
    assert _tail_s(waits, decay, 0.01) == pytest.approx(math.log(0.5 / 0.01) / 0.5, rel=0.01)


@pytest.mark.parametrize(
    ("rate", "size", "fields", "bound"),
    [
        (50, Size(200, 0, 400), {}, "throughput"),
        (50, Size(10, 0, 400), {"slots": 4, "itl_ms": 1, "prefill_tps": 1e6, "kv_tokens": 10**9}, "throughput"),
        (50, Size(20_000, 0, 400), {"kv_tokens": 25_000, "prefill_tps": 1e6}, "kv_cache"),
    ],
)
def test_what_binds(rate: float, size: Size, fields: dict[str, Any], bound: str) -> None:
    found = need(rate, [size], speeds(**fields), LEVEL)
    assert found.binding == bound
    assert found.workers == max(found.bounds.values())


def test_bounds_are_the_formulas() -> None:
    found = need(50, [Size(400, 200, 300)], speeds(), LEVEL)
    span_s = 200 / 8_000 + 300 * 0.02
    assert found.bounds["throughput"] == math.ceil(50 * (200 / 8_000 + 300 * 0.02 / 64) / 0.8)
    assert found.bounds["slots"] == math.ceil(50 * span_s / (0.9 * 64))
    assert found.bounds["kv_cache"] == math.ceil(50 * (400 + 150) * span_s / (0.9 * 500_000))


def test_a_tight_first_token_needs_more_than_throughput_does() -> None:
    sizes = sample(fixed(4_000, 10))
    loose, tight = (need(10, sizes, speeds(), Level(ttft_ms=ms, tpot_ms=100)) for ms in (5_000, 520))
    assert loose.binding == "throughput"
    assert tight.binding == "tail"
    assert tight.workers > loose.workers
    assert tight.ttft_p99_ms <= 520


def test_more_is_never_less() -> None:
    sizes = sample(fixed(1_000, 200))
    counts = [need(rate, sizes, speeds(), LEVEL).workers for rate in (1, 5, 20, 80, 320)]
    assert counts == sorted(counts)
    around = sensitivity(20, sizes, speeds(), LEVEL)
    assert len(around) == 6
    for what in ("rate", "prompt", "output"):
        less, more = around[f"{what} -20 %"], around[f"{what} +20 %"]
        assert not isinstance(less, str)
        assert not isinstance(more, str)
        assert less.workers <= more.workers


@pytest.mark.parametrize(
    ("size", "fields", "reason"),
    [
        (Size(100_000, 0, 10), {}, "99th percentile"),
        (Size(100, 0, 10), {"itl_ms": 200}, "cannot be kept"),
        (Size(100, 0, 10_000), {"kv_tokens": 1, "slots": 1_000_000, "itl_ms": 99}, "more than"),
    ],
)
def test_what_no_number_of_workers_reaches_is_said(size: Size, fields: dict[str, Any], reason: str) -> None:
    with pytest.raises(Unreachable, match=reason):
        need(100, [size], speeds(**fields), LEVEL)


@pytest.mark.parametrize("least", [1, 2, 7, 64, 1_000])
@pytest.mark.parametrize("first", [1, 7, 500])
def test_bisection_finds_the_least(least: int, first: int) -> None:
    assert least_by(lambda workers: workers >= least, first) == least


def run(*arguments: str) -> Any:
    done = CliRunner().invoke(app, ["capacity", *arguments, "--json"])
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


def test_a_benchmarks_result_is_read(tmp_path: Path) -> None:
    """Its lengths, its gap between tokens, and the prefill's speed: the slope of first tokens over prompts."""
    prompts = [500, 1_000, 2_000, 4_000]
    file = tmp_path / "r.json"
    result = {
        "input_lens": [*prompts, 100],
        "output_lens": [100] * 5,
        "ttfts": [*(0.05 + prompt / 5_000 for prompt in prompts), 0.0],
        "errors": ["", "", "", "", "529"],
        "mean_tpot_ms": 25.0,
        "cached_tokens": 750,
    }
    file.write_text(json.dumps(result))
    found = run("--rate", "5", "--bench", str(file))
    assert found["speeds"]["prefill_tps"] == pytest.approx(5_000)
    assert found["speeds"]["itl_ms"] == 25
    assert found["workers"] == found["needed"]["workers"] + 1
    file.write_text("{}")
    with pytest.raises(ComposeError, match="no benchmark's result"):
        run("--rate", "5", "--bench", str(file))


def test_the_simulator_agrees_on_the_size() -> None:
    """It needs no more; its decode does not slow its prefill, so it may need fewer."""
    figures = ("--prefill-tps", "8000", "--itl-ms", "20", "--ttft-ms", "2500", "--verify")
    found = run("--rate", "10", "--lengths", "azure-conversation", *figures)
    assert found["needed"]["workers"] / 2 <= found["simulated_workers"] <= found["needed"]["workers"]


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (("--rate", "5"), "how long requests are"),
        (("--rate", "5", "--lengths", "10,10"), "what a worker does"),
        (("--rate", "5", "--lengths", "x", "--prefill-tps", "1", "--itl-ms", "1"), "neither PROMPT,OUTPUT"),
        (("--rate", "5", "--lengths", "9000,10", "--prefill-tps", "100", "--itl-ms", "1"), "cannot be kept"),
    ],
)
def test_what_is_missing_is_named(arguments: tuple[str, ...], reason: str) -> None:
    with pytest.raises(ComposeError, match=reason):
        run(*arguments)
