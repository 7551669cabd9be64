"""``headrace key``: API keys."""

from typing import Annotated

import typer

from compose.cli.common import DataDirOption, JsonOption, instant, on_bus, show, table

app = typer.Typer(no_args_is_help=True, help="API keys.")


@app.command("create")
def key_create(tenant: str, data_dir: DataDirOption = None, as_json: JsonOption = False) -> None:
    """Make an API key. It is shown this once."""
    from compose.stack.data_dir import read_peppers
    from contracts import registry

    made = on_bus(data_dir, lambda bus, target: registry.create_key(bus, read_peppers(target.pepper), tenant))
    show(made, f"id   {made.id}\nkey  {made.key}", as_json=as_json)


@app.command("list")
def key_list(
    tenant: Annotated[str | None, typer.Option(help="Only this tenant's keys.")] = None,
    data_dir: DataDirOption = None,
    as_json: JsonOption = False,
) -> None:
    """Keys by id; never the keys themselves."""
    from contracts import registry

    records = [each for each in on_bus(data_dir, lambda bus, _: registry.keys(bus)) if tenant in (None, each.tenant)]
    rows = [
        (
            record.id,
            record.tenant,
            "yes" if record.admin else "no",
            instant(record.created_at_ms),
            instant(record.revoked_at_ms),
        )
        for record in records
    ]
    show(records, table(("id", "tenant", "admin", "created", "revoked"), rows), as_json=as_json)


@app.command("revoke")
def key_revoke(
    identifier: Annotated[str, typer.Argument(metavar="ID")],
    data_dir: DataDirOption = None,
    as_json: JsonOption = False,
) -> None:
    """Revoke a key everywhere, within a second."""
    from contracts import registry

    record = on_bus(data_dir, lambda bus, _: registry.revoke_key(bus, identifier))
    show(record, f"revoked {record.id} of tenant {record.tenant}", as_json=as_json)
