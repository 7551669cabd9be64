"""``headrace nats-config``: users and permissions of the bus, for its operator."""

import asyncio
import os
import secrets
import signal
from pathlib import Path
from typing import Annotated

import typer

from compose.stack.data_dir import ComposeError, DataDir

TRIES, TRY_S = 10, 1.0


def nats_config(
    tenant: Annotated[str | None, typer.Option(help="The user of this tenant's own services instead.")] = None,
    data_dir: Annotated[
        Path | None, typer.Option(help="Stack whose server gets the tenant's user; the address of the bus is printed.")
    ] = None,
) -> None:
    """Print the users block of the NATS configuration, or admit a tenant's services to the bus.

    Without --tenant: all services, each with what it needs and no more; passwords are variables. With --tenant: one
    more user, who may submit, cancel and read for that tenant alone. With --data-dir the stack that runs there takes
    and keeps the user.
    """
    from compose.stack import nats_config
    from compose.stack.terminal import quiet_logs
    from contracts import permissions, subjects

    if tenant is None:
        print(nats_config.users({role: nats_config.variable(role) for role in permissions.ROLES}, {}), end="")
        return
    try:
        user = permissions.user_of_tenant(tenant)
    except subjects.InvalidName as error:
        raise ComposeError(f"this tenant cannot be a user: {error}") from error
    if data_dir is None:
        print(nats_config.tenant_block(tenant, secrets.token_hex(24)), end="")
        return
    directory = DataDir(data_dir)
    run = directory.read_run()
    kept = directory.secrets(tenant)
    nats_config.write(directory.nats, kept.nats_passwords, kept.nats_tenants)
    if not run.pids.get("nats"):
        raise ComposeError("the stack uses a server that is not its own; print the block without --data-dir")
    quiet_logs()
    url = f"nats://{user}:{kept.nats_tenants[tenant]}@{run.nats_url.rpartition('@')[2]}"
    os.kill(run.pids["nats"][0], signal.SIGHUP)  # The server reads its configuration again.
    asyncio.run(_admitted(url, user))
    print(url)


async def _admitted(url: str, user: str) -> None:
    """Wait until the server takes the user; raises ComposeError."""
    from contracts.bus import Bus, BusError

    for _ in range(TRIES):
        try:
            bus = await Bus.connect(url, name="operator", inbox=user, timeout_s=TRY_S)
        except BusError:
            continue
        await bus.close()
        return
    raise ComposeError("the server does not take its new configuration; its log says why")
