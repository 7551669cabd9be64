"""Which attempts are in flight at a worker, what they occupy, and what became of those that are not any more.

Counts and remembers. What starts, stops or ends an attempt is decided in `core`.
"""

from collections import deque
from collections.abc import Iterator
from typing import Any, Literal

import msgspec

from contracts.messages.attempts import AttemptEvent
from contracts.messages.base import Epoch
from contracts.messages.request import WorkItem
from worker.core.events import Key
from worker.core.outcomes import AttemptOutcome, reserved_tokens
from worker.engines.base import Counts

Stage = Literal["waiting", "running", "stopping", "storing"]
ACTIVE = ("running", "stopping")
"""Stages in which the engine has the attempt."""

Tombstone = Literal["never", "finished", "settled"]
"""Of an attempt that is not in flight: never started; finished; finished, and by our stored event so is its request."""

NEVER_SEEN: tuple[Tombstone, Epoch] = ("never", Epoch(-1, -1))
FOR_EVER = Epoch(2**63 - 1, 2**63 - 1)

TOMBSTONES_MAX = 100_000
"""Minutes of the fastest worker, while a repeated delivery of a finished attempt needs a lost acknowledgement or a
cancel that overtook it, seconds."""


class InFlight(msgspec.Struct, kw_only=True):
    """An attempt from its pull until its terminal event is stored."""

    item: WorkItem
    deliveries: list[int]
    stage: Stage = "waiting"
    counts: Counts
    pulled_at_ms: int
    """By the worker's monotonic clock, from which the spans of its event are counted."""
    started_at_ms: int = 0
    """When its engine got it, by the same clock; 0 while it waits."""
    outcome: AttemptOutcome | None = None
    accused: int = 0
    """To how many the death of its engine is put down, this one among them."""
    event: AttemptEvent | None = None
    askers: list[Any]
    """Who wait for the answer to a cancel."""
    slots: int
    tokens: int
    seen_tokens: int = 0
    """Output tokens at the last look at progress."""
    idle_samples: int = 0
    """Looks in a row without progress."""

    @property
    def key(self) -> Key:
        """Request id and number of the attempt."""
        return self.item.request.request_id, self.item.attempt

    def is_late(self, now_ms: int) -> bool:
        """Whether its deadline has passed without a token. The instants are the owner's, between them lies a span."""
        if self.counts.completion_tokens:
            return False
        within_ms = self.item.request.deadline_at_ms - self.item.dispatched_at_ms
        return now_ms - self.pulled_at_ms >= within_ms


class Occupancy:
    """What of an engine is taken, by all that share it."""

    def __init__(self) -> None:
        self.slots = 0
        self.tokens = 0
        self.releases = 0
        """So many attempts have left it: who waits may look again when that grows."""


