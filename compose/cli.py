"""The ``headrace`` command: runs the one-machine stack and manages the records of a running one.

Exit status: 0 done, 1 not done (the reason is on standard error), 2 the command line is wrong. With
``--json`` standard output is JSON alone. A command imports what it needs, so that each starts fast.
"""

import asyncio
import enum
import json
import os
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar, cast

import typer

from compose.config import ComposeError, Engine, Options, Target, default_data_dir, find_target

if TYPE_CHECKING:
    from contracts.bus import Bus
    from contracts.messages import UsageDimension

T = TypeVar("T")

CONNECT_TIMEOUT_S = 5.0

app = typer.Typer(
    no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, help="Headrace: LLM serving."
)
tenant_app = typer.Typer(no_args_is_help=True, help="Tenants and their limits.")
key_app = typer.Typer(no_args_is_help=True, help="API keys.")
model_app = typer.Typer(no_args_is_help=True, help="Models in the registry.")
app.add_typer(tenant_app, name="tenant")
app.add_typer(key_app, name="key")
app.add_typer(model_app, name="model")

DataDirOption = Annotated[
    Path | None,
    typer.Option(
        "--data-dir",
        help="Data directory of the stack; else HEADRACE_NATS_URL, HEADRACE_DATA_DIR or .headrace.",
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="JSON alone on standard output.")]
LimitOption = Annotated[int | None, typer.Option(min=0, show_default="unlimited")]


def main() -> None:
    """Entry point of the console script."""
    try:
        app()
    except ComposeError as error:
        print(f"headrace: {error}", file=sys.stderr)
        sys.exit(1)


# The stack -------------------------------------------------------------------------------------------------


@app.command()
def up(
    engine: Annotated[Engine, typer.Option(help="Engine of the workers.")] = "vllm",
    model: Annotated[list[str] | None, typer.Option(help="Model to serve; may be repeated.")] = None,
    workers: Annotated[int, typer.Option(min=1, help="Workers of each model.")] = 1,
    gateways: Annotated[int, typer.Option(min=1, help="Gateways, which share the port.")] = 1,
    schedulers: Annotated[int, typer.Option(min=1, help="Schedulers.")] = 1,
    host: Annotated[str, typer.Option(help="Address that the gateways listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port of the API; 0 takes a free one.")] = 8080,
    data_dir: Annotated[Path | None, typer.Option(help="Default: HEADRACE_DATA_DIR or .headrace.")] = None,
    nats_url: Annotated[str, typer.Option(help="NATS to use instead of an own server.")] = "",
    clickhouse_url: Annotated[str, typer.Option(help="ClickHouse to use instead of the built-in engine.")] = "",
    sim_slots: Annotated[int, typer.Option(min=1)] = 64,
    sim_kv_tokens: Annotated[int, typer.Option(min=1)] = 1_000_000,
    sim_prefill_tps: Annotated[float, typer.Option(min=0.001)] = 20_000,
    sim_itl_ms: Annotated[float, typer.Option(min=0)] = 20,
    sim_context: Annotated[int, typer.Option(min=1)] = 1_048_576,
) -> None:
    """Start everything on this machine and keep it up until Ctrl-C."""
    from compose import up as stack

    options = Options(
        engine=engine,
        models=tuple(dict.fromkeys(model or [stack.default_model(engine)])),
        workers=workers,
        gateways=gateways,
        schedulers=schedulers,
        host=host,
        port=port,
        nats_url=nats_url,
        clickhouse_url=clickhouse_url,
        sim_slots=sim_slots,
        sim_kv_tokens=sim_kv_tokens,
        sim_prefill_tps=sim_prefill_tps,
        sim_itl_ms=sim_itl_ms,
        sim_context=sim_context,
    )
    raise typer.Exit(stack.run(options, data_dir or default_data_dir(os.environ)))


