"""``headrace ledger dead``: events that could never be a row."""

import typer

from compose.cli.common import DataDirOption, JsonOption, instant, on_bus, show, table

app = typer.Typer(no_args_is_help=True, help="What the ledger holds.")


@app.callback()
def ledger() -> None:
    """What the ledger holds."""


@app.command()
def dead(data_dir: DataDirOption = None, as_json: JsonOption = False) -> None:
    """Events that the ledger refused, oldest first, and why."""
    from compose.stack import records

    letters = on_bus(data_dir, lambda bus, _: records.dead_letters(bus))
    rows = [(instant(each.stored_at_ms), each.stream_seq, each.subject, each.reason) for each in letters]
    show(letters, table(("stored", "sequence", "subject", "reason"), rows), as_json=as_json)
