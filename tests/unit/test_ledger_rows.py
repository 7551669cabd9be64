"""Which attempt events become rows, which are refused and why."""

import uuid

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from contracts import ids, instants, subjects
from contracts.messages.attempts import AttemptEvent
from ledger.availability import pause_s
from ledger.core import rows

NOW_MS = 1_790_000_000_000
DAY_MS = 86_400_000


def event(**changes: object) -> AttemptEvent:
    fields: dict[str, object] = {
        "request_id": ids.request_id(NOW_MS - 2_000),
        "attempt": 1,
        "tenant": "acme",
        "key_id": "key-1",
        "model": "org/model",
        "version": "v1",
        "endpoint": "chat/completions",
        "priority": "interactive",
        "outcome": "completed",
        "reporter": "worker",
        "billable": True,
        "prompt_tokens": 12,
        "completion_tokens": 34,
        "admitted_at_ms": NOW_MS - 1_900,
        "dispatched_at_ms": NOW_MS - 1_800,
        "first_token_at_ms": NOW_MS - 1_000,
        "ended_at_ms": NOW_MS - 10,
    }
    return AttemptEvent(**{**fields, **changes})  # type: ignore[arg-type]


def source(of: AttemptEvent, **patch: object) -> rows.Source:
    """The event as ATTEMPTS holds it; ``patch`` puts values into its JSON that no AttemptEvent can hold."""
    body = msgspec.json.decode(msgspec.json.encode(of))
    for name, value in patch.items():
        if value is None:
            del body[name]
        else:
            body[name] = value
    subject = subjects.attempt(of.model, of.request_id, of.attempt)
    return rows.Source(subject, msgspec.json.encode(body), 7, NOW_MS)


def test_a_good_event_keeps_every_figure() -> None:
    row = rows.row_of(source(event()))
    assert (row.tenant, row.key_id, row.model, row.version) == ("acme", "key-1", "org/model", "v1")
    assert (row.prompt_tokens, row.completion_tokens, row.billable) == (12, 34, True)
    assert (row.requested_at, row.admitted_at, row.ended_at) == (NOW_MS - 2_000, NOW_MS - 1_900, NOW_MS - 10)
    assert row.time_flag == ""


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("completion_tokens", -5),
        ("completion_tokens", 1 << 40),
        ("completion_tokens", 1 << 32),
        ("completion_tokens", 1 << 70),
        ("completion_tokens", "7"),
        ("completion_tokens", 1.5),
        ("prompt_tokens", True),
        ("attempt", 1 << 16),
        ("ended_at_ms", -1),
        ("reserved_tokens", 1 << 64),
        ("last_seq", -2),
        ("outcome", "won"),
        ("tenant", ""),
        ("tenant", "x" * 129),
        ("tenant", 5),
        ("request_id", "4b4d4d4d-0000-4000-8000-000000000000"),
        ("request_id", "mine"),
    ],
)
def test_a_value_out_of_range_is_refused_by_name(field: str, value: object) -> None:
    with pytest.raises(rows.InvalidEvent, match=field):
        rows.row_of(source(event(), **{field: value}))


def test_a_missing_tenant_is_refused() -> None:
    with pytest.raises(rows.InvalidEvent, match="tenant"):
        rows.row_of(source(event(), tenant=None))


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"nope",
        b"[]",
        b"null",
        b"\xff\xfe",
        b'{"tenant": NaN}',
        b'{"tenant":"\\ud800"}',
        b"[" * 5_000,
        b'{"x":' + b"[" * 1_000_000,
    ],
)
def test_what_is_no_event_is_refused(data: bytes) -> None:
    with pytest.raises(rows.InvalidEvent):
        rows.row_of(rows.Source("attempt.v1.m.x.1", data, 1, NOW_MS))


def test_null_is_no_number() -> None:
    data = source(event()).data.replace(b'"completion_tokens":34', b'"completion_tokens":null')
    with pytest.raises(rows.InvalidEvent, match="completion_tokens"):
        rows.row_of(source(event())._replace(data=data))


def test_an_event_on_another_attempts_subject_is_refused() -> None:
    """The subject is what makes an event the only one of its attempt."""
    with pytest.raises(rows.InvalidEvent, match="belongs on"):
        rows.row_of(source(event())._replace(subject=source(event()).subject))


@given(st.binary(max_size=200))
def test_no_bytes_raise_anything_else(data: bytes) -> None:
    with pytest.raises(rows.InvalidEvent):
        rows.row_of(rows.Source("attempt.v1.m.x.1", data, 1, NOW_MS))


