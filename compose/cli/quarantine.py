"""``headrace quarantine``: requests that ended the engines that ran them, kept for a person to look at."""

from pathlib import Path
from typing import Annotated, Any

import typer

from compose.cli.common import DataDirOption, JsonOption, administer, instant, on_bus, show, table
from compose.stack.data_dir import ComposeError

app = typer.Typer(no_args_is_help=True, help="Requests that ended engines and are not tried again.")

RequestId = Annotated[str, typer.Argument(metavar="ID", help="Id of the request.")]


@app.command("list")
def quarantine_list(data_dir: DataDirOption = None, as_json: JsonOption = False) -> None:
    """What is in quarantine, oldest first; without bodies."""
    from contracts import operations

    kept: list[dict[str, Any]] = [
        {
            "request_id": each.request.request_id,
            "quarantined_at_ms": each.quarantined_at_ms,
            "tenant": each.request.tenant,
            "model": each.request.model,
            "reason": each.reason,
        }
        for each in on_bus(data_dir, lambda bus, _: operations.quarantined(bus))
    ]
    rows = [list((line | {"quarantined_at_ms": instant(line["quarantined_at_ms"])}).values()) for line in kept]
    show(kept, table(("id", "since", "tenant", "model", "reason"), rows), as_json=as_json)


@app.command("keys")
def quarantine_keys(key_file: Annotated[Path, typer.Argument(metavar="FILE", help="Of the private key.")]) -> None:
    """Make a pair of keys, so that bodies are kept, and only who has FILE can read them."""
    from compose.stack.data_dir import write_private
    from contracts import sealed

    if key_file.exists():
        raise ComposeError(f"{key_file} is there: without the key in it what was sealed for it is lost")
    private, public = sealed.new_keys()
    write_private(key_file, f"{private}\n".encode())
    print(f"HEADRACE_QUARANTINE_PUBLIC_KEY={public}")


@app.command("show")
def quarantine_show(
    request_id: RequestId,
    key_file: Annotated[Path | None, typer.Option(help="Private key, to show the body too.")] = None,
    data_dir: DataDirOption = None,
) -> None:
    """All that is known of one, as JSON: the request, how its last attempt ended, with --key-file its body."""
    import msgspec

    from contracts import operations, sealed
    from contracts.service.config import ConfigError, read_secret

    kept = on_bus(data_dir, lambda bus, _: operations.quarantined(bus, request_id))
    if not kept:
        raise ComposeError(f"request {request_id} is not in quarantine")
    found: dict[str, Any] = msgspec.to_builtins(kept[-1])
    if key_file is not None:
        if not kept[-1].sealed_body:
            raise ComposeError("its body was not kept: schedulers do so when they have HEADRACE_QUARANTINE_PUBLIC_KEY")
        try:
            body = sealed.unseal(kept[-1].sealed_body, read_secret(key_file))
        except (sealed.BadKey, ConfigError) as error:
            raise ComposeError(f"the body cannot be read with {key_file}: {error}") from error
        del found["sealed_body"]
        found["request"]["body"] = msgspec.json.decode(body)
    show(found, "", as_json=True)


@app.command("drop")
def quarantine_drop(request_id: RequestId, data_dir: DataDirOption = None, as_json: JsonOption = False) -> None:
    """Forget one."""
    administer(data_dir, lambda do: do.drop_quarantined(request_id))
    show({"request_id": request_id, "dropped": True}, f"dropped {request_id}", as_json=as_json)
