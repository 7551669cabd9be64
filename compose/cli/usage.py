"""Commands about what was used and what it costs: usage, latency, invoices, single requests, prices, dead letters.

Everything is asked of a ledger over the bus, as an operator; prices are records in a bucket, like tenants.
"""

import csv
import enum
import sys
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, Any, TypeVar, cast

import typer

from compose.cli.common import DataDirOption, JsonOption, instant, on_bus, print_json, print_table
from compose.stack.data_dir import ComposeError
from contracts import clock

if TYPE_CHECKING:
    from contracts.messages.usage import LatencyDimension, UsageDimension

price_app = typer.Typer(no_args_is_help=True, help="Prices by model and tier.")
ledger_app = typer.Typer(no_args_is_help=True, help="What the ledger holds.")

T = TypeVar("T")

FIGURES = (
    "requests",
    "prompt_tokens",
    "cached_tokens",
    "completion_tokens",
    "reasoning_tokens",
    "attempts",
    "unbilled_tokens",
    "amount",
    "unpriced_tokens",
)


class By(enum.StrEnum):
    """What usage is summed by."""

    TENANT = "tenant"
    KEY = "key"
    MODEL = "model"
    VERSION = "version"
    DAY = "day"
    HOUR = "hour"
    ENDPOINT = "endpoint"
    PRIORITY = "priority"
    OUTCOME = "outcome"


class LatencyBy(enum.StrEnum):
    """What latencies are told apart by."""

    TENANT = "tenant"
    MODEL = "model"
    VERSION = "version"
    PRIORITY = "priority"
    DAY = "day"
    HOUR = "hour"


class Tier(enum.StrEnum):
    INTERACTIVE = "interactive"
    BATCH = "batch"


def _instant(text: str) -> int:
    try:
        return clock.parse(text)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error


CsvOption = Annotated[bool, typer.Option("--csv", help="CSV alone on standard output.")]
TenantOption = Annotated[str | None, typer.Option(help="Only this tenant.")]
FromOption = Annotated[
    int | None,
    typer.Option(
        "--from", parser=_instant, metavar="TIME", help="First instant, UTC day or RFC 3339; default: this month."
    ),
]
ToOption = Annotated[
    int | None, typer.Option("--to", parser=_instant, metavar="TIME", help="First instant that is left out.")
]


def usage(
    by: Annotated[list[By] | None, typer.Option(help="May be repeated.", show_default="tenant")] = None,
    tenant: TenantOption = None,
    start: FromOption = None,
    end: ToOption = None,
    data_dir: DataDirOption = None,
    as_json: JsonOption = False,
    as_csv: CsvOption = False,
) -> None:
    """Usage and what it costs, of all tenants or one; the current UTC month unless a range is given."""
    from compose.stack import records

    dimensions = cast("list[UsageDimension]", [part.value for part in dict.fromkeys(by or [By.TENANT])])
    from_at_ms, to_at_ms = _range(start, end)
    rows, currency = on_bus(data_dir, lambda bus, _: records.usage(bus, dimensions, from_at_ms, to_at_ms, tenant))
    columns = (*dimensions, *FIGURES)
    lines = [tuple(getattr(row, column) for column in columns) for row in rows]
    if as_json:
        data = [dict(zip(columns, line, strict=True)) for line in lines]
        print_json({"object": "list", "data": data, "has_more": False, "currency": currency})
    elif as_csv:
        _print_csv((*columns, "currency"), [(*line, currency) for line in lines])
    else:
        heads = tuple(f"{column} {currency}".rstrip() if column == "amount" else column for column in columns)
        _print_rows(heads, lines)


