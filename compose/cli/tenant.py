"""``headrace tenant``: tenants and their limits, in the registry of a running stack."""

from typing import Annotated, Any

import typer

from compose.cli.common import DataDirOption, JsonOption, administer, names, numbers_or_none, on_bus, show, table
from contracts.messages.records import PriceTier

app = typer.Typer(no_args_is_help=True, help="Tenants and their limits.")

LimitOption = Annotated[int | None, typer.Option(min=0, show_default="unlimited")]
ChangeOption = Annotated[str | None, typer.Option(help="A number, or 'none' for no limit.", show_default="as it is")]


@app.command("create")
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
    from contracts.forms import LimitsChange, NewTenant

    if not 0 < weight < float("inf"):
        raise typer.BadParameter("the weight is a number above 0", param_hint="--weight")
    allowed = None if models is None else names(models)
    if allowed == []:
        raise typer.BadParameter("no model is named", param_hint="--models")
    limits = LimitsChange(rpm=rpm, input_tpm=input_tpm, output_tpm=output_tpm, concurrency=concurrency)
    wanted = NewTenant(name=name, limits=limits, weight=weight, models=allowed)
    registry.check_tenant(wanted.record())
    record = administer(data_dir, lambda do: do.create_tenant(wanted))
    show(record, f"tenant {record.name}", as_json=as_json)


@app.command("set")
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
    price_ceiling: Annotated[PriceTier | None, typer.Option(help="Dearer models are not there for it.")] = None,
    prefix_caching: Annotated[bool | None, typer.Option("--prefix-caching/--no-prefix-caching")] = None,
    disabled: Annotated[bool | None, typer.Option("--disable/--enable")] = None,
    data_dir: DataDirOption = None,
    as_json: JsonOption = False,
) -> None:
    """Change a tenant; what is not given stays. Every service follows within a second."""
    from contracts.forms import LimitsChange, TenantChange

    limits = numbers_or_none(
        rpm=rpm,
        input_tpm=input_tpm,
        output_tpm=output_tpm,
        concurrency=concurrency,
        queued_requests=queued_requests,
        queued_tokens=queued_tokens,
    )
    fields: dict[str, Any] = numbers_or_none(monthly_budget_tokens=monthly_budget)
    if models is not None:
        fields["models"] = None if models == "all" else names(models)
    if priorities is not None:
        fields["priorities"] = tuple(names(priorities))
        if not set(fields["priorities"]) <= {"interactive", "batch"}:
            raise typer.BadParameter("the classes are interactive and batch", param_hint="--priorities")
    for field, value in (
        ("weight", weight),
        ("deadline_ms", deadline_ms),
        ("fallback", fallback),
        ("price_ceiling", price_ceiling),
        ("prefix_caching", prefix_caching),
        ("disabled", disabled),
    ):
        if value is not None:
            fields[field] = value
    if not fields and not limits:
        raise typer.BadParameter("nothing is to be changed")

    of_limits = LimitsChange(**limits)
    if model is None:
        change = TenantChange(limits=of_limits, **fields)
    else:
        change = TenantChange(model_limits={model: of_limits} if limits else {}, **fields)
    record = administer(data_dir, lambda do: do.change_tenant(name, change))
    show(record, f"tenant {record.name} changed", as_json=as_json)


@app.command("list")
def tenant_list(data_dir: DataDirOption = None, as_json: JsonOption = False) -> None:
    """All tenants with their limits."""
    from contracts import registry

    records = on_bus(data_dir, lambda bus, _: registry.tenants(bus))
    limits = ("rpm", "input_tpm", "output_tpm", "concurrency")
    rows = [
        (
            record.name,
            *("-" if (limit := getattr(record.limits, name)) is None else limit for name in limits),
            f"{record.weight:g}",
            "all" if record.models is None else ",".join(record.models),
        )
        for record in records
    ]
    show(records, table(("name", *limits, "weight", "models"), rows), as_json=as_json)
