"""``headrace quarantine``: requests that ended the engines that ran them, kept for a person to look at."""

from typing import TYPE_CHECKING, Annotated

import typer

from compose.cli.common import DataDirOption, JsonOption, instant, on_bus, print_json, print_table
from compose.stack.data_dir import ComposeError

if TYPE_CHECKING:
    from contracts.messages.attempts import Quarantined

quarantine_app = typer.Typer(no_args_is_help=True, help="Requests that ended engines and are not tried again.")

RequestId = Annotated[str, typer.Argument(metavar="ID", help="Id of the request.")]


@quarantine_app.command("list")
def quarantine_list(data_dir: DataDirOption = None, as_json: JsonOption = False) -> None:
    """What is in quarantine, oldest first; without bodies."""
    from compose.stack import admin

    kept = on_bus(data_dir, lambda bus, _: admin.quarantined(bus))
    if as_json:
        print_json([_line(one) for one in kept])
        return
    print_table(
        ("ID", "SINCE", "TENANT", "MODEL", "REASON"),
        [
            (
                one.request.request_id,
                instant(one.quarantined_at_ms),
                one.request.tenant,
                one.request.model,
                one.reason,
            )
            for one in kept
        ],
    )


def _line(kept: "Quarantined") -> dict[str, object]:
    return {
        "request_id": kept.request.request_id,
        "quarantined_at_ms": kept.quarantined_at_ms,
        "tenant": kept.request.tenant,
        "model": kept.request.model,
        "reason": kept.reason,
    }


@quarantine_app.command("show")
def quarantine_show(request_id: RequestId, data_dir: DataDirOption = None) -> None:
    """All that is known of one, as JSON: the request with its body, and how its last attempt ended."""
    from compose.stack import admin

    print_json(_known(request_id, on_bus(data_dir, lambda bus, _: admin.quarantined(bus, request_id))))


@quarantine_app.command("drop")
def quarantine_drop(request_id: RequestId, data_dir: DataDirOption = None, as_json: JsonOption = False) -> None:
    """Forget one."""
    from compose.stack import admin

    dropped = on_bus(data_dir, lambda bus, _: admin.drop_quarantined(bus, request_id))
    if not dropped:
        raise ComposeError(f"request {request_id} is not in quarantine")
    if as_json:
        print_json({"request_id": request_id, "dropped": True})
    else:
        print(f"dropped {request_id}")


def _known(request_id: str, kept: "list[Quarantined]") -> "Quarantined":
    if not kept:
        raise ComposeError(f"request {request_id} is not in quarantine")
    return kept[-1]
