"""``headrace invoice``: what a tenant owes for a month."""

import sys
from typing import Annotated

import typer

from compose.cli.common import CsvOption, DataDirOption, JsonOption, csv_text, on_bus, show, table


def invoice(
    tenant: str,
    month: Annotated[str, typer.Argument(metavar="MONTH", help="UTC, as in 2026-11.")],
    data_dir: DataDirOption = None,
    as_json: JsonOption = False,
    as_csv: CsvOption = False,
) -> None:
    """What a tenant owes for a month. The lines add up to the total, to the last digit.

    A closed month's invoice never changes: what comes later is a correction in the first open month.
    """
    from compose.stack import records

    made = on_bus(data_dir, lambda bus, _: records.invoice(bus, tenant, month))
    if made.unpriced_tokens:
        print(f"note: {made.unpriced_tokens} tokens have no price and are not charged", file=sys.stderr)
    if not made.closed:
        print("note: the month is not closed yet: late usage may still come", file=sys.stderr)
    columns = ("kind", "corrects", "model", "version", "tier", "valid_from", "tokens", "price", "amount")
    lines = [tuple(getattr(line, column) for column in columns) for line in made.lines]
    if as_csv and not as_json:
        head = ("tenant", "month", *columns, "currency")
        print(csv_text(head, [(made.tenant, made.month, *line, made.currency) for line in lines]))
        return
    total = ("total", "", "", "", "", "", "", made.currency, made.total)
    text = f"{made.tenant}, {made.month}: {made.requests} requests\n\n" + table(columns, [*lines, total])
    show(made, text, as_json=as_json)
