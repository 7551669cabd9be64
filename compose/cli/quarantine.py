"""``headrace quarantine``: requests that ended the engines that ran them, kept for a person to look at."""

from typing import Annotated, Any

import typer

from compose.cli.common import DataDirOption, JsonOption, instant, on_bus, show, table
from compose.stack.data_dir import ComposeError

app = typer.Typer(no_args_is_help=True, help="Requests that ended engines and are not tried again.")

RequestId = Annotated[str, typer.Argument(metavar="ID", help="Id of the request.")]


@app.command("list")
def quarantine_list(data_dir: DataDirOption = None, as_json: JsonOption = False) -> None:
    """What is in quarantine, oldest first; without bodies."""
    from compose.stack import records

    kept: list[dict[str, Any]] = [
        {
            "request_id": each.request.request_id,
            "quarantined_at_ms": each.quarantined_at_ms,
            "tenant": each.request.tenant,
            "model": each.request.model,
            "reason": each.reason,
        }
        for each in on_bus(data_dir, lambda bus, _: records.quarantined(bus))
    ]
    rows = [list((line | {"quarantined_at_ms": instant(line["quarantined_at_ms"])}).values()) for line in kept]
    show(kept, table(("id", "since", "tenant", "model", "reason"), rows), as_json=as_json)


@app.command("show")
def quarantine_show(request_id: RequestId, data_dir: DataDirOption = None) -> None:
    """All that is known of one, as JSON: the request with its body, and how its last attempt ended."""
    from compose.stack import records

    kept = on_bus(data_dir, lambda bus, _: records.quarantined(bus, request_id))
    if not kept:
        raise ComposeError(f"request {request_id} is not in quarantine")
    show(kept[-1], "", as_json=True)


@app.command("drop")
def quarantine_drop(request_id: RequestId, data_dir: DataDirOption = None, as_json: JsonOption = False) -> None:
    """Forget one."""
    from compose.stack import records

    if not on_bus(data_dir, lambda bus, _: records.drop_quarantined(bus, request_id)):
        raise ComposeError(f"request {request_id} is not in quarantine")
    show({"request_id": request_id, "dropped": True}, f"dropped {request_id}", as_json=as_json)
