"""Workers after a roll-out, in virtual time: those of a version that is left go to the stable one, one at a time."""

from collections import Counter
from typing import Any

from contracts.messages.records import ModelRecord
from scheduler.core import events
from scheduler.core.moves import AGAIN_MS
from tests.support.rollout_world import GOOD, Kind, RolloutWorld, SimWorker


def world(kind: Kind = GOOD, *, rate: float = 4.0, **fields: Any) -> RolloutWorld:
    made = RolloutWorld(5, kind, rate=rate, **fields)
    made.run(8)
    return made


def serving(made: RolloutWorld) -> Counter[str]:
    return Counter(worker.version for worker in made.workers if worker.alive and worker.state == "ready")


def promote(made: RolloutWorld) -> None:
    made.start(steps=[50.0], hold_ms=10**9, shadow=0)
    made.want("promote")


def test_after_a_promotion_the_others_follow_one_after_another_and_nothing_breaks() -> None:
    made = world(stable=3, new=2)
    promote(made)
    for _ in range(90):
        made.run(1)
        away = sum(worker.alive and worker.state != "ready" for worker in made.workers)
        assert away <= 1
    assert serving(made) == {"v2": 5}
    assert [(of, to) for _, of, to in made.orders] == [("v1", "v2")] * 3
    assert {end.outcome for end in made.ends} <= {"completed", "failed"}
    assert not [end for end in made.ends if end.outcome == "lost"]
    assert made.core.lost_workers == 0, "who went is not lost"
    assert {end.version for end in made.ends[-20:]} == {"v2"}
    made.check()


def test_after_an_abort_the_new_versions_workers_come_back() -> None:
    made = world(stable=2, new=2)
    made.start(steps=[50.0], hold_ms=10**9, shadow=0)
    made.run(10)
    assert made.orders == [], "they were started for it"
    made.want("abort")
    made.run(60)
    assert serving(made) == {"v1": 4}
    assert not [end for end in made.ends if end.outcome == "lost"]
    assert {end.version for end in made.ends[-20:]} == {"v1"}
    made.check()


def test_a_stopped_version_keeps_no_worker_and_one_that_is_started_for_it_afterwards_stays() -> None:
    made = world(Kind(fails=0.9), rate=20, stable=2, new=1)
    made.start(steps=[50.0], shadow=0)
    made.run_until_over(60)
    assert made.progress.phase == "stopped"
    made.run(40)
    assert serving(made) == {"v1": 3}
    made.workers.append(SimWorker("later", "v2", GOOD, pinned=True))
    made.run(30)
    assert serving(made) == {"v1": 3, "v2": 1}


def test_the_next_owner_brings_home_whom_the_last_one_had_not_told() -> None:
    made = world(stable=2, new=2, rate=0)
    made.start(steps=[50.0], hold_ms=10**9, shadow=0)
    made.run(2)
    made.want("abort")
    made.run(2)
    assert made.kept is not None and made.kept.released == ["c0", "c1"]
    made.takeover()
    made.run(40)
    assert serving(made) == {"v1": 4}


def test_a_worker_that_was_started_for_a_version_keeps_it() -> None:
    made = world(stable=1, new=1)
    made.workers.append(SimWorker("kept", "v1", GOOD, pinned=True))
    made.run(2)
    promote(made)
    made.run(40)
    assert serving(made) == {"v1": 1, "v2": 2}
    made.feed(events.ModelChanged(ModelRecord(name="m", stable="v3")))
    made.run(60)
    assert serving(made) == {"v1": 1, "v3": 2}, "the roll-out's own goes with the others from then on"


def test_the_last_worker_of_a_version_stays_while_requests_of_it_are_open() -> None:
    made = world(stable=1, new=1, rate=0)
    long = made.call()
    made.run(0.3)
    [running] = made.workers[0].running.values()
    assert running.envelope.request_id == long
    for sequence in made.workers[0].running:
        sequence.itl_s = 1.0
    promote(made)
    made.run(3)
    assert made.workers[0].running
    assert made.orders == []
    made.run(120)
    assert serving(made) == {"v2": 2}
    assert {end.outcome for end in made.ends} == {"completed"}


def test_pins_alone_keep_no_worker() -> None:
    made = world(stable=1, new=1, rate=0)
    promote(made)
    made.run(30)
    made.call(version="v1")
    made.run(5)
    assert serving(made) == {"v2": 2}


def test_a_version_that_a_worker_refuses_is_not_tried_on_all_of_them() -> None:
    made = world(stable=3, new=0, rate=2)
    made.broken.add("v2")
    made.feed(events.ModelChanged(ModelRecord(name="m", stable="v2")))
    made.rate = 0
    made.run(AGAIN_MS / 1000 - 60)
    assert len(made.orders) == 1
    assert serving(made) == {"v1": 3}
    made.broken.clear()
    made.run(120)
    assert serving(made) == {"v1": 1, "v2": 2}, "the one that refused is last"
    made.run(AGAIN_MS / 1000)
    assert serving(made) == {"v2": 3}
