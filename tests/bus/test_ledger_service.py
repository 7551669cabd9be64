"""The ledger as a process, against a real nats-server and the real ClickHouse engine: nothing lost, nothing twice."""

import asyncio
import itertools
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import TypeVar

import msgspec
import pytest

from contracts import ids, instants, subjects, topology
from contracts.bus import Bus, BusError, NotFound
from contracts.messages.attempts import AttemptEvent, DeadLetter
from contracts.messages.base import Message
from contracts.messages.records import Budget, Price
from contracts.messages.usage import (
    ExplainAnswer,
    ExplainQuery,
    Invoice,
    InvoiceAnswer,
    InvoiceQuery,
    LatencyAnswer,
    LatencyQuery,
    UsageAnswer,
    UsageQuery,
)
from ledger import retention
from tests.support import failure_table
from tests.support.nats_server import free_port
from tests.support.polling import day_with, metric, until

ROOT = Path(__file__).parents[2]
HTTP_SERVER = ROOT / "tests" / "support" / "clickhouse_http.py"
WAIT_S = 60.0

A = TypeVar("A")


class Process:
    """A program that is killed when the test ends, and may be before."""

    def __init__(self, *command: str, **environment: str) -> None:
        self._command = command
        self._environment = {**os.environ, **environment}
        self._running: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        self._running = subprocess.Popen(self._command, cwd=ROOT, env=self._environment)

    def send(self, number: signal.Signals) -> int:
        """Send a signal that ends the process; its exit status."""
        assert self._running is not None
        self._running.send_signal(number)
        return self._running.wait(WAIT_S)

    def end(self) -> None:
        if self._running is not None and self._running.poll() is None:
            self.send(signal.SIGKILL)


class Ledger(Process):
    def __init__(self, nats_url: str, clickhouse_url: str) -> None:
        self.port = free_port()
        super().__init__(
            sys.executable,
            "-m",
            "ledger",
            HEADRACE_NATS_URL=nats_url,
            HEADRACE_CLICKHOUSE_URL=clickhouse_url,
            HEADRACE_METRICS_PORT=str(self.port),
            HEADRACE_LOG_LEVEL="warning",
        )

    async def get(self, path: str) -> tuple[int, str]:
        """Status and text of a page of its telemetry; status 0 while it does not listen."""

        def get() -> tuple[int, str]:
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=5) as answer:
                    return answer.status, answer.read().decode()
            except urllib.error.HTTPError as error:
                with error:
                    return error.code, error.read().decode()
            except OSError:
                return 0, ""

        return await asyncio.to_thread(get)

    async def ready(self) -> bool:
        return (await self.get("/health/ready"))[0] == 200

    async def metric(self, name: str) -> float:
        lines = (await self.get("/metrics"))[1].splitlines()
        return next((float(line.split()[1]) for line in lines if line.startswith(name + " ")), -1.0)


@pytest.fixture
async def bus(nats_url: str) -> AsyncIterator[Bus]:
    """A connection to a server whose ATTEMPTS, dead letters and budgets are empty."""
    bus = await Bus.connect(nats_url, name="test")
    await topology.ensure(bus)
    try:
        await bus.jetstream.api(f"CONSUMER.DELETE.{topology.ATTEMPTS}.ledger")
    except NotFound:
        pass
    buckets = (f"KV_{bucket}" for bucket in (topology.BUDGETS, topology.PRICES, topology.INVOICES))
    for stream in (topology.ATTEMPTS, topology.DEAD_LETTERS, *buckets):
        await bus.jetstream.api(f"STREAM.PURGE.{stream}")
    yield bus
    await bus.close()


@pytest.fixture
def started() -> Iterator[Callable[[Process], None]]:
    """Starts a process and sees to its end."""
    running: list[Process] = []

    def start(process: Process) -> None:
        running.append(process)
        process.start()

    yield start
    for process in running:
        process.end()


@pytest.fixture
async def ledger(bus: Bus, nats_url: str, tmp_path: Path, started: Callable[[Process], None]) -> Ledger:
    ledger = Ledger(nats_url, f"chdb://{tmp_path}/chdb")
    started(ledger)
    await until(ledger.ready, "the ledger")
    return ledger


_numbers = itertools.count()


