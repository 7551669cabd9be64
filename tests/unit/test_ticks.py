"""What is done again and again is done at the same instants."""

import itertools

import pytest

from contracts.ticks import EARLY_S, next_tick_s


@pytest.mark.parametrize("period_s", [0.1, 0.25, 0.5, 1.0, 3.0])
def test_ticks_of_one_period_are_those_of_a_shorter_one_that_divides_it(period_s: float) -> None:
    now, ticks = 1234.567, []
    for _ in range(40):
        now += next_tick_s(period_s, now)
        ticks.append(now)
    assert all(abs(at / period_s - round(at / period_s)) < 1e-6 for at in ticks)
    assert all(later - at == pytest.approx(period_s) for at, later in itertools.pairwise(ticks))


def test_a_timer_that_fires_early_or_late_makes_no_second_tick_and_skips_none() -> None:
    for late_s in (-EARLY_S / 2, 0.0, 0.2):
        assert 10.0 + late_s + next_tick_s(0.5, 10.0 + late_s) == pytest.approx(10.5)
    assert 10.7 + next_tick_s(0.5, 10.7) == pytest.approx(11.0)
