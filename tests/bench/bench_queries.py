"""Measures the ledger's queries over a month of generated attempts (10,000,000 by default), and its page.

``python -m tests.bench.bench_queries [ROWS] [DIRECTORY]``. One tenant of 50 has a quarter of the rows. Prints how
long building the rollups took and each question's time: median and worst of 7, as the ledger's own process sees it.
With a Chromium on the machine, the page's time too. A directory is kept, and used again.
"""

import asyncio
import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from typing import Any

from contracts import instants
from contracts.messages.usage import Invoice, LatencyQuery, UsageQuery
from ledger.core import queries
from ledger.query_api import QueryApi
from ledger.rollups import Rollups, plan
from ledger.store import Store

ROOT = Path(__file__).parents[2]
STEP = 500_000
REPEATS = 7
NOW_MS = time.time_ns() // 1_000_000
FROM_MS, TO_MS = instants.month_around(instants.month_around(NOW_MS)[0] - 1)
"""The last whole month."""
MONTH = datetime.fromtimestamp(FROM_MS / 1000, UTC).strftime("%Y-%m")
BUSY = "tenant-0"


class NoPrices:
    """The bucket's mirror, of which queries ask the currency only."""

    currency = "USD"


class NoInvoices:
    """None is ever issued."""

    async def of(self, tenant: str) -> dict[str, Invoice]:
        return {}

    async def issue(self, made: Invoice) -> Invoice:
        return made


def generated(first: int, count: int, of: int) -> str:
    """An insert of rows spread evenly over the month, in order of time as a ledger meets them."""
    span = TO_MS - FROM_MS
    return f"""
    INSERT INTO attempts
    SELECT
        concat('tenant-', toString(if(rand(1) % 4 = 0, 0, rand(2) % 50))) AS tenant,
        UUIDv7ToDateTime(request_id, 'UTC') AS requested_at,
        dateTimeToUUIDv7(toDateTime(intDiv({FROM_MS} + intDiv(number * {span}, {of}), 1000), 'UTC')) AS request_id,
        1, concat(tenant, '-key-', toString(rand(4) % 4)), concat('model-', toString(rand(5) % 3)),
        toString(rand(6) % 2),
        'chat/completions', if(rand(7) % 5 = 0, 'batch', 'interactive'),
        if(rand(8) % 20 = 0, 'cancelled', 'completed'), 'worker', concat('w-', toString(rand(9) % 16)), true, 'stop',
        '', '', false, false, true, 1,
        toUInt32(rand(10) % 4000) AS prompt, intDiv(prompt, 3), toUInt32(2 + rand(11) % 500) AS completion,
        intDiv(completion, 4), 5000, 500,
        requested_at + toIntervalMillisecond(rand(12) % 5) AS admitted,
        admitted + toIntervalMillisecond(rand(13) % 2000) AS dispatched,
        dispatched + toIntervalMillisecond(50 + rand(14) % 300) AS first,
        first + toIntervalMillisecond(completion * 20) AS ended,
        ended, number, '', '', 18446744073709551615 - toUnixTimestamp64Milli(ended)
    FROM numbers({first}, {count})"""


async def fill(store: Store, rows: int) -> None:
    started = time.monotonic()
    for first in range(0, rows, STEP):
        await store.build(queries.Query(generated(first, min(STEP, rows - first), rows), {}))
    marks = (
        "INSERT INTO rollup_marks SELECT toStartOfHour(admitted_at, 'UTC') AS hour, 1, min(requested_at),"
        " max(requested_at) FROM attempts GROUP BY hour"
    )
    await store.build(queries.Query(marks, {}))
    await store.insert_prices(
        [
            (f"model-{model}", tier, date(2026, 1, 1) + timedelta(days=15 * step), "USD", *(150_000 + step,) * 4, 1, 0)
            for model in range(3)
            for tier in ("interactive", "batch")
            for step in range(25)
        ]
    )
    print(f"{rows:,} rows generated in {time.monotonic() - started:.0f} s")


async def timed(name: str, ask: Callable[[], Awaitable[Any]]) -> None:
    spent, size = [], 0
    for _ in range(REPEATS):
        started = time.monotonic()
        answer = await ask()
        spent.append((time.monotonic() - started) * 1000)
        size = len(getattr(answer, "rows", ())) or 1
    print(f"{statistics.median(spent):7.0f} ms {max(spent):7.0f} ms  {name}, {size} rows")