def event(**changes: object) -> AttemptEvent:
    number = next(_numbers)
    now_ms = time.time_ns() // 1_000_000
    fields: dict[str, object] = {
        "request_id": ids.request_id(now_ms),
        "attempt": 1,
        "tenant": f"tenant {number % 3}",
        "key_id": "key-1",
        "model": "m",
        "version": "v1",
        "endpoint": "completions",
        "priority": "batch",
        "outcome": "completed",
        "reporter": "worker",
        "billable": True,
        "prompt_tokens": 1000 + number,
        "completion_tokens": 1,
        "admitted_at_ms": now_ms,
        "ended_at_ms": now_ms,
    }
    return AttemptEvent(**{**fields, **changes})  # type: ignore[arg-type]


async def store(bus: Bus, events: list[AttemptEvent]) -> None:
    async def one(of: AttemptEvent) -> None:
        subject = subjects.attempt(of.model, of.request_id, of.attempt)
        msg_id = f"{of.request_id}.{of.attempt}"
        await bus.jetstream.store(subject, msgspec.json.encode(of), msg_id=msg_id, expect_last=0, timeout_s=30)

    for start in range(0, len(events), 50):
        await asyncio.gather(*(one(of) for of in events[start : start + 50]))


async def ask(bus: Bus, **changes: object) -> UsageAnswer:
    now_ms = time.time_ns() // 1_000_000
    fields: dict[str, object] = {"from_at_ms": now_ms - 86_400_000, "to_at_ms": now_ms + 86_400_000, "by": []}
    query = UsageQuery(**{**fields, **changes})  # type: ignore[arg-type]
    answer = await bus.request(subjects.usage_all("usage"), msgspec.json.encode(query), timeout_s=10)
    return msgspec.json.decode(answer, type=UsageAnswer)


async def requests(bus: Bus) -> int:
    """Requests in the ledger; -1 while no ledger answers."""
    try:
        answer = await ask(bus)
    except BusError:
        return -1
    return -1 if answer.error else answer.rows[0].requests


async def arrived(bus: Bus, count: int) -> None:
    async def there() -> bool:
        return await requests(bus) == count

    await until(there, f"{count} requests in the ledger")


async def test_events_become_usage_and_budgets(bus: Bus, ledger: Ledger) -> None:
    month = day_with(20).strftime("%Y-%m")
    events = [event() for _ in range(6)]
    await store(bus, events)
    await arrived(bus, 6)

    answer = await ask(bus, by=["tenant", "model", "day"], limit=2)
    assert [(row.tenant, row.model, row.requests) for row in answer.rows] == [
        ("tenant 0", "m", 2),
        ("tenant 1", "m", 2),
    ]
    assert answer.has_more
    assert answer.rows[0].day is not None
    assert answer.rows[0].key is None
    rest = await ask(bus, by=["tenant", "model", "day"], limit=2, offset=2)
    assert [row.tenant for row in rest.rows] == ["tenant 2"]
    assert not rest.has_more
    mine = await ask(bus, tenant="tenant 1")
    assert mine.rows[0].prompt_tokens == sum(of.prompt_tokens for of in events if of.tenant == "tenant 1")

    async def budgets_are_right() -> bool:
        entries = await bus.kv.all(topology.BUDGETS)
        found = {subjects.decode(key): msgspec.json.decode(entry.value, type=Budget) for key, entry in entries.items()}
        wanted: dict[str, int] = {}
        for of in events:
            wanted[of.tenant] = wanted.get(of.tenant, 0) + of.prompt_tokens + of.completion_tokens
        newest = {of.tenant: seq for seq, of in enumerate(events, 1)}
        covered = all(newest[tenant] <= budget.covers_seq <= len(events) for tenant, budget in found.items())
        return covered and {tenant: (budget.month, budget.tokens) for tenant, budget in found.items()} == {
            tenant: (month, tokens) for tenant, tokens in wanted.items()
        }

    await until(budgets_are_right, "budgets")


