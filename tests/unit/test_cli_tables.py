"""What the command line prints for other programs."""

import csv
import io

import pytest

from compose.cli.common import csv_text


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
