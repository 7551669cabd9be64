"""What ``--autoscale`` may say, and how many workers come or go."""

import pytest

from compose.stack.autoscale import change, parse
from compose.stack.data_dir import ComposeError
from contracts.messages.queues import Replicas


@pytest.mark.parametrize(("text", "bounds"), [("", None), ("0..1", (0, 1)), ("2..2", (2, 2)), ("1..16", (1, 16))])
def test_bounds(text: str, bounds: tuple[int, int] | None) -> None:
    assert parse(text) == bounds


@pytest.mark.parametrize("text", ["3", "1..", "..4", "4..1", "0..0", "-1..2", "1..x", "1...3", "1..99999", "\u0661..2"])
def test_what_makes_no_sense_is_refused(text: str) -> None:
    with pytest.raises(ComposeError, match=r"MIN\.\.MAX"):
        parse(text)


@pytest.mark.parametrize(
    ("desired", "present", "count"), [(3, 1, 2), (1, 3, -2), (2, 2, 0), (9, 2, 2), (0, 2, -1), (0, 1, 0)]
)
def test_workers_are_as_planned_within_the_bounds(desired: int, present: int, count: int) -> None:
    assert change(Replicas(desired=desired, reason="throughput"), present, (1, 4)) == count


def test_what_is_not_known_changes_nothing() -> None:
    assert change(Replicas(), 3, (0, 4)) == 0
    assert change(Replicas(), 6, (0, 4)) == -2, "the bounds hold all the same"