async def test_a_ledger_measures_what_it_inserts_and_answers(bus: Bus, ledger: Ledger) -> None:
    """Rows count repetitions, too, so there may be more than events."""
    asked = await ledger.metric("headrace_ledger_query_seconds_count")
    await store(bus, [event() for _ in range(30)])
    await arrived(bus, 30)
    assert await ledger.metric("headrace_ledger_query_seconds_count") > asked
    assert await ledger.metric("headrace_ledger_rows_total") >= 30
    batches = await ledger.metric("headrace_ledger_batches_total")
    assert batches == await ledger.metric("headrace_ledger_insert_seconds_count") >= 1
    assert 0 < await ledger.metric("headrace_ledger_insert_seconds_sum") < WAIT_S
    assert 0 <= await ledger.metric("headrace_ledger_lag_seconds") < WAIT_S
    assert await ledger.metric("headrace_ledger_connected") == 1
    assert await ledger.metric("headrace_ledger_failures_total") == 0

    async def nothing_waits() -> bool:
        return await ledger.metric("headrace_ledger_pending") == 0

    await until(nothing_waits, "the last batch's end")


async def test_bad_queries_are_answered_with_the_reason(bus: Bus, ledger: Ledger) -> None:
    for query in (b"nope", b"{}", b'{"from_at_ms":5,"to_at_ms":5,"by":[]}', b'{"from_at_ms":"x"}'):
        answer = msgspec.json.decode(await bus.request(subjects.usage_all("usage"), query), type=UsageAnswer)
        assert answer.error
        assert answer.code == "invalid_request"


async def test_bad_events_are_set_aside_and_block_nothing(
    bus: Bus, nats_url: str, tmp_path: Path, started: Callable[[Process], None], capfd: pytest.CaptureFixture[str]
) -> None:
    ledger = Ledger(nats_url, f"chdb://{tmp_path}/chdb")
    started(ledger)
    await until(ledger.ready, "the ledger")
    good = event()
    text = msgspec.json.encode(good)
    bad = [
        text.replace(b'"completion_tokens":1', b'"completion_tokens":%b' % value)
        for value in (b"-5", b"1099511627776", b'"7"', b"null", b"NaN")
    ]
    bad += [text.replace(b'"tenant":', b'"tenants":'), b"\xff\xfe not JSON", b""]
    for number, data in enumerate(bad):
        await bus.jetstream.store(
            subjects.attempt("m", f"bad-{number}", 1), data, msg_id=f"bad-{number}-{good.request_id}"
        )
    await store(bus, [good, *(event() for _ in range(9))])
    await arrived(bus, 10)

    async def set_aside() -> bool:
        return len([0 async for _ in bus.jetstream.read(topology.DEAD_LETTERS, "dead.>")]) == len(bad)

    await until(set_aside, "dead letters")
    letters = [
        msgspec.json.decode(message.data, type=DeadLetter)
        async for message in bus.jetstream.read(topology.DEAD_LETTERS, "dead.>")
    ]
    assert all(letter.reason for letter in letters)
    assert [letter.original_base64 for letter in letters if letter.original is None] == ["//4gbm90IEpTT04="]
    row = failure_table.table()["end of an attempt that nobody can read"]
    assert row.name == "headrace_ledger_dead_letters_total"
    assert row.figure((await ledger.get("/metrics"))[1]) == len(bad)
    assert capfd.readouterr().err.count(f'"{row.log}"') == len(bad)
    consumer = await bus.jetstream.api(f"CONSUMER.INFO.{topology.ATTEMPTS}.ledger")
    assert consumer["num_ack_pending"] == consumer["num_pending"] == 0


async def test_a_ledger_killed_while_it_works_loses_and_doubles_nothing(bus: Bus, ledger: Ledger) -> None:
    events = [event() for _ in range(1000)]
    for number in range(3):
        storing = asyncio.create_task(store(bus, events[number * 300 : (number + 1) * 300]))
        await asyncio.sleep(0.3 * number)
        ledger.send(signal.SIGKILL)
        ledger.start()
        await storing
    await store(bus, events[900:])
    await arrived(bus, 1000)
    total = (await ask(bus)).rows[0]
    assert total.prompt_tokens == sum(of.prompt_tokens for of in events)
    assert total.completion_tokens == 1000


