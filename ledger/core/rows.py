"""Which event becomes which row, which is refused and why, what hours a batch touches, how its insert is named; pure.

Writing is the store's, delivery the service's.
"""

import base64
import functools
import hashlib
import re
import uuid
from collections.abc import Iterable, Sequence
from typing import Annotated, Any, NamedTuple

import msgspec

from contracts import shards, subjects
from contracts.messages.attempts import AttemptEvent, DeadLetter
from contracts.messages.base import Codec

UINT32_MAX = (1 << 32) - 1
UINT64_MAX = (1 << 64) - 1
INT64_MAX = (1 << 63) - 1

AHEAD_MS_MAX = 5 * 60_000
"""A time further ahead of the bus's clock comes from a wrong clock. A guess at what hosts drift."""
LATE_MS = 7 * 86_400_000
"""Older than ATTEMPTS keeps events: plausible only as a replay, so it is kept and flagged."""
BEHIND_MS_MAX = 3 * 366 * 86_400_000
"""A time further back comes from a wrong clock (a dead one says 1970)."""

REQUESTED_MS_MIN = 1_577_836_800_000
REQUESTED_MS_MAX = 4_102_444_799_999
"""Bounds of the partition's time, 2020 to 2099: an absurd request id must not make partitions without end."""

ORIGINAL_BYTES_MAX = 100_000
"""Of a refused event, so that its dead letter fits into a bus message however it is escaped."""

_UInt16 = Annotated[int, msgspec.Meta(ge=0, le=(1 << 16) - 1)]
_UInt32 = Annotated[int, msgspec.Meta(ge=0, le=UINT32_MAX)]
_Natural = Annotated[int, msgspec.Meta(ge=0, le=INT64_MAX)]


class _Event(AttemptEvent, frozen=True, kw_only=True):
    """An attempt event whose numbers fit their columns; the decoder checks that."""

    attempt: _UInt16
    choices: _UInt32 = 1
    prompt_tokens: _UInt32 = 0
    cached_tokens: _UInt32 = 0
    completion_tokens: _UInt32 = 0
    reasoning_tokens: _UInt32 = 0
    reserved_tokens: _Natural = 0
    last_seq: Annotated[int, msgspec.Meta(ge=-1, le=INT64_MAX)] = -1
    admitted_at_ms: _Natural = 0
    dispatched_at_ms: _Natural = 0
    started_at_ms: _Natural = 0
    first_token_at_ms: _Natural = 0
    ended_at_ms: _Natural = 0
    pause_ms_max: _UInt32 = 0


_events: Codec[_Event] = Codec(_Event)

_UUID7 = re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-7[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}")
"""One spelling only: another one would be another subject for the same key."""


class InvalidEvent(ValueError):
    """The event can be no row; the text says why and repeats nothing of the event but numbers and names."""


class Source(NamedTuple):
    """An event as ATTEMPTS holds it. ``stored_at_ms`` is the bus's clock, by which others are judged."""

    subject: str
    data: bytes
    stream_seq: int
    stored_at_ms: int


class Row(NamedTuple):
    """One row of table ``attempts``: its columns, in order. Instants are Unix ms, ids the UUID's integer."""

    tenant: str
    requested_at: int
    request_id: int
    attempt: int
    key_id: str
    model: str
    version: str
    endpoint: str
    priority: str
    outcome: str
    reporter: str
    worker: str
    stream: bool
    finish_reason: str
    error_code: str
    error_message: str
    retryable: bool
    engine_death: bool
    billable: bool
    choices: int
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    reasoning_tokens: int
    reserved_tokens: int
    last_seq: int
    admitted_at: int
    dispatched_at: int
    started_at: int
    first_token_at: int
    ended_at: int
    pause_ms_max: int
    arm: str
    stored_at: int
    stream_seq: int
    time_flag: str
    client_request_id: str
    traceparent: str
    precedence: int
    requested_model: str
    choice_reason: str