def latency(
    by: Annotated[list[LatencyBy] | None, typer.Option(help="May be repeated.", show_default="model")] = None,
    tenant: TenantOption = None,
    start: FromOption = None,
    end: ToOption = None,
    data_dir: DataDirOption = None,
    as_json: JsonOption = False,
) -> None:
    """Quantiles of queue wait, first token, inter-token pause and whole answer, in milliseconds."""
    from compose.stack import records

    dimensions = cast("list[LatencyDimension]", [part.value for part in dict.fromkeys(by or [LatencyBy.MODEL])])
    from_at_ms, to_at_ms = _range(start, end)
    rows = on_bus(data_dir, lambda bus, _: records.latency(bus, dimensions, from_at_ms, to_at_ms, tenant))
    if as_json:
        print_json(rows)
        return
    _print_rows(
        (*dimensions, "span", "count", "p50", "p90", "p95", "p99"),
        [
            (
                *(getattr(row, name) for name in dimensions),
                span,
                found.count,
                found.p50,
                found.p90,
                found.p95,
                found.p99,
            )
            for row in rows
            for span, found in (
                ("queue wait", row.queue_wait_ms),
                ("first token", row.first_token_ms),
                ("inter-token", row.inter_token_ms),
                ("end to end", row.end_to_end_ms),
            )
        ],
    )


def invoice(
    tenant: str,
    month: Annotated[str, typer.Argument(metavar="MONTH", help="UTC, as in 2026-11.")],
    data_dir: DataDirOption = None,
    as_json: JsonOption = False,
    as_csv: CsvOption = False,
) -> None:
    """What a tenant owes for a month. The lines add up to the total, to the last digit."""
    from compose.stack import records

    made = on_bus(data_dir, lambda bus, _: records.invoice(bus, tenant, month))
    if made.unpriced_tokens:
        print(f"note: {made.unpriced_tokens} tokens have no price and are not charged", file=sys.stderr)
    if not made.closed:
        print("note: the month is not closed yet: late usage may still come", file=sys.stderr)
    if as_json:
        print_json(made)
        return
    columns = ("kind", "model", "tier", "valid_from", "tokens", "price", "amount")
    lines = [tuple(getattr(line, column) for column in columns) for line in made.lines]
    if as_csv:
        head = ("tenant", "month", *columns, "currency")
        _print_csv(head, [(made.tenant, made.month, *line, made.currency) for line in lines])
        return
    print(f"{made.tenant}, {made.month}: {made.requests} requests\n")
    _print_rows(columns, [*lines, ("total", "", "", "", "", made.currency, made.total)])


def explain(
    request_id: Annotated[str, typer.Argument(metavar="REQUEST_ID")],
    data_dir: DataDirOption = None,
    as_json: JsonOption = False,
) -> None:
    """What became of a request: all attempts, times, worker, version, outcome, and what is billed."""
    from compose.stack import records

    found = on_bus(data_dir, lambda bus, _: records.explain(bus, request_id))
    if as_json:
        print_json(found)
    else:
        print("\n".join(found.text))


@ledger_app.command("dead")
def dead(
    data_dir: DataDirOption = None,
    as_json: JsonOption = False,
) -> None:
    """Events that the ledger refused, oldest first, and why."""
    from compose.stack import records

    letters = on_bus(data_dir, lambda bus, _: records.dead_letters(bus))
    if as_json:
        print_json(letters)
        return
    print_table(
        ("STORED", "SEQUENCE", "SUBJECT", "REASON"),
        [(instant(each.stored_at_ms), str(each.stream_seq), each.subject, each.reason) for each in letters],
    )


# Prices ----------------------------------------------------------------------------------------------------

PriceOption = Annotated[str | None, typer.Option(metavar="PRICE")]


