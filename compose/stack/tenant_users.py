"""Users of disabled tenants are none: their connections end, and new ones are refused, until the tenant is enabled.

Gateways refuse a disabled tenant's submits by themselves, and at once; this closes the door to the bus behind it.
"""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import msgspec

from compose.stack import nats_config
from compose.stack.data_dir import ComposeError
from compose.stack.nats_system import Servers
from compose.stack.seeds import SYSTEM, Seeds
from contracts import permissions, subjects, topology
from contracts.bus import Bus, BusError, Credentials, KvEntry
from contracts.messages.base import Codec
from contracts.messages.records import TenantRecord

_tenant: Codec[TenantRecord] = Codec(TenantRecord)


RETRY_S = 1.0


async def keep_following(
    url: str, files: Credentials, seeds: Seeds, directory: Path, say: Callable[[str], None]
) -> NoReturn:
    """``follow``, again after whatever ends it, until cancelled. ``files``: of TLS; the seeds are ours to find."""
    operator, system = (
        msgspec.structs.replace(files, seed_file=str(seeds.path(user))) for user in (permissions.OPERATOR, SYSTEM)
    )
    while True:
        try:
            bus = await Bus.connect(url, name=permissions.OPERATOR, credentials=operator)
            try:
                await follow(bus, seeds, directory, Servers(url, system))
            finally:
                await bus.close()
        except (BusError, ComposeError, TimeoutError) as error:
            say(f"note: the bus may be open to disabled tenants: {error}")
        await asyncio.sleep(RETRY_S)


async def follow(bus: Bus, seeds: Seeds, directory: Path, servers: Servers) -> None:
    """Have the servers know the users of enabled tenants alone, until cancelled. ``bus``: as the operator.

    Raises BusError, and ComposeError when the servers do not take it.
    """
    enabled: dict[str, bool] = {}
    changed = asyncio.Event()

    def note(key: str, entry: KvEntry | None) -> None:
        enabled[permissions.user_of_tenant(subjects.decode(key))] = entry is not None and _is_enabled(entry)
        changed.set()

    watch = await bus.kv.watch(topology.TENANTS, note)
    try:
        while True:
            await changed.wait()
            changed.clear()
            changes = [seeds.shut(user, shut=not is_enabled) for user, is_enabled in enabled.items()]
            if any(changes):
                nats_config.write(directory, seeds)
                await servers.reload()
    finally:
        await watch.close()


def _is_enabled(entry: KvEntry) -> bool:
    """What nobody can read lets nobody in."""
    try:
        return not _tenant.decode(entry.value).disabled
    except msgspec.MsgspecError:
        return False
