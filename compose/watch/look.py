"""What ``headrace top`` shows: the live view, open roll-outs and the last failures, over the operator's connection."""

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Self

import msgspec

from contracts import clock, operations, registry, topology
from contracts.bus import Bus, Incoming
from contracts.errors import HeadraceError
from contracts.live import LiveView, Rates, live_model
from contracts.messages.attempts import AttemptEvent
from contracts.messages.base import Codec
from contracts.messages.queues import QueueAnswer
from contracts.messages.rollouts import OVER

FAILURES_MAX = 20
TAIL = 500
"""Ends of attempts among which the last failures are looked for at the start: half a MB."""
OVER_FOR_MS = 3_600_000
"""How long a roll-out that is over is still shown."""
_FAILED = ("failed", "lost", "expired")

_event = Codec[AttemptEvent](AttemptEvent)


class Failure(msgspec.Struct, frozen=True, kw_only=True):
    """An attempt that failed, was lost, or whose time ran out; ``headrace explain`` says more."""

    at_ms: int
    request_id: str
    attempt: int
    tenant: str
    model: str
    version: str
    worker: str
    outcome: str
    code: str


class Rolling(msgspec.Struct, frozen=True, kw_only=True):
    """A roll-out that is open, or was until lately. ``why``: what it waits for, or why it is over."""

    model: str
    stable: str | None
    to: str
    phase: str | None
    """None: no scheduler has taken it up."""
    paused: bool
    share: float | None
    """Of requests that the new version gets, 0 to 1."""
    why: str


class Seen(msgspec.Struct, frozen=True, kw_only=True):
    """One look."""

    live: LiveView
    rollouts: list[Rolling]
    failures: list[Failure]
    """The last one first."""


class Looker:
    """Looks at a system within ``at``: rates need looks a second apart."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._rates: dict[str, Rates] = {}
        self._failures: deque[Failure] = deque(maxlen=FAILURES_MAX)

    @classmethod
    @asynccontextmanager
    async def at(cls, bus: Bus) -> AsyncIterator[Self]:
        """Hears of failures meanwhile."""
        looker = cls(bus)
        subscription = await bus.subscribe("attempt.v1.>", looker._on_end)
        try:
            _, last = await bus.jetstream.stream_state(topology.ATTEMPTS)
            heard = list(looker._failures)
            looker._failures.clear()
            async for message in bus.jetstream.read(topology.ATTEMPTS, "attempt.v1.>", start_seq=max(1, last - TAIL)):
                looker._on_end(message)
            known = {(each.request_id, each.attempt) for each in looker._failures}
            looker._failures += [each for each in heard if (each.request_id, each.attempt) not in known]
            yield looker
        finally:
            await subscription.close()

    def _on_end(self, message: Incoming) -> None:
        event = _event.decode(message.data)
        if event.outcome in _FAILED:
            self._failures.append(_failure(event))

    async def look(self) -> Seen:
        """How it stands now; what does not answer says so. Raises BusError when the bus does not."""
        records = sorted(await registry.models(self._bus), key=lambda record: record.name)
        answers = await asyncio.gather(*(self._ask(record.name) for record in records))
        models = []
        for record, told in zip(records, answers, strict=True):
            rates = self._rates.setdefault(record.name, Rates())
            if isinstance(told, QueueAnswer):
                rates.take(told.workers, time.monotonic())
            models.append(live_model(record.name, record.stable, told, rates))
        live = LiveView(at_ms=clock.now_ms(), gateway="", bus="connected", models=models)
        return Seen(live=live, rollouts=await self._rollouts(), failures=list(reversed(self._failures)))

    async def _ask(self, model: str) -> QueueAnswer | str:
        try:
            return await operations.queue(self._bus, model)
        except HeadraceError as error:
            return error.message

    async def _rollouts(self) -> list[Rolling]:
        found = []
        for shown in await registry.rollouts(self._bus):
            progress = shown.progress
            if progress is None:
                found.append(_rolling_up(shown.plan.model, shown.plan.to))
            elif progress.phase not in OVER or clock.now_ms() - progress.ended_at_ms < OVER_FOR_MS:
                found.append(
                    Rolling(
                        model=progress.model,
                        stable=progress.stable,
                        to=progress.to,
                        phase=progress.phase,
                        paused=progress.paused,
                        share=progress.share,
                        why=progress.reason or (f"waits for {progress.waits_for}" if progress.waits_for else ""),
                    )
                )
        return found


def _rolling_up(model: str, to: str) -> Rolling:
    why = "no scheduler has taken it up yet"
    return Rolling(model=model, stable=None, to=to, phase=None, paused=False, share=None, why=why)


def _failure(event: AttemptEvent) -> Failure:
    return Failure(
        at_ms=event.ended_at_ms,
        request_id=event.request_id,
        attempt=event.attempt,
        tenant=event.tenant,
        model=event.model,
        version=event.version,
        worker=event.worker,
        outcome=event.outcome,
        code=event.error_code,
    )
