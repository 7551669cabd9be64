"""Roll-outs in virtual time: the scheduler's core with the simulated engine's batches, callers, owners and workers."""

from collections import Counter
from typing import Any

import pytest

from contracts.messages.records import ModelRecord
from contracts.messages.rollouts import SHADOW_TENANT
from scheduler.core import events
from scheduler.metrics import Collector
from tests.support.rollout_world import GOOD, KINDS, Kind, RolloutWorld

BY_NAME = {kind.name: kind for kind in KINDS}


def world(kind: Kind = GOOD, *, rate: float = 30.0, **fields: Any) -> RolloutWorld:
    made = RolloutWorld(5, kind, rate=rate, **fields)
    made.run(8)
    return made


@pytest.mark.parametrize(
    ("name", "criterion"),
    [
        ("fails 20 %", "errors"),
        ("first token 3 x", "first_token"),
        ("never stops", "length"),
        ("answers nothing", "empty"),
    ],
)
def test_a_gross_version_is_stopped_and_nothing_new_goes_there(name: str, criterion: str) -> None:
    """The long form, 50 runs of each kind, is tests/bench's."""
    made = world(BY_NAME[name])
    made.start(shadow=0)
    made.run_until_over(60)
    progress = made.progress
    assert progress.phase == "stopped"
    assert f"v2 is worse than v1 by {criterion}" in progress.reason
    assert made.told[-1].news == "stopped" and made.told[-1].reason == progress.reason
    assert (made.told[-1].share, progress.share) == (0, 0)
    assert made.kept is not None, "what the next owner reads"
    assert (made.kept.phase, made.kept.measures, made.kept.evidence) == (
        *("stopped", progress.measures, progress.evidence),
    )
    made.run(10)
    assert not [version for at, _, version in made.dispatches if at >= progress.ended_at_ms and version == "v2"]
    assert not [end for end in made.ends if end.version == "v2" and end.outcome == "lost"], "what ran there stayed"
    made.check()


def test_a_good_version_goes_through_its_steps_and_becomes_the_stable_one() -> None:
    made = world(rate=40, new=4)
    made.start(steps=[50.0, 100.0], hold_ms=5_000, shadow=20.0)
    made.run_until_over(120)
    assert [told.news for told in made.told] == ["started", "step", "promoted"]
    assert made.progress.phase == "promoted"
    assert made.stable == "v2"
    copies = list(made.given_to_canary(shadow=True))
    assert len(copies) >= 20
    assert {(end.tenant, end.version, end.key_id) for end in copies} == {(SHADOW_TENANT, "v2", "")}
    assert {end.arm for end in made.ends if end.tenant == "t"} == {"", "stable", "canary"}
    made.rate = 0
    made.run(20)
    began = made.now
    made.call()
    made.run(5)
    assert [version for at, _, version in made.dispatches if at >= began] == ["v2"]
    made.check()


def test_shares_are_those_of_the_steps_and_a_unit_keeps_its_side() -> None:
    made = world(rate=0)
    made.start(steps=[10.0, 40.0], hold_ms=10**9, shadow=0, by="conversation")
    sides: dict[str, str] = {}
    for _ in range(2):
        for number in range(300):
            made.call(conversation=f"c{number}")
            if number % 10 == 9:
                made.run(1)
        made.run(5)
        tail = made.dispatches[-300:]
        again = {f"c{number}": version for number, (_, _, version) in enumerate(tail)}
        assert sides in ({}, again), "twice the same"
        sides = again
    assert 15 <= Counter(sides.values())["v2"] <= 45
    rollout = made.core.versions.rollout
    assert rollout is not None
    rollout.step = 1
    for number in range(300):
        made.call(conversation=f"c{number}")
        if number % 10 == 9:
            made.run(1)
    made.run(5)
    later = {f"c{number}": version for number, (_, _, version) in enumerate(made.dispatches[-300:])}
    assert {name for name, side in sides.items() if side == "v2"} < {n for n, side in later.items() if side == "v2"}


def test_pins_and_other_tenants_are_not_moved() -> None:
    made = world(rate=0)
    made.start(steps=[99.0], hold_ms=10**9, shadow=0, tenants=["a"])
    for _ in range(10):
        made.call(version="v1", tenant="a")
        made.call(tenant="b")
    made.run(5)
    assert {version for _, _, version in made.dispatches[-20:]} == {"v1"}
    for _ in range(10):
        made.call(version="v2", tenant="b")
    made.run(5)
    assert {version for _, _, version in made.dispatches[-10:]} == {"v2"}
    assert made.progress.evidence[0].stable == made.progress.evidence[0].canary == 0, "pins say nothing"
    made.call(tenant="a")
    made.run(5)
    assert made.dispatches[-1][2] == "v2"


