"""How one query of an analyst runs: who may ask, its place among the others, its handle on the engine, and its end.

Each query has a handle of its own, with limits and ``readonly=1`` set before it, so nothing of one reaches the next.
What may be asked is decided in policy.py; HTTP is http.py's.
"""

import asyncio
import hmac
import os
import re
import time
import uuid
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait

from ledger import metrics
from ledger.sql_endpoint import policy
from ledger.sql_endpoint.formats import Failed, Result

QUERIES_MAX = 2
"""At once; others wait for up to WAIT_S."""
WAIT_S = 20.0
KILL_PAUSE_S = 0.1
"""Between two attempts to end a query: the engine may not have registered it yet."""

_OBJECTS = frozenset({"dataframe", "arrowtable"})
"""What chDB takes for formats and answers with Python's objects."""


class Sessions:
    """Runs analysts' queries on the engine that is open in this process, QUERIES_MAX at a time.

    ``directory``: chDB's. ``open`` and ``close`` block; ``run`` belongs to one event loop.
    """

    def __init__(self, directory: str, database: str, user: str, password: str) -> None:
        self._directory = os.path.realpath(directory)
        self._database = database
        self._user, self._password = user.encode(), password.encode()
        self._functions = frozenset[str]()
        self._databases = frozenset[str]()
        self._places = ThreadPoolExecutor(QUERIES_MAX, thread_name_prefix="sql")
        self._killer = ThreadPoolExecutor(1, thread_name_prefix="sql-kill")
        self._running: dict[str, Future[Result]] = {}
        """By mark, which the engine knows the query by. Those that wait for a place, too."""
        self._closing = False

    def open(self) -> None:
        """Ask the engine which functions and databases it has; raises Failed."""
        self._functions, self._databases = (
            frozenset(self._perform(names, "TabSeparated", {}).data.decode().split())
            for names in (policy.FUNCTION_NAMES, policy.DATABASE_NAMES)
        )

    def close(self, grace_s: float) -> None:
        """Refuse what waits and what comes, give the others ``grace_s``, then end them. No query runs afterwards."""
        self._closing = True
        self._places.shutdown(wait=False, cancel_futures=True)
        wait(list(self._running.values()), timeout=grace_s)
        for mark, running in list(self._running.items()):
            self._kill(mark, running)
        self._killer.shutdown()
        self._places.shutdown()

    def admits(self, user: str, password: str) -> bool:
        """Whether these are the user and the password, in a time that does not tell how much of them was right."""
        same_user = hmac.compare_digest(user.encode(), self._user)
        return hmac.compare_digest(password.encode(), self._password) and same_user

    async def run(self, query: str, parameters: Mapping[str, str]) -> Result:
        """The result of one statement; raises Failed. Cancelling it ends the query in the engine, too.

        ``parameters``: of the request; ``param_*`` are the query's values.
        """
        database = parameters.get("database") or self._database
        if database not in (self._database, "default"):
            raise Failed(81, "UNKNOWN_DATABASE", f"there is only the database {self._database} here")
        refusal = Failed(202, "TOO_MANY_SIMULTANEOUS_QUERIES", "too many queries run now, try again later")
        if self._closing:
            raise refusal
        mark = uuid.uuid4().hex
        running = self._running[mark] = self._places.submit(self._answer, query, parameters, mark)
        running.add_done_callback(lambda _: self._running.pop(mark))
        result = asyncio.wrap_future(running)
        try:
            await asyncio.wait([result], timeout=WAIT_S)
            if running.cancel():  # it has not begun
                raise refusal
            return await result
        except asyncio.CancelledError:
            result.cancel()
            if not running.cancel():
                metrics.SQL_ABANDONED.inc()
                self._killer.submit(self._kill, mark, running)
            raise

    def _answer(self, query: str, parameters: Mapping[str, str], mark: str) -> Result:
        started = time.monotonic()
        try:
            # What the engine prints of the statement is judged, and is what runs.
            text = {"statement": query.replace("\\", "\\\\").replace("\t", "\\t").replace("\n", "\\n")}
            printed = self._perform("SELECT formatQuerySingleLine({statement:String})", "TSVRaw", text)
            statement = printed.data.decode().rstrip("\n")
            try:
                policy.check(statement, self._functions, self._databases)
                limits = policy.limits(parameters)
            except policy.Forbidden as error:
                raise Failed(164, "READONLY", str(error)) from error
            kind = policy.format_of(statement, parameters.get("default_format") or "TabSeparated")
            if kind.lower() in _OBJECTS:
                raise Failed(73, "UNKNOWN_FORMAT", f"Unknown format {kind}")
            values = {name[6:]: value for name, value in parameters.items() if name.startswith("param_")}
            settings = policy.client_settings(parameters) | {"log_comment": mark}
            return self._perform(statement, kind, values, settings, limits)
        finally:
            metrics.SQL_SECONDS.observe(time.monotonic() - started)

    def _perform(
        self,
        query: str,
        kind: str,
        values: Mapping[str, str],
        settings: Mapping[str, str] | None = None,
        limits: Mapping[str, str] = policy.LIMITS,
    ) -> Result:
        """Run on a handle of its own, which cannot change anything. Raises Failed."""
        import chdb

        handle = chdb.connect(self._directory)
        try:
            handle.query(f"USE `{self._database}`")
            for name, value in (settings or {}).items():
                quoted = value.replace("\\", "\\\\").replace("'", "\\'")
                handle.query(f"SET {name} = '{quoted}'")
            for name, value in limits.items():
                handle.query(f"SET {name} = {value}")
            result = handle.query(query, kind, params=dict(values))
            return Result(kind, bytes(result.bytes()), result.rows_read(), result.bytes_read())
        except Exception as error:
            raise _failed(error) from error
        finally:
            handle.close()

    def _kill(self, mark: str, running: Future[Result]) -> None:
        """End the query that carries the mark; returns when it has ended."""
        import chdb

        handle = chdb.connect(self._directory)
        try:
            while not running.done():
                handle.query(f"KILL QUERY WHERE Settings['log_comment'] = '{mark}' ASYNC")
                wait([running], timeout=KILL_PAUSE_S)
        finally:
            handle.close()


def _failed(error: Exception) -> Failed:
    """The engine's error, without what it wraps it in."""
    found = re.search(r"Code: (\d+)\. DB::Exception: (.*?)\.?\s*\(([A-Z_0-9]+)\)", str(error), re.DOTALL)
    if found is None:
        return Failed(1002, "UNKNOWN_EXCEPTION", str(error)[:1000])
    text = re.sub(r"^(Code: \d+\. DB::Exception: )+", "", found[2])
    return Failed(int(found[1]), found[3], text[:2000])
