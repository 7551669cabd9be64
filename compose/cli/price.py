"""``headrace price``: prices by model, version and tier, records in a bucket like tenants."""

import sys
from typing import Annotated

import typer

from compose.cli.common import DataDirOption, JsonOption, administer, on_bus, show, table
from contracts.messages.base import Priority

app = typer.Typer(no_args_is_help=True, help="Prices by model, version and tier.")


@app.command("set")
def price_set(
    model: Annotated[str, typer.Argument(help="Or an adapter; model@version for one version's own.")],
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
    from contracts import registry
    from contracts.forms import NewPrice

    name, _, version = model.partition("@")
    form = NewPrice(
        model=name,
        version=version,
        input=input_price,
        output=output_price,
        cached_input=cached or "",
        reasoning=reasoning or "",
        tier=tier,
        valid_from=start or "",
        currency=currency,
        backdate=backdate,
    )
    prices = administer(data_dir, lambda do: do.set_prices(form)).data
    if not on_bus(data_dir, lambda bus, _: registry.is_known(bus, name)):
        print(f"note: there is no model {name!r} yet; the price waits for it", file=sys.stderr)
    lines = [f"price of {model}, {price.tier}, from {price.valid_from}" for price in prices]
    show(prices, "\n".join(lines), as_json=as_json)


@app.command("list")
def price_list(data_dir: DataDirOption = None, as_json: JsonOption = False) -> None:
    """All prices, for a million tokens."""
    from contracts import registry
    from contracts.currency import shown

    prices = on_bus(data_dir, lambda bus, _: registry.prices(bus))
    rows = [
        (
            price.model,
            price.version or "-",
            price.tier,
            price.valid_from,
            price.currency,
            *(shown(each) for each in (price.input, price.cached_input, price.output, price.reasoning)),
        )
        for price in prices
    ]
    head = ("model", "version", "tier", "from", "currency", "input", "cached", "output", "reasoning")
    show(prices, table(head, rows), as_json=as_json)