async def test_a_rebuild_from_the_stream_gives_the_same_totals(
    bus: Bus, ledger: Ledger, nats_url: str, tmp_path: Path, started: Callable[[Process], None]
) -> None:
    """Replay into the same tables changes nothing; into empty ones it gives the same."""
    await store(bus, [event() for _ in range(100)])
    await arrived(bus, 100)
    before = await ask(bus, by=["tenant", "key", "model", "version", "day", "hour"])
    for directory in ("chdb", "empty"):
        assert ledger.send(signal.SIGTERM) == 0
        await bus.jetstream.api(f"CONSUMER.DELETE.{topology.ATTEMPTS}.ledger")
        ledger = Ledger(nats_url, f"chdb://{tmp_path}/{directory}")
        started(ledger)
        await arrived(bus, 100)
        assert await ledger_has_read_everything(bus)
        assert await ask(bus, by=["tenant", "key", "model", "version", "day", "hour"]) == before


async def ledger_has_read_everything(bus: Bus) -> bool:
    async def settled() -> bool:
        try:
            consumer = await bus.jetstream.api(f"CONSUMER.INFO.{topology.ATTEMPTS}.ledger")
        except NotFound:
            return False
        return bool(consumer["ack_floor"]["stream_seq"] >= 100 and consumer["num_ack_pending"] == 0)

    await until(settled, "the replay")
    return True


async def test_on_chdb_a_second_ledger_stands_by_and_takes_over(
    bus: Bus, ledger: Ledger, nats_url: str, tmp_path: Path, started: Callable[[Process], None]
) -> None:
    second = Ledger(nats_url, f"chdb://{tmp_path}/chdb")
    started(second)

    async def stands_by() -> bool:
        status, text = await second.get("/health/ready")
        return status == 503 and text.startswith("standby")

    await until(stands_by, "the standby")
    assert (await second.get("/health/live"))[0] == 200
    await store(bus, [event()])
    await arrived(bus, 1)
    ledger.send(signal.SIGKILL)
    await until(second.ready, "the take-over")
    await store(bus, [event()])
    await arrived(bus, 2)
    assert second.send(signal.SIGTERM) == 0


async def test_while_clickhouse_is_away_events_wait_and_the_ledger_lives(
    bus: Bus, nats_url: str, tmp_path: Path, started: Callable[[Process], None], capfd: pytest.CaptureFixture[str]
) -> None:
    """Also the path over HTTP: two ledgers share one ClickHouse, which is killed and comes back."""
    port = free_port()
    clickhouse = Process(sys.executable, str(HTTP_SERVER), str(port), str(tmp_path / "server"))
    ledgers = [Ledger(nats_url, f"http://bob:hunter2@127.0.0.1:{port}") for _ in range(2)]
    for process in ledgers:
        started(process)
    await until(lambda: is_away(ledgers[0]), "a ledger that misses ClickHouse")
    started(clickhouse)
    for ledger in ledgers:
        await until(ledger.ready, "the ledgers")
    events = [event() for _ in range(300)]
    await store(bus, events[:100])
    await arrived(bus, 100)
    await until(lambda: acknowledged(bus, 100), "what arrived is acknowledged")

    clickhouse.send(signal.SIGKILL)
    await store(bus, events[100:])
    await until(lambda: any_is_away(ledgers), "a ledger that misses ClickHouse")
    row = failure_table.table()["ClickHouse is down"]
    assert max([row.figure((await ledger.get("/metrics"))[1]) for ledger in ledgers]) > 0
    assert f'"{row.log}"' in capfd.readouterr().err
    assert 0 in [await ledger.metric("headrace_ledger_connected") for ledger in ledgers]
    for ledger in ledgers:
        assert (await ledger.get("/health/live"))[0] == 200
        assert "hunter2" not in (await ledger.get("/health/ready"))[1]
    assert (await ask(bus)).code == "unavailable"
    assert await acknowledged(bus, 100)

    clickhouse.start()
    await arrived(bus, 300)
    assert (await ask(bus)).rows[0].prompt_tokens == sum(of.prompt_tokens for of in events)
    for ledger in ledgers:
        assert ledger.send(signal.SIGTERM) == 0


async def acknowledged(bus: Bus, count: int) -> bool:
    """Whether the ledger has acknowledged the first ``count`` events, and no more."""
    consumer = await bus.jetstream.api(f"CONSUMER.INFO.{topology.ATTEMPTS}.ledger")
    return bool(consumer["ack_floor"]["stream_seq"] == count)