class Attempts:
    """``slots`` and ``kv_tokens`` are the engine's; several attempts run at once only while both suffice.

    ``occupancy``: of an engine that others use, too.
    """

    def __init__(self, kv_overbooking: float, occupancy: Occupancy | None = None) -> None:
        self._taken = occupancy or Occupancy()
        self.slots = 0
        self.kv_tokens = 0
        self._kv_overbooking = kv_overbooking
        self._in_flight: dict[Key, InFlight] = {}
        self._waiting: deque[Key] = deque()
        self._slots_in_flight = 0
        self._slots_active = 0
        self._tokens_active = 0
        self._tombstones: dict[Key, tuple[Tombstone, Epoch]] = {}
        """Oldest first; with the highest epoch whose work for the attempt is refused."""

    def __len__(self) -> int:
        return len(self._in_flight)

    def __iter__(self) -> Iterator[InFlight]:
        """All in flight; they may be changed and removed meanwhile."""
        return iter(list(self._in_flight.values()))

    def get(self, key: Key) -> InFlight | None:
        """The attempt if it is in flight."""
        return self._in_flight.get(key)

    @property
    def waiting(self) -> int:
        """How many have not started."""
        return len(self._waiting)

    def not_started(self) -> list[InFlight]:
        """Those that wait, in order."""
        return [self._in_flight[key] for key in self._waiting]

    @property
    def free_slots(self) -> int:
        """Slots that nothing in flight takes; what waits or is being stored takes some, too."""
        return max(0, self.slots_here - self._slots_in_flight)

    @property
    def slots_here(self) -> int:
        """Slots that others who share the engine do not take; one at least, so that nobody is shut out for ever."""
        return max(min(1, self.slots), self.slots - (self._taken.slots - self._slots_active))

    def add(self, item: WorkItem, delivery: int, now_ms: int) -> InFlight:
        """Take in a new attempt, as the last one that waits."""
        attempt = InFlight(
            item=item,
            deliveries=[delivery],
            counts=Counts(),
            pulled_at_ms=now_ms,
            askers=[],
            slots=max(1, min(item.request.choices, self.slots)),
            tokens=reserved_tokens(item.request),
        )
        self._tombstones.pop(attempt.key, None)
        self._in_flight[attempt.key] = attempt
        self._slots_in_flight += attempt.slots
        self._waiting.append(attempt.key)
        return attempt

    @property
    def engine_idle(self) -> bool:
        """Whether nobody has anything in it."""
        return not self._taken.slots

    def start_next(self) -> InFlight | None:
        """The first that waits, now running, if its slots and KV tokens are free; an idle engine takes any size."""
        if not self._waiting:
            return None
        attempt = self._in_flight[self._waiting[0]]
        taken = self._taken
        if taken.slots and (taken.slots + attempt.slots > self.slots or taken.tokens + attempt.tokens > self._room):
            return None
        self._waiting.popleft()
        attempt.stage = "running"
        self._occupy(attempt, 1)
        return attempt

    def leave_engine(self, attempt: InFlight) -> None:
        """It runs no more, or never will; its event is being stored."""
        if attempt.stage == "waiting":
            self._waiting.remove(attempt.key)
        elif attempt.stage in ACTIVE:
            self._occupy(attempt, -1)
            self._taken.releases += 1
        attempt.stage = "storing"

    def _occupy(self, attempt: InFlight, sign: int) -> None:
        self._slots_active += sign * attempt.slots
        self._tokens_active += sign * attempt.tokens
        self._taken.slots += sign * attempt.slots
        self._taken.tokens += sign * attempt.tokens

    def remove(self, attempt: InFlight) -> None:
        """It is no longer in flight, whatever its stage."""
        self.leave_engine(attempt)
        del self._in_flight[attempt.key]
        self._slots_in_flight -= attempt.slots

    def bury(self, key: Key, tombstone: Tombstone, until: Epoch) -> None:
        """Remember what became of an attempt; work for it is refused up to and including the epoch ``until``."""
        self._tombstones.pop(key, None)
        self._tombstones[key] = (tombstone, until)
        if len(self._tombstones) > TOMBSTONES_MAX:
            del self._tombstones[next(iter(self._tombstones))]

    def tombstone(self, key: Key) -> tuple[Tombstone, Epoch]:
        """What ``bury`` was told last; NEVER_SEEN without that."""
        return self._tombstones.get(key, NEVER_SEEN)

    @property
    def _room(self) -> float:
        return self.kv_tokens * self._kv_overbooking

    def violations(self) -> Iterator[str]:
        """Rules that do not hold now; tests look after every step."""
        active = [attempt for attempt in self if attempt.stage in ACTIVE]
        if self._slots_active != sum(attempt.slots for attempt in active):
            yield "active slots are miscounted"
        if self._tokens_active != sum(attempt.tokens for attempt in active):
            yield "active tokens are miscounted"
        if self._slots_in_flight != sum(attempt.slots for attempt in self):
            yield "slots in flight are miscounted"
        if sorted(self._waiting) != sorted(attempt.key for attempt in self if attempt.stage == "waiting"):
            yield "the line and the stages differ"
        if self._in_flight.keys() & self._tombstones.keys():
            yield "an attempt is in flight and buried"
        if len(active) > 1 and self._slots_active > self.slots:
            yield "more runs than there are slots"
        if len(active) > 1 and self._tokens_active > self._room:
            yield "more runs than the KV cache holds"
        for attempt in self:
            if (attempt.stage in ("stopping", "storing")) != (attempt.outcome is not None):
                yield f"{attempt.key} is {attempt.stage} with the outcome {attempt.outcome}"
