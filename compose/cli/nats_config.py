"""``headrace nats-config``: users of the bus, for its operator."""

import asyncio
import os
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from compose.stack.data_dir import ComposeError, DataDir, default_data_dir

if TYPE_CHECKING:
    from compose.stack.nats_system import Servers
    from compose.stack.seeds import Seeds
    from contracts.bus import Credentials

ROTATION_S, LOOK_S = 60.0, 0.5
"""So long may services take to connect with new seeds; they look twice a second."""
RECORD_S = 3.0


def nats_config(
    user: Annotated[
        list[str] | None, typer.Option(help="Make this user of a service: gateway-eu1, worker-7; may be repeated.")
    ] = None,
    tenant: Annotated[str | None, typer.Option(help="Make the user of this tenant's own services.")] = None,
    rotate: Annotated[
        bool, typer.Option("--rotate", help="Replace the seeds: of --user and --tenant, else of all.")
    ] = False,
    follow: Annotated[
        bool, typer.Option("--follow", help="Go on: cut off the services of tenants as they are disabled.")
    ] = False,
    directory: Annotated[
        Path | None, typer.Option("--dir", help="Of server/ and seeds/ for a server of your own.")
    ] = None,
    data_dir: Annotated[
        Path | None, typer.Option(help="Stack whose bus it is; else HEADRACE_DATA_DIR or .headrace.")
    ] = None,
) -> None:
    """Make users of the bus, with what each needs and no more, and have its servers take them at once.

    Seeds stand in files of mode 0600, <user>.seed, and nowhere else; the server's configuration, nats-users.conf, has
    public keys. A rotation lets nobody go: services notice the new file, and only when nobody uses a former seed any
    more it is refused. With --dir the servers at HEADRACE_NATS_URL are told, if that is set.
    """
    from compose.stack import nats_config, tenant_users
    from compose.stack.nats_system import Servers
    from compose.stack.seeds import SYSTEM, Seeds
    from compose.stack.terminal import quiet_logs
    from contracts import permissions, subjects
    from contracts.bus import Credentials

    quiet_logs()
    where, url = _place(directory, data_dir)
    try:
        named = [*(user or ()), *([permissions.user_of_tenant(tenant)] if tenant is not None else [])]
        for each in user or ():
            permissions.role_of(each)
    except subjects.InvalidName as error:
        raise ComposeError(f"this cannot be a user: {error}") from error
    seeds = Seeds(where / "seeds")
    seeds.ensure([SYSTEM, permissions.OPERATOR, *named])
    nats_config.write(where, seeds)
    system = Credentials.from_environment(os.environ | {"HEADRACE_NATS_SEED_FILE": str(seeds.path(SYSTEM))})
    if (rotate or follow) and not url:
        raise ComposeError("this asks the servers of the bus: set HEADRACE_NATS_URL")
    if rotate:
        asyncio.run(_rotate(where, seeds, named or seeds.users(), Servers(url, system)))
    elif url:
        asyncio.run(Servers(url, system).reload())
    if url:
        credentials = Credentials.from_environment(
            os.environ | {"HEADRACE_NATS_SEED_FILE": str(seeds.path(permissions.OPERATOR))}
        )
        asyncio.run(_record(url, credentials, "users.rotate" if rotate else "users.make", ", ".join(named) or "all"))
    if follow:
        asyncio.run(tenant_users.keep_following(url, system, seeds, where, partial(print, file=sys.stderr)))
    for each in named:
        print(f"HEADRACE_NATS_URL={url}\nHEADRACE_NATS_SEED_FILE={seeds.path(each)}")


async def _record(url: str, credentials: "Credentials", action: str, target: str) -> None:
    """In the audit trail, where there is one already. Not a condition: who has the server's files needs no command."""
    from compose.stack.records import operator
    from contracts import audit
    from contracts.bus import Bus, BusError
    from contracts.errors import HeadraceError

    try:
        bus = await Bus.connect(url, name="operator", credentials=credentials, timeout_s=RECORD_S)
        try:
            async with audit.recorded(bus, operator(), action, target):
                pass
        finally:
            await bus.close()
    except (BusError, HeadraceError) as error:
        print(f"note: this is not in the audit trail: {error}", file=sys.stderr)


def _place(directory: Path | None, data_dir: Path | None) -> tuple[Path, str]:
    """Where the files are, and the address of the bus, empty when nobody is to be told."""
    if directory is not None:
        return directory, os.environ.get("HEADRACE_NATS_URL", "")
    stack = DataDir(data_dir or default_data_dir(os.environ))
    run = stack.read_run()
    if not run.pids.get("nats"):
        raise ComposeError("the stack uses a server that is not its own; name the directory of its users with --dir")
    return stack.nats, run.nats_url


async def _rotate(where: Path, seeds: "Seeds", users: Sequence[str], servers: "Servers") -> None:
    """The servers take both seeds until nobody uses the former one."""
    from compose.stack import nats_config

    former = {key for user in users for key in seeds.public_keys(user)}
    seeds.prepare(users)
    nats_config.write(where, seeds)
    await servers.reload()
    seeds.switch(users)
    deadline = time.monotonic() + ROTATION_S
    while used := former & await servers.connected_keys():
        if time.monotonic() > deadline:
            print(f"{len(used)} users have not taken their new seed within {ROTATION_S:g} s: cut off", file=sys.stderr)
            break
        await asyncio.sleep(LOOK_S)
    nats_config.write(where, seeds)
    await servers.reload()
