"""The table of cases in tests/README.md names tests that exist, and every test that carries a case's number."""

import re
from pathlib import Path

TESTS = Path(__file__).parents[1]
ROWS = [line for line in (TESTS / "README.md").read_text().splitlines() if re.match(r"\| [CDE]\d\d ", line)]


def test_every_test_that_is_named_exists() -> None:
    for row in ROWS:
        for names, file in re.findall(r"((?:`test_\w+`(?:, )?)+) (\w+/test_\w+)", row):
            source = (TESTS / f"{file}.py").read_text()
            for name in re.findall(r"`(test_\w+)`", names):
                assert f"def {name}(" in source, f"{file}: {name}"


def test_every_test_with_a_number_is_named() -> None:
    table = "\n".join(ROWS)
    for file in TESTS.glob("*/test_*.py"):
        for name in re.findall(r"def (test_[cde]\d\d_\w+)\(", file.read_text()):
            assert f"`{name}`" in table, name
