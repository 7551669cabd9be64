"""``headrace usage``: what was used and what it costs."""

from typing import Annotated, Any

from compose.cli.asked import FromOption, TenantOption, ToOption, by_option, month_or_range, note_if_none
from compose.cli.common import CsvOption, DataDirOption, JsonOption, csv_text, on_bus, show, table
from contracts.messages.usage import USAGE_FIGURES, UsageDimension


def usage(
    by: Annotated[list[Any] | None, by_option(UsageDimension, "tenant")] = None,
    tenant: TenantOption = None,
    start: FromOption = None,
    end: ToOption = None,
    data_dir: DataDirOption = None,
    as_json: JsonOption = False,
    as_csv: CsvOption = False,
) -> None:
    """Usage and what it costs, of all tenants or one; the current UTC month unless a range is given."""
    from compose.stack import records

    dimensions: list[UsageDimension] = list(dict.fromkeys(by or ["tenant"]))
    from_at_ms, to_at_ms = month_or_range(start, end)
    rows, currency = on_bus(data_dir, lambda bus, _: records.usage(bus, dimensions, from_at_ms, to_at_ms, tenant))
    note_if_none(rows, from_at_ms, to_at_ms)
    columns = (*dimensions, *USAGE_FIGURES)
    lines = [tuple(getattr(row, column) for column in columns) for row in rows]
    if as_csv and not as_json:
        print(csv_text((*columns, "currency"), [(*line, currency) for line in lines]))
        return
    heads = [f"{column} {currency}".rstrip() if column == "amount" else column for column in columns]
    data = [dict(zip(columns, line, strict=True)) for line in lines]
    found = {"object": "list", "data": data, "has_more": False, "currency": currency}
    show(found, table(heads, lines), as_json=as_json)
