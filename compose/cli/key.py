"""``headrace key``: API keys."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from compose.cli.common import DataDirOption, JsonOption, administer, instant, names, on_bus, show, table
from contracts import instants

if TYPE_CHECKING:
    from contracts.administration import Administration
    from contracts.messages.records import KeyRecord

app = typer.Typer(no_args_is_help=True, help="API keys.")


def _expiry(text: str) -> int:
    try:
        return 0 if text == "never" else instants.parse(text)
    except ValueError as error:
        raise typer.BadParameter(f"{error}, nor 'never'") from error


ExpiresOption = Annotated[
    int | None, typer.Option("--expires", parser=_expiry, metavar="TIME", help="UTC day or RFC 3339, or 'never'.")
]
AddressesOption = Annotated[
    str | None, typer.Option(help="Networks whose callers may use it, as 10.0.0.0/8,192.0.2.1; 'all' for all.")
]
NoteOption = Annotated[str | None, typer.Option(help="What people call it.")]


def _changes(expires: int | None, addresses: str | None, note: str | None) -> dict[str, Any]:
    given: dict[str, Any] = {"expires_at_ms": expires, "note": note}
    if addresses is not None:
        given["addresses"] = () if addresses == "all" else tuple(names(addresses))
    return {field: value for field, value in given.items() if value is not None}


@app.command("create")
def key_create(
    tenant: str,
    scopes: Annotated[
        str,
        typer.Option(
            help="inference, usage; or admin:keys, admin:tenants, admin:models, admin:usage, admin:prices; "
            "'admin' is all of those."
        ),
    ] = "inference,usage",
    expires: ExpiresOption = None,
    addresses: AddressesOption = None,
    note: NoteOption = None,
    out: Annotated[Path | None, typer.Option(help="Write the key to this new file, mode 0600.")] = None,
    data_dir: DataDirOption = None,
    as_json: JsonOption = False,
) -> None:
    """Make an API key. It is shown this once."""
    import msgspec

    from compose.stack.data_dir import ComposeError, write_private
    from contracts.forms import NewKey
    from contracts.keys import ADMIN_SCOPES, SCOPES

    asked: list[str] = []
    for name in names(scopes):
        if name not in (*SCOPES, "admin"):
            raise typer.BadParameter(f"{name!r} is not one of {', '.join(SCOPES)}, admin", param_hint="--scopes")
        asked += ADMIN_SCOPES if name == "admin" else [name]
    try:
        form = msgspec.convert(
            {"tenant": tenant, "scopes": list(dict.fromkeys(asked)), **_changes(expires, addresses, note)}, NewKey
        )
    except msgspec.ValidationError as error:
        raise typer.BadParameter(str(error), param_hint="--scopes") from error
    if out is None:
        made = administer(data_dir, lambda do: do.create_key(form), makes_keys=True)
        show(made, f"id   {made.id}\nkey  {made.key}", as_json=as_json)
        return
    # The file comes first: a key that could not be written would be valid, and nobody's.
    try:
        out.touch(0o600, exist_ok=False)
    except FileExistsError as error:
        raise ComposeError(f"{out} exists; a key is written to a new file") from error
    try:
        made = administer(data_dir, lambda do: do.create_key(form), makes_keys=True)
    except BaseException:
        out.unlink()
        raise
    write_private(out, made.key.encode())
    show({"id": made.id, "file": str(out)}, f"id    {made.id}\nfile  {out}", as_json=as_json)


@app.command("set")
def key_set(
    identifier: Annotated[str, typer.Argument(metavar="ID")],
    expires: ExpiresOption = None,
    addresses: AddressesOption = None,
    note: NoteOption = None,
    data_dir: DataDirOption = None,
    as_json: JsonOption = False,
) -> None:
    """Change from where and until when a key may be used; what is not given stays."""
    from contracts.forms import KeyChange

    changes = _changes(expires, addresses, note)
    if not changes:
        raise typer.BadParameter("nothing is to be changed")
    record = administer(data_dir, lambda do: do.change_key(identifier, KeyChange(**changes)))
    show(record, f"key {record.id} changed", as_json=as_json)


@app.command("list")
def key_list(
    tenant: Annotated[str | None, typer.Option(help="Only this tenant's keys.")] = None,
    data_dir: DataDirOption = None,
    as_json: JsonOption = False,
) -> None:
    """Keys by id, and when each was last used; never the keys themselves."""
    from contracts import registry

    records = [each for each in on_bus(data_dir, lambda bus, _: registry.keys(bus)) if tenant in (None, each.tenant)]
    head = ("id", "tenant", "scopes", "addresses", "created", "last used", "expires", "revoked", "pepper", "note")
    rows = [
        (
            record.id,
            record.tenant,
            ",".join(record.scopes),
            ",".join(record.addresses) or "all",
            *map(instant, (record.created_at_ms, record.last_used_at_ms, record.expires_at_ms, record.revoked_at_ms)),
            record.pepper,
            record.note,
        )
        for record in records
    ]
    show(records, table(head, rows), as_json=as_json)


@app.command("move")
def key_move(data_dir: DataDirOption = None, as_json: JsonOption = False) -> None:
    """Move keys from the previous pepper to the current one; reads the keys from standard input, one a line.

    Keys that are used move by themselves.
    """
    secrets = [line.strip() for line in sys.stdin if line.strip()]

    async def move(do: "Administration") -> list["KeyRecord"]:
        return [await do.move_key(secret) for secret in secrets]

    records = administer(data_dir, move, makes_keys=True)
    show(records, "\n".join(f"moved {record.id} of tenant {record.tenant}" for record in records), as_json=as_json)


@app.command("revoke")
def key_revoke(
    identifier: Annotated[str, typer.Argument(metavar="ID")],
    data_dir: DataDirOption = None,
    as_json: JsonOption = False,
) -> None:
    """Revoke a key everywhere, within a second."""
    record = administer(data_dir, lambda do: do.revoke_key(identifier))
    show(record, f"revoked {record.id} of tenant {record.tenant}", as_json=as_json)
