"""``headrace rollout``: what it draws, and what it refuses before it asks anybody."""

import base64
import io
import json

import pytest
from rich.console import Console

from compose.cli import rollout
from compose.cli.common import show
from compose.stack.data_dir import ComposeError
from contracts.registry import ShownRollout
from tests.support.rollout_world import KINDS, RolloutWorld


def drawn(shown: ShownRollout) -> str:
    console = Console(file=io.StringIO(), width=160, color_system=None)
    console.print(rollout._drawn(shown))
    return console.file.getvalue()  # type: ignore[attr-defined]


def test_a_stopped_roll_out_says_why_with_the_numbers() -> None:
    world = RolloutWorld(5, next(kind for kind in KINDS if kind.empty), rate=30)
    world.run(5)
    world.start(steps=[50.0], shadow=0)
    assert world.plan is not None
    assert "not begun" in drawn(ShownRollout(plan=world.plan))
    world.run(1)
    assert "waits    for the end of the step's time" in drawn(ShownRollout(plan=world.plan, progress=world.progress))
    world.run_until_over(30)
    text = drawn(ShownRollout(plan=world.plan, progress=world.progress))
    assert "m: v1 > v2  stopped by the judge since 2023-" in text
    assert "why      v2 is worse than v1 by empty" in text
    row = next(line for line in text.splitlines() if line.strip().startswith("empty"))
    assert "worse" in row and "of 5,000" in row


def test_as_json_it_holds_what_an_owner_keeps_too(capsys: pytest.CaptureFixture[str]) -> None:
    world = RolloutWorld(5, next(kind for kind in KINDS if kind.empty), rate=30)
    world.start(steps=[50.0], shadow=0)
    world.run(10)
    assert world.plan is not None and world.progress.units
    show(ShownRollout(plan=world.plan, progress=world.progress), "", as_json=True)
    told = json.loads(capsys.readouterr().out)
    assert base64.b64decode(told["progress"]["units"]) == world.progress.units
    assert told["plan"]["to"] == "v2"


@pytest.mark.parametrize(
    ("text", "milliseconds"), [("10m", 600_000), ("30s", 30_000), ("1.5h", 5_400_000), ("250ms", 250), ("7", 7_000)]
)
def test_spans(text: str, milliseconds: int) -> None:
    assert rollout._span_ms(text) == milliseconds


@pytest.mark.parametrize("text", ["", "m", "-1s", "1w", "ten minutes", "1m30s", "٣s"])
def test_what_is_no_span(text: str) -> None:
    with pytest.raises(ComposeError, match="--hold is a time such as 10m"):
        rollout._span_ms(text)


@pytest.mark.parametrize("text", ["", "x", "nan", "inf", "1e999", "5%%"])
def test_what_is_no_number(text: str) -> None:
    with pytest.raises(ComposeError, match="is no number"):
        rollout._number(text, "--steps")
