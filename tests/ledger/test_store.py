"""The ledger's table on the real engine (chDB): exact before any merge, with duplicates and across months.

chDB allows one directory per process, so one store serves the module.
"""

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import datetime
from pathlib import Path
from typing import Any

import msgspec
import pytest

from contracts import ids, instants, subjects
from contracts.messages.attempts import AttemptEvent
from contracts.messages.usage import UsageQuery
from ledger import rollups
from ledger.config import LedgerConfig
from ledger.core import queries
from ledger.core.rows import UINT32_MAX, Row, Source, row_of
from ledger.store import Away, BadValues, Owned, Store, _patiently, migrate, migrations
from tests.support.polling import until

ROOT = Path(__file__).parents[2]


def ms(text: str) -> int:
    return int(datetime.fromisoformat(text + "+00:00").timestamp() * 1000)


STORED_MS = ms("2026-11-02T12:00:00")
_tenants = iter(range(10_000))


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("chdb")


@asynccontextmanager
async def opened(directory: Path) -> AsyncIterator[Store]:
    store = Store(f"chdb://{directory}", "headrace")
    await store.open()
    try:
        yield store
    finally:
        await store.close()


@pytest.fixture
def tenant() -> str:
    return f"tenant-{next(_tenants)}"


def row(tenant: str, admitted: str, *, seq: int = 1, **changes: object) -> Row:
    at_ms = ms(admitted)
    fields: dict[str, object] = {
        "request_id": ids.request_id(at_ms),
        "attempt": 1,
        "tenant": tenant,
        "key_id": "key-1",
        "model": "m",
        "version": "v1",
        "endpoint": "completions",
        "priority": "batch",
        "outcome": "completed",
        "reporter": "worker",
        "billable": True,
        "prompt_tokens": 100,
        "completion_tokens": 10,
        "admitted_at_ms": at_ms,
        "ended_at_ms": at_ms + 500,
    }
    event = AttemptEvent(**{**fields, **changes})  # type: ignore[arg-type]
    subject = subjects.attempt(event.model, event.request_id, event.attempt)
    return row_of(Source(subject, msgspec.json.encode(event), seq, STORED_MS))


async def usage(store: Store, tenant: str, by: list[str], start: str, end: str) -> list[tuple[object, ...]]:
    """Dimensions, requests, and the four counts of tokens."""
    query = UsageQuery(from_at_ms=ms(start), to_at_ms=ms(end), by=by, tenant=tenant)  # type: ignore[arg-type]
    plan = await rollups.plan(store, query.from_at_ms, query.to_at_ms)
    return [row[: len(by) + 5] for row in await store.select(queries.usage(query, plan))]


async def test_duplicates_count_once_within_an_insert_and_over_inserts(directory: Path, tenant: str) -> None:
    rows = [row(tenant, "2026-10-31T23:59:59.999"), row(tenant, "2026-11-01T00:00:00.000")]
    async with opened(directory) as store:
        await store.insert([*rows, *rows])
        await store.insert(list(reversed(rows)))
        await store.insert(rows[:1])
        total = await usage(store, tenant, [], "2026-10-01", "2026-12-01")
        assert total == [(2, 200, 0, 20, 0)]


async def test_each_event_lies_in_one_day_and_days_add_up(directory: Path, tenant: str) -> None:
    edges = ["2026-10-30T23:59:59.999", "2026-10-31T00:00:00.000", "2026-10-31T23:59:59.999", "2026-11-01T00:00:00"]
    async with opened(directory) as store:
        await store.insert([row(tenant, edge) for edge in edges])
        days = await usage(store, tenant, ["day"], "2026-10-30", "2026-11-02")
        assert [(day, count) for day, count, *_ in days] == [("2026-10-30", 1), ("2026-10-31", 2), ("2026-11-01", 1)]
        assert (await usage(store, tenant, [], "2026-10-31", "2026-11-01"))[0][0] == 2
        hours = await usage(store, tenant, ["hour"], "2026-11-01", "2026-11-02")
        assert hours[0][0] == "2026-11-01T00:00:00Z"


async def test_retries_are_one_request_and_only_billable_tokens_count(directory: Path, tenant: str) -> None:
    request_id = ids.request_id(ms("2026-11-01T10:00:00"))
    common: dict[str, Any] = {"request_id": request_id}
    lost = row(tenant, "2026-11-01T10:00:00", **common, outcome="lost", reporter="scheduler", billable=False)
    won = row(tenant, "2026-11-01T10:00:00", **common, attempt=2, version="v2", cached_tokens=60)
    refused = row(
        tenant, "2026-11-01T10:00:01", attempt=0, outcome="expired", billable=False, completion_tokens=0, version=""
    )
    async with opened(directory) as store:
        await store.insert([lost])
        assert await usage(store, tenant, ["version"], "2026-11-01", "2026-11-02") == [("v1", 1, 0, 0, 0, 0)]
        await store.insert([won, refused])
        by_version = await usage(store, tenant, ["version"], "2026-11-01", "2026-11-02")
        assert by_version == [("", 1, 0, 0, 0, 0), ("v1", 0, 0, 0, 0, 0), ("v2", 1, 100, 60, 10, 0)]
        assert await usage(store, tenant, [], "2026-11-01", "2026-11-02") == [(2, 100, 60, 10, 0)]


