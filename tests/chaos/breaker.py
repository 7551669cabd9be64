"""What breaks during the long run: services, links, the bus, clocks, the store of bodies; and an earlier state."""

import asyncio
import random
import shutil
import time
from collections import Counter
from collections.abc import Callable, Coroutine
from signal import SIGTERM
from typing import Any

from contracts import topology
from contracts.bus import Bus
from tests.support.cluster import Cluster, Service
from tests.support.polling import until
from tests.support.proxy import Link

LONG_CUT_S = 90.0
CLOCK_STEPS_S = (-3600, -120, -5, 5, 120, 3600)
FULL_BYTES = 64 << 10
"""Of the store of bodies while it counts as full: less than one takes."""
RESTORED_S = 5.0
"""What ended so shortly before a restore may be lost with what was not backed up."""


class Breaker:
    """Breaks something every few seconds and mends it again. ``kills``: when workers were killed, by bus name."""

    def __init__(self, cluster: Cluster, clients: list[Link], source: random.Random, every_s: float) -> None:
        self.counts: Counter[str] = Counter()
        self.kills: dict[str, float] = {}
        self.exits: Counter[str] = Counter()
        """Services that ended by themselves."""
        self.restores: list[tuple[float, float]] = []
        """From what may be lost until the server was back."""
        self.backups: list[tuple[float, float]] = []
        """Times from which REQUESTS and WORK of the backup may be."""
        self._cluster = cluster
        self._clients = clients
        self._source = source
        self._every_s = every_s
        self._broken: set[Service] = set()
        self._faults: set[asyncio.Task[None]] = set()
        self._bus_is_down = asyncio.Lock()
        self._cut_long = False
        self._backup = cluster.directory / "backup"

    async def run(self) -> None:
        kinds: list[tuple[int, str, Callable[[], Coroutine[Any, Any, None]]]] = [
            (8, "kill", self._kill),
            (6, "freeze", self._freeze),
            (6, "cut", self._cut),
            (4, "stop", self._stop),
            (2, "nats", self._nats),
            (1, "long cut", self._cut_for_long),
            (2, "full store of bodies", self._fill_bodies),
            *([(6, "clock", self._step_clock)] if self._cluster.faketime else []),
        ]
        while True:
            await asyncio.sleep(self._source.uniform(0.5, 1.5) * self._every_s)
            self._revive()
            _, name, fault = self._source.choices(kinds, [weight for weight, _, _ in kinds])[0]
            self.begin(name, fault())

    def begin(self, name: str, fault: Coroutine[Any, Any, None]) -> None:
        """Break something beside the rest."""
        task = asyncio.create_task(fault, name=name)
        self._faults.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._faults.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self.exits[f"the fault {task.get_name()} itself: {error!r}"] += 1

    async def settle(self) -> None:
        """No more faults; everything is up again."""
        while self._faults:
            await asyncio.wait(self._faults)
        for link in self._clients:
            link.heal()
        self._revive()
        await self._cluster.mend()

    def _revive(self) -> None:
        """What ended by itself is started again, as a supervisor does."""
        for service in self._cluster.services:
            if service not in self._broken and not service.alive:
                self.exits[f"{service.role} exit {service.exit_code}"] += 1
                service.start()

    def _choose(self) -> Service | None:
        """Nothing that is broken already, and never the last of its role for long."""
        whole = [service for service in self._cluster.services if service not in self._broken and service.alive]
        if not whole:
            return None
        chosen = self._source.choice(whole)
        self._broken.add(chosen)
        return chosen

    async def _kill(self) -> None:
        if (service := self._choose()) is None:
            return
        self.counts[f"kill {service.role}"] += 1
        if service.role == "worker":
            self.kills[service.joined_as] = time.monotonic()
        service.kill()
        await asyncio.sleep(self._source.uniform(0.1, 4))
        service.start()
        self._broken.discard(service)

    async def _freeze(self) -> None:
        if (service := self._choose()) is None:
            return
        self.counts[f"freeze {service.role}"] += 1
        service.freeze()
        await asyncio.sleep(self._source.uniform(0.5, 7))
        service.thaw()
        self._broken.discard(service)

    async def _cut(self) -> None:
        if self._source.random() < 0.2:
            self.counts["cut client"] += 1
            link = self._source.choice(self._clients)
            link.cut()
            await asyncio.sleep(self._source.uniform(0.5, 7))
            link.heal()
        elif (service := self._choose()) is not None:
            self.counts[f"cut {service.role}"] += 1
            if self._source.random() < 0.3:
                service.link.stall()
            else:
                service.link.cut()
            await asyncio.sleep(self._source.uniform(0.5, 7))
            service.link.heal()
            self._broken.discard(service)

    async def _cut_for_long(self) -> None:
        """One service, or one client, is away from the bus for 90 s; one at a time."""
        if self._cut_long:
            return
        self._cut_long = True
        try:
            if self._source.random() < 0.3:
                self.counts["cut client for 90 s"] += 1
                link = self._source.choice(self._clients)
                link.cut()
                await asyncio.sleep(LONG_CUT_S)
                link.heal()
            elif (service := self._choose()) is not None:
                self.counts[f"cut {service.role} for 90 s"] += 1
                service.link.cut()
                await asyncio.sleep(LONG_CUT_S)
                service.link.heal()
                self._broken.discard(service)
        finally:
            self._cut_long = False

    async def cut_all(self) -> None:
        """Nobody reaches the bus for 90 s."""
        async with self._bus_is_down:
            self.counts["cut all for 90 s"] += 1
            self._cluster.nats.freeze()
            await asyncio.sleep(LONG_CUT_S)
            self._cluster.nats.thaw()

    async def _stop(self) -> None:
        if (service := self._choose()) is None:
            return
        self.counts[f"stop {service.role}"] += 1
        service.signal(SIGTERM)
        code = await service.exited(60)
        if code != 0:
            self.exits[f"{service.role} exit {code} after SIGTERM"] += 1
        service.start()
        self._broken.discard(service)

    async def _nats(self) -> None:
        if self._bus_is_down.locked():
            return
        async with self._bus_is_down:
            self.counts["restart nats"] += 1
            self._cluster.nats.stop()
            await asyncio.sleep(self._source.uniform(0, 2.5))
            self._cluster.nats.start()

    async def _step_clock(self) -> None:
        """The wall clock of one service, and what it believes of the time, for some seconds."""
        service = self._source.choice(self._cluster.clocked)
        step_s = self._source.choice(CLOCK_STEPS_S)
        self.counts[f"clock of {service.role}"] += 1
        service.set_clock(step_s)
        await asyncio.sleep(self._source.uniform(3, 15))
        service.set_clock(0)

    async def _fill_bodies(self) -> None:
        """No body can be stored for some seconds."""
        if self._bus_is_down.locked():
            return
        async with self._bus_is_down, self._cluster.bus() as bus:
            self.counts["full store of bodies"] += 1
            full = await _resized(bus, FULL_BYTES)
            await asyncio.sleep(self._source.uniform(2, 10))
            await _resized(bus, full)

    async def back_up(self) -> None:
        """Keep the server's store as it is now."""
        async with self._bus_is_down:
            self.counts["backup"] += 1
            began = time.monotonic() - RESTORED_S
            self._cluster.nats.stop(SIGTERM)
            shutil.rmtree(self._backup, ignore_errors=True)
            await asyncio.to_thread(shutil.copytree, self._cluster.nats.store, self._backup)
            self.backups = [(began, time.monotonic())]
            self._cluster.nats.start()

    async def restore(self) -> None:
        """The server's store is again what was backed up, once the ledger has booked what was stored until now."""
        async with self._bus_is_down:
            self.counts["restore"] += 1
            for ledger in self._cluster.ledgers:
                self._broken.add(ledger)
                ledger.link.heal()
                if ledger.alive:
                    ledger.thaw()
                else:
                    ledger.start()
            async with self._cluster.bus() as bus:
                await until(lambda: _is_booked(bus), "the ledger has read all", 60)
            began = time.monotonic() - RESTORED_S
            self._cluster.nats.stop()
            store = self._cluster.nats.store
            shutil.rmtree(store)
            await asyncio.to_thread(shutil.copytree, self._backup, store)
            self._cluster.nats.start()
            self._broken -= set(self._cluster.ledgers)
            self.restores.append((began, time.monotonic() + RESTORED_S))
            print(f"  restored, {time.strftime('%H:%M:%S')}", flush=True)


async def _is_booked(bus: Bus) -> bool:
    info = await bus.jetstream.api(f"CONSUMER.INFO.{topology.ATTEMPTS}.ledger")
    return not info["num_pending"] and not info["num_ack_pending"]


async def _resized(bus: Bus, bytes_max: int) -> int:
    """Give the store of bodies so much room; gives what it had."""
    config = (await bus.jetstream.api(f"STREAM.INFO.{topology.BODIES}"))["config"]
    had = int(config["max_bytes"])
    await bus.jetstream.api(f"STREAM.UPDATE.{topology.BODIES}", config | {"max_bytes": bytes_max})
    return had
