"""What the command line prints for other programs."""

import csv
import io

import pytest

from compose.cli.common import csv_text, table


@pytest.mark.parametrize(
    "cell",
    ['=HYPERLINK("http://x","y")', "+1+1", "-1+1", "-", "@SUM(A1)", "\t=1", "\r=1", "-1e5", "--1", "=", "-1\n=1"],
)
def test_d35_no_cell_is_a_formula(cell: str) -> None:
    [_, [found]] = csv.reader(io.StringIO(csv_text(["name"], [[cell]]), newline=""))
    assert found == f"'{cell}"


@pytest.mark.parametrize("cell", ["-0.0045", "-12", -3, 1.5, "acme", "a=b", "", "2026-11-01"])
def test_numbers_and_plain_words_stay_as_they_are(cell: object) -> None:
    assert csv_text(["name"], [[cell, "x"]]).splitlines()[1] == f"{cell},x"


def test_columns_meet_whatever_is_written_in_them() -> None:
    rows = [("acme", 1), ("🤖🤖", 2), ("会社", 3)]
    assert table(("name", "in_use"), rows) == "NAME  IN USE\nacme  1\n🤖🤖  2\n会社  3"


def test_a_terminal_that_is_too_narrow_gets_a_block_for_each_row() -> None:
    rows = [("acme", "x" * 30, ""), ("b", "y", "z")]
    assert table(("name", "long_one", "note"), rows, columns=30) == (
        f"acme\n  LONG ONE  {'x' * 30}\n\nb\n  LONG ONE  y\n  NOTE      z"
    )
    assert table(("name", "long_one", "note"), rows, columns=44).startswith("NAME  LONG ONE")
