"""Removes from ATTEMPTS what is in ClickHouse and older than any zombie (KEEP_S).

A subject kept costs the server memory, so this is due. By sequence it takes a few calls for any number of
events; by subject it would take one each.
"""

from datetime import UTC, datetime

from contracts.bus import Bus, NotFound
from contracts.bus.jetstream import rfc3339_ns
from contracts.topology import ATTEMPTS
from ledger import metrics

KEEP_S = 2 * 3600
"""Longer than any worker or scheduler may sleep and still have its event refused as the second one."""
MESSAGES_MAX = 100_000
"""Removed at a time, so that the server never works on it for long."""


async def purge(bus: Bus, durable: str) -> int:
    """Remove at most MESSAGES_MAX events that are old and that ``durable`` has acknowledged without a gap.

    Old by the bus's clock, which dated them: a ledger whose own is ahead must not let an attempt end twice. Returns
    how many went; raises BusError.
    """
    consumer = await bus.jetstream.api(f"CONSUMER.INFO.{ATTEMPTS}.{durable}")
    stream = await bus.jetstream.api(f"STREAM.INFO.{ATTEMPTS}")
    first_seq = int(stream["state"]["first_seq"])
    keep_from = min(int(consumer["ack_floor"]["stream_seq"]) + 1, first_seq + MESSAGES_MAX)
    cutoff_s = rfc3339_ns(stream["ts"]) / 1e9 - KEEP_S
    cutoff = datetime.fromtimestamp(cutoff_s, UTC).isoformat().replace("+00:00", "Z")
    try:
        young = await bus.jetstream.api(f"STREAM.MSG.GET.{ATTEMPTS}", {"start_time": cutoff})
        keep_from = min(keep_from, int(young["message"]["seq"]))
    except NotFound:
        pass  # all are old
    if keep_from <= first_seq:
        return 0
    answer = await bus.jetstream.api(f"STREAM.PURGE.{ATTEMPTS}", {"seq": keep_from})
    metrics.PURGED.inc(int(answer["purged"]))
    return int(answer["purged"])
