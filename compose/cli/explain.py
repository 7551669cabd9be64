"""``headrace explain``: the story of one request."""

from typing import Annotated

import typer

from compose.cli.common import DataDirOption, JsonOption, on_bus, show


def explain(
    request_id: Annotated[
        str, typer.Argument(metavar="ID", help="Of the answer (header or body), or the caller's own.")
    ],
    data_dir: DataDirOption = None,
    as_json: JsonOption = False,
) -> None:
    """What became of a request: all attempts, times, worker, version, outcome, and what is billed."""
    from compose.stack import records

    found = on_bus(data_dir, lambda bus, _: records.explain(bus, request_id))
    show(found, "\n".join(found.text), as_json=as_json)
