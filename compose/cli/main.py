"""The ``headrace`` command: runs the one-machine stack and manages the records of a running one.

Exit status: 0 done, 1 not done (the reason is on standard error), 2 the command line is wrong. With
``--json`` standard output is JSON alone. A command imports what it needs, so that each starts fast.
"""

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from compose.cli import usage
from compose.cli.common import DataDirOption, JsonOption, on_bus, print_json, print_table
from compose.cli.nats_config import nats_config
from compose.cli.quarantine import quarantine_app
from compose.cli.records import key_app, model_app, tenant_app
from compose.stack.data_dir import ComposeError, Engine, Options, Target, default_data_dir
from contracts.errors import HeadraceError

if TYPE_CHECKING:
    from contracts.bus import Bus

app = typer.Typer(
    no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, help="Headrace: LLM serving."
)
app.add_typer(tenant_app, name="tenant")
app.add_typer(key_app, name="key")
app.add_typer(model_app, name="model")
app.add_typer(quarantine_app, name="quarantine")
app.command()(nats_config)


def main() -> None:
    """Entry point of the console script."""
    try:
        app()
    except (ComposeError, HeadraceError) as error:
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
    tls_cert: Annotated[str, typer.Option(help="Certificate file of the API; with --tls-key. Else plain HTTP.")] = "",
    tls_key: Annotated[str, typer.Option(help="File of the certificate's key.")] = "",
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
    from compose.stack import up as stack

    options = Options(
        engine=engine,
        models=tuple(dict.fromkeys(model or [stack.default_model(engine)])),
        workers=workers,
        gateways=gateways,
        schedulers=schedulers,
        host=host,
        port=port,
        tls_cert=tls_cert,
        tls_key=tls_key,
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
    from compose.stack import doctor as checks

    findings = checks.examine(data_dir or default_data_dir(os.environ), port)
    if as_json:
        print_json([{"name": f.name, "ok": f.ok, "needed": f.needed, "text": f.text} for f in findings])
    else:
        for finding in findings:
            mark = "ok     " if finding.ok else "WRONG  " if finding.needed else "note   "
            print(f"{mark} {finding.name}: {finding.text}")
    raise typer.Exit(1 if any(finding.needed and not finding.ok for finding in findings) else 0)


# Asking ----------------------------------------------------------------------------------------------------


@app.command()
def submit(
    text: Annotated[str, typer.Argument(help="What the user says.")],
    model: Annotated[str | None, typer.Option(show_default="the first of the registry")] = None,
    tenant: Annotated[str, typer.Option(help="Tenant that the answer is charged to.")] = "demo",
    max_tokens: Annotated[int | None, typer.Option(min=1)] = None,
    data_dir: DataDirOption = None,
) -> None:
    """Chat once, as an internal service does: over the bus."""
    from contracts import registry
    from contracts.client.client import Client

    registry.check_name("tenant name", tenant)
    limit = {} if max_tokens is None else {"max_tokens": max_tokens}

    async def chat(bus: "Bus", target: Target) -> None:
        names = [model] if model is not None else [manifest.name for manifest in await registry.models(bus)]
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

    on_bus(data_dir, chat)


@app.command()
def queue(
    model: Annotated[str | None, typer.Option(help="Only this model.")] = None,
    data_dir: DataDirOption = None,
    as_json: JsonOption = False,
) -> None:
    """Live queues of each model, by tenant."""
    from compose.stack import admin
    from contracts import registry

    async def ask(bus: "Bus", _: Target) -> list[admin.QueueAnswer]:
        names = [model] if model is not None else [manifest.name for manifest in await registry.models(bus)]
        return [await admin.queue(bus, registry.check_name("model name", name)) for name in names]

    answers = on_bus(data_dir, ask)
    if as_json:
        print_json(answers)
        return
    for answer in answers:
        print(
            f"{answer.model}: {answer.waiting} waiting, {answer.running} running, "
            f"{answer.reserved_tokens} tokens reserved, {len(answer.workers)} workers"
        )
        print_table(
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


usage.register(app)


if __name__ == "__main__":
    main()
