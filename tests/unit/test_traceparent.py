"""Which ``traceparent`` is one, by W3C's Trace Context."""

import pytest

from contracts.traceparent import TraceParent, checked, parse

GOOD = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


def test_a_good_one_is_read_and_passed_on() -> None:
    assert parse(GOOD) == TraceParent(0x0AF7651916CD43DD8448EB211C80319C, 0xB7AD6B7169203331, True)
    assert parse(GOOD[:-1] + "0") == TraceParent(0x0AF7651916CD43DD8448EB211C80319C, 0xB7AD6B7169203331, False)
    assert checked(GOOD) == GOOD


def test_a_later_version_may_say_more_and_is_cut() -> None:
    assert checked("cc" + GOOD[2:] + "-what-comes-later") == "cc" + GOOD[2:]


@pytest.mark.parametrize(
    "text",
    [
        "", "junk", GOOD.upper(), GOOD + "-x", "ff" + GOOD[2:], GOOD[:-3], GOOD + " ", "\n" + GOOD,
        "00-" + "0" * 32 + "-b7ad6b7169203331-01", "00-0af7651916cd43dd8448eb211c80319c-" + "0" * 16 + "-01",
    ],
)  # fmt: skip
def test_anything_else_is_none(text: str) -> None:
    assert parse(text) is None
    assert checked(text) == ""
