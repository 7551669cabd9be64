"""Money in whole picounits (10^-12 of the currency's unit), so that no sum is ever rounded, and invoices; pure.

A price of one millionth of the unit for a million tokens is one picounit for one token.
"""

from collections.abc import Sequence
from typing import Any, Literal

from contracts.messages.usage import Invoice, InvoiceLine

UNIT_PICO = 10**12
MICRO_PICO = 10**6
CENT_PICO = UNIT_PICO // 100


def decimal(pico: int) -> str:
    """The amount in the currency's unit, exact, without zeros at its end."""
    sign, pico = ("-", -pico) if pico < 0 else ("", pico)
    text = f"{pico // UNIT_PICO}.{pico % UNIT_PICO:012d}".rstrip("0").rstrip(".")
    return f"{sign}{text}"


def cents(pico: int) -> int:
    """The amount in picounits, brought to whole cents; half a cent goes up."""
    return (pico + CENT_PICO // 2) // CENT_PICO * CENT_PICO


def whole_cents(pico: int) -> str:
    """An amount of whole cents, always with two digits after the point."""
    return f"{pico // UNIT_PICO}.{pico % UNIT_PICO // CENT_PICO:02d}"


_KINDS: tuple[Literal["input", "cached_input", "output", "reasoning"], ...] = (
    "input",
    "cached_input",
    "output",
    "reasoning",
)


def invoice(tenant: str, month: str, found: Sequence[tuple[Any, ...]], *, closed: bool, currency: str) -> Invoice:
    """The invoice of what ``queries.invoice`` gives."""
    lines: list[InvoiceLine] = []
    usage_pico = unpriced = requests = 0
    for model, tier, valid_from, _, *rest in found:
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
                    tier=tier,
                    valid_from=valid_from,
                    tokens=amount,
                    price=decimal(price * MICRO_PICO),
                    amount=decimal(amount * price),
                )
            )
    total = cents(usage_pico)
    if total != usage_pico:
        lines.append(InvoiceLine(kind="rounding", amount=decimal(total - usage_pico)))
    return Invoice(
        tenant=tenant,
        month=month,
        currency=currency,
        closed=closed,
        requests=requests,
        lines=lines,
        usage_amount=decimal(usage_pico),
        total=whole_cents(total),
        unpriced_tokens=unpriced,
    )
