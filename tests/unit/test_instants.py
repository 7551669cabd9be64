"""Points in time as people write them."""

from datetime import UTC, datetime

import pytest

from contracts import instants


@pytest.mark.parametrize(
    ("text", "same"),
    [
        ("2026-11-29", "2026-11-29T00:00:00+00:00"),
        ("2026-11-29T18:30:00Z", "2026-11-29T18:30:00+00:00"),
        ("2026-11-29T18:30Z", "2026-11-29T18:30:00+00:00"),
        ("2026-11-29T18:30:00.123+05:30", "2026-11-29T13:00:00.123+00:00"),
        ("2024-02-29", "2024-02-29T00:00:00+00:00"),
    ],
)
def test_days_and_instants(text: str, same: str) -> None:
    assert instants.parse(text) == round(datetime.fromisoformat(same).timestamp() * 1000)


@pytest.mark.parametrize(
    "text",
    ["2026-02-30", "2026-11-29T18:30:00", "2026-11-29T25:00:00Z", "20261129", "1793491200", "", "now", "2026-11",
     "2026-11-29T18:30:00 05:30", "2026-11-29\n", "٢٠٢٦-١١-٢٩", "2026-W01-1"],
)  # fmt: skip
def test_anything_else_is_refused(text: str) -> None:
    with pytest.raises(ValueError):
        instants.parse(text)


@pytest.mark.parametrize(
    ("text", "month"),
    [("2026-11-01", ("2026-11-01", "2026-12-01")), ("2026-12-31T23:59:59.999Z", ("2026-12-01", "2027-01-01")),
     ("2024-02-29", ("2024-02-01", "2024-03-01"))],
)  # fmt: skip
def test_the_month_around(text: str, month: tuple[str, str]) -> None:
    found = instants.month_around(instants.parse(text))
    assert found == tuple(instants.parse(each) for each in month)
    assert datetime.fromtimestamp(found[0] / 1000, UTC).day == 1


def test_a_range_is_completed_by_the_month() -> None:
    start, end = instants.parse("2026-02-10"), instants.parse("2026-02-20")
    month = instants.parse("2026-02-01"), instants.parse("2026-03-01")
    assert instants.month_or_range(None, None, start) == month
    assert instants.month_or_range(start, None, 0) == (start, month[1])
    assert instants.month_or_range(None, end, 0) == (month[0], end)
    assert instants.month_or_range(None, month[1], 0) == month
    assert instants.month_or_range(start, end, 0) == (start, end)
    for empty in ((end, start), (start, start)):
        with pytest.raises(ValueError, match="empty or reversed"):
            instants.month_or_range(*empty, 0)