async def test_the_event_stored_first_wins_whatever_is_inserted_last(directory: Path, tenant: str) -> None:
    first = row(tenant, "2026-11-01T10:00:00")
    second = first._replace(completion_tokens=999, stored_at=STORED_MS + 1, precedence=first.precedence - 1)
    async with opened(directory) as store:
        for batch in ([first], [second], [second, first]):
            await store.insert(batch)
        assert await usage(store, tenant, [], "2026-11-01", "2026-11-02") == [(1, 100, 0, 10, 0)]


async def test_sums_pass_32_bits(directory: Path, tenant: str) -> None:
    rows = [row(tenant, "2026-11-01T10:00:00", prompt_tokens=UINT32_MAX) for _ in range(3)]
    async with opened(directory) as store:
        await store.insert(rows)
        assert (await usage(store, tenant, [], "2026-11-01", "2026-11-02"))[0][1] == 3 * UINT32_MAX
        plan = await rollups.plan(store, *instants.month_around(STORED_MS))
        month = queries.month_tokens(plan, {tenant, "o'neill"})
        assert await store.select(month) == [(tenant, 3 * UINT32_MAX + 30)]


async def test_pages_join_up(directory: Path, tenant: str) -> None:
    rows = [row(tenant, "2026-11-01T10:00:00", key_id=f"key-{number}") for number in range(7)]
    async with opened(directory) as store:
        await store.insert(rows)
        seen: list[object] = []
        for offset in (0, 3, 6):
            query = UsageQuery(from_at_ms=0, to_at_ms=STORED_MS, by=["key"], tenant=tenant, limit=3, offset=offset)
            page = await store.select(queries.usage(query, await rollups.plan(store, 0, STORED_MS)))
            assert len(page) == min(4, 7 - offset)
            seen += [key for key, *_ in page[:3]]
        assert seen == [f"key-{number}" for number in range(7)]


async def test_one_insert_may_span_more_months_than_clickhouse_likes(directory: Path, tenant: str) -> None:
    stamps = [f"{year}-{month:02}-15T00:00:00" for year in range(2024, 2035) for month in range(1, 13)]
    async with opened(directory) as store:
        await store.insert([row(tenant, stamp) for stamp in stamps])
        plan = await rollups.plan(store, 0, ms("2200-01-01"))
        assert len(await store.select(queries.month_tokens(plan, {tenant}))) == 1


async def test_d34_a_slow_drip_levels_off(directory: Path, tenant: str) -> None:
    """One row at a time, as a small load writes them: the engine merges as fast as they come."""
    parts = (
        "SELECT count() FROM system.parts WHERE active AND database = 'headrace' AND table = 'attempts'"
        " AND partition = '202312'"  # a month of no other test's
    )
    async with opened(directory) as store:
        for number in range(120):
            await store.insert([row(tenant, "2023-12-01T10:00:00", seq=number + 1)])

        async def few() -> bool:
            [(count,)] = await store.select(queries.Query(parts, {}))
            return 0 < count < 50

        await until(few, "merges")


async def test_content_that_clickhouse_refuses_is_told_apart(directory: Path, tenant: str) -> None:
    async with opened(directory) as store:
        with pytest.raises(BadValues):
            await store.insert([row(tenant, "2026-11-01T10:00:00")._replace(attempt=1 << 20)])
        with pytest.raises(BadValues):
            await store.insert([row(tenant, "2026-11-01T10:00:00")._replace(worker="\ud800")])


async def test_reopening_keeps_everything_and_repeats_no_migration(directory: Path, tenant: str) -> None:
    async with opened(directory) as store:
        await store.insert([row(tenant, "2026-11-01T10:00:00")])
    async with opened(directory) as store:
        assert (await usage(store, tenant, [], "2026-11-01", "2026-11-02"))[0][0] == 1
        applied = queries.Query("SELECT name, count() FROM migrations GROUP BY name ORDER BY name", {})
        assert [count for _, count in await store.select(applied)] == [1] * len(migrations())


