"""ClickHouse for the ledger: a server (``http(s)://`` URL) or chDB in this process (``chdb:///directory``).

Both go through clickhouse-connect. Its calls block, so one thread inserts, one selects and one builds rollups, each
with a client of its own; chDB releases the interpreter lock while it works. chDB's data belong to one process at a
time, which holds a lock in the directory.
"""

import asyncio
import fcntl
import importlib.resources
import logging
import os
import re
import time
import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import urlsplit

from ledger.core import queries
from ledger.core.rows import Row, insert_token, marks

if TYPE_CHECKING:
    from clickhouse_connect.driver.client import Client

R = TypeVar("R")

# Codes by which ClickHouse says that the values are at fault, not itself: parse and type errors, values out
# of range or too large, a broken constraint. Anything else may pass, and is tried again.
_CONTENT_CODES = frozenset({6, 26, 27, 33, 38, 41, 53, 69, 70, 72, 117, 131, 190, 321, 349, 407, 469, 691})

_INSERT_SETTINGS = {
    "async_insert": 0,  # an acknowledged insert must be in the table
    "insert_deduplicate": 1,
    "max_partitions_per_insert_block": 0,  # a replay may span any number of months
}

_BUILD_SETTINGS = {
    "max_execution_time": 600,
    "max_threads": 1,  # queries come first
    "max_partitions_per_insert_block": 0,
    "mutations_sync": 1,
}

_REPLICATED_SETTINGS = {
    # Any replica answers with all that was acknowledged, or says that it cannot (code 289). A mark is written after
    # what it stands for and a build is named after its rows, so tables must never be seen in another order.
    "insert_quorum": "auto",
    "insert_quorum_parallel": 0,
    "select_sequential_consistency": 1,
    "insert_quorum_timeout": 30_000,  # less than the client waits
    # A replica that is away gets the schema when it comes back.
    "distributed_ddl_output_mode": "null_status_on_timeout",
    "distributed_ddl_task_timeout": 10,
}
_CHDB_OPTIONS = {
    "memory_worker_period_ms": 1000  # it looks at its own memory twenty times a second else, 1.6 ms of CPU
}
_SOON_CODES = frozenset({286, 289})
"""Another insert is waiting for its quorum, or this replica lacks a part of the last one: over in milliseconds."""
_SOON_S = 5.0


class StoreError(Exception):
    """Base of what this module raises."""


class Away(StoreError):
    """ClickHouse cannot be reached or cannot work now; the same call may succeed later."""


class Owned(Away):
    """Another process owns the chDB directory."""


class BadValues(StoreError):
    """ClickHouse refuses these values, now and later."""


