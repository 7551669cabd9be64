"""What metrics say is what callers see: measured from outside under a steady load, at two gateways and two workers."""

from tests.bench.bench_metrics import TOLERANCE, agreement, off

SECONDS, RATE, SLOWER = 20.0, 10.0, 4.0
"""Times of a second and more: beside them what a busy client waits for itself is nothing."""


def test_counts_are_equal_and_sums_and_quantiles_within_five_per_cent() -> None:
    found = agreement(SECONDS, RATE, SLOWER)
    assert set(found) == {"first token", "between tokens", "whole answer"}
    for what, figures in found.items():
        count, inside = figures.pop("count")
        assert count == inside > 100, what
        if what != "between tokens":
            del figures["p99"]  # Two of two hundred answers are above it: that is chance, whoever measures.
        for figure, (seen, told) in figures.items():
            assert off(seen, told) <= TOLERANCE, f"{what}, {figure}: {seen:.4f} s outside, {told:.4f} s inside"