REPLICA = """
import os, sys, chdb
from ledger.store import _RECORD, _REPLICATED_SETTINGS, migrations, replicated_ddl
engine = chdb.connect(f"{sys.argv[1]}?config-file={sys.argv[2]}")
engine.query("CREATE DATABASE headrace ENGINE = Atomic")
engine.query("USE headrace")
for name, value in _REPLICATED_SETTINGS.items():
    engine.query(f"SET {name} = '{value}'")
for statement in [_RECORD, *(part for _, parts in migrations() for part in parts)]:
    if not statement.startswith("INSERT"):  # no replica of it is active without a server around it
        engine.query(replicated_ddl(statement))
engines = "SELECT name, engine FROM system.tables WHERE database = 'headrace' AND engine != 'View' FORMAT CSV"
print(engine.query(engines))
print(engine.query("SELECT count() FROM usage FORMAT CSV"), flush=True)
os._exit(0)  # the stand-in does not end well
"""
KEEPER = """
<clickhouse>
    <zookeeper><implementation>testkeeper</implementation></zookeeper>
    <macros><shard>1</shard><replica>r1</replica></macros>
    <default_replica_path>/tables/{shard}/{table}</default_replica_path>
</clickhouse>
"""


async def test_every_migration_makes_replicated_tables_when_told_so(tmp_path: Path) -> None:
    """With the engine's own stand-in for a Keeper: it makes the tables, and nothing can be inserted."""
    config = tmp_path / "config.xml"
    config.write_text(KEEPER)
    made = await asyncio.to_thread(
        subprocess.run,
        [sys.executable, "-c", REPLICA, str(tmp_path / "replica"), str(config)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert made.returncode == 0, made.stderr[-2000:]
    *tables, count = made.stdout.split()
    assert sorted(tables) == [
        '"attempts","ReplicatedReplacingMergeTree"',
        '"deliveries","ReplicatedReplacingMergeTree"',
        '"latency_days","ReplicatedMergeTree"',
        '"latency_hours","ReplicatedMergeTree"',
        '"migrations","ReplicatedReplacingMergeTree"',
        '"prices","ReplicatedReplacingMergeTree"',
        '"rollup_builds","ReplicatedReplacingMergeTree"',
        '"rollup_marks","ReplicatedAggregatingMergeTree"',
        '"usage_days","ReplicatedMergeTree"',
        '"usage_hours","ReplicatedMergeTree"',
    ]
    assert count == "0"


async def test_equal_marks_count_twice_where_equal_blocks_are_dropped(directory: Path, tenant: str) -> None:
    """As replicated tables drop them. The second event would be missing in a sum that was built in between."""
    window = "ALTER TABLE rollup_marks MODIFY SETTING non_replicated_deduplication_window = {}"
    async with opened(directory) as store:
        await store.build(queries.Query(window.format(100), {}))
        for _ in range(2):
            await store.insert([row(tenant, "2026-09-01T10:00:00")])
        marks = "SELECT sum(marks) FROM rollup_marks WHERE hour = toDateTime('2026-09-01 10:00:00', 'UTC')"
        assert await store.select(queries.Query(marks, {})) == [(2,)]
        await store.build(queries.Query(window.format(0), {}))


def test_replicas_need_a_server() -> None:
    there = {"nats_url": "nats://h", "clickhouse_replicated": True}
    assert LedgerConfig(clickhouse_url="http://h:8123", **there).problems() == []  # type: ignore[arg-type]
    [wrong] = LedgerConfig(clickhouse_url="chdb:///d", **there).problems()  # type: ignore[arg-type]
    assert wrong.startswith("HEADRACE_CLICKHOUSE_REPLICATED")


async def test_tables_of_one_server_are_not_taken_for_replicated_ones(directory: Path) -> None:
    async with opened(directory) as store:
        assert store._writer is not None
        with pytest.raises(Away, match="HEADRACE_CLICKHOUSE_REPLICATED"):
            migrate(store._writer, replicated=True)


def test_only_what_replicas_refuse_while_they_catch_up_is_tried_again() -> None:
    class Raised(Exception):
        def __init__(self, code: int) -> None:
            self.code = code

    answers: list[Exception | str] = [Raised(286), Raised(289), "done", Raised(319), "never"]

    def call() -> str:
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    assert _patiently(call) == "done"
    with pytest.raises(Raised):
        _patiently(call)
    assert answers == ["never"]


async def test_a_second_process_is_told_that_the_directory_is_owned(directory: Path) -> None:
    program = (
        "import asyncio, sys\nfrom ledger.store import Owned, Store\n"
        "try: asyncio.run(Store(sys.argv[1], 'headrace').open())\n"
        "except Owned: print('owned')\n"
    )
    async with opened(directory) as store:
        with pytest.raises(Owned):
            await Store(f"chdb://{directory}", "headrace").open()
        second = await asyncio.to_thread(
            subprocess.run,
            [sys.executable, "-c", program, f"chdb://{directory}"],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=True,
        )
        assert second.stdout.strip() == "owned"
        await store.select(queries.Query("SELECT 1", {}))


async def test_a_server_that_is_not_there_is_away_and_no_password_is_told() -> None:
    store = Store("http://bob:hunter2@127.0.0.1:9", "headrace")
    with pytest.raises(Away) as caught:
        await store.open()
    assert "hunter2" not in str(caught.value)
    await store.close()