class Store:
    """The tables of one database. Methods may be called from one event loop; none blocks it.

    ``replicated``: the tables are Replicated*MergeTree in a Replicated database of a server.
    """

    def __init__(self, url: str, database: str, *, replicated: bool = False) -> None:
        self._url = url
        self._database = database
        self._replicated = replicated
        self._write_thread = ThreadPoolExecutor(1, thread_name_prefix="insert")
        self._read_thread = ThreadPoolExecutor(1, thread_name_prefix="select")
        self._build_thread = ThreadPoolExecutor(1, thread_name_prefix="build")
        self._lock: int | None = None
        self._writer: Client | None = None
        self._reader: Client | None = None
        self._builder: Client | None = None

    async def open(self) -> None:
        """Connect, own chDB's directory, apply migrations. Raises Away or Owned; may be called again then."""
        await self._in(self._write_thread, self._open)

    async def insert(self, rows: Sequence[Row]) -> None:
        """Returns when the rows are in the table. Raises Away (they may be in it all the same) or BadValues."""
        await self._in(self._write_thread, lambda: self._insert(rows))

    async def select(self, query: queries.Query) -> list[tuple[Any, ...]]:
        """All rows of the answer; raises Away."""
        return await self._in(self._read_thread, lambda: _rows(self._reader, query))

    async def build(self, query: queries.Query) -> list[tuple[Any, ...]]:
        """A statement of the rollups, which may take minutes; its rows, if it gives any. Raises Away."""
        return await self._in(self._build_thread, lambda: _rows(self._builder, query))

    async def insert_prices(self, rows: Sequence[Sequence[object]]) -> None:
        """Rows of ``prices``, in the table's order of columns. Raises Away."""
        await self._in(self._write_thread, lambda: self._append("prices", rows))

    async def insert_deliveries(self, rows: Sequence[Sequence[object]]) -> None:
        """Rows of ``deliveries``, in the table's order of columns. Raises Away or BadValues."""
        await self._in(self._write_thread, lambda: self._append("deliveries", rows))

    async def close(self) -> None:
        """Wait for running calls, close the clients, give the directory back."""
        await asyncio.to_thread(self._close)

    def _open(self) -> None:
        if self._url.startswith("chdb:") and self._lock is None:
            self._lock = _own(Path(urlsplit(self._url).path))
        for client in (self._writer, self._reader, self._builder):
            if client is not None:
                client.close()
        self._writer = self._reader = self._builder = None
        self._writer = self._connect({})
        engine = ""
        if self._replicated:  # spreads the schema, and lets tables find their replicas without being told a path
            engine = f" ENGINE = Replicated('/clickhouse/databases/{self._database}', '{{shard}}', '{{replica}}')"
        self._writer.command(f"CREATE DATABASE IF NOT EXISTS `{self._database}`{engine}")
        self._writer.database = self._database
        migrate(self._writer, replicated=self._replicated)
        self._reader = self._connect(queries.SETTINGS)
        self._reader.database = self._database
        self._builder = self._connect({**queries.SETTINGS, **_BUILD_SETTINGS})
        self._builder.database = self._database

    def _connect(self, settings: dict[str, Any]) -> "Client":
        # Imported late and in the thread: the import and the engine's start take most of a second.
        import clickhouse_connect
        from clickhouse_connect.driver import options

        # Its inserts would import pandas, if it is there, only to see that rows are no data frame: 0.3 s and 60 MB.
        options.pd = options.pd_time_test = None
        # It logs what it raises, with stack traces; who catches it says it once.
        logging.getLogger("clickhouse_connect").setLevel(logging.CRITICAL)
        if self._replicated:
            settings = {**settings, **_REPLICATED_SETTINGS}
        scheme = urlsplit(self._url).scheme
        if scheme == "chdb":
            return clickhouse_connect.get_client(dsn=self._url, settings=settings, chdb_options=_CHDB_OPTIONS)
        return clickhouse_connect.get_client(
            dsn=self._url,
            interface=scheme,  # clickhouse-connect takes TLS from the port alone
            settings=settings,
            connect_timeout=5,
            send_receive_timeout=60,
            autogenerate_session_id=False,
        )

    def _insert(self, rows: Sequence[Row]) -> None:
        if self._writer is None:
            raise Away("not open")
        self._writer.insert(
            "attempts",
            list(zip(*rows, strict=True)),
            column_names=Row._fields,
            column_oriented=True,
            settings={**_INSERT_SETTINGS, "insert_deduplication_token": insert_token(rows)},
        )
        # After the rows: who sees a mark sees what it stands for. A repetition of both does no harm.
        self._append("rollup_marks", marks(rows))

    def _append(self, table: str, rows: Sequence[Sequence[object]]) -> None:
        if self._writer is None:
            raise Away("not open")
        if rows:
            # A name for each insert: replicated tables drop a block that equals another, and equal marks are two.
            # (insert_deduplicate=0 would say so too, but since 26 only where deduplicate_insert lets it.)
            self._writer.insert(
                table, rows, settings={"async_insert": 0, "insert_deduplication_token": uuid.uuid4().hex}
            )

    def _close(self) -> None:
        for thread in (self._read_thread, self._build_thread, self._write_thread):
            thread.shutdown()
        for client in (self._reader, self._builder, self._writer):
            if client is not None:
                client.close()
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    async def _in(self, thread: ThreadPoolExecutor, call: Callable[[], R]) -> R:
        def translated() -> R:
            try:
                return _patiently(call)
            except StoreError:
                raise
            except Exception as error:
                text = f"{type(error).__name__}: {self._without_secrets(error)}"
                raise (BadValues(text) if _at_fault(error) else Away(text)) from None

        return await asyncio.get_running_loop().run_in_executor(thread, translated)

    def _without_secrets(self, error: Exception) -> str:
        text = re.sub(r"//[^/@\s]*@", "//", str(error))
        password = urlsplit(self._url).password
        if password:
            text = text.replace(password, "***")
        return " ".join(text.split())[:500]


