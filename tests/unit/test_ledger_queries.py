"""SQL of the ledger's queries: text and parameters, and what is refused."""

from typing import Any

import pytest

from contracts.messages.usage import LatencyQuery, UsageQuery
from ledger.core import queries
from ledger.core.query_limits import BadQuery, check
from ledger.core.rollup_plan import HOUR_S, Build, Level, Mark, Piece, Plan, due, plan
from ledger.store import statements


def query(**changes: object) -> UsageQuery:
    fields: dict[str, object] = {"from_at_ms": 1_000, "to_at_ms": 2_000, "by": ["day", "key"]}
    return UsageQuery(**{**fields, **changes})  # type: ignore[arg-type]


HOUR = 1_793_491_200
RAW = Plan([], [], [Piece(1_000, 2_000, 900, 1_900)])


def test_values_are_parameters_never_text() -> None:
    text, parameters = queries.usage(query(tenant="a' OR 1=1 --"), RAW)
    assert "OR 1=1" not in text
    assert parameters["tenant"] == "a' OR 1=1 --"


def test_what_is_not_built_is_read_with_final_and_half_open() -> None:
    text, _ = queries.usage(query(), RAW)
    assert "FROM attempts FINAL" in text
    assert "admitted_at >= fromUnixTimestamp64Milli(1000, 'UTC') AND admitted_at < " in text
    assert "usage_days" not in text and "usage_hours" not in text


def test_what_is_built_is_not_read_from_attempts() -> None:
    text, _ = queries.usage(query(), Plan([(HOUR, 7)], [(HOUR + 86_400, 8)], []))
    assert f"usage_days WHERE start >= toDateTime({HOUR}, 'UTC')" in text
    assert "build IN (8)" in text
    assert "attempts FINAL" not in text


def test_pages_have_a_stable_order_and_one_row_more() -> None:
    text, parameters = queries.usage(query(limit=10, offset=20), RAW)
    assert "GROUP BY by_day, by_key ORDER BY by_day, by_key" in text
    assert (parameters["limit"], parameters["offset"]) == (11, 20)


def test_without_dimensions_there_is_one_total() -> None:
    assert "ORDER BY" not in queries.usage(query(by=[]), RAW).text


@pytest.mark.parametrize(
    "changes",
    [
        {"from_at_ms": 2_000},
        {"from_at_ms": 3_000},
        {"from_at_ms": -1},
        {"to_at_ms": 1 << 62},
        {"by": ["day", "day"]},
        {"by": ["hour"], "to_at_ms": 93 * 86_400_000},
        {"limit": 0},
        {"limit": 10_001},
        {"offset": -1},
    ],
)
def test_a_bad_query_is_refused(changes: dict[str, object]) -> None:
    with pytest.raises(BadQuery):
        check(query(**changes))


def test_latencies_of_all_tenants_by_hour_are_asked_for_in_short_ranges() -> None:
    bounds: dict[str, Any] = {"from_at_ms": 0, "to_at_ms": 3 * 86_400_000}
    with pytest.raises(BadQuery):
        check(LatencyQuery(**bounds, by=["hour", "tenant"]))
    check(LatencyQuery(**bounds, by=["hour", "tenant"], tenant="a"))
    check(LatencyQuery(**bounds, by=["hour"]))


# Plans: every event of the range in exactly one part ------------------------------------------------------


def mark(hour: int, marks: int = 1) -> Mark:
    start_s = HOUR + hour * HOUR_S
    return Mark(start_s, marks, start_s * 1000 - 5, start_s * 1000 + 3_599_000)


def build(level: Level, hour: int, watermark: int = 1) -> Build:
    return Build(level, HOUR + hour * HOUR_S, 100 + hour, watermark)


def ms(hour: float) -> int:
    return int((HOUR + hour * HOUR_S) * 1000)


def test_a_whole_day_that_is_built_is_read_as_a_day() -> None:
    found = plan(ms(0), ms(24), [mark(1), mark(2, 3)], [build("day", 0, 4), build("hour", 1)])
    assert found == Plan([(HOUR, 100)], [], [])


@pytest.mark.parametrize("bounds", [(0.5, 24), (0, 23.5)])
def test_a_day_that_the_range_cuts_is_read_by_hours(bounds: tuple[float, float]) -> None:
    marks, builds = [mark(0), mark(1), mark(23)], [build("day", 0, 3), *(build("hour", hour) for hour in (0, 1, 23))]
    found = plan(ms(bounds[0]), ms(bounds[1]), marks, builds)
    assert not found.days
    assert (HOUR + HOUR_S, 101) in found.hours
    assert len(found.hours) == 2
    assert [piece.to_ms - piece.from_ms for piece in found.raw] == [1_800_000]


def test_an_hour_with_a_mark_beyond_its_builds_watermark_is_read_raw() -> None:
    found = plan(ms(0), ms(24), [mark(3), mark(4, 2)], [build("day", 0, 2), build("hour", 3), build("hour", 4)])
    assert found == Plan([], [(HOUR + 3 * HOUR_S, 103)], [Piece(ms(4), ms(5), ms(4) - 5, ms(4) + 3_599_000)])


def test_neighbouring_hours_are_read_as_one_piece_and_hours_without_events_not_at_all() -> None:
    found = plan(ms(0.5), ms(30), [mark(0), mark(1), mark(5), mark(24)], [])
    assert [(piece.from_ms, piece.to_ms) for piece in found.raw] == [(ms(0.5), ms(2)), (ms(5), ms(6)), (ms(24), ms(25))]


def test_a_period_is_built_when_it_is_over_and_quiet() -> None:
    end_s = HOUR + HOUR_S
    assert due("hour", {HOUR: 5}, {HOUR: (5, 0.0)}, end_s) == []  # not settled
    assert due("hour", {HOUR: 5}, {}, end_s + 31) == []  # first look
    assert due("hour", {HOUR: 6}, {HOUR: (5, end_s + 29)}, end_s + 31) == []  # still changing
    assert due("hour", {HOUR: 5}, {HOUR: (5, end_s + 29)}, end_s + 31) == [HOUR]
    assert due("hour", {HOUR: 6}, {HOUR: (5, end_s)}, end_s + 61) == [HOUR]  # changing for long


def test_statements_are_split_at_line_ends() -> None:
    assert statements("-- a; b\nSELECT ';' ;\n\nSELECT 2;") == ["SELECT ';'", "SELECT 2"]
