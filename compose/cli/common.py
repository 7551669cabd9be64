"""What the commands share: their common options, one connection to the stack's bus, and how they print."""

import asyncio
import base64
import csv
import io
import json
import os
import re
import shutil
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from compose.stack.data_dir import ComposeError, Target, find_target

if TYPE_CHECKING:
    from contracts.administration import Administration
    from contracts.bus import Bus
    from simulator.traces import Lengths

T = TypeVar("T")

CONNECT_TIMEOUT_S = 5.0

DataDirOption = Annotated[
    Path | None,
    typer.Option(
        "--data-dir", help="Data directory of the stack; else HEADRACE_NATS_URL, HEADRACE_DATA_DIR or .headrace."
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="JSON alone on standard output.")]
CsvOption = Annotated[bool, typer.Option("--csv", help="CSV alone on standard output.")]


def on_bus(data_dir: Path | None, work: "Callable[[Bus, Target], Awaitable[T]]") -> T:
    """What ``work`` gives on a connection to the stack that the command is about; raises ComposeError."""
    from compose.stack.terminal import quiet_logs
    from contracts.bus import Bus, BusError

    quiet_logs()
    target = find_target(data_dir, os.environ)

    async def perform() -> T:
        try:
            bus = await Bus.connect(
                target.nats_url, name="operator", credentials=target.credentials, timeout_s=CONNECT_TIMEOUT_S
            )
        except BusError as error:
            raise ComposeError(f"{error}; is the stack running?") from error
        try:
            return await work(bus, target)
        except BusError as error:
            raise ComposeError(f"no answer over the bus: {error}") from error
        finally:
            await bus.close()

    return asyncio.run(perform())


def administer(
    data_dir: Path | None, work: "Callable[[Administration], Awaitable[T]]", *, makes_keys: bool = False
) -> T:
    """What ``work`` gives, as the operator's action on that stack; raises ComposeError."""
    from compose.stack import records
    from compose.stack.data_dir import read_peppers
    from contracts.administration import Administration

    def perform(bus: "Bus", target: Target) -> Awaitable[T]:
        peppers = read_peppers(target.pepper) if makes_keys else None
        return work(Administration(bus, records.operator(), peppers=peppers))

    return on_bus(data_dir, perform)


def show(value: object, text: str, *, as_json: bool) -> None:
    """``value`` as JSON, or ``text`` for people."""
    print(json.dumps(_plain(value), ensure_ascii=False, indent=2) if as_json else text)


def _plain(value: object) -> object:
    """A message as JSON values, with the fields that its wire form leaves out (those with their default)."""
    import msgspec

    if isinstance(value, msgspec.Struct):
        return {name: _plain(item) for name, item in msgspec.structs.asdict(value).items()}
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    if isinstance(value, msgspec.Raw):
        return json.loads(bytes(value)) if bytes(value) else None
    if isinstance(value, dict):
        return {name: _plain(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value


_NUMBER = re.compile(r"-\d+(\.\d+)?\Z", re.ASCII)


def table(head: Sequence[str], rows: Sequence[Sequence[object]], *, columns: int | None = None) -> str:
    """Plain columns, never cut; column names in capitals. For a terminal that is too narrow each row becomes a block.

    ``columns``: what there is room for; by default a terminal's own, elsewhere no bound.
    """
    from rich.cells import cell_len

    if columns is None:
        columns = shutil.get_terminal_size().columns if sys.stdout.isatty() else sys.maxsize
    names = [name.upper().replace("_", " ") for name in head]
    lines = [names, *([str(cell) for cell in row] for row in rows)]
    widths = [max(map(cell_len, column)) for column in zip(*lines, strict=True)]
    if sum(widths) + 2 * (len(widths) - 1) > columns:
        wide = max(map(len, names[1:]))
        blocks = [
            "\n".join(
                [first, *(f"  {name:<{wide}}  {cell}" for name, cell in zip(names[1:], rest, strict=True) if cell)]
            )
            for first, *rest in lines[1:]
        ]
        return "\n\n".join(blocks)

    def padded(line: Sequence[str]) -> str:
        cells = zip(line, widths, strict=True)
        return "  ".join(cell + " " * (width - cell_len(cell)) for cell, width in cells).rstrip()

    return "\n".join(map(padded, lines))


def csv_text(head: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """Lines of CSV (RFC 4180), without the last line end. What a spreadsheet would take for a formula is made text."""
    csv.writer(text := io.StringIO()).writerows([head, *([_no_formula(cell) for cell in row] for row in rows)])
    return text.getvalue().removesuffix("\r\n")


def _no_formula(cell: Any) -> Any:
    """With an apostrophe in front, as spreadsheets mark text; amounts below zero stay numbers."""
    if not isinstance(cell, str) or not cell.startswith(("=", "+", "-", "@", "\t", "\r")):
        return cell
    return cell if _NUMBER.match(cell) else f"'{cell}"


def names(text: str) -> list[str]:
    """The parts of a list with commas."""
    return [part.strip() for part in text.split(",") if part.strip()]


def instant(at_ms: int) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%SZ", time.gmtime(at_ms / 1000)) if at_ms else "-"


def numbers_or_none(**given: str | None) -> dict[str, int | None]:
    """Numbers, or None for 'none', of the options that were given."""
    changes: dict[str, int | None] = {}
    for field, text in given.items():
        if text is None:
            continue
        if text != "none" and not (text.isascii() and text.isdigit()):
            raise typer.BadParameter("a whole number from 0 up, or 'none'", param_hint=f"--{field.replace('_', '-')}")
        changes[field] = None if text == "none" else int(text)
    return changes


def lengths_of(text: str) -> "Lengths":
    """Of prompt and output: PROMPT,OUTPUT, or the name of a public trace. Raises ComposeError."""
    from simulator.traces import LENGTH_MAX, TRACES, fixed

    if text in TRACES:
        return TRACES[text]
    prompt, _, output = text.partition(",")
    if not (prompt.isdecimal() and output.isdecimal()):
        raise ComposeError(f"--lengths: {text!r} is neither PROMPT,OUTPUT nor one of {', '.join(TRACES)}")
    if not (0 < int(prompt) <= LENGTH_MAX and 0 < int(output) <= LENGTH_MAX):
        raise ComposeError(f"--lengths must be from 1 to {LENGTH_MAX}")
    return fixed(int(prompt), int(output))
