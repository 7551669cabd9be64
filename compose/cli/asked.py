"""What usage and latency are asked for: dimensions, a range of time, a tenant."""

import sys
from typing import Annotated, Any, get_args

import typer

from compose.cli.common import instant
from contracts import clock, instants


def by_option(dimension: Any, default: str) -> Any:
    """An option that may be repeated, of the values of ``dimension``, a Literal of contracts.messages.usage."""
    known = get_args(dimension)

    def parse(text: str) -> str:
        if text not in known:
            raise typer.BadParameter(f"{text!r} is not one of {', '.join(known)}")
        return text

    return typer.Option("--by", parser=parse, metavar="|".join(known), help="May be repeated.", show_default=default)


def _instant(text: str) -> int:
    try:
        return instants.parse(text)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error


def _from_option(default: str) -> Any:
    shown = f"First instant, UTC day or RFC 3339; default: {default}."
    return typer.Option("--from", parser=_instant, metavar="TIME", help=shown)


TenantOption = Annotated[str | None, typer.Option(help="Only this tenant.")]
FromOption = Annotated[int | None, _from_option("this month")]
FromHourOption = Annotated[int | None, _from_option("an hour before the last")]
FromAnyOption = Annotated[int | None, _from_option("all that there is")]
ToOption = Annotated[
    int | None, typer.Option("--to", parser=_instant, metavar="TIME", help="First instant that is left out.")
]


def month_or_range(start: int | None, end: int | None) -> tuple[int, int]:
    """The current UTC month where nothing is said; with one end alone, the rest of that end's month."""
    try:
        return instants.month_or_range(start, end, clock.now_ms())
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error


def note_if_none(rows: list[Any], from_at_ms: int, to_at_ms: int) -> None:
    """On standard error, of which time there is nothing: a month that has just begun looks like a loss otherwise."""
    if not rows:
        print(
            f"note: nothing from {instant(from_at_ms)} to {instant(to_at_ms)}; --from and --to name another time",
            file=sys.stderr,
        )