def test_an_operator_pauses_resumes_promotes_and_aborts() -> None:
    made = world(rate=0)
    made.start(steps=[50.0, 90.0], hold_ms=1_000, shadow=0)
    made.want("pause")
    made.run(5)
    assert (made.progress.paused, made.progress.held_ms) == (True, 0)
    assert "paused" in made.progress.waits_for
    made.want("run")
    made.run(5)
    assert made.progress.held_ms >= 4_000
    assert "more requests" in made.progress.waits_for, "no requests are no success"
    made.want("abort")
    made.run(1)
    assert (made.progress.phase, made.progress.reason) == ("aborted", "the operator aborted it")
    made.want("promote")
    made.run(1)
    assert made.stable == "v1", "it is over"
    made.start(steps=[50.0], shadow=0)
    made.want("promote")
    made.run(1)
    assert (made.progress.phase, made.stable) == ("promoted", "v2")
    assert [told.news for told in made.told] == ["started", "paused", "resumed", "aborted", "started", "promoted"]


def test_a_new_owner_goes_on_in_the_middle_of_a_step() -> None:
    made = world(BY_NAME["fails 5 %"], rate=60)
    made.start(steps=[20.0], hold_ms=600_000, shadow=0)
    made.run(12)
    before = made.kept
    assert before is not None and before.evidence[0].canary > 20
    made.takeover()
    after = made.progress
    assert after.held_ms >= before.held_ms - 2_000
    assert after.evidence[0].canary >= before.evidence[0].canary
    for now, then in zip(after.measures, before.measures, strict=True):
        assert now.canary >= then.canary and now.stable >= then.stable
    for _ in range(20):
        if made.over:
            break
        made.run(6)
        made.takeover()
    assert made.progress.phase == "stopped"
    assert "by errors" in made.progress.reason
    made.run(15)
    made.check()


def test_a_new_owner_finishes_a_promotion() -> None:
    made = world(rate=0)
    made.start(steps=[50.0], shadow=0)
    assert made.kept is not None
    made.kept = made.progress
    rollout = made.core.versions.rollout
    assert rollout is not None
    rollout.phase = "promoting"
    made.kept = made.progress
    made.takeover()
    made.run(1)
    assert (made.progress.phase, made.stable) == ("promoted", "v2")


def test_while_the_new_version_has_no_worker_its_share_goes_to_the_stable_one() -> None:
    made = world()
    made.start(steps=[50.0], hold_ms=10**9, shadow=0)
    made.run(5)
    made.kill("v2")
    made.run(10)
    held_ms = made.progress.held_ms
    before = len(made.dispatches)
    made.run(10)
    assert {version for _, _, version in made.dispatches[before:]} == {"v1"}
    assert made.progress.held_ms == held_ms
    assert made.kept is not None and "a worker of v2" in made.kept.waits_for
    assert made.progress.spilled > 20
    made.add_worker("v2")
    made.run(5)
    assert {version for _, _, version in made.dispatches[-40:]} == {"v1", "v2"}
    assert made.progress.held_ms > held_ms
    made.rate = 0
    made.run(40)
    made.check()


def test_when_all_workers_die_it_waits_and_goes_on_with_those_that_come() -> None:
    made = world(rate=10)
    made.start(steps=[50.0], hold_ms=10**9, shadow=0)
    made.run(5)
    made.kill("v1")
    made.kill("v2")
    made.run(8)
    assert made.progress.phase == "live"
    made.add_worker("v1")
    made.add_worker("v2")
    made.run(20)
    assert {version for _, _, version in made.dispatches[-40:]} == {"v1", "v2"}
    made.rate = 0
    made.run(60)
    assert not made.core.requests
    made.check()


def test_the_stable_version_changed_by_hand_ends_it() -> None:
    made = world(rate=0)
    made.start(steps=[50.0], shadow=0)
    made.feed(events.ModelChanged(ModelRecord(name="m", stable="v3")))
    assert (made.progress.phase, made.progress.reason) == ("aborted", "the stable version was changed to v3")


def test_metrics_show_how_it_stands() -> None:
    made = world(BY_NAME["never stops"])
    made.start(steps=[50.0], hold_ms=10**9, shadow=0)
    made.run_until_over(30)
    families = {family.name: family for family in Collector(lambda: [made.core], 0.5).collect()}
    assert families["headrace_rollout_share"].samples[0].value == 0
    assert families["headrace_rollout_phase"].samples[0].labels["phase"] == "stopped"
    assert {s.labels["arm"] for s in families["headrace_rollout_requests"].samples} == {"canary", "stable"}
    bad = {(s.labels["arm"], s.labels["criterion"]): s.value for s in families["headrace_rollout_bad_requests"].samples}
    assert bad["canary", "length"] > 5
    evidence = {
        (s.labels["criterion"], s.labels["side"]): s.value for s in families["headrace_rollout_evidence"].samples
    }
    assert evidence["length", "against"] > 8.5 > evidence["errors", "against"]
    assert families["headrace_rollout_spilled"].samples[0].value == 0