@app.command()
def doctor(
    data_dir: DataDirOption = None,
    port: Annotated[int, typer.Option(min=1, max=65535, help="Port that `headrace up` would use.")] = 8080,
    as_json: JsonOption = False,
) -> None:
    """Say in plain words what is missing or wrong on this machine."""
    from compose import doctor as checks

    findings = checks.examine(data_dir or default_data_dir(os.environ), port)
    if as_json:
        _print_json([{"name": f.name, "ok": f.ok, "needed": f.needed, "text": f.text} for f in findings])
    else:
        for finding in findings:
            mark = "ok     " if finding.ok else "WRONG  " if finding.needed else "note   "
            print(f"{mark} {finding.name}: {finding.text}")
    raise typer.Exit(1 if any(finding.needed and not finding.ok for finding in findings) else 0)


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
    from compose import admin
    from contracts.messages import TenantLimits

    if not 0 < weight < float("inf"):
        raise typer.BadParameter("the weight is a number above 0", param_hint="--weight")
    names = None if models is None else [part.strip() for part in models.split(",") if part.strip()]
    if names == []:
        raise typer.BadParameter("no model is named", param_hint="--models")
    limits = TenantLimits(rpm=rpm, input_tpm=input_tpm, output_tpm=output_tpm, concurrency=concurrency)
    admin.check_name("tenant name", name)
    record = _on_bus(data_dir, lambda bus, _: admin.create_tenant(bus, name, limits, weight, names))
    if as_json:
        _print_json(record)
    else:
        print(f"tenant {record.name}")