_NO_COLUMN = ("idempotency", "withdrawn", "spent_input_tokens", "accused", "body_hash")
EVENT_COLUMNS = {name: name.removesuffix("_ms") for name in AttemptEvent.__struct_fields__ if name not in _NO_COLUMN}
"""Field of an attempt event -> its column. Idempotency keys are for schedulers and end after minutes."""


def row_of(source: Source) -> Row:
    """The row of an event; raises InvalidEvent. The same event always gives the same row."""
    try:
        event = _events.decode(source.data)
    except msgspec.ValidationError as error:
        raise InvalidEvent(f"not an attempt event: {error}") from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidEvent(f"not JSON: {error}") from error
    request_id = _identity(event, source.subject)
    created_at_ms = request_id >> 80

    clock = _Clock(source.stored_at_ms)
    # What was never admitted is dated by its id.
    admitted_at = clock.read(event.admitted_at_ms or created_at_ms)
    dispatched_at = clock.read(event.dispatched_at_ms)
    started_at = clock.read(event.started_at_ms)
    first_token_at = clock.read(event.first_token_at_ms)
    ended_at = clock.read(event.ended_at_ms)
    return Row(
        tenant=event.tenant,
        requested_at=requested_at_ms(request_id),
        request_id=request_id,
        attempt=event.attempt,
        key_id=event.key_id,
        model=shards.model_of(event.model),
        version=event.version,
        endpoint=event.endpoint,
        priority=event.priority,
        outcome=event.outcome,
        reporter=event.reporter,
        worker=event.worker,
        stream=event.stream,
        finish_reason=event.finish_reason,
        error_code=event.error_code,
        error_message=event.error_message,
        retryable=event.retryable,
        engine_death=event.engine_death,
        billable=event.billable,
        choices=event.choices,
        prompt_tokens=event.prompt_tokens,
        # Part of the prompt, whatever an engine says: what was not cached is priced, and is never negative.
        cached_tokens=min(event.cached_tokens, event.prompt_tokens),
        completion_tokens=event.completion_tokens,
        reasoning_tokens=min(event.reasoning_tokens, event.completion_tokens),
        reserved_tokens=event.reserved_tokens,
        last_seq=event.last_seq,
        admitted_at=admitted_at,
        dispatched_at=dispatched_at,
        started_at=started_at,
        first_token_at=first_token_at,
        ended_at=ended_at,
        pause_ms_max=event.pause_ms_max,
        arm=event.arm,
        stored_at=source.stored_at_ms,
        stream_seq=source.stream_seq,
        time_flag=clock.flag,
        client_request_id=event.client_request_id,
        traceparent=event.traceparent,
        precedence=UINT64_MAX - source.stored_at_ms,
        requested_model=event.requested_model or shards.model_of(event.model),
        choice_reason=event.choice_reason,
    )


def event_of(values: Sequence[Any]) -> AttemptEvent:
    """The event of a row: its EVENT_COLUMNS, in their order; instants in Unix ms."""
    fields = dict(zip(EVENT_COLUMNS, values, strict=True))
    fields["request_id"] = str(uuid.UUID(str(fields["request_id"])))
    return AttemptEvent(**fields)


def event_of_row(row: Row) -> AttemptEvent:
    """The event that a row was made of, but for what no column holds."""
    values = row._asdict() | {"request_id": uuid.UUID(int=row.request_id)}
    return event_of([values[column] for column in EVENT_COLUMNS.values()])


HOUR_MS = 3_600_000


def marks(rows: Iterable[Row]) -> list[tuple[int, int, int, int]]:
    """Row of ``rollup_marks`` for each hour of usage that these rows touch: its start in Unix s, one mark, and
    the bounds of the rows in the key of ``attempts``.
    """
    found: dict[int, tuple[int, int]] = {}
    for each in rows:
        hour = each.admitted_at // HOUR_MS
        first, last = found.get(hour, (each.requested_at, each.requested_at))
        found[hour] = (min(first, each.requested_at), max(last, each.requested_at))
    return [(hour * 3600, 1, first, last) for hour, (first, last) in sorted(found.items())]