@price_app.command("set")
def price_set(
    model: str,
    input_price: Annotated[str, typer.Option("--input", metavar="PRICE", help="For a million prompt tokens.")],
    output_price: Annotated[str, typer.Option("--output", metavar="PRICE", help="For a million completion tokens.")],
    cached: Annotated[
        str | None,
        typer.Option("--cached", metavar="PRICE", help="For cached prompt tokens.", show_default="as input"),
    ] = None,
    reasoning: Annotated[
        str | None,
        typer.Option("--reasoning", metavar="PRICE", help="For reasoning tokens.", show_default="as output"),
    ] = None,
    tier: Annotated[Tier | None, typer.Option(help="Priority class.", show_default="both")] = None,
    start: Annotated[
        str | None,
        typer.Option("--from", metavar="DAY", help="UTC day from which it holds.", show_default="tomorrow"),
    ] = None,
    currency: Annotated[str, typer.Option(help="The same for all prices.")] = "USD",
    backdate: Annotated[
        bool, typer.Option(help="Allow a day that has begun: it changes what was used already.")
    ] = False,
    data_dir: DataDirOption = None,
    as_json: JsonOption = False,
) -> None:
    """Set a model's prices from a day on, until a later price begins."""
    from compose.stack import records
    from contracts.messages.records import Price

    today = datetime.now(UTC).date()
    day = start or datetime.fromtimestamp(time.time() + 86_400, UTC).date().isoformat()
    try:
        valid_from = datetime.strptime(day, "%Y-%m-%d").replace(tzinfo=UTC).date()
        figures = [records.micros(text) for text in (input_price, cached or input_price, output_price)]
        figures.append(records.micros(reasoning or output_price))
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    if valid_from <= today and not backdate:
        raise ComposeError(f"{valid_from} has begun, and what was used since would cost otherwise: say --backdate")
    prices = [
        Price(
            model=model,
            tier=each.value,
            valid_from=valid_from.isoformat(),
            currency=currency,
            input=figures[0],
            cached_input=figures[1],
            output=figures[2],
            reasoning=figures[3],
            created_at_ms=time.time_ns() // 1_000_000,
        )
        for each in ([tier] if tier else Tier)
    ]
    on_bus(data_dir, lambda bus, _: records.set_prices(bus, prices))
    if as_json:
        print_json(prices)
    else:
        for price in prices:
            print(f"price of {price.model}, {price.tier}, from {price.valid_from}")


@price_app.command("list")
def price_list(data_dir: DataDirOption = None, as_json: JsonOption = False) -> None:
    """All prices, for a million tokens."""
    from compose.stack import records

    prices = on_bus(data_dir, lambda bus, _: records.prices(bus))
    if as_json:
        print_json(prices)
        return
    print_table(
        ("MODEL", "TIER", "FROM", "CURRENCY", "INPUT", "CACHED", "OUTPUT", "REASONING"),
        [
            (
                price.model,
                price.tier,
                price.valid_from,
                price.currency,
                *(records.shown(m) for m in (price.input, price.cached_input, price.output, price.reasoning)),
            )
            for price in prices
        ],
    )


# Helpers ---------------------------------------------------------------------------------------------------


def _range(start: int | None, end: int | None) -> tuple[int, int]:
    """The current UTC month where nothing is said; with one end alone, the rest of that end's month."""
    at_ms = time.time_ns() // 1_000_000
    around = start if start is not None else end - 1 if end is not None else at_ms
    month = clock.month_around(around)
    found = (month[0] if start is None else start, month[1] if end is None else end)
    if found[0] >= found[1]:
        raise typer.BadParameter("the range is empty or reversed: --to is the first instant that is left out")
    return found


def _print_csv(head: Sequence[str], lines: Sequence[Sequence[Any]]) -> None:
    writer = csv.writer(sys.stdout)
    writer.writerow(head)
    writer.writerows(lines)


def _print_rows(head: Sequence[str], lines: Sequence[Sequence[Any]]) -> None:
    print_table(
        tuple(name.upper().replace("_", " ") for name in head), [tuple(str(cell) for cell in line) for line in lines]
    )


def register(app: typer.Typer) -> None:
    """Add the commands of this module to the command line."""
    for command in (usage, latency, invoice, explain):
        app.command()(command)
    app.add_typer(price_app, name="price")
    app.add_typer(ledger_app, name="ledger")
