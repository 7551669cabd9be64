"""The hand-over explored: many histories, and broken cores that must be found out."""

import os
import time

import pytest

from tests.explore import mutants
from tests.explore.parts import Parts
from tests.explore.records import Scenario
from tests.explore.search import SCENARIOS, Found, Search, explore

WORLDS = int(os.environ.get("HEADRACE_EXPLORE_WORLDS", "6000"))
"""Of each scenario; 20 s in all. The same ones each time, so that red is a change: ``make explore`` looks for more."""
ENOUGH_S = 600.0
"""Far more than a search takes that must be complete."""
MUTANT_S = 150.0
"""Bound for one mutant; most take seconds."""
STREAM, ANSWER, POISON, TWO, LIMITED, PINNED, FULL, SERVICE, SLOW = SCENARIOS


@pytest.mark.parametrize(
    ("scenarios", "most"),
    [((STREAM, ANSWER, LIMITED, SERVICE, SLOW), 1), ((TWO, POISON, PINNED, FULL), 0)],
    ids=["one", "two"],
)
def test_no_history_with_so_many_faults_breaks_a_rule(scenarios: tuple[Scenario, ...], most: int) -> None:
    """One request with at most one fault, two requests without any: all histories."""
    levels = [*explore(ENOUGH_S, scenarios, most)]
    print(*levels, sep="\n")
    found = [(level.scenario, level.faults) for level in levels if level.complete]
    assert sorted(found) == sorted((it.name, faults) for it in scenarios for faults in range(most + 1))


def test_no_history_within_the_bound_breaks_a_rule(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With more faults there are too many histories for all of them."""
    monkeypatch.setenv("PYTHONHASHSEED", "0")
    for level in explore(ENOUGH_S, worlds_max=WORLDS):
        assert level.states > 0
        with capsys.disabled():
            print(f"\n  explored: {level}", end="")


LATE_WORK = Scenario("late work", (False,), leaves=0, only=("crash", "work stored late"))
RESTORE = Scenario("restore", (False,), leaves=0, only=("restore",))
CLOCK = Scenario("clock", (False,), leaves=0, only=("step clock",))
UNHEARD = Scenario("unheard", (True,), leaves=0, keyed=True, only=("crash", "answer lost", "submit unconfirmed"))
COPIES = Scenario("copies", (False,), faults=3, leaves=0, poison=True, only=("crash s0", "drain 1", "delete late"))
LATE = Scenario("late", (True,), faults=1, leaves=0, slow=True, only=("late",))
LATE_HEIR = Scenario("late heir", (True,), leaves=0, slow=True, only=("late 1", "crash w0"))
DRAINS = Scenario("drains", (True,), leaves=0, only=("drain",))

BROKEN: dict[str, tuple[Parts, Scenario, set[str]]] = {
    "repeating": (Parts(worker=mutants.RepeatingWorker), STREAM, {"a worker starts an attempt once"}),
    "deaf": (Parts(worker=mutants.DeafWorker), STREAM, {"a confirmed cancel holds"}),
    "fenceless": (
        Parts(relay=mutants.FencelessRelay),
        STREAM,
        {"attempts are never concatenated", "no retry of what was seen"},
    ),
    "stubborn": (Parts(core=mutants.StubbornCore), STREAM, {"no retry after tokens"}),
    "forgetful": (
        Parts(core=mutants.ForgetfulCore),
        ANSWER,
        {"what was stored is not forgotten", "no request fails in vain"},
    ),
    "hasty": (Parts(core=mutants.HastyCore), STREAM, {"no request fails in vain"}),
    "impatient": (
        Parts(core=mutants.ImpatientCore),
        STREAM,
        {"an attempt ends before the next", "nothing follows an end"},
    ),
    "amnesiac": (
        Parts(core=mutants.AmnesiacCore),
        POISON,
        {"a request ends three engines at most", "the last death quarantines"},
    ),
    "forgiving": (Parts(core=mutants.ForgivingCore), POISON, {"a request ends three engines at most"}),
    "refunding twice": (Parts(core=mutants.TwiceRefundingCore), LIMITED, {"token buckets hold what the rules say"}),
    "silent on a stream": (Parts(relay=mutants.SilentRelay), STREAM, {"no request fails in vain"}),
    "silent on an answer": (Parts(relay=mutants.SilentRelay), ANSWER, {"no request fails in vain"}),
    "billing": (Parts(worker=mutants.BillingWorker), STREAM, {"nobody pays for our failures"}),
    "hurried": (Parts(core=mutants.HurriedCore), STREAM, {"no retry of what was seen"}),
    "humble": (Parts(core=mutants.HumbleCore), RESTORE, {"no request fails in vain", "everything comes to its end"}),
    "on the wall's time": (Parts(clock=mutants.wall_clock), CLOCK, {"no request fails in vain"}),
    "in single file": (Parts(core=mutants.SingleFileCore), PINNED, {"no request fails in vain"}),
    "clinging": (Parts(core=mutants.ClingingCore), COPIES, {"a body is kept until the end"}),
    "trusting": (Parts(core=mutants.TrustingCore), ANSWER, {"everything comes to its end"}),
    "counting": (Parts(core=mutants.CountingCore), DRAINS, {"no request fails in vain"}),
    "epochless": (Parts(work_id=mutants.work_id_without_epoch), LATE_WORK, {"what is dispatched reaches its worker"}),
    "keyless": (Parts(core=mutants.KeylessCore), UNHEARD, {"a key is run once", "at most one billable attempt"}),
    "unnamed": (Parts(core=mutants.UnnamedCore), UNHEARD, {"a key is run once", "at most one billable attempt"}),
    "forgetting": (Parts(core=mutants.ForgettingCore), UNHEARD, {"a key is run once", "at most one billable attempt"}),
    "pulseless": (Parts(core=mutants.PulselessCore), LATE, {"who is late is not dead", "no request fails in vain"}),
    "heedless": (Parts(core=mutants.HeedlessCore), LATE_HEIR, {"nothing new goes to who is slow"}),
    "selfish": (Parts(core=mutants.SelfishCore), UNHEARD, {"no request fails in vain"}),
}
"""A broken part, the scenario in which it is found, and the rules that it breaks."""


LONG = {"clinging"}
"""Found after half a minute."""


@pytest.mark.parametrize(
    ("parts", "scenario", "rules"),
    [pytest.param(*it, id=name, marks=[pytest.mark.slow] * (name in LONG)) for name, it in BROKEN.items()],
)
def test_a_broken_core_is_found(parts: Parts, scenario: Scenario, rules: set[str]) -> None:
    with pytest.raises(Found) as found:
        for _ in Search(parts, scenario).run(time.monotonic() + MUTANT_S):
            pass
    print(found.value)
    assert found.value.violation.rule in rules
