"""SQL of the ledger's questions: text and parameters, and what is refused."""

import pytest

from contracts.messages import UsageDimension, UsageQuery
from ledger import queries
from ledger.store import statements


def query(**changes: object) -> UsageQuery:
    fields: dict[str, object] = {"from_at_ms": 1_000, "to_at_ms": 2_000, "by": ["day", "key"]}
    return UsageQuery(**{**fields, **changes})  # type: ignore[arg-type]


def test_values_are_parameters_never_text() -> None:
    text, parameters = queries.usage(query(tenant="a' OR 1=1 --"))
    assert "OR 1=1" not in text
    assert parameters["tenant"] == "a' OR 1=1 --"
    assert "tenant = {tenant:String}" in text


def test_every_read_of_tokens_is_final_and_half_open() -> None:
    text, _ = queries.usage(query())
    assert "FROM attempts FINAL" in text
    assert "admitted_at >= " in text
    assert "admitted_at < " in text
    assert "FINAL" in queries.month_tokens(0, 1, None).text


def test_pages_have_a_stable_order_and_one_row_more() -> None:
    text, parameters = queries.usage(query(limit=10, offset=20))
    assert "GROUP BY by_day, by_key ORDER BY by_day, by_key" in text
    assert (parameters["limit"], parameters["offset"]) == (11, 20)


def test_without_dimensions_there_is_one_total() -> None:
    assert "GROUP BY by_" not in queries.usage(query(by=[])).text


def test_every_dimension_has_an_expression() -> None:
    from typing import get_args

    assert set(queries.DIMENSIONS) == set(get_args(UsageDimension))


@pytest.mark.parametrize(
    "changes",
    [
        {"from_at_ms": 2_000},
        {"from_at_ms": 3_000},
        {"from_at_ms": -1},
        {"to_at_ms": 1 << 62},
        {"by": ["day", "day"]},
        {"limit": 0},
        {"limit": 10_001},
        {"offset": -1},
    ],
)
def test_a_bad_question_is_refused(changes: dict[str, object]) -> None:
    with pytest.raises(queries.BadQuery):
        queries.usage(query(**changes))


def test_statements_are_split_at_line_ends() -> None:
    assert statements("-- a; b\nSELECT ';' ;\n\nSELECT 2;") == ["SELECT ';'", "SELECT 2"]
