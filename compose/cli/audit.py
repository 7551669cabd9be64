"""``headrace audit``: what operators did, and who failed to log in."""

import asyncio
import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated

import typer

from compose.cli.asked import FromAnyOption, ToOption
from compose.cli.common import DataDirOption, JsonOption, instant, on_bus, show, table
from compose.stack.data_dir import Target

if TYPE_CHECKING:
    from contracts.bus import Bus
    from contracts.messages.administration import AuditEntry

HEAD = ("time", "actor", "address", "via", "action", "target", "result", "changes")


def audit(
    actor: Annotated[str | None, typer.Option(help="Only what this key id did, or 'operator'.")] = None,
    action: Annotated[str | None, typer.Option(help="Only this action, keys.create, or area, keys.")] = None,
    target: Annotated[str | None, typer.Option(help="Only what was done to this tenant, key or model.")] = None,
    address: Annotated[str | None, typer.Option(help="Only from this address.")] = None,
    start: FromAnyOption = None,
    end: ToOption = None,
    follow: Annotated[bool, typer.Option("--follow", help="Go on with what is to come, until Ctrl-C.")] = False,
    data_dir: DataDirOption = None,
    as_json: JsonOption = False,
) -> None:
    """Who did what to tenants, keys, models and prices, and failed logins; oldest first.

    An action that is only "intended" was cut off, and may have been done. With --follow each entry is a line, the
    intended ones too; with --json a JSON object.
    """

    def wanted(entry: "AuditEntry") -> bool:
        return (
            actor in (None, entry.actor)
            and (action is None or entry.action == action or entry.action.startswith(f"{action}."))
            and target in (None, entry.target)
            and address in (None, entry.address)
            and (start is None or entry.at_ms >= start)
            and (end is None or entry.at_ms < end)
        )

    if follow:
        on_bus(data_dir, lambda bus, _: _follow(bus, wanted, as_json))
        return

    async def read(bus: "Bus", _: Target) -> list["AuditEntry"]:
        from contracts import audit

        return await audit.entries(bus)

    from contracts.audit import settled

    entries = on_bus(data_dir, read)
    found = [entry for entry in settled(entries) if wanted(entry)]
    show(found, table(HEAD, [_row(entry) for entry in found]), as_json=as_json)


async def _follow(bus: "Bus", wanted: "Callable[[AuditEntry], bool]", as_json: bool) -> None:
    import msgspec

    from contracts import audit

    def tell(entry: "AuditEntry") -> None:
        if wanted(entry):
            print(msgspec.json.encode(entry).decode() if as_json else "  ".join(_row(entry)), flush=True)

    await audit.follow(bus, tell)
    await asyncio.Event().wait()


def _row(entry: "AuditEntry") -> tuple[str, ...]:
    result = entry.result if not entry.reason else f"{entry.result}: {entry.reason}"
    count = f" ({entry.count} times)" if entry.count > 1 else ""
    who = (entry.actor or "-", entry.address or "-", entry.via, entry.action, entry.target or "-")
    return tuple(_printable(cell) for cell in (instant(entry.at_ms), *who, result + count, _changes(entry)))


def _printable(text: str) -> str:
    """Part of it came from strangers: nothing of that may act on a terminal."""
    return "".join(each if each.isprintable() else f"\\u{ord(each):04x}" for each in text)


def _changes(entry: "AuditEntry") -> str:
    """``weight 1 -> 2``; of a new record its fields."""
    names = dict.fromkeys((*entry.before, *entry.after))
    parts = [
        f"{name} {_shown(entry.before.get(name))} -> {_shown(entry.after.get(name))}"
        if entry.before
        else f"{name} {_shown(entry.after.get(name))}"
        for name in names
    ]
    return ", ".join(parts)


def _shown(value: object) -> str:
    return "-" if value is None else json.dumps(value, ensure_ascii=False)
