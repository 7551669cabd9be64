"""The hand-over explored: every history within the time, and broken cores that must be found out."""

import os
import time

import pytest

from tests.explore import mutants
from tests.explore.parts import Parts
from tests.explore.records import Scenario
from tests.explore.search import Found, Search, explore

SECONDS = float(os.environ.get("HEADRACE_EXPLORE_S", "60"))
MUTANT_S = 60.0
"""Bound for one mutant; each takes seconds."""

STREAM = Scenario("one stream", (True,))
ANSWER = Scenario("one answer", (False,))
POISON = Scenario("poison", (True,), leaves=0, poison=True)


def test_no_history_breaks_a_rule(capsys: pytest.CaptureFixture[str]) -> None:
    levels = []
    for level in explore(SECONDS):
        levels.append(level)
        with capsys.disabled():
            print(f"\n  explored: {level}", end="")
    assert all(level.states > 0 for level in levels)
    assert all(level.complete for level in levels if level.faults == 0)


@pytest.mark.parametrize(
    ("parts", "scenario", "rules"),
    [
        (Parts(worker=mutants.RepeatingWorker), STREAM, ["a worker starts an attempt once"]),
        (Parts(worker=mutants.DeafWorker), STREAM, ["a confirmed cancel holds"]),
        (Parts(relay=mutants.FencelessRelay), STREAM, ["attempts are never concatenated"]),
        (Parts(core=mutants.StubbornCore), STREAM, ["no retry after tokens"]),
        (Parts(core=mutants.ForgetfulCore), ANSWER, ["what was stored is not forgotten", "no request fails in vain"]),
        (Parts(core=mutants.HastyCore), STREAM, ["no request fails in vain"]),
        (Parts(core=mutants.ImpatientCore), STREAM, ["an attempt ends before the next", "nothing follows an end"]),
        (Parts(core=mutants.AmnesiacCore), POISON, ["a second death quarantines"]),
        (Parts(relay=mutants.SilentRelay), STREAM, ["no request fails in vain"]),
        (Parts(relay=mutants.SilentRelay), ANSWER, ["no request fails in vain"]),
    ],
    ids=[
        *("repeating", "deaf", "fenceless", "stubborn", "forgetful", "hasty", "impatient"),
        *("amnesiac", "silent on a stream", "silent on an answer"),
    ],
)
def test_a_broken_core_is_found(parts: Parts, scenario: Scenario, rules: list[str]) -> None:
    with pytest.raises(Found) as found:
        for _ in Search(parts, scenario).run(time.monotonic() + MUTANT_S):
            pass
    print(found.value)
    assert found.value.violation.rule in rules
