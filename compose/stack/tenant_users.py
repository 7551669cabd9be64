"""Users of disabled tenants are none: their connections end, and new ones are refused, until the tenant is enabled.

Gateways refuse a disabled tenant's submits by themselves, and at once; this closes the door to the bus behind it.
"""

import asyncio
from pathlib import Path

import msgspec

from compose.stack import nats_config
from compose.stack.nats_system import Servers
from compose.stack.seeds import Seeds
from contracts import permissions, subjects, topology
from contracts.bus import Bus, KvEntry
from contracts.messages.base import Codec
from contracts.messages.records import TenantRecord

_tenant: Codec[TenantRecord] = Codec(TenantRecord)


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