def request_number(request_id: str) -> int:
    """The integer of a request id; raises ValueError when it is no UUIDv7 in lower case."""
    if not _UUID7.fullmatch(request_id):
        raise ValueError("request_id is not a UUIDv7")
    return int(request_id.replace("-", ""), 16)


def request_id_at_the_end(text: str) -> str:
    """The request id that an answer's id ends with, as in ``chatcmpl-<request id>``; empty when there is none."""
    found = text[-36:].lower()
    return found if _UUID7.fullmatch(found) else ""


def requested_at_ms(request_number: int) -> int:
    """The time inside a request id, as the table's key holds it."""
    return min(max(request_number >> 80, REQUESTED_MS_MIN), REQUESTED_MS_MAX)


def _identity(event: AttemptEvent, subject: str) -> int:
    """The request id's integer. The subject is what made the event the only one of its attempt."""
    try:
        number = request_number(event.request_id)
    except ValueError as error:
        raise InvalidEvent(str(error)) from error
    try:
        _subject_token(event.tenant)
    except subjects.InvalidName as error:
        raise InvalidEvent(f"tenant: {error}") from error
    try:
        expected = f"attempt.v1.{_subject_token(event.model)}.{event.request_id}.{event.attempt}"
    except subjects.InvalidName as error:
        raise InvalidEvent(f"model: {error}") from error
    if subject != expected:
        raise InvalidEvent(f"the event belongs on {expected}")
    return number


@functools.lru_cache(10_000)
def _subject_token(name: str) -> str:
    return subjects.encode(name)


class _Clock:
    """Reads an event's times against the bus's; ``flag`` holds the worst finding."""

    def __init__(self, stored_at_ms: int) -> None:
        self._stored_at_ms = stored_at_ms
        self.flag = ""

    def read(self, at_ms: int) -> int:
        """``at_ms``, or the time of storage where it cannot be right; 0, which means never, stays."""
        age_ms = self._stored_at_ms - at_ms
        if at_ms == 0 or -AHEAD_MS_MAX <= age_ms <= LATE_MS:
            return at_ms
        if LATE_MS < age_ms <= BEHIND_MS_MAX:
            self.flag = self.flag or "late"
            return at_ms
        self.flag = "ahead" if age_ms < 0 else "behind"
        return self._stored_at_ms


def dead_letter(source: Source, reason: str) -> DeadLetter:
    """What is kept of a refused event: the reason, where it was and its first ORIGINAL_BYTES_MAX bytes."""
    original = source.data[:ORIGINAL_BYTES_MAX]
    text, encoded = None, None
    try:
        text = original.decode()
    except UnicodeDecodeError:
        encoded = base64.b64encode(original).decode()
    return DeadLetter(
        reason=reason,
        subject=source.subject,
        stream_seq=source.stream_seq,
        stored_at_ms=source.stored_at_ms,
        original=text,
        original_base64=encoded,
        truncated=len(original) < len(source.data),
    )


def insert_token(rows: Iterable[Row]) -> str:
    """Name of an insert: equal for a repetition of the same rows in the same order, and for nothing else.

    Sequences alone would not do: those of a recreated stream start again at 1.
    """
    digest = hashlib.sha256()
    for each in rows:
        digest.update(f"{each.stream_seq} {each.stored_at} {each.request_id} {each.attempt}\n".encode())
    return digest.hexdigest()


def halves(rows: Sequence[Row]) -> tuple[Sequence[Row], Sequence[Row]]:
    """Two parts of a batch that ClickHouse refused, to find the row that it refuses."""
    middle = len(rows) // 2
    return rows[:middle], rows[middle:]
