"""Invoices of a tenant's months; pure.

A month is open until no event of it can still come, then closed. The invoice of a closed month is issued once and
never changes. What comes later all the same (a replayed event, a backdated price) is charged or given back by
correction lines in the first open month.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

from contracts import currency as currencies
from contracts import instants
from contracts.messages.usage import Invoice, InvoiceLine
from ledger.core import money
from ledger.core.rows import LATE_MS

_KINDS: tuple[Literal["input", "cached_input", "output", "reasoning"], ...] = (
    "input",
    "cached_input",
    "output",
    "reasoning",
)

Found = Sequence[tuple[Any, ...]]
"""Rows of one month, as ``queries.invoice`` gives them, without the month."""


class Usage(NamedTuple):
    """A month's usage, priced."""

    lines: list[InvoiceLine]
    pico: int
    requests: int
    unpriced_tokens: int


def first_open(now_ms: int) -> str:
    """The earliest month whose events the bus may still hold."""
    return instants.month_of(now_ms - LATE_MS)


def to_issue(month: str, used: Mapping[str, Found], issued: Mapping[str, Invoice], now_ms: int) -> list[str]:
    """Months to issue before the invoice of ``month`` can be told, in order: the closed ones up to it that have usage,
    and ``month`` itself if it is closed, usage or none.
    """
    opened = first_open(now_ms)
    return sorted(each for each in {*used, month} if each <= month and each < opened and each not in issued)


def make(
    tenant: str, month: str, used: Mapping[str, Found], issued: Mapping[str, Invoice], *, currency: str, now_ms: int
) -> Invoice:
    """The invoice of a month that is not issued, closed or not.

    The first open month and every closed one that is issued late carry the corrections of the months before them.
    """
    opened = first_open(now_ms)
    usage = priced(used.get(month, ()))
    before = {each: made for each, made in issued.items() if each < month} if month <= opened else {}
    lines = [*usage.lines, *_corrections(before, issued, used)]
    due_pico = sum(money.pico(line.amount) for line in lines)
    digits = currencies.digits_of(currency) if currency else 2
    total = money.rounded(due_pico, digits)
    if total != due_pico:
        lines.append(InvoiceLine(kind="rounding", amount=money.decimal(total - due_pico)))
    return Invoice(
        tenant=tenant,
        month=month,
        currency=currency,
        closed=month < opened,
        issued_at_ms=now_ms if month < opened else 0,
        requests=usage.requests,
        lines=lines,
        usage_amount=money.decimal(usage.pico),
        total=money.coins(total, digits),
        unpriced_tokens=usage.unpriced_tokens,
    )


def priced(found: Found) -> Usage:
    """Lines of what was used, a line for each model, version, tier, price and kind of tokens."""
    lines: list[InvoiceLine] = []
    usage_pico = unpriced = requests = 0
    for model, version, tier, valid_from, _, *rest in found:
        prices, (count, prompt, cached, completion, reasoning) = rest[:4], rest[4:]
        requests += count
        unpriced += 0 if valid_from else prompt + completion
        tokens = (prompt - cached, cached, completion - reasoning, reasoning)
        for kind, amount, price in zip(_KINDS, tokens, prices, strict=True):
            if not amount:
                continue
            usage_pico += amount * price
            lines.append(
                InvoiceLine(
                    kind=kind,
                    model=model,
                    version=version,
                    tier=tier,
                    valid_from=valid_from,
                    tokens=amount,
                    price=money.decimal(price * money.MICRO_PICO),
                    amount=money.decimal(amount * price),
                )
            )
    return Usage(lines, usage_pico, requests, unpriced)


def _corrections(
    months: Mapping[str, Invoice], issued: Mapping[str, Invoice], used: Mapping[str, Found]
) -> list[InvoiceLine]:
    """What ``months`` cost now beyond what all issued invoices charged for them, by month, model, version and tier."""
    tokens: defaultdict[tuple[str, str, str, str], int] = defaultdict(int)
    amounts: defaultdict[tuple[str, str, str, str], int] = defaultdict(int)

    def add(month: str, line: InvoiceLine, sign: int) -> None:
        if month in months and line.kind != "rounding":
            key = (month, line.model, line.version, line.tier)
            tokens[key] += sign * line.tokens
            amounts[key] += sign * money.pico(line.amount)

    for month in months:
        for line in priced(used.get(month, ())).lines:
            add(month, line, 1)
    for made in issued.values():
        for line in made.lines:
            add(line.corrects or made.month, line, -1)
    return [
        InvoiceLine(
            kind="correction",
            corrects=month,
            model=model,
            version=version,
            tier=tier,
            tokens=tokens[month, model, version, tier],
            amount=money.decimal(amounts[month, model, version, tier]),
        )
        for month, model, version, tier in sorted(amounts)
        if tokens[month, model, version, tier] or amounts[month, model, version, tier]
    ]
