"""``headrace price``: prices by model and tier, records in a bucket like tenants."""

import time
from datetime import UTC, datetime
from typing import Annotated, get_args

import typer

from compose.cli.common import DataDirOption, JsonOption, on_bus, show, table
from compose.stack.data_dir import ComposeError
from contracts import clock
from contracts.messages.base import Priority

app = typer.Typer(no_args_is_help=True, help="Prices by model and tier.")


@app.command("set")
def price_set(
    model: str,
    input_price: Annotated[str, typer.Option("--input", metavar="PRICE", help="For a million prompt tokens.")],
    output_price: Annotated[str, typer.Option("--output", metavar="PRICE", help="For a million completion tokens.")],
    cached: Annotated[
        str | None, typer.Option("--cached", metavar="PRICE", help="For cached prompt tokens.", show_default="as input")
    ] = None,
    reasoning: Annotated[
        str | None, typer.Option("--reasoning", metavar="PRICE", help="For reasoning tokens.", show_default="as output")
    ] = None,
    tier: Annotated[Priority | None, typer.Option(help="Priority class.", show_default="both")] = None,
    start: Annotated[
        str | None, typer.Option("--from", metavar="DAY", help="UTC day from which it holds.", show_default="tomorrow")
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
            tier=each,
            valid_from=valid_from.isoformat(),
            currency=currency,
            input=figures[0],
            cached_input=figures[1],
            output=figures[2],
            reasoning=figures[3],
            created_at_ms=clock.now_ms(),
        )
        for each in ([tier] if tier else get_args(Priority))
    ]
    on_bus(data_dir, lambda bus, _: records.set_prices(bus, prices))
    lines = [f"price of {price.model}, {price.tier}, from {price.valid_from}" for price in prices]
    show(prices, "\n".join(lines), as_json=as_json)


@app.command("list")
def price_list(data_dir: DataDirOption = None, as_json: JsonOption = False) -> None:
    """All prices, for a million tokens."""
    from compose.stack import records

    prices = on_bus(data_dir, lambda bus, _: records.prices(bus))
    rows = [
        (
            price.model,
            price.tier,
            price.valid_from,
            price.currency,
            *(records.shown(each) for each in (price.input, price.cached_input, price.output, price.reasoning)),
        )
        for price in prices
    ]
    head = ("model", "tier", "from", "currency", "input", "cached", "output", "reasoning")
    show(prices, table(head, rows), as_json=as_json)
