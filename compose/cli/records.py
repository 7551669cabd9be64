"""``headrace tenant|key|model``: the records that people manage, in the registry of a running stack."""

import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from compose.cli.common import DataDirOption, JsonOption, instant, on_bus, print_json, print_table
from compose.stack.data_dir import Engine, Target

if TYPE_CHECKING:
    from contracts.bus import Bus
    from contracts.messages.records import TenantRecord

tenant_app = typer.Typer(no_args_is_help=True, help="Tenants and their limits.")
key_app = typer.Typer(no_args_is_help=True, help="API keys.")
model_app = typer.Typer(no_args_is_help=True, help="Models in the registry.")

LimitOption = Annotated[int | None, typer.Option(min=0, show_default="unlimited")]
ChangeOption = Annotated[str | None, typer.Option(help="A number, or 'none' for no limit.", show_default="as it is")]


# Tenants ---------------------------------------------------------------------------------------------------


@tenant_app.command("create")
def tenant_create(
    name: str,
    rpm: LimitOption = None,
    input_tpm: LimitOption = None,
    output_tpm: LimitOption = None,
    concurrency: LimitOption = None,
    weight: Annotated[float, typer.Option(help="Share of the fair queue, above 0.")] = 1.0,
    models: Annotated[str | None, typer.Option(help="Models it may use, separated by commas; else all.")] = None,
    data_dir: DataDirOption = None,
    as_json: JsonOption = False,
) -> None:
    """Make a tenant. A limit that is not given is unlimited."""
    from contracts import registry
    from contracts.messages.records import TenantLimits, TenantRecord

    if not 0 < weight < float("inf"):
        raise typer.BadParameter("the weight is a number above 0", param_hint="--weight")
    names = None if models is None else _names(models)
    if names == []:
        raise typer.BadParameter("no model is named", param_hint="--models")
    limits = TenantLimits(rpm=rpm, input_tpm=input_tpm, output_tpm=output_tpm, concurrency=concurrency)
    wanted = registry.check_tenant(TenantRecord(name=name, limits=limits, weight=weight, models=names))
    record = on_bus(data_dir, lambda bus, _: registry.create_tenant(bus, wanted))
    if as_json:
        print_json(record)
    else:
        print(f"tenant {record.name}")


@tenant_app.command("set")
def tenant_set(
    name: str,
    rpm: ChangeOption = None,
    input_tpm: ChangeOption = None,
    output_tpm: ChangeOption = None,
    concurrency: ChangeOption = None,
    queued_requests: ChangeOption = None,
    queued_tokens: ChangeOption = None,
    model: Annotated[str | None, typer.Option(help="Set the limits for this model only.")] = None,
    weight: Annotated[float | None, typer.Option(help="Share of the fair queue, above 0.")] = None,
    models: Annotated[str | None, typer.Option(help="Models it may use, separated by commas, or 'all'.")] = None,
    priorities: Annotated[str | None, typer.Option(help="interactive, batch, or both with a comma.")] = None,
    deadline_ms: Annotated[int | None, typer.Option(min=1, help="Default time to the first token.")] = None,
    monthly_budget: ChangeOption = None,
    fallback: Annotated[bool | None, typer.Option("--fallback/--no-fallback")] = None,
    prefix_caching: Annotated[bool | None, typer.Option("--prefix-caching/--no-prefix-caching")] = None,
    disabled: Annotated[bool | None, typer.Option("--disable/--enable")] = None,
    data_dir: DataDirOption = None,
    as_json: JsonOption = False,
) -> None:
    """Change a tenant; what is not given stays. Every service follows within a second."""
    from contracts import registry

    limits = _changes(
        rpm=rpm,
        input_tpm=input_tpm,
        output_tpm=output_tpm,
        concurrency=concurrency,
        queued_requests=queued_requests,
        queued_tokens=queued_tokens,
    )
    fields: dict[str, Any] = _changes(monthly_budget_tokens=monthly_budget)
    if models is not None:
        fields["models"] = None if models == "all" else _names(models)
    if priorities is not None:
        fields["priorities"] = tuple(_names(priorities))
        if not set(fields["priorities"]) <= {"interactive", "batch"}:
            raise typer.BadParameter("the classes are interactive and batch", param_hint="--priorities")
    for field, value in (
        ("weight", weight),
        ("deadline_ms", deadline_ms),
        ("fallback", fallback),
        ("prefix_caching", prefix_caching),
        ("disabled", disabled),
    ):
        if value is not None:
            fields[field] = value
    if not fields and not limits:
        raise typer.BadParameter("nothing is to be changed")

    def change(record: "TenantRecord") -> "TenantRecord":
        return registry.with_limits(record, limits, model=model, **fields)

    record = on_bus(data_dir, lambda bus, _: registry.change_tenant(bus, name, change))
    if as_json:
        print_json(record)
    else:
        print(f"tenant {record.name} changed")


