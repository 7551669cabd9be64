"""What the commands share: their common options, one connection to the stack's bus, and how they print."""

import asyncio
import json
import os
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

from compose.stack.data_dir import ComposeError, Target, find_target

if TYPE_CHECKING:
    from contracts.bus import Bus

T = TypeVar("T")

CONNECT_TIMEOUT_S = 5.0

DataDirOption = Annotated[
    Path | None,
    typer.Option(
        "--data-dir",
        help="Data directory of the stack; else HEADRACE_NATS_URL, HEADRACE_DATA_DIR or .headrace.",
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="JSON alone on standard output.")]


def on_bus(data_dir: Path | None, work: "Callable[[Bus, Target], Awaitable[T]]") -> T:
    """What ``work`` gives on a connection to the stack that the command is about; raises ComposeError."""
    from compose.stack.terminal import quiet_logs
    from contracts.bus import Bus, BusError

    quiet_logs()
    target = find_target(data_dir, os.environ)

    async def perform() -> T:
        try:
            bus = await Bus.connect(target.nats_url, name="operator", timeout_s=CONNECT_TIMEOUT_S)
        except BusError as error:
            raise ComposeError(f"{error}; is the stack running?") from error
        try:
            return await work(bus, target)
        except BusError as error:
            raise ComposeError(f"no answer over the bus: {error}") from error
        finally:
            await bus.close()

    return asyncio.run(perform())


def print_json(value: object) -> None:
    print(json.dumps(_plain(value), ensure_ascii=False, indent=2))


def _plain(value: object) -> object:
    """A message as JSON values, with the fields that its wire form leaves out (those with their default)."""
    import msgspec

    if isinstance(value, msgspec.Struct):
        return {name: _plain(item) for name, item in msgspec.structs.asdict(value).items()}
    if isinstance(value, msgspec.Raw):
        return json.loads(bytes(value)) if bytes(value) else None
    if isinstance(value, dict):
        return {name: _plain(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value


def print_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Plain columns, never cut."""
    widths = [max(len(line[column]) for line in (head, *rows)) for column in range(len(head))]
    for line in (head, *rows):
        print("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())


def instant(at_ms: int) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%SZ", time.gmtime(at_ms / 1000)) if at_ms else "-"
