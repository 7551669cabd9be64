"""Two owners of one model against one, in memory: CPU of a request in an owner, and what leases of limits add to it.

    python -m tests.bench.bench_shards [--requests 20000]

A request's way from its admission to its dispatch, one in a millisecond, of 200 tenants; each owner has every other
request. An exchange of leases costs its step, the record's decoding and encoding; its two trips to the bus are not
here, so that what one costs nats-server and an owner's socket comes on top: exchanges are counted for that.
"""

import argparse
import gc
import statistics
import time
from typing import NamedTuple

import msgspec

from contracts import shards
from contracts.messages.admission import AdmissionRequest
from contracts.messages.base import Codec, Epoch
from contracts.messages.control import WorkerHeartbeat
from contracts.messages.records import ModelRecord, PoolLimits, SharedQuota, TenantLimits, TenantRecord
from scheduler.core import events
from scheduler.core.core import Core
from scheduler.core.quota_leases import exchange
from scheduler.core.settings import Settings

EPOCH = Epoch(1, 1)
TENANTS = 200
UNBOUNDED = PoolLimits(
    queued_requests=10**9, queued_tokens=10**15, tenant_queued_requests=10**9, tenant_queued_tokens=10**15
)
RATES = TenantLimits(rpm=10**6, input_tpm=10**9, output_tpm=10**9)
LIMITS = {"none": TenantLimits(), "rates": RATES, "all": msgspec.structs.replace(RATES, concurrency=10**6)}
"""Far from reached: what counts is what it costs to hold them. Nothing ends here, so that permits are asked for all the
time."""
_record = Codec[SharedQuota](SharedQuota)


class Cost(NamedTuple):
    """Microseconds of CPU of a request in its owner, and exchanges for each."""

    us: float
    exchanges: float


class Owners:
    """All owners of one model, and the records that they share."""

    def __init__(self, number: int, limits: TenantLimits) -> None:
        self.cores = [
            Core(
                model=name,
                owner=name,
                epoch=EPOCH,
                record=ModelRecord(name=name, stable="v", shards=number, limits=UNBOUNDED),
                settings=Settings(),
                now_ms=0,
            )
            for name in shards.names("m", number)
        ]
        self.records: dict[str, bytes] = {}
        self.exchanges = 0
        for core in self.cores:
            for tenant in range(TENANTS):
                self.feed(core, events.TenantChanged(f"t{tenant}", TenantRecord(name=f"t{tenant}", limits=limits)), 0)
            self.feed(core, events.Recovered(), 0)

    def feed(self, core: Core, event: events.Event, now_ms: int) -> None:
        for effect in core.step(event, now_ms):
            if isinstance(effect, events.ExchangeLease):
                self.exchanges += 1
                stored = self.records.get(effect.tenant)
                before = None if stored is None else _record.decode(stored)
                shared, grant = exchange(before, core.model, effect.ask, now_ms)
                self.records[effect.tenant] = _record.encode(shared)
                self.feed(core, events.LeaseExchanged(effect.tenant, grant), now_ms)


def measure(number: int, requests: int, limits: TenantLimits) -> Cost:
    owners = Owners(number, limits)
    for core in owners.cores:
        beat = WorkerHeartbeat(
            worker="w", model=core.model, version="v", state="ready", epoch=EPOCH, slots=requests, kv_tokens=10**12
        )
        owners.feed(core, events.WorkerSeen(beat), 0)
    asked = [
        AdmissionRequest(
            request_id=f"r{each}",
            tenant=f"t{each // number % TENANTS}",
            key_id="k",
            model=owners.cores[each % number].model,
            endpoint="chat/completions",
            prompt_tokens=100 + each % 900,
            max_output_tokens=100,
        )
        for each in range(requests)
    ]
    gc.collect()
    began = time.process_time()
    for now_ms, request in enumerate(asked):
        core = owners.cores[now_ms % number]
        owners.feed(core, events.AdmissionAsked(request, None), now_ms)
        owners.feed(core, events.RequestStored(core.requests[request.request_id].envelope, now_ms + 1, now_ms), now_ms)
        if now_ms % 250 == 0:
            for each in owners.cores:
                owners.feed(each, events.TimePassed(), now_ms)
    spent = time.process_time() - began
    assert sum(len(core.requests) for core in owners.cores) == requests
    return Cost(spent / requests * 1e6, owners.exchanges / requests)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=20_000)
    options = parser.parse_args()
    print("owners  limits  us a request  exchanges a request  requests for a second of each owner's CPU, together")
    for number, held in ((1, "none"), (1, "all"), (2, "none"), (2, "rates"), (2, "all")):
        limits = LIMITS[held]
        runs = [measure(number, options.requests, limits) for _ in range(3)]
        us, exchanges = (statistics.median(figures) for figures in zip(*runs, strict=True))
        print(f"{number:6}  {held:6}  {us:12.1f}  {exchanges:19.3f}  {number * 1e6 / us:10.0f}")


if __name__ == "__main__":
    main()
