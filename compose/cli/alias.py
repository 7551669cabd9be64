"""``headrace alias``: names that stand for one of several models."""

from typing import Annotated

import typer

from compose.cli.common import DataDirOption, JsonOption, administer, on_bus, show, table
from contracts.messages.records import AliasOrder

app = typer.Typer(no_args_is_help=True, help="Names that stand for one of several models.")


@app.command("list")
def alias_list(data_dir: DataDirOption = None, as_json: JsonOption = False) -> None:
    """Aliases, those that are built in among them."""
    from contracts import registry

    found = on_bus(data_dir, lambda bus, _: registry.aliases(bus))
    rows = [(each.name, ", ".join(each.models) or "all", each.order) for each in found]
    show(found, table(("alias", "models", "order"), rows), as_json=as_json)


@app.command("set")
def alias_set(
    name: str,
    model: Annotated[list[str] | None, typer.Option(help="One that it stands for; may be repeated. Else all.")] = None,
    order: Annotated[
        AliasOrder | None, typer.Option(help="Which of those that fit goes first.", show_default="listed")
    ] = None,
    data_dir: DataDirOption = None,
    as_json: JsonOption = False,
) -> None:
    """Say what an alias stands for: the first model that fits the request, is up and takes it."""
    from contracts.forms import AliasChange

    change = AliasChange(models=model or [], order=order or "listed")
    made = administer(data_dir, lambda do: do.set_alias(name, change))
    show(made, f"alias {name} set", as_json=as_json)


@app.command("remove")
def alias_remove(name: str, data_dir: DataDirOption = None, as_json: JsonOption = False) -> None:
    """Forget an alias; one that is built in stands for all models again."""
    removed = administer(data_dir, lambda do: do.remove_alias(name))
    show(removed, f"alias {name} removed", as_json=as_json)