@pytest.mark.parametrize(
    ("admitted_at_ms", "kept", "flag"),
    [
        (NOW_MS + 4 * 60_000, True, ""),
        (NOW_MS + 3 * DAY_MS, False, "ahead"),
        (NOW_MS - 6 * DAY_MS, True, ""),
        (NOW_MS - 60 * DAY_MS, True, "late"),
        (1, False, "behind"),
        ((1 << 63) - 1, False, "ahead"),
    ],
)
def test_a_wrong_clock_cannot_date_usage(admitted_at_ms: int, kept: bool, flag: str) -> None:
    """Far-off times are replaced by the bus's time of storage, and flagged; a late replay keeps its time."""
    row = rows.row_of(source(event(admitted_at_ms=admitted_at_ms)))
    assert row.admitted_at == (admitted_at_ms if kept else NOW_MS)
    assert row.time_flag == flag


def test_what_was_never_admitted_is_dated_by_its_id() -> None:
    row = rows.row_of(source(event(attempt=0, outcome="expired", admitted_at_ms=0, dispatched_at_ms=0)))
    assert (row.admitted_at, row.dispatched_at, row.time_flag) == (NOW_MS - 2_000, 0, "")


@pytest.mark.parametrize("at_ms", [0, (1 << 48) - 1])
def test_an_absurd_id_makes_no_absurd_partition(at_ms: int) -> None:
    """The key's time comes from the id alone, so that copies meet, and is bounded."""
    row = rows.row_of(source(event(request_id=ids.request_id(at_ms))))
    assert rows.REQUESTED_MS_MIN <= row.requested_at <= rows.REQUESTED_MS_MAX


def test_the_event_stored_first_has_precedence() -> None:
    first, second = event(), event(outcome="lost")
    assert (
        rows.row_of(source(first)).precedence > rows.row_of(source(second)._replace(stored_at_ms=NOW_MS + 1)).precedence
    )


def test_tokens_of_inserts() -> None:
    """Equal for the same rows; not for others, other orders, or the same sequences of a recreated stream."""
    one, two = rows.row_of(source(event())), rows.row_of(source(event()))
    assert rows.insert_token([one, two]) == rows.insert_token([one, two])
    assert rows.insert_token([one, two]) != rows.insert_token([two, one])
    assert rows.insert_token([one]) != rows.insert_token([two])
    assert rows.insert_token([one]) != rows.insert_token([one._replace(stored_at=NOW_MS + 1)])


def test_columns_are_the_migrations() -> None:
    from ledger.store import migrations

    (create,) = migrations()[0][1]
    names = [line.split()[0] for line in create.splitlines() if line.startswith("    ") and "INDEX" not in line]
    added = [
        line.split()[5]
        for _, parts in migrations()
        for part in parts
        for line in part.splitlines()
        if "ADD COLUMN" in line
    ]
    assert set(names) | set(added) == set(rows.Row._fields)
    assert [name for name in rows.Row._fields if name not in added] == names


def test_columns_of_deliveries_are_the_migrations() -> None:
    from ledger.core import deliveries
    from ledger.store import migrations

    [create] = [part for _, parts in migrations() for part in parts if "EXISTS deliveries" in part]
    assert [line.split()[0] for line in create.splitlines() if line.startswith("    ")] == list(deliveries.COLUMNS)


def test_dead_letters_keep_what_came() -> None:
    of = rows.Source("attempt.v1.m.x.1", b"nope", 3, NOW_MS)
    letter = rows.dead_letter(of, "not JSON")
    assert (letter.original, letter.original_base64, letter.truncated) == ("nope", None, False)
    letter = rows.dead_letter(of._replace(data=b"\xff"), "not JSON")
    assert (letter.original, letter.original_base64) == (None, "/w==")
    letter = rows.dead_letter(of._replace(data=b"\0" * 1_000_000), "not JSON")
    assert letter.truncated
    assert len(msgspec.json.encode(letter)) < 1_000_000


def test_a_cut_never_makes_text_unreadable() -> None:
    """A letter of several bytes may lie across the cut."""
    data = b"a" + "é".encode() * rows.ORIGINAL_BYTES_MAX
    letter = rows.dead_letter(rows.Source("attempt.v1.m.x.1", data, 3, NOW_MS), "not JSON")
    assert letter.original is not None or letter.original_base64 is not None


@pytest.mark.parametrize(
    ("text", "month", "days"), [("2026-12-31T23:59:59.999", "2026-12", 31), ("2028-02-29T00:00:00", "2028-02", 29)]
)
def test_months_are_utc_and_half_open(text: str, month: str, days: int) -> None:
    from datetime import datetime

    at_ms = int(datetime.fromisoformat(text + "+00:00").timestamp() * 1000)
    start, end = instants.month_around(at_ms)
    assert instants.month_of(at_ms) == instants.month_of(start) == instants.month_of(end - 1) == month
    assert end - start == days * DAY_MS


def test_pauses_grow_to_a_bound() -> None:
    pauses = [pause_s(failures, lambda: 0.0) for failures in range(1, 100)]
    assert pauses[0] == 0.2
    assert pauses == sorted(pauses)
    assert pauses[-1] == 30.0


def test_ids_are_kept_exactly() -> None:
    of = event()
    assert str(uuid.UUID(int=rows.row_of(source(of)).request_id)) == of.request_id