@tenant_app.command("list")
def tenant_list(data_dir: DataDirOption = None, as_json: JsonOption = False) -> None:
    """All tenants with their limits."""
    from compose import admin

    records = _on_bus(data_dir, lambda bus, _: admin.tenants(bus))
    if as_json:
        _print_json(records)
        return
    _print_table(
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
    from compose import admin

    made = _on_bus(data_dir, lambda bus, target: admin.create_key(bus, admin.read_pepper(target.pepper), tenant))
    if as_json:
        _print_json(made)
    else:
        print(f"id   {made.id}\nkey  {made.key}")


@key_app.command("list")
def key_list(
    tenant: Annotated[str | None, typer.Option(help="Only this tenant's keys.")] = None,
    data_dir: DataDirOption = None,
    as_json: JsonOption = False,
) -> None:
    """Keys by id; never the keys themselves."""
    from compose import admin

    records = [
        record
        for record in _on_bus(data_dir, lambda bus, _: admin.keys(bus))
        if tenant is None or record.tenant == tenant
    ]
    if as_json:
        _print_json(records)
        return
    _print_table(
        ("ID", "TENANT", "ADMIN", "CREATED", "REVOKED"),
        [
            (
                record.id,
                record.tenant,
                "yes" if record.admin else "no",
                _instant(record.created_at_ms),
                _instant(record.revoked_at_ms),
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
    from compose import admin

    record = _on_bus(data_dir, lambda bus, _: admin.revoke_key(bus, identifier))
    if as_json:
        _print_json(record)
    else:
        print(f"revoked {record.id} of tenant {record.tenant}")


# Models, queues, usage -------------------------------------------------------------------------------------


@model_app.command("list")
def model_list(data_dir: DataDirOption = None, as_json: JsonOption = False) -> None:
    """Models in the registry."""
    from compose import admin

    manifests = _on_bus(data_dir, lambda bus, _: admin.models(bus))
    if as_json:
        _print_json(manifests)
        return
    _print_table(
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
    from compose import admin
    from compose.up import default_model, make_manifest
    from contracts import topology

    manifest = make_manifest(engine, name or default_model(engine), sim_context)

    async def enter(bus: "Bus", _: Target) -> None:
        for line in await topology.ensure(bus):
            print(f"note: {line}", file=sys.stderr)
        await admin.put_manifest(bus, manifest)

    _on_bus(data_dir, enter)
    if as_json:
        _print_json(manifest)
    else:
        print(f"model {manifest.name} {manifest.version}")


@app.command()
def submit(
    text: Annotated[str, typer.Argument(help="What the user says.")],
    model: Annotated[str | None, typer.Option(show_default="the first of the registry")] = None,
    tenant: Annotated[str, typer.Option(help="Tenant that the answer is charged to.")] = "demo",
    max_tokens: Annotated[int | None, typer.Option(min=1)] = None,
    data_dir: DataDirOption = None,
) -> None:
    """Chat once, as an internal service does: over the bus."""
    from compose import admin
    from contracts.client import Client
    from contracts.errors import HeadraceError

    admin.check_name("tenant name", tenant)
    limit = {} if max_tokens is None else {"max_tokens": max_tokens}

    async def chat(bus: "Bus", target: Target) -> None:
        names = [model] if model is not None else [manifest.name for manifest in await admin.models(bus)]
        if not names:
            raise ComposeError("there is no model in the registry")
        messages = [{"role": "user", "content": text}]
        try:
            async with Client(target.nats_url, tenant=tenant) as client:
                async for chunk in client.chat(model=names[0], messages=messages, **limit):
                    print(chunk.text, end="", flush=True)
        except HeadraceError as error:
            print()
            raise ComposeError(f"{error.message} ({error.code})") from error
        print()

    _on_bus(data_dir, chat)


@app.command()
def queue(
    model: Annotated[str | None, typer.Option(help="Only this model.")] = None,
    data_dir: DataDirOption = None,
    as_json: JsonOption = False,
) -> None:
    """Live queues of each model, by tenant."""
    from compose import admin

    async def ask(bus: "Bus", _: Target) -> list[admin.QueueAnswer]:
        names = [model] if model is not None else [manifest.name for manifest in await admin.models(bus)]
        return [await admin.queue(bus, admin.check_name("model name", name)) for name in names]

    answers = _on_bus(data_dir, ask)
    if as_json:
        _print_json(answers)
        return
    for answer in answers:
        print(
            f"{answer.model}: {answer.waiting} waiting, {answer.running} running, "
            f"{answer.reserved_tokens} tokens reserved, {len(answer.workers)} workers"
        )
        _print_table(
            ("TENANT", "WAITING", "TOKENS", "RUNNING", "RESERVED", "SERVED", "OLDEST MS"),
            [
                (
                    line.tenant,
                    str(line.waiting),
                    str(line.waiting_tokens),
                    str(line.running),
                    str(line.reserved_tokens),
                    f"{line.served_counter:.0f}",
                    str(line.oldest_wait_ms),
                )
                for line in answer.tenants
            ],
        )


class By(enum.StrEnum):
    """What usage is summed by."""

    TENANT = "tenant"
    KEY = "key"
    MODEL = "model"
    VERSION = "version"
    DAY = "day"


@app.command()
def usage(
    by: Annotated[list[By] | None, typer.Option(help="May be repeated.", show_default="tenant")] = None,
    data_dir: DataDirOption = None,
    as_json: JsonOption = False,
) -> None:
    """Usage of the current UTC month, over all tenants."""
    from compose import admin

    dimensions = cast("list[UsageDimension]", [part.value for part in dict.fromkeys(by or [By.TENANT])])
    from_at_ms, to_at_ms = admin.month_of(time.time_ns() // 1_000_000)
    rows = _on_bus(data_dir, lambda bus, _: admin.usage(bus, dimensions, from_at_ms, to_at_ms))
    counts = ("requests", "prompt_tokens", "cached_tokens", "completion_tokens", "reasoning_tokens")
    columns = (*dimensions, *counts)
    if as_json:
        data = [{column: getattr(row, column) for column in columns} for row in rows]
        _print_json({"object": "list", "data": data, "has_more": False})
        return
    _print_table(
        tuple(column.upper().replace("_", " ") for column in columns),
        [tuple(str(getattr(row, column)) for column in columns) for row in rows],
    )


# Helpers ---------------------------------------------------------------------------------------------------


def _on_bus(data_dir: Path | None, work: "Callable[[Bus, Target], Awaitable[T]]") -> T:
    """What ``work`` gives on a connection to the stack that the command is about; raises ComposeError."""
    from compose.terminal import quiet_logs
    from contracts.bus import Bus, BusError

    quiet_logs()
    target = find_target(data_dir, os.environ)

    async def perform() -> T:
        try:
            bus = await Bus.connect(target.nats_url, name="operator", timeout_s=CONNECT_TIMEOUT_S)
        except BusError as error:
            raise ComposeError(f"{error}; is the stack running?") from error
        try:
            return await work(bus, target)
        except BusError as error:
            raise ComposeError(f"no answer over the bus: {error}") from error
        finally:
            await bus.close()

    return asyncio.run(perform())


def _print_json(value: object) -> None:
    print(json.dumps(_plain(value), ensure_ascii=False, indent=2))


def _plain(value: object) -> object:
    """A message as JSON values, with the fields that its wire form leaves out (those with their default)."""
    import msgspec

    if isinstance(value, msgspec.Struct):
        return {name: _plain(item) for name, item in msgspec.structs.asdict(value).items()}
    if isinstance(value, dict):
        return {name: _plain(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value


def _print_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Plain columns, never cut."""
    widths = [max(len(line[column]) for line in (head, *rows)) for column in range(len(head))]
    for line in (head, *rows):
        print("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())


def _instant(at_ms: int) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%SZ", time.gmtime(at_ms / 1000)) if at_ms else "-"


if __name__ == "__main__":
    main()
