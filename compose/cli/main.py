"""The ``headrace`` command: one file a noun, one row of the table below.

Exit status: 0 done, 1 not done (the reason is on standard error), 2 the command line is wrong. With
``--json`` standard output is JSON alone. A command imports what it needs, so that each starts fast.
"""

import sys

import typer

from compose.cli import (
    alias,
    audit,
    bench,
    cancel,
    capacity,
    dead_letters,
    doctor,
    explain,
    invoice,
    key,
    latency,
    model,
    nats_config,
    pools,
    price,
    quarantine,
    queue,
    rollout,
    simulate,
    submit,
    tenant,
    top,
    trace,
    up,
    usage,
    worker,
)
from compose.stack.data_dir import ComposeError
from contracts.errors import HeadraceError

COMMANDS = (
    up.up,
    doctor.doctor,
    submit.submit,
    queue.queue,
    pools.pools,
    usage.usage,
    latency.latency,
    invoice.invoice,
    explain.explain,
    top.top,
    cancel.cancel,
    trace.trace,
    nats_config.nats_config,
    audit.audit,
    bench.bench,
    simulate.simulate,
    capacity.capacity,
)
GROUPS = {
    "tenant": tenant.app,
    "key": key.app,
    "model": model.app,
    "alias": alias.app,
    "rollout": rollout.app,
    "worker": worker.app,
    "quarantine": quarantine.app,
    "price": price.app,
    "ledger": dead_letters.app,
}

app = typer.Typer(
    no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, help="Headrace: LLM serving."
)
for command in COMMANDS:
    app.command()(command)
for name, group in GROUPS.items():
    app.add_typer(group, name=name)


def main() -> None:
    """Entry point of the console script."""
    try:
        app()
    except (ComposeError, HeadraceError, OSError) as error:  # OSError: a file that was named and is not to be had
        print(f"headrace: {error}", file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    main()
