"""Who owns a model: a KV lease with a time to live, taken and renewed by compare-and-set.

A bus that was restored from a backup gives revisions again that it gave before. Then an owner finds workers that know
an epoch above its own: it writes down an era above theirs, beside the lease, and the terms after it begin there.
"""

import asyncio
import time
from collections.abc import Callable

import structlog
from msgspec.structs import astuple

from contracts import topology
from contracts.bus import Bus, BusError, WrongSequence
from contracts.clock import SteadyClock
from contracts.messages.base import Epoch
from contracts.ticks import tick

log = structlog.get_logger()

ERA_MAX = 2**62
"""Centuries above any creation time in ns; a message that names a higher one is nonsense."""


class Lease:
    """One candidate's hold on one model's lease.

    ``held`` is judged by our own monotonic clock: a frozen process that wakes up finds the lease gone before it
    acts, even when the bus is cut off.
    """

    def __init__(self, bus: Bus, key: str, owner: str, *, ttl_s: int, renew_s: float) -> None:
        self._bus = bus
        self._key = key
        self._value = owner.encode()
        self._ttl_s = ttl_s
        self._renew_s = renew_s
        self._revision = 0
        self._renewed_at = 0.0
        self._surpassed = False
        self.epoch = Epoch()
        self.clock = SteadyClock(0)
        """The term's time: the bus's when the lease was taken, and what has passed since."""

    @property
    def held(self) -> bool:
        """Whether nobody else can own the model yet."""
        return self._left_s > 0

    @property
    def _left_s(self) -> float:
        return self._renewed_at + self._ttl_s * 0.9 - time.monotonic() if self._revision > 0 else 0.0

    async def acquire(self) -> None:
        """Wait until the lease is ours; sets ``epoch`` and ``clock``."""
        while True:
            asked_at = time.monotonic()
            try:
                revision = await self._bus.kv.create(topology.LEASES, self._key, self._value, ttl_s=self._ttl_s)
                era, _ = await self._least_era()
                created_ns, now_ns = await self._bus.kv.times_ns(topology.LEASES)
            except WrongSequence:
                pass
            except BusError as error:
                log.warning("lease_unreachable", key=self._key, reason=str(error))
            else:
                self._revision = revision
                self._renewed_at = asked_at
                self.epoch = Epoch(max(created_ns, era), revision)
                self.clock = SteadyClock(now_ns // 1_000_000)
                return
            await asyncio.sleep(self._renew_s)

    async def keep(self, bus: Bus, moves: Callable[[], bool] = lambda: True) -> None:
        """Renew until the lease is lost or the epoch surpassed, then return; in time, also when the bus is silent.

        By ``bus``, which may be another thread's: an owner whose event loop is late keeps its lease. One of which
        ``moves`` says that it is given up does not.
        """
        while self.held:
            await tick(self._renew_s)
            if self._surpassed:
                return
            if not moves():
                log.error("lease_given_up", key=self._key, reason="the owner's event loop stands still")
                break
            try:
                async with asyncio.timeout(max(0.0, self._left_s)):
                    if not await self._renew(bus):
                        break
            except BusError as error:
                log.warning("lease_not_renewed", key=self._key, reason=str(error))
            except TimeoutError:
                log.warning("lease_not_renewed", key=self._key, reason="no answer in time")
        self._revision = 0

    async def _renew(self, bus: Bus) -> bool:
        """Whether the lease is still ours."""
        asked_at = time.monotonic()
        try:
            self._revision = await bus.kv.update(
                topology.LEASES, self._key, self._value, revision=self._revision, ttl_s=self._ttl_s
            )
        except WrongSequence:
            return await self._renewed_after_all(bus)
        self._renewed_at = asked_at
        return True

    async def _renewed_after_all(self, bus: Bus) -> bool:
        """A renewal whose answer was lost is seen as a newer revision with our own value.

        An older one is of a bus that was restored: what was read of its streams holds no longer.
        """
        asked_at = time.monotonic()
        try:
            entry = await bus.kv.get(topology.LEASES, self._key)
        except BusError:
            return self.held
        if entry is None or entry.value != self._value or entry.revision < self._revision or not self.held:
            return False
        self._revision = entry.revision
        self._renewed_at = asked_at
        return True

    async def rise_above(self, epoch: Epoch) -> None:
        """End the term; whoever owns the model next has an epoch above ``epoch``. Raises BusError."""
        if self._surpassed or not self.held or epoch.era >= ERA_MAX:
            return
        least, revision = await self._least_era()
        if least <= epoch.era:
            value = str(epoch.era + 1).encode()
            try:
                await self._bus.kv.update(topology.LEASES, self._era_key, value, revision=revision)
            except WrongSequence:
                return  # Somebody else was faster; the next heartbeat tells whether by enough.
        log.warning("epoch_surpassed", key=self._key, ours=astuple(self.epoch), theirs=astuple(epoch))
        self._surpassed = True

    async def _least_era(self) -> tuple[int, int]:
        """The era that was written down, and the revision of that; zeros when there is none."""
        entry = await self._bus.kv.get(topology.LEASES, self._era_key)
        return (int(entry.value), entry.revision) if entry else (0, 0)

    @property
    def _era_key(self) -> str:
        return f"{self._key}/era"

    async def release(self) -> None:
        """Give the lease back so that a standby takes over at once."""
        if self._revision:
            revision, self._revision = self._revision, 0
            try:
                await self._bus.kv.delete(topology.LEASES, self._key, revision=revision)
            except BusError as error:
                log.warning("lease_not_released", key=self._key, reason=str(error))
