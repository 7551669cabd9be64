"""``headrace up``: the one-machine stack."""

import os
from pathlib import Path
from typing import Annotated

import typer

from compose.stack.data_dir import ComposeError, Engine, Options, default_data_dir


def up(
    engine: Annotated[Engine, typer.Option(help="Engine of the workers.")] = "vllm",
    model: Annotated[list[str] | None, typer.Option(help="Model to serve; may be repeated.")] = None,
    workers: Annotated[str, typer.Option(help="Workers of each model, or such as a=2,b=1.")] = "1",
    autoscale: Annotated[
        str, typer.Option(help="MIN..MAX: workers of each model come and go by what its requests need.")
    ] = "",
    gateways: Annotated[int, typer.Option(min=1, help="Gateways, which share the port.")] = 1,
    schedulers: Annotated[int, typer.Option(min=1, help="Schedulers.")] = 1,
    host: Annotated[str, typer.Option(help="Address that the gateways listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port of the API; 0 takes a free one.")] = 8080,
    admin_port: Annotated[
        int, typer.Option(min=0, max=65535, help="Port of the admin API on 127.0.0.1; 0 takes a free one.")
    ] = 0,
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
    from compose.stack.autoscale import parse
    from compose.stack.manifest import default_model
    from compose.stack.up import run
    from compose.stack.workers import counts

    models = tuple(dict.fromkeys(model or [default_model(engine)]))
    try:
        of_each = counts(workers, models)
        bounds = parse(autoscale)
    except ComposeError as error:
        raise typer.BadParameter(str(error)) from error
    options = Options(
        engine=engine,
        models=models,
        workers=of_each,
        autoscale=bounds,
        gateways=gateways,
        schedulers=schedulers,
        host=host,
        port=port,
        admin_port=admin_port,
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
    raise typer.Exit(run(options, data_dir or default_data_dir(os.environ)))
