"""Which adapters a worker serves, and how those who share an engine share its room."""

import msgspec

from contracts.messages.records import Base, Manifest, ModelRecord
from contracts.messages.rollouts import RolloutPlan, RolloutProgress
from tests.unit.test_worker_core import World, item
from worker.adapters import Wanted
from worker.core.attempts import Occupancy
from worker.core.events import RoomFreed

BASE = Base(model="m", version="v1")


def adapter(version: str, base: Base = BASE) -> Manifest:
    return Manifest(name="a", version=version, engine="simulated", context=10, default_output_tokens=1, base=base)


def test_wanted_is_what_a_model_serves_of_this_version_of_the_base() -> None:
    wanted = Wanted(BASE)
    wanted.set_version("a.v1", adapter("v1"))
    assert wanted.now() == {}  # No model serves it yet.
    wanted.set_model("a", ModelRecord(name="a", stable="v1"))
    wanted.set_model("m", ModelRecord(name="m", stable="v1"))
    assert [manifest.version for _, manifest in wanted.now().values()] == ["v1"]
    wanted.set_model("a", ModelRecord(name="a", stable="v2"))
    assert wanted.now() == {}
    wanted.set_version("a.v2", adapter("v2", Base(model="m", version="v2")))
    assert wanted.now() == {}  # Workers of the base's other version serve it.
    wanted.set_version("a.v2", adapter("v2"))
    assert [manifest.version for _, manifest in wanted.now().values()] == ["v2"]
    wanted.base = Base(model="m", version="v2")
    assert wanted.now() == {}, "the worker has switched"
    wanted.base = BASE
    wanted.set_model("a", ModelRecord(name="a", stable="v2", removed=True))
    assert wanted.now()  # What it had admitted goes on.
    wanted.set_model("a", None)
    assert wanted.now() == {}


def test_both_versions_are_wanted_while_one_is_rolled_out() -> None:
    wanted = Wanted(BASE)
    wanted.set_model("a", ModelRecord(name="a", stable="v1"))
    for version in ("v1", "v2"):
        wanted.set_version(f"a.{version}", adapter(version))
    plan = RolloutPlan(id="1", model="a", to="v2", steps=[50], hold_ms=0)
    progress = RolloutProgress(id="1", model="a", stable="v1", to="v2", phase="live")
    wanted.set_plan("a", plan)
    assert set(wanted.now()) == {("a", "v1"), ("a", "v2")}
    wanted.set_progress(progress)
    assert set(wanted.now()) == {("a", "v1"), ("a", "v2")}
    wanted.set_progress(msgspec.structs.replace(progress, phase="stopped"))
    assert set(wanted.now()) == {("a", "v1")}
    wanted.set_plan("a", msgspec.structs.replace(plan, id="2"))
    assert set(wanted.now()) == {("a", "v1"), ("a", "v2")}, "another roll-out"
    wanted.set_model("a", ModelRecord(name="a", stable="v2"))
    assert set(wanted.now()) == {("a", "v2")}, "promoted: the old one is left"
    wanted.set_plan("a", None)
    assert set(wanted.now()) == {("a", "v2")}


def test_those_who_share_an_engine_share_its_room() -> None:
    """Each sees what the others leave, one slot at least; what waits starts when somebody leaves."""
    occupancy = Occupancy()
    base, other = World(slots=3, occupancy=occupancy), World(slots=3, occupancy=occupancy)
    for number in range(3):
        base.pull(item(f"b{number}"))
    assert len(base.runs) == 3 and base.core.credit() == 0
    assert (base.core.attempts.slots_here, other.core.attempts.slots_here) == (3, 1)
    other.pull(item("o1"))
    assert other.runs == {} and other.core.attempts.waiting == 1
    before = occupancy.releases
    base.end(("b0", 1))
    assert occupancy.releases > before
    other.step(RoomFreed())
    assert list(other.runs) == [("o1", 1)] and base.core.attempts.slots_here == 2


def test_a_large_attempt_waits_for_the_tokens_of_others_too() -> None:
    occupancy = Occupancy()
    base, other = World(kv_tokens=100, occupancy=occupancy), World(kv_tokens=100, occupancy=occupancy)
    base.pull(item("b", prompt=80))
    other.pull(item("o", prompt=80))
    assert base.runs and not other.runs
    base.end(("b", 1))
    other.step(RoomFreed())
    assert other.runs
