"""What the worker's core is told (events, past tense) and what it orders (effects, imperative). No decisions."""

from typing import Any

import msgspec

from contracts.messages.attempts import AttemptEvent
from contracts.messages.control import ControlAnswer, ControlRequest
from contracts.messages.frames import EndData, ErrorData
from contracts.messages.request import WorkItem
from worker.engines.base import Counts, EngineFailure

Key = tuple[str, int]
"""(request_id, attempt)"""


class Event(msgspec.Struct, frozen=True, kw_only=True):
    """Something that happened; what happens to the engine is an EngineEvent."""


class Joined(Event, frozen=True, kw_only=True):
    """The worker took a new name: at its start, or after an eviction."""

    worker: str


class RoomFreed(Event, frozen=True, kw_only=True):
    """Somebody else who shares the engine takes up less of it."""


class WorkPulled(Event, frozen=True, kw_only=True):
    """An attempt came out of WORK, perhaps not for the first time."""

    item: WorkItem
    delivery: int
    """Number in the stream, by which it is acknowledged."""


class AttemptEnded(Event, frozen=True, kw_only=True):
    """An attempt's generation is over: by itself, by ``failure``, or by a Stop."""

    key: Key
    frames: int
    """Frames sent so far."""
    chunks: int
    """Chunks among them."""
    failure: EngineFailure | None = None


class EventStored(Event, frozen=True, kw_only=True):
    """The attempt's terminal event is stored: this worker's (``won``) or somebody else's."""

    key: Key
    won: bool


class ControlAsked(Event, frozen=True, kw_only=True):
    """An order came from a scheduler."""

    request: ControlRequest
    asker: Any
    """Whom AnswerControl goes to; only handed back."""


class DrainStarted(Event, frozen=True, kw_only=True):
    """The graceful drain begins: what runs may finish, nothing new starts."""


class GraceEnded(Event, frozen=True, kw_only=True):
    """The time for the graceful drain is over."""


class VersionFetched(Event, frozen=True, kw_only=True):
    """Another version's files are here, verified."""

    version: str


class DrainKnown(Event, frozen=True, kw_only=True):
    """Since a drain for another version began there was time to hear of it: nothing more is on its way here."""


class VersionRefused(Event, frozen=True, kw_only=True):
    """Another version's files cannot be had, or are not what was published."""

    version: str
    reason: str


class Effect(msgspec.Struct, frozen=True, kw_only=True):
    """Something to do."""


class StartAttempt(Effect, frozen=True, kw_only=True):
    """Run it; AttemptEnded must follow, once."""

    key: Key
    item: WorkItem
    counts: Counts


class StopAttempt(Effect, frozen=True, kw_only=True):
    """Abort the generation; AttemptEnded must follow within a bound, whatever the engine does."""

    key: Key


class StoreEvent(Effect, frozen=True, kw_only=True):
    """Store it unless another one is; EventStored must follow, once it is known which."""

    key: Key
    event: AttemptEvent


class CloseStream(Effect, frozen=True, kw_only=True):
    """Send the frame ``last``, if there is one; no frames follow."""

    item: WorkItem
    last: EndData | ErrorData | None = None


class AckWork(Effect, frozen=True, kw_only=True):
    """The request is settled: its message leaves WORK."""

    delivery: int


class LeaveWork(Effect, frozen=True, kw_only=True):
    """The message stays in WORK: another attempt may need its body, and the scheduler deletes it."""

    delivery: int


class AnswerControl(Effect, frozen=True, kw_only=True):
    """Answer an order."""

    asker: Any
    answer: ControlAnswer


class TellCache(Effect, frozen=True, kw_only=True):
    """Tell anew what the engine's cache keeps: there is a new owner, or this one has missed something."""


class SendHeartbeat(Effect, frozen=True, kw_only=True):
    """Send one at once: something changed that the scheduler waits for."""


class RebuildEngine(Effect, frozen=True, kw_only=True):
    """Close the engine and build another one."""

    reason: str


class FetchVersion(Effect, frozen=True, kw_only=True):
    """Fetch a version's files while this one is served; VersionFetched or VersionRefused must follow."""

    version: str


class LoadVersion(Effect, frozen=True, kw_only=True):
    """Close the engine, load that version's, and take a new name (Joined). Nothing is in flight."""

    version: str


class Rejoin(Effect, frozen=True, kw_only=True):
    """Abort all attempts without another frame or event, then take a new name (Joined)."""
