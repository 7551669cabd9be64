"""What makes a run of the tests red, and what a second look may rescue (tests/support/suite.py)."""

from collections.abc import Iterator, Sequence

import pytest

from tests.support.suite import Result, Run, plan, suite

CHAOS = Run("chaos", "chaos", second_look=True)
OTHERS = Run("others", "not chaos")


def report(test: str, outcome: str = "passed", when: str = "call") -> dict[str, str | float]:
    return {"test": test, "when": when, "outcome": outcome, "seconds": 1.0, "text": f"why {test} {outcome}"}


GREEN = Result(0, [report("tests/chaos/a.py::a")])


class Scripted:
    """A pytest that ends as it is told; ``asked`` keeps its arguments."""

    def __init__(self, *results: Result) -> None:
        self._results: Iterator[Result] = iter(results)
        self.asked: list[list[str]] = []

    def __call__(self, arguments: Sequence[str]) -> Result:
        self.asked.append(list(arguments))
        return next(self._results)


def red(*failed: str, code: int = 1) -> Result:
    return Result(code, [report("tests/chaos/a.py::fine"), *(report(test, "failed") for test in failed)])


def test_green_is_green_and_every_run_takes_part() -> None:
    scripted = Scripted(GREEN, GREEN)
    assert suite([OTHERS, CHAOS], ["-k", "name"], second_look=True, pytest=scripted) == 0
    assert scripted.asked == [["-m", "not chaos", "-k", "name"], ["-m", "chaos", "-k", "name"]]


def test_one_failure_of_chaos_is_looked_at_again_with_its_file_and_told(capsys: pytest.CaptureFixture[str]) -> None:
    scripted = Scripted(red("tests/chaos/a.py::a"), GREEN)
    assert suite([CHAOS], second_look=True, pytest=scripted) == 0
    assert scripted.asked[1] == ["tests/chaos/a.py"]
    told = capsys.readouterr().out
    assert "RESCUED by a second look: tests/chaos/a.py::a. Its first failure:\nwhy tests/chaos/a.py::a failed" in told
    assert told.endswith("1 passed, 0 failed, 0 skipped\n")


@pytest.mark.parametrize(
    ("run", "first"),
    [
        (OTHERS, red("tests/bus/a.py::a")),
        (CHAOS, red("tests/chaos/a.py::a", "tests/chaos/b.py::b")),
        (CHAOS, red("tests/chaos/a.py::a", code=2)),
        (CHAOS, red("tests/chaos/a.py::a", code=3)),
        (CHAOS, red(code=1)),
        (CHAOS, red(code=-9)),
        (CHAOS, red("the shared stack")),
        (CHAOS, red("tests/chaos/a.py")),
    ],
    ids=[
        *("another folder", "two failures", "interrupted", "internal error", "without a test", "killed"),
        *("a shared fixture", "collection"),
    ],
)
def test_everything_else_stays_red_without_a_second_look(
    run: Run, first: Result, capsys: pytest.CaptureFixture[str]
) -> None:
    scripted = Scripted(first)
    assert suite([run], second_look=True, pytest=scripted) == 1
    assert len(scripted.asked) == 1
    assert "RED" in capsys.readouterr().out


def test_what_fails_twice_is_red(capsys: pytest.CaptureFixture[str]) -> None:
    twice = red("tests/chaos/a.py::a")
    assert suite([CHAOS], second_look=True, pytest=Scripted(twice, twice)) == 1
    assert "RED: chaos: it failed again\n  tests/chaos/a.py::a" in capsys.readouterr().out


def test_without_the_option_nothing_is_looked_at_again() -> None:
    assert suite([CHAOS], pytest=Scripted(red("tests/chaos/a.py::a"))) == 1


def test_a_failure_before_is_not_forgotten_and_the_rest_still_runs() -> None:
    scripted = Scripted(red("tests/bus/a.py::a", code=3), GREEN)
    assert suite([OTHERS, CHAOS], second_look=True, pytest=scripted) == 1
    assert len(scripted.asked) == 2


def test_a_test_that_fails_twice_over_is_one_failure_and_its_first_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    first = red("tests/chaos/a.py::a")
    first.reports.append(report("tests/chaos/a.py::a", "failed", "teardown") | {"text": "later"})
    assert suite([CHAOS], second_look=True, pytest=Scripted(first, GREEN)) == 0
    told = capsys.readouterr().out
    assert "why tests/chaos/a.py::a failed" in told and "later" not in told


def test_nothing_run_is_red_only_when_nothing_ran_at_all() -> None:
    nothing = Result(5)
    assert suite([OTHERS, CHAOS], pytest=Scripted(nothing, GREEN)) == 0
    assert suite([OTHERS, CHAOS], pytest=Scripted(nothing, nothing)) == 5


def test_slow_tests_are_left_out_unless_all_are_wanted() -> None:
    assert all("slow" not in run.marks for run in plan(everything=True))
    assert all(run.marks.endswith(" and not slow and (bus)") for run in plan(everything=False, marks="bus"))
    assert [run.name for run in plan(everything=True) if run.second_look] == ["chaos"]