def _patiently(call: Callable[[], R]) -> R:
    """The call's result. What replicas refuse while they catch up has changed nothing and is tried again."""
    until = time.monotonic() + _SOON_S
    while True:
        try:
            return call()
        except Exception as error:
            if getattr(error, "code", None) not in _SOON_CODES or time.monotonic() >= until:
                raise
        time.sleep(0.02)


def _rows(client: "Client | None", query: queries.Query) -> list[tuple[Any, ...]]:
    if client is None:
        raise Away("not open")
    return [tuple(row) for row in client.query(query.text, parameters=query.parameters).result_rows]


def _own(directory: Path) -> int:
    """Descriptor of the directory's lock, which ends with this process however it dies; raises Owned."""
    directory.mkdir(parents=True, exist_ok=True)
    lock = os.open(directory / "headrace.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(lock)
        raise Owned(f"another process owns {directory}") from error
    return lock


def _at_fault(error: Exception) -> bool:
    """Whether the values made the error: they cannot be encoded, or ClickHouse says so."""
    from clickhouse_connect.driver.exceptions import DatabaseError, DataError

    if isinstance(error, DatabaseError) and not isinstance(error, DataError):
        return getattr(error, "code", None) in _CONTENT_CODES
    return isinstance(error, DataError | ValueError | TypeError | OverflowError)


_RECORD = """
CREATE TABLE IF NOT EXISTS migrations (name String, applied_at DateTime64(3, 'UTC') DEFAULT now64(3))
ENGINE = ReplacingMergeTree ORDER BY name
"""


def migrations() -> list[tuple[str, list[str]]]:
    """Every migration, in order: its name and its statements."""
    folder = importlib.resources.files("ledger") / "migrations"
    files = {file.name: file for file in folder.iterdir() if file.name.endswith(".sql")}
    return [(name, statements(files[name].read_text("utf-8"))) for name in sorted(files)]


def statements(text: str) -> list[str]:
    """The statements of an SQL file: each ends with a semicolon at a line's end. Comment lines go."""
    lines = [line for line in text.splitlines() if not line.lstrip().startswith("--")]
    return [part.strip() for part in re.split(r";[ \t]*(?:\n|\Z)", "\n".join(lines)) if part.strip()]


def replicated_ddl(statement: str) -> str:
    """The statement with its engine's replicated kind; path and replica are the server's defaults."""
    return re.sub(r"^ENGINE = (?=\w*MergeTree\b)", "ENGINE = Replicated", statement, flags=re.MULTILINE)


def migrate(client: "Client", *, replicated: bool = False) -> None:
    """Apply what is not recorded yet.

    Each statement is safe to repeat, so a crash before the record and two processes at once do no harm. Raises Away
    when the database was made for the other kind of tables.
    """
    adapted = replicated_ddl if replicated else str
    client.command(adapted(_RECORD))
    applied = {name for (name,) in client.query("SELECT name FROM migrations").result_rows}
    for name, parts in migrations():
        if name in applied:
            continue
        for statement in parts:
            client.command(adapted(statement))
        client.insert("migrations", [[name]], column_names=["name"], settings={"async_insert": 0})
    engines = "SELECT name, engine FROM system.tables WHERE database = currentDatabase() AND engine LIKE '%MergeTree'"
    for name, engine in client.query(engines).result_rows:
        if engine.startswith("Replicated") != replicated:
            raise Away(f"table {name} is a {engine}, and HEADRACE_CLICKHOUSE_REPLICATED is {replicated}")
