"""``headrace model``: models in the registry."""

import sys
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer

from compose.cli.common import DataDirOption, JsonOption, administer, names, numbers_or_none, on_bus, show, table
from compose.cli.publish import publish, unpublish
from compose.cli.worker import WithinOption, ask, is_local
from compose.stack.control import WITHIN_S
from compose.stack.data_dir import Engine, Target
from contracts import shards
from contracts.messages.records import PriceTier
from contracts.shards import SHARDS_MAX

if TYPE_CHECKING:
    from contracts.bus import Bus

app = typer.Typer(no_args_is_help=True, help="Models in the registry.")
app.command("publish")(publish)
app.command("unpublish")(unpublish)


@app.command("list")
def model_list(data_dir: DataDirOption = None, as_json: JsonOption = False) -> None:
    """Models in the registry and their versions."""
    from contracts import registry
    from contracts.messages.records import Manifest, ModelRecord

    async def read(bus: "Bus", _: Target) -> tuple[list[ModelRecord], list[Manifest]]:
        return await registry.models(bus), await registry.versions(bus)

    models, versions = on_bus(data_dir, read)
    kept = [
        msgspec.structs.asdict(model) | {"versions": [each for each in versions if each.name == model.name]}
        for model in models
    ]
    stable = {(each.name, each.stable) for each in models}
    rows = [
        (
            each.name,
            each.version,
            "stable" if (each.name, each.version) in stable else "",
            each.engine,
            each.context,
            each.default_output_tokens,
        )
        for each in versions
    ]
    header = ("name", "version", "", "engine", "context", "default_output")
    show(kept, table(header, rows), as_json=as_json)


@app.command("add")
def model_add(
    name: Annotated[str | None, typer.Argument(help="Known name, or path of a Hugging Face model.")] = None,
    engine: Annotated[Engine, typer.Option(help="Engine of the model's workers.")] = "vllm",
    sim_context: Annotated[int, typer.Option(min=1)] = 1_048_576,
    price_tier: Annotated[PriceTier, typer.Option(help="What price ceilings are compared with.")] = "standard",
    data_dir: DataDirOption = None,
    as_json: JsonOption = False,
) -> None:
    """Prepare a model's files here and enter it into the registry; also makes the bus ready for services."""
    from compose.stack import records
    from compose.stack.manifest import default_model, make_manifest
    from contracts import topology
    from contracts.administration import Administration

    manifest = make_manifest(engine, name or default_model(engine), sim_context, price_tier)

    async def enter(bus: "Bus", _: Target) -> None:
        for line in await topology.ensure(bus):
            print(f"note: {line}", file=sys.stderr)
        do = Administration(bus, records.operator())
        await do.publish(manifest)
        await do.set_stable(manifest.name, manifest.version)

    on_bus(data_dir, enter)
    show(manifest, f"model {manifest.name} {manifest.version}", as_json=as_json)


@app.command("remove")
def model_remove(
    name: str, within_s: WithinOption = WITHIN_S, data_dir: DataDirOption = None, as_json: JsonOption = False
) -> None:
    """Take a model out of service: new requests get 404 at once, those that wait or run go on to their end.

    Its workers in the stack that runs here stop after that; others are for whoever runs them.
    """
    from compose.stack.control import RemoveModel

    if is_local(data_dir):
        for note in ask(data_dir, RemoveModel(name, within_s)).notes:
            print(f"note: {note}", file=sys.stderr)
    else:
        administer(data_dir, lambda do: do.remove_model(name))
    show({"removed": name}, f"model {name} removed", as_json=as_json)


@app.command("limits")
def model_limits(
    name: str,
    queued_requests: Annotated[int | None, typer.Option(min=0)] = None,
    queued_tokens: Annotated[int | None, typer.Option(min=0)] = None,
    tenant_queued_requests: Annotated[int | None, typer.Option(min=0, help="One tenant's share.")] = None,
    tenant_queued_tokens: Annotated[int | None, typer.Option(min=0, help="One tenant's share.")] = None,
    body_bytes: Annotated[int | None, typer.Option(min=0, help="Of open requests' large bodies.")] = None,
    tenant_body_bytes: Annotated[int | None, typer.Option(min=0, help="One tenant's share.")] = None,
    kv_overbooking: Annotated[float | None, typer.Option(help="Reserved KV tokens over real ones.")] = None,
    cached_input_share: Annotated[
        float | None, typer.Option(help="Of a cached prompt token in the limit of input tokens, 0 to 1.")
    ] = None,
    replicas_min: Annotated[int | None, typer.Option(min=0, help="Workers at least; 0: none while idle.")] = None,
    replicas_max: Annotated[str | None, typer.Option(help="Workers at most; 'none' for no bound.")] = None,
    replicas_spare: Annotated[int | None, typer.Option(min=0, help="Workers beyond those that are needed.")] = None,
    replicas_hold_s: Annotated[int | None, typer.Option(min=0, help="Seconds before one is taken away.")] = None,
    fallbacks: Annotated[str | None, typer.Option(help="Models to go to when overloaded; 'none' for none.")] = None,
    data_dir: DataDirOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show or change the bounds of a model's queue and its fallbacks."""
    from contracts import registry
    from contracts.forms import ModelChange
    from contracts.messages.records import ModelRecord

    given = {
        "queued_requests": queued_requests,
        "queued_tokens": queued_tokens,
        "tenant_queued_requests": tenant_queued_requests,
        "tenant_queued_tokens": tenant_queued_tokens,
        "body_bytes": body_bytes,
        "tenant_body_bytes": tenant_body_bytes,
        "kv_overbooking": kv_overbooking,
        "cached_input_share": cached_input_share,
        "replicas_min": replicas_min,
        "replicas_spare": replicas_spare,
        "replicas_hold_s": replicas_hold_s,
    }
    changes: dict[str, Any] = {field: value for field, value in given.items() if value is not None}
    changes |= numbers_or_none(replicas_max=replicas_max)
    if fallbacks is not None:
        changes["fallbacks"] = [] if fallbacks == "none" else names(fallbacks)

    async def look(bus: "Bus", _: Target) -> ModelRecord:
        return await registry.model(bus, name)

    if changes:
        record = administer(data_dir, lambda do: do.change_model(name, ModelChange(**changes)))
    else:
        record = on_bus(data_dir, look)
    lines = [f"{field:24}{getattr(record.limits, field):g}" for field in given]
    most = record.limits.replicas_max
    lines.append(f"{'replicas_max':24}{'none' if most is None else most}")
    lines.append(f"{'fallbacks':24}{', '.join(record.fallbacks) or '-'}")
    show(record, "\n".join(lines), as_json=as_json)


@app.command("shards")
def model_shards(
    name: str,
    count: Annotated[int, typer.Argument(min=1, max=SHARDS_MAX, help="Owners that it is split over; never fewer.")],
    data_dir: DataDirOption = None,
    as_json: JsonOption = False,
) -> None:
    """Split a model that is too hot for one owner: each shard has its own queue and needs workers of its own.

    Tenants' limits and budgets stay what they are, for all shards together.
    """
    record = administer(data_dir, lambda do: do.set_shards(name, count))
    shown = ", ".join(shards.names(name, record.shards))
    show(record, f"model {name} has {record.shards} shards: {shown}; headrace worker add {name}", as_json=as_json)
