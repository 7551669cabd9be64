"""How late an event loop is, by a virtual clock."""

import pytest

from contracts.service.vitals import PULSE_S, Lag


def turn(lag: Lag, now: float, times: int, every_s: float = PULSE_S) -> tuple[float, list[bool]]:
    """The loop turns so often; gives the time then, and each change of ``late``."""
    changes = []
    for _ in range(times):
        now += every_s
        if lag.turned(now):
            changes.append(lag.late)
    return now, changes


def test_a_loop_that_turns_in_time_has_no_lag() -> None:
    lag = Lag(0.0, 0.1)
    now, changes = turn(lag, 0.0, 100)
    assert lag.at(now) == pytest.approx(0, abs=1e-6) and not changes


def test_a_short_pause_is_no_overload_and_a_long_one_is() -> None:
    lag = Lag(0.0, 0.1)
    now, changes = turn(lag, 0.0, 1, PULSE_S + 0.15)
    assert not changes
    now, changes = turn(lag, now, 1, PULSE_S + 0.5)
    assert changes == [True]


def test_who_is_always_a_little_late_is_late_and_recovers_only_well_below() -> None:
    lag = Lag(0.0, 0.1)
    now, changes = turn(lag, 0.0, 50, PULSE_S + 0.12)
    assert changes == [True]
    now, changes = turn(lag, now, 50, PULSE_S + 0.07)
    assert not changes, "below the limit, but not by half"
    now, changes = turn(lag, now, 50, PULSE_S + 0.04)
    assert changes == [False]


def test_who_is_late_at_instants_that_were_given_is_late_though_it_turns_often_enough() -> None:
    lag, now = Lag(0.0, 0.1), 0.0
    for number in range(1, 50):
        now = number * PULSE_S + 0.12
        lag.turned(now, PULSE_S - 0.12)
    assert lag.late and lag.at(now) == pytest.approx(0.12, rel=0.05)


def test_while_a_loop_stands_still_others_see_for_how_long() -> None:
    lag = Lag(0.0, 0.1)
    now, _ = turn(lag, 0.0, 10)
    for stood_s in (1, 5, 30):
        assert lag.at(now + PULSE_S + stood_s) == pytest.approx(stood_s, rel=0.2)
    assert not lag.late, "only the loop itself says so"