async def ask_all(store: Store, request_id: str) -> None:
    query_api = QueryApi(store, NoPrices(), NoInvoices(), 4 << 20)  # type: ignore[arg-type]

    def usage(*by: str, **changes: Any) -> Callable[[], Awaitable[Any]]:
        fields = {"from_at_ms": FROM_MS, "to_at_ms": TO_MS, **changes}
        return lambda: query_api.usage(UsageQuery(by=list(by), **fields))  # type: ignore[arg-type]

    def latency(*by: str, **changes: Any) -> Callable[[], Awaitable[Any]]:
        fields = {"from_at_ms": FROM_MS, "to_at_ms": TO_MS, **changes}
        return lambda: query_api.latency(LatencyQuery(by=list(by), **fields))  # type: ignore[arg-type]

    of_busy = {"tenant": BUSY}
    odd = {"from_at_ms": FROM_MS + 1_234_567, "to_at_ms": TO_MS - 7_654_321}
    six_hours = {"to_at_ms": FROM_MS + 6 * 3_600_000}
    print("  median     worst")
    await timed("usage, total", usage())
    await timed("usage by tenant", usage("tenant"))
    await timed("usage by day and model", usage("day", "model"))
    await timed("usage by key", usage("key"))
    await timed("usage by model and version", usage("model", "version"))
    await timed("usage by endpoint, priority and outcome", usage("endpoint", "priority", "outcome"))
    await timed("usage by hour", usage("hour"))
    await timed("usage by hour and tenant, a page", usage("hour", "tenant", limit=1000))
    await timed("usage by day, range within hours", usage("day", **odd))
    await timed("usage of the busy tenant by day, model and version", usage("day", "model", "version", **of_busy))
    await timed("usage of the busy tenant by hour and key", usage("hour", "key", **of_busy))
    await timed("latency by model", latency("model"))
    await timed("latency by day", latency("day"))
    await timed("latency by tenant", latency("tenant"))
    await timed("latency by hour", latency("hour"))
    await timed("latency by hour and tenant, six hours", latency("hour", "tenant", **six_hours))
    await timed("latency of the busy tenant by hour and model", latency("hour", "model", **of_busy))
    await timed("invoice of the busy tenant", lambda: query_api.invoice(BUSY, MONTH))
    await timed("explain", lambda: query_api.explain(request_id, None))

    async def budgets() -> Any:
        return await store.select(queries.month_tokens(await plan(store, FROM_MS, TO_MS), None))

    await timed("month's tokens of every tenant", budgets)


async def main() -> None:
    rows = int(sys.argv[1]) if len(sys.argv) > 1 else 10_000_000
    with contextlib.ExitStack() as stack:
        directory = sys.argv[2] if len(sys.argv) > 2 else stack.enter_context(tempfile.TemporaryDirectory())
        store = Store(f"chdb://{directory}/ledger", "headrace")
        await store.open()
        [(present,)] = await store.select(queries.Query("SELECT count() FROM attempts", {}))
        if not present:
            await fill(store, rows)
        [(some,)] = await store.select(queries.Query("SELECT toString(any(request_id)) FROM attempts", {}))
        started = time.monotonic()
        rollups = Rollups(store)
        for _ in range(2):
            await rollups.step(time.time() + 1e6)
        print(f"rollups built in {time.monotonic() - started:.0f} s")
        sizes = (
            "SELECT table, sum(rows), sum(bytes_on_disk) FROM system.parts"
            " WHERE active AND database = 'headrace' GROUP BY table ORDER BY table"
        )
        for table, count, size in await store.select(queries.Query(sizes, {})):
            print(f"{table}: {count:,} rows, {size / 1e6:,.1f} MB")
        await ask_all(store, some)
        last = queries.Query(
            f"SELECT toUnixTimestamp64Milli(max(requested_at)) FROM attempts WHERE tenant = '{BUSY}'", {}
        )
        [(at_ms,)] = await store.select(last)
        mark = (
            "INSERT INTO rollup_marks SELECT toStartOfHour(requested_at, 'UTC') AS hour, 1, min(requested_at),"
            " max(requested_at) FROM attempts"
            f" WHERE requested_at >= fromUnixTimestamp64Milli({at_ms - 3_600_000}) GROUP BY hour"
        )
        await store.build(queries.Query(mark, {}))
        print("the same with two hours that are read from the attempts, as the present hour is:")
        await ask_all(store, some)
        await store.close()
        page(Path(directory))


def page(directory: Path) -> None:
    """Time from the click to the drawn charts, for the busy tenant, behind a whole stack."""
    from tests.support.browser import Browser, chromium, enter_key

    binary = chromium()
    if binary is None:
        print("no Chromium: the page is not measured")
        return
    with running(directory) as (url, key), Browser(binary) as browser:
        browser.open(f"{url}/usage?month={MONTH}")
        spent = []
        for number in range(REPEATS):
            started = time.monotonic()
            browser.run("document.body.dataset.drawn = ''")
            enter_key(browser, key)
            drawn = browser.until("document.body.dataset.drawn")
            assert drawn != "failed", browser.run("document.getElementById('notice').textContent")
            spent.append((time.monotonic() - started) * 1000)
            if not number:
                browser.screenshot(directory / "usage.png")
        print(f"{statistics.median(spent):7.0f} ms {max(spent):7.0f} ms  the page; first {spent[0]:.0f} ms")
        print(f"screenshot: {directory / 'usage.png'}")


@contextlib.contextmanager
def running(directory: Path) -> Iterator[tuple[str, str]]:
    """A stack over this ledger, and a key of the busy tenant."""
    command = [sys.executable, "-m", "compose.cli.main"]
    with open(directory / "up.log", "wb") as log:
        up = subprocess.Popen(
            [*command, "up", "--engine", "simulated", "--port", "0", "--data-dir", str(directory)],
            cwd=ROOT,
            stdout=log,
            stderr=log,
            env=os.environ,
        )
    try:
        while not (directory / "run.json").exists():
            assert up.poll() is None, (directory / "up.log").read_text()
            time.sleep(0.1)
        where = ["--data-dir", str(directory)]
        subprocess.run([*command, "tenant", "create", BUSY, *where], cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
        for model in range(3):
            price = ["price", "set", f"model-{model}", "--input", "0.15", "--output", "0.6", "--from", "2026-01-01"]
            subprocess.run([*command, *price, "--backdate", *where], cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
        made = subprocess.run(
            [*command, "key", "create", BUSY, "--json", *where], cwd=ROOT, check=True, capture_output=True
        )
        yield json.loads((directory / "run.json").read_text())["url"], json.loads(made.stdout)["key"]
    finally:
        up.send_signal(signal.SIGTERM)
        up.wait()


if __name__ == "__main__":
    asyncio.run(main())
