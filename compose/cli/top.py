"""``headrace top``: what runs now, in a terminal."""

import asyncio
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from compose.cli.common import DataDirOption, on_bus
from compose.stack.data_dir import Target

if TYPE_CHECKING:
    from compose.watch.look import Looker, Seen
    from contracts.bus import Bus

EVERY_S = 1.0
QUIT = frozenset(b"qQ\x03\x04")
"""Keys; Ctrl-C and Ctrl-D among them."""


def top(
    once: Annotated[bool, typer.Option("--once", help="Print all of it once; so does a pipe.")] = False,
    data_dir: DataDirOption = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="JSON alone on standard output: a line a second, or one with --once.")
    ] = False,
) -> None:
    """Pools, workers with slots and KV cache, queues by tenant, token rates, roll-outs, last failures. q quits."""
    once = once or not (as_json or sys.stdout.isatty())

    async def show(bus: "Bus", _: Target) -> None:
        from compose.watch.look import Looker

        async with Looker.at(bus) as looker:
            if once or as_json:
                await _print(looker, once=once, as_json=as_json)
            else:
                await _live(looker)

    on_bus(data_dir, show)


async def _print(looker: "Looker", *, once: bool, as_json: bool) -> None:
    await looker.look()  # Rates need a second.
    while True:
        await asyncio.sleep(EVERY_S)
        seen = await looker.look()
        if as_json:
            print(msgspec.json.encode(seen).decode(), flush=True)
        else:
            _console_print(seen)
        if once:
            return


def _console_print(seen: "Seen") -> None:
    from rich.console import Console

    from compose.watch.screen import screen

    console = Console()
    console.print(screen(seen, console.width))


async def _live(looker: "Looker") -> None:
    """Until a key says otherwise; drawn anew each second, and when the terminal's size changes."""
    from rich.console import Console
    from rich.live import Live

    from compose.watch.screen import screen
    from contracts.bus import BusError

    console, changed, seen = Console(), asyncio.Event(), await looker.look()
    with _keys(changed) as pressed, Live(console=console, screen=True, auto_refresh=False) as live:
        due = 0.0
        loop = asyncio.get_running_loop()
        while not pressed():
            if loop.time() >= due:
                due = loop.time() + EVERY_S
                with suppress(BusError):  # What was seen last stays, with its time.
                    seen = await looker.look()
            live.update(screen(seen, console.width, console.height), refresh=True)
            changed.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(max(0.0, due - loop.time())):
                    await changed.wait()


@contextmanager
def _keys(changed: asyncio.Event) -> Iterator[Callable[[], bool]]:
    """Sets ``changed`` at each key and each new size; gives whether to quit. The terminal is as before afterwards."""
    import termios
    import tty

    quits = False

    def quit_() -> None:
        nonlocal quits
        quits = True
        changed.set()

    def read() -> None:
        if set(os.read(stdin, 64)) & QUIT:
            quit_()

    loop, stdin = asyncio.get_running_loop(), sys.stdin.fileno()
    loop.add_signal_handler(signal.SIGINT, quit_)
    loop.add_signal_handler(signal.SIGWINCH, changed.set)
    before = termios.tcgetattr(stdin) if sys.stdin.isatty() else None
    if before is not None:
        tty.setcbreak(stdin)
        loop.add_reader(stdin, read)
    try:
        yield lambda: quits
    finally:
        loop.remove_signal_handler(signal.SIGWINCH)
        loop.remove_signal_handler(signal.SIGINT)
        if before is not None:
            loop.remove_reader(stdin)
            termios.tcsetattr(stdin, termios.TCSADRAIN, before)
