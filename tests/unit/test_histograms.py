"""Histograms of our own: what Prometheus reads in them is what was put in, and tails are within 5 %."""

import math
import random
from itertools import pairwise

import pytest
from prometheus_client.parser import text_string_to_metric_families

from contracts import histograms
from contracts.histograms import CHILDREN_MAX, RATIO, ROUND, Histogram, bounds


@pytest.fixture(autouse=True)
def families(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of a test are on nobody's page."""
    monkeypatch.setattr(histograms, "FAMILIES", [])


def histogram(*labels: str) -> Histogram:
    return Histogram("headrace_x_seconds", "Seconds of x", labels, least=0.001, most=600.0)


def samples(of: Histogram) -> dict[tuple[str, ...], float]:
    [family] = text_string_to_metric_families(of.text())
    assert (family.name, family.type, family.documentation) == ("headrace_x_seconds", "histogram", "Seconds of x")
    return {(each.name, *each.labels.values()): each.value for each in family.samples}


def quantile(of: Histogram, q: float) -> float:
    """As Prometheus' histogram_quantile: linear within a bucket."""
    [family] = text_string_to_metric_families(of.text())
    buckets = [(float(s.labels["le"]), s.value) for s in family.samples if s.name.endswith("_bucket")]
    rank = q * buckets[-1][1]
    below, count = 0.0, 0.0
    for bound, value in buckets:
        if value >= rank:
            return below + (bound - below) * (rank - count) / (value - count)
        below, count = bound, value
    raise AssertionError("no such rank")


def test_bounds_are_a_tenth_apart_and_hold_every_round_target() -> None:
    found = bounds(0.001, 600.0)
    assert found[0] <= 0.001 and found[-1] >= 600
    assert all(1 < after / before <= RATIO * 1.001 for before, after in pairwise(found))
    assert set(ROUND) - {600.0} <= set(found)


@pytest.mark.parametrize("seed", range(5))
def test_tails_are_within_five_percent(seed: int) -> None:
    """Also of what is worst: an engine that takes the same time for everything."""
    dice = random.Random(seed)
    shape = [0.0, 0.05, 0.3, 1.0, 1.5][seed]
    values = [0.2 * math.exp(dice.gauss(0, shape)) for _ in range(20_000)]
    of = histogram()
    of.of().observe_all(values)
    values.sort()
    for q in (0.5, 0.9, 0.95, 0.99):
        assert quantile(of, q) == pytest.approx(values[math.ceil(q * len(values)) - 1], rel=0.05)


def test_counts_and_sums_are_those_of_what_came_however_it_came() -> None:
    of = histogram("model", "phase")
    one = of.of("m", "edge")
    assert of.of("m", "edge") is one
    one.observe(0.5)
    one.observe_all([0.25, 1_000.0])
    of.of('a "quoted"\\\nname', "edge").observe(2.0)
    found = samples(of)
    assert found["headrace_x_seconds_count", "m", "edge"] == 3
    assert found["headrace_x_seconds_sum", "m", "edge"] == 1000.75
    assert found["headrace_x_seconds_bucket", "m", "edge", "0.5"] == 2
    assert found["headrace_x_seconds_bucket", "m", "edge", "0.2"] == 0
    assert found["headrace_x_seconds_bucket", "m", "edge", "+Inf"] == 3
    assert found["headrace_x_seconds_count", 'a "quoted"\\\nname', "edge"] == 1


def test_label_values_without_end_are_counted_as_other() -> None:
    of = histogram("model")
    for number in range(CHILDREN_MAX + 50):
        of.of(str(number)).observe(1.0)
    found = {labels[1]: value for labels, value in samples(of).items() if labels[0] == "headrace_x_seconds_count"}
    assert len(found) == CHILDREN_MAX + 1
    assert found["other"] == 50
