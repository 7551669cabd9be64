"""Invoices: exact money, the coins of each currency, and that what was issued never changes."""

import random
from collections import defaultdict
from decimal import Decimal
from typing import Any

import pytest

from contracts import currency, instants
from contracts.messages.usage import Invoice, InvoiceLine
from ledger.core import invoices, money

AUGUST, SEPTEMBER, OCTOBER, NOVEMBER = months = ("2026-08", "2026-09", "2026-10", "2026-11")
NOW_MS = instants.parse("2026-11-20")
DAY_MS = 86_400_000


def test_money_is_written_exactly() -> None:
    for pico, text in ((0, "0"), (1, "0.000000000001"), (10**12, "1"), (-1_500_000_000_000, "-1.5")):
        assert (money.decimal(pico), money.pico(text)) == (text, pico)
    assert [money.rounded(pico, 2) for pico in (4_999_999_999, 5_000_000_000, -1)] == [0, 10**10, 0]
    assert [money.coins(12_340_000_000_000, digits) for digits in (0, 1, 2, 3)] == ["12", "12.3", "12.34", "12.340"]
    assert money.coins(-50_000_000_000, 2) == "-0.05"


@pytest.mark.parametrize(("code", "digits"), [("USD", 2), ("JPY", 0), ("KWD", 3), ("EUR", 2), ("CLF", 4), ("IQD", 3)])
def test_a_currency_has_the_digits_of_iso_4217(code: str, digits: int) -> None:
    assert currency.digits_of(code) == digits


@pytest.mark.parametrize("code", ["usd", "", "EURO", "=1+1", "XAU", "XXX", "US D", "840", "\u202eUSD"])
def test_what_is_no_currency_is_refused_with_a_word_why(code: str) -> None:
    with pytest.raises(ValueError, match="ISO 4217"):
        currency.digits_of(code)


def row(
    tokens: int, price: int = 3, model: str = "m", since: str = "2026-01-01", version: str = "v1"
) -> tuple[Any, ...]:
    """One request of prompt tokens only."""
    return (model, version, "batch", since, "USD", price, price, price, price, 1, tokens, 0, 0, 0)


def make(month: str, used: dict[str, Any], issued: dict[str, Invoice], currency: str = "USD") -> Invoice:
    return invoices.make("t", month, used, issued, currency=currency, now_ms=NOW_MS)


def lines(made: Invoice, kind: str) -> list[InvoiceLine]:
    return [line for line in made.lines if line.kind == kind]


@pytest.mark.parametrize(
    ("currency", "total", "rounding"),
    [("USD", "1.23", "-0.004567"), ("JPY", "1", "-0.234567"), ("KWD", "1.235", "0.000433"), ("", "1.23", "-0.004567")],
)
def test_a_total_is_whole_coins_of_its_currency(currency: str, total: str, rounding: str) -> None:
    made = make(NOVEMBER, {NOVEMBER: [row(1, 1_234_567_000_000)]}, {}, currency)
    assert (made.total, [line.amount for line in lines(made, "rounding")]) == (total, [rounding])


def test_a_month_is_open_until_no_event_of_it_can_come() -> None:
    first = instants.parse("2026-11-01")
    assert invoices.first_open(first) == OCTOBER
    assert invoices.first_open(first + 7 * DAY_MS - 1) == OCTOBER
    assert invoices.first_open(first + 7 * DAY_MS) == NOVEMBER


def test_closed_months_are_issued_in_order_before_a_later_one_is_told() -> None:
    used = {AUGUST: [row(1)], OCTOBER: [row(1)], NOVEMBER: [row(1)]}
    assert invoices.to_issue(NOVEMBER, used, {}, NOW_MS) == [AUGUST, OCTOBER]
    assert invoices.to_issue(SEPTEMBER, used, {}, NOW_MS) == [AUGUST, SEPTEMBER]
    issued = {AUGUST: make(AUGUST, used, {})}
    assert invoices.to_issue(OCTOBER, used, issued, NOW_MS) == [OCTOBER]
    assert invoices.to_issue("2026-12", {}, {}, NOW_MS) == []


def test_what_comes_late_is_corrected_once_in_the_first_open_month() -> None:
    used = {SEPTEMBER: [row(10)], NOVEMBER: [row(1)]}
    issued = {SEPTEMBER: make(SEPTEMBER, used, {})}
    used[SEPTEMBER] = [row(15), row(7, 0, "late", "")]
    made = make(NOVEMBER, used, issued)
    found = [(line.corrects, line.model, line.tokens, line.amount) for line in lines(made, "correction")]
    assert found == [(SEPTEMBER, "late", 7, "0"), (SEPTEMBER, "m", 5, money.decimal(15))]
    assert make("2026-12", used, issued).lines == [], "only the first open month corrects"
    used[SEPTEMBER] = [row(10, price=2)]
    assert [line.amount for line in lines(make(NOVEMBER, used, issued), "correction")] == [money.decimal(-10)]
    used[SEPTEMBER] = [row(10)]
    assert lines(make(NOVEMBER, used, issued), "correction") == []


def test_whatever_comes_when_each_token_is_charged_once() -> None:
    for seed in range(500):
        history(random.Random(seed))


def history(chance: random.Random) -> None:
    """Months close one after the other while usage of any month still comes and prices change."""
    used: defaultdict[str, list[tuple[Any, ...]]] = defaultdict(list)
    issued: dict[str, Invoice] = {}
    now_ms = instants.parse("2026-08-20")
    for _ in range(40):
        now_ms += chance.randrange(5 * DAY_MS)
        month = chance.choice(months)
        if month <= instants.month_of(now_ms):
            used[month].append(row(chance.randrange(100), model=chance.choice("ab"), version=chance.choice("12")))
        if used[month] and chance.random() < 0.1:
            used[month] = [(*each[:5], *[chance.randrange(9)] * 4, *each[9:]) for each in used[month]]
        asked = chance.choice([*months, "2027-01"])
        if asked not in issued and chance.random() < 0.5:
            for each in invoices.to_issue(asked, used, issued, now_ms):
                issued[each] = invoices.make("t", each, used, issued, currency="USD", now_ms=now_ms)
                assert issued[each].closed
    opened = invoices.first_open(now_ms)
    for each in invoices.to_issue(opened, used, issued, now_ms):
        issued[each] = invoices.make("t", each, used, issued, currency="USD", now_ms=now_ms)
    later = sorted(month for month in {*used, opened} if month >= opened)
    told = [*issued.values(), *(invoices.make("t", m, used, issued, currency="USD", now_ms=now_ms) for m in later)]
    charged = sum(Decimal(line.amount) for made in told for line in made.lines if line.kind != "rounding")
    assert charged == sum(Decimal(money.decimal(each[10] * each[5])) for rows in used.values() for each in rows)
    assert sum(Decimal(made.total) for made in told) == sum(
        Decimal(line.amount) for made in told for line in made.lines
    )