async def is_away(ledger: Ledger) -> bool:
    failed = await ledger.metric("headrace_ledger_failures_total") > 0 and not await ledger.ready()
    return failed and await ledger.metric("headrace_ledger_connected") == 0


async def any_is_away(ledgers: list[Ledger]) -> bool:
    return any([await is_away(ledger) for ledger in ledgers])


async def test_what_is_stored_and_old_is_purged_and_nothing_else(
    bus: Bus, ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    await store(bus, [event() for _ in range(20)])
    await arrived(bus, 20)
    assert ledger.send(signal.SIGTERM) == 0
    await store(bus, [event() for _ in range(5)])  # old as well below, but not in the ledger
    purged = metric("headrace_ledger_purged_total")
    now_s = time.time()
    monkeypatch.setattr(time, "time", lambda: now_s + 2 * retention.KEEP_S)
    assert await retention.purge(bus, "ledger") == 0, "it is old by the bus's clock alone"
    monkeypatch.setattr(retention, "KEEP_S", -2 * retention.KEEP_S)
    assert await retention.purge(bus, "ledger") == 20
    assert await retention.purge(bus, "ledger") == 0
    assert (await bus.jetstream.api(f"STREAM.INFO.{topology.ATTEMPTS}"))["state"]["messages"] == 5
    assert metric("headrace_ledger_purged_total") == purged + 20


async def answer(bus: Bus, subject: str, query: Message, kind: type[A]) -> A:
    return msgspec.json.decode(await bus.request(subject, msgspec.json.encode(query), timeout_s=10), type=kind)


async def test_the_subject_says_whose_usage_is_told(bus: Bus, ledger: Ledger) -> None:
    mine, other = event(tenant="tenant 1"), event(tenant="tenant.2")
    await store(bus, [mine, other])
    await arrived(bus, 2)
    now_ms = time.time_ns() // 1_000_000
    query = UsageQuery(from_at_ms=now_ms - 86_400_000, to_at_ms=now_ms + 86_400_000, by=["tenant"], tenant="tenant.2")
    for tenant in ("tenant 1", "tenant.2"):
        found = await answer(bus, subjects.usage_of(tenant, "usage"), query, UsageAnswer)
        assert [row.tenant for row in found.rows] == [tenant]
    everybody = await answer(bus, subjects.usage_all("usage"), msgspec.structs.replace(query, tenant=None), UsageAnswer)
    assert [row.tenant for row in everybody.rows] == ["tenant 1", "tenant.2"]

    spans = LatencyQuery(from_at_ms=query.from_at_ms, to_at_ms=query.to_at_ms, by=[], tenant="tenant.2")
    latency = await answer(bus, subjects.usage_of("tenant 1", "latency"), spans, LatencyAnswer)
    assert latency.rows[0].end_to_end_ms.count == 1
    month = InvoiceQuery(tenant="tenant.2", month=day_with(10).strftime("%Y-%m"))
    made = (await answer(bus, subjects.usage_of("tenant 1", "invoice"), month, InvoiceAnswer)).invoice
    assert made is not None and made.tenant == "tenant 1"

    theirs = ExplainQuery(request_id=other.request_id)
    explained = await answer(bus, subjects.usage_of("tenant 1", "explain"), theirs, ExplainAnswer)
    assert (explained.code, explained.text) == ("not_found", [])
    explained = await answer(bus, subjects.usage_all("explain"), theirs, ExplainAnswer)
    assert [attempt.tenant for attempt in explained.attempts] == ["tenant.2"]

    for subject in ("usage.v1.all.nothing", "usage.v1.of.tenant_20", "usage.v1.of.a__b.usage", "usage.v1.other"):
        assert (await answer(bus, subject, query, UsageAnswer)).code == "invalid_request"


async def test_a_price_in_the_bucket_holds_at_once(bus: Bus, ledger: Ledger) -> None:
    await store(bus, [event(prompt_tokens=10, completion_tokens=1)])
    await arrived(bus, 1)
    assert (await ask(bus)).rows[0].unpriced_tokens == 11
    key = f"{subjects.encode('m')}.batch.2026-01-01"

    async def costs(amount: str, currency: str) -> bool:
        try:
            found = await ask(bus)
        except BusError:  # while it starts again
            return False
        return bool(found.rows) and (found.rows[0].amount, found.currency) == (amount, currency)

    price = Price(
        model="m", tier="batch", valid_from="2026-01-01", currency="EUR", input=3, cached_input=1, output=5, reasoning=5
    )
    for change, amount in (({}, "0.000000000035"), ({"input": 1_000_000}, "0.000010000005")):
        await bus.kv.put(topology.PRICES, key, msgspec.json.encode(msgspec.structs.replace(price, **change)))
        await until(lambda amount=amount: costs(amount, "EUR"), "the price")  # type: ignore[misc]
    await bus.kv.put(topology.PRICES, f"{key}x", b"not a price")
    assert ledger.send(signal.SIGTERM) == 0
    ledger.start()
    await until(lambda: costs("0.000010000005", "EUR"), "the price after a restart")
    await bus.kv.delete(topology.PRICES, key)
    await until(lambda: costs("0", ""), "no price")


async def test_an_issued_invoice_never_changes(bus: Bus, ledger: Ledger) -> None:
    """D19: a price set for a closed month, and an event of it that comes late, correct the first open month."""
    closed_ms, _ = instants.month_around(time.time_ns() // 1_000_000 - 45 * 86_400_000)
    closed, opened = (instants.month_of(at_ms) for at_ms in (closed_ms, time.time_ns() // 1_000_000 - 7 * 86_400_000))

    def of_then(tokens: int) -> AttemptEvent:
        fields = {"tenant": "t 1", "request_id": ids.request_id(closed_ms + 50), "prompt_tokens": tokens}
        return event(**fields, completion_tokens=0, admitted_at_ms=closed_ms + 50, ended_at_ms=closed_ms + 90)

    async def invoice(month: str) -> Invoice:
        subject = subjects.usage_of("t 1", "invoice")
        made = (await answer(bus, subject, InvoiceQuery(month=month), InvoiceAnswer)).invoice
        assert made is not None
        return made

    async def corrected(amount: str) -> bool:
        lines = (await invoice(opened)).lines
        return [(line.corrects, line.amount) for line in lines if line.kind == "correction"] == [(closed, amount)]

    price = Price(
        model="m",
        tier="batch",
        valid_from=f"{closed}-01",
        currency="USD",
        input=2,
        cached_input=2,
        output=2,
        reasoning=2,
    )
    key = f"{subjects.encode('m')}.batch.{closed}-01"

    async def charge(amount: int) -> None:
        await bus.kv.put(topology.PRICES, key, msgspec.json.encode(msgspec.structs.replace(price, input=amount)))

    await charge(2_000_000)
    await store(bus, [of_then(1000), of_then(500)])

    async def priced() -> bool:
        found = await ask(bus, from_at_ms=closed_ms, tenant="t 1")
        return bool(found.rows) and found.rows[0].amount == "0.003"

    await until(priced, "usage of the closed month, priced")
    issued = await invoice(closed)
    assert (issued.closed, issued.requests, issued.usage_amount, issued.total) == (True, 2, "0.003", "0.00")
    await charge(3_000_000)
    await until(lambda: corrected("0.0015"), "the price's correction")
    await store(bus, [of_then(100)])
    await until(lambda: corrected("0.0018"), "the event's correction")
    assert await invoice(closed) == issued
    assert ledger.send(signal.SIGTERM) == 0
    ledger.start()
    await until(ledger.ready, "the ledger")
    assert await invoice(closed) == issued


def test_bad_configuration_is_told_at_once_and_without_the_password() -> None:
    wrong = {"HEADRACE_CLICKHOUSE_URL": "ftp://bob:hunter2@host", "HEADRACE_CLICKHOUSE_DATABASE": "a b"}
    ended = subprocess.run(
        [sys.executable, "-m", "ledger"],
        cwd=ROOT,
        env={**os.environ, **wrong},
        capture_output=True,
        text=True,
        timeout=WAIT_S,
        check=False,
    )
    assert ended.returncode == 2
    assert len(ended.stderr.splitlines()) == 2
    assert "hunter2" not in ended.stderr