def _names(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def _changes(**given: str | None) -> dict[str, int | None]:
    """Numbers, or None for 'none', of the options that were given."""
    changes: dict[str, int | None] = {}
    for field, text in given.items():
        if text is None:
            continue
        if text != "none" and not (text.isascii() and text.isdigit()):
            raise typer.BadParameter("a whole number from 0 up, or 'none'", param_hint=f"--{field.replace('_', '-')}")
        changes[field] = None if text == "none" else int(text)
    return changes


@tenant_app.command("list")
def tenant_list(data_dir: DataDirOption = None, as_json: JsonOption = False) -> None:
    """All tenants with their limits."""
    from contracts import registry

    records = on_bus(data_dir, lambda bus, _: registry.tenants(bus))
    if as_json:
        print_json(records)
        return
    print_table(
        ("NAME", "RPM", "INPUT TPM", "OUTPUT TPM", "CONCURRENCY", "WEIGHT", "MODELS"),
        [
            (
                record.name,
                *(
                    "-" if limit is None else str(limit)
                    for limit in (
                        record.limits.rpm,
                        record.limits.input_tpm,
                        record.limits.output_tpm,
                        record.limits.concurrency,
                    )
                ),
                f"{record.weight:g}",
                "all" if record.models is None else ",".join(record.models),
            )
            for record in records
        ],
    )


# Keys ------------------------------------------------------------------------------------------------------


@key_app.command("create")
def key_create(tenant: str, data_dir: DataDirOption = None, as_json: JsonOption = False) -> None:
    """Make an API key. It is shown this once."""
    from compose.stack.admin import read_pepper
    from contracts import registry

    made = on_bus(data_dir, lambda bus, target: registry.create_key(bus, read_pepper(target.pepper), tenant))
    if as_json:
        print_json(made)
    else:
        print(f"id   {made.id}\nkey  {made.key}")


@key_app.command("list")
def key_list(
    tenant: Annotated[str | None, typer.Option(help="Only this tenant's keys.")] = None,
    data_dir: DataDirOption = None,
    as_json: JsonOption = False,
) -> None:
    """Keys by id; never the keys themselves."""
    from contracts import registry

    records = [
        record
        for record in on_bus(data_dir, lambda bus, _: registry.keys(bus))
        if tenant is None or record.tenant == tenant
    ]
    if as_json:
        print_json(records)
        return
    print_table(
        ("ID", "TENANT", "ADMIN", "CREATED", "REVOKED"),
        [
            (
                record.id,
                record.tenant,
                "yes" if record.admin else "no",
                instant(record.created_at_ms),
                instant(record.revoked_at_ms),
            )
            for record in records
        ],
    )


@key_app.command("revoke")
def key_revoke(
    identifier: Annotated[str, typer.Argument(metavar="ID")],
    data_dir: DataDirOption = None,
    as_json: JsonOption = False,
) -> None:
    """Revoke a key everywhere, within a second."""
    from contracts import registry

    record = on_bus(data_dir, lambda bus, _: registry.revoke_key(bus, identifier))
    if as_json:
        print_json(record)
    else:
        print(f"revoked {record.id} of tenant {record.tenant}")


# Models -------------------------------------------------------------------------------------


@model_app.command("list")
def model_list(data_dir: DataDirOption = None, as_json: JsonOption = False) -> None:
    """Models in the registry."""
    from contracts import registry

    manifests = on_bus(data_dir, lambda bus, _: registry.models(bus))
    if as_json:
        print_json(manifests)
        return
    print_table(
        ("NAME", "VERSION", "ENGINE", "CONTEXT", "DEFAULT OUTPUT"),
        [(m.name, m.version, m.engine, str(m.context), str(m.default_output_tokens)) for m in manifests],
    )


@model_app.command("add")
def model_add(
    name: Annotated[str | None, typer.Argument(help="Known name, or path of a Hugging Face model.")] = None,
    engine: Annotated[Engine, typer.Option(help="Engine of the model's workers.")] = "vllm",
    sim_context: Annotated[int, typer.Option(min=1)] = 1_048_576,
    data_dir: DataDirOption = None,
    as_json: JsonOption = False,
) -> None:
    """Prepare a model's files here and enter it into the registry; also makes the bus ready for services."""
    from compose.stack.up import default_model, make_manifest
    from contracts import registry, topology

    manifest = make_manifest(engine, name or default_model(engine), sim_context)

    async def enter(bus: "Bus", _: Target) -> None:
        for line in await topology.ensure(bus):
            print(f"note: {line}", file=sys.stderr)
        await registry.put_manifest(bus, manifest)

    on_bus(data_dir, enter)
    if as_json:
        print_json(manifest)
    else:
        print(f"model {manifest.name} {manifest.version}")


@model_app.command("limits")
def model_limits(
    name: str,
    queued_requests: Annotated[int | None, typer.Option(min=0)] = None,
    queued_tokens: Annotated[int | None, typer.Option(min=0)] = None,
    tenant_queued_requests: Annotated[int | None, typer.Option(min=0, help="One tenant's share.")] = None,
    tenant_queued_tokens: Annotated[int | None, typer.Option(min=0, help="One tenant's share.")] = None,
    kv_overbooking: Annotated[float | None, typer.Option(help="Reserved KV tokens over real ones.")] = None,
    fallbacks: Annotated[str | None, typer.Option(help="Models to go to when overloaded; 'none' for none.")] = None,
    data_dir: DataDirOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show or change the bounds of a model's queue and its fallbacks."""
    from contracts import registry

    given = {
        "queued_requests": queued_requests,
        "queued_tokens": queued_tokens,
        "tenant_queued_requests": tenant_queued_requests,
        "tenant_queued_tokens": tenant_queued_tokens,
        "kv_overbooking": kv_overbooking,
    }
    limits = {field: value for field, value in given.items() if value is not None}
    others = None if fallbacks is None else [] if fallbacks == "none" else _names(fallbacks)
    manifest = on_bus(data_dir, lambda bus, _: registry.change_model(bus, name, limits=limits, fallbacks=others))
    if as_json:
        print_json({"name": manifest.name, "limits": manifest.limits, "fallbacks": manifest.fallbacks})
        return
    for field in given:
        print(f"{field:24}{getattr(manifest.limits, field):g}")
    print(f"{'fallbacks':24}{', '.join(manifest.fallbacks) or '-'}")
