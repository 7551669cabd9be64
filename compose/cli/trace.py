"""``headrace trace``: the life of one request, as it happens with ``--follow``."""

import sys
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from compose.cli.common import DataDirOption, on_bus
from compose.stack.data_dir import ComposeError, Target
from compose.stack.terminal import printable

if TYPE_CHECKING:
    from compose.watch.life import Step
    from contracts.bus import Bus

JsonLinesOption = Annotated[bool, typer.Option("--json", help="JSON lines alone on standard output, a step a line.")]


def trace(
    request_id: Annotated[
        str, typer.Argument(metavar="ID", help="Of the answer (header or body), or the caller's own.")
    ],
    follow: Annotated[
        bool,
        typer.Option("--follow", "-f", help="Go on until it has ended; one that nobody knows is awaited for 10 s."),
    ] = False,
    data_dir: DataDirOption = None,
    as_json: JsonLinesOption = False,
) -> None:
    """The life of one request: admission, queue, dispatch, prefill, tokens, retries, end. No text of it is shown."""
    from compose.watch.follow import Follower

    async def show(bus: "Bus", _: Target) -> bool:
        follower = Follower(bus, request_id)
        return await _show(follower.follow() if follow else follower.told(), as_json=as_json)

    if not on_bus(data_dir, show):
        raise ComposeError("nothing is heard of it, and its owner does not know it any more")


async def _show(steps: "AsyncIterator[Step]", *, as_json: bool) -> bool:
    """Each as it comes; whether it was in sight to the end."""
    what = ""
    async for step in steps:
        what = step.what
        sys.stdout.write(f"{msgspec.json.encode(step).decode() if as_json else line(step)}\n")
        sys.stdout.flush()
    return what != "out_of_sight"


def line(step: "Step") -> str:
    """For people: since when, what, which attempt, and the facts that are not empty. ``~``: when it was seen."""
    after = "" if step.after_ms is None else f"+{step.after_ms / 1000:.3f} s"
    facts = "  ".join(f"{name}={_fact(value)}" for name, value in step.facts.items() if value not in ("", None))
    number = f"attempt {step.attempt}" if step.attempt else ""
    return f"{'~' if step.seen else ' '}{after:>11}  {step.what:<13}  {number:<9}  {facts}".rstrip()


def _fact(value: object) -> str:
    text = printable(str(value).lower() if isinstance(value, bool) else str(value))
    return f'"{text}"' if " " in text else text
