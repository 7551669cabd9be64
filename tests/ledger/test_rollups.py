"""Rollups, prices and invoices on the real engine (chDB), against sums made in Python of the same events.

Everything is asked twice: of the engine, and over HTTP of its read-only SQL endpoint.
"""

import asyncio
import random
from collections import defaultdict
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import clickhouse_connect
import msgspec
import pytest

from contracts import ids, subjects
from contracts.messages.attempts import AttemptEvent
from contracts.messages.base import Epoch
from contracts.messages.records import Price
from contracts.messages.request import Reply, RequestEnvelope, WorkItem
from contracts.messages.usage import Invoice, LatencyQuery, UsageQuery
from ledger import prices
from ledger.core import money, queries
from ledger.core.query_limits import BadQuery
from ledger.core.rollup_plan import DAY_S, HOUR_S
from ledger.core.rows import Row, Source, row_of
from ledger.query_api import QueryApi
from ledger.rollups import Rollups, plan
from ledger.sql_endpoint.http import SqlEndpoint
from ledger.sql_endpoint.session import Sessions
from ledger.store import Store
from tests.support.polling import metric
from worker.core import outcomes
from worker.engines.base import Counts


def ms(text: str) -> int:
    return int(datetime.fromisoformat(text + "+00:00").timestamp() * 1000)


START, END = ms("2026-10-30T00:00:00"), ms("2026-11-03T00:00:00")
STORED = ms("2026-11-03T12:00:00")
NOW_S = ms("2026-11-10T00:00:00") / 1000

PRICES = [
    Price(model="m1", tier="interactive", valid_from="2026-01-01", currency="USD",
          input=150_000, cached_input=37_500, output=600_001, reasoning=600_001),
    Price(model="m1", tier="interactive", valid_from="2026-11-01", currency="USD",
          input=140_000, cached_input=35_000, output=500_000, reasoning=700_000),
    Price(model="m1", tier="batch", valid_from="2026-01-01", currency="USD",
          input=75_000, cached_input=18_750, output=300_000, reasoning=300_000),
    Price(model="m1", version="2", tier="interactive", valid_from="2026-11-01", currency="USD",
          input=0, cached_input=0, output=77, reasoning=78),
    Price(model="m1", version="2", tier="interactive", valid_from="2026-11-02", currency="USD",
          input=11, cached_input=5, output=0, reasoning=1),
    Price(model="m2", version="1", tier="batch", valid_from="2026-01-01", currency="USD",
          input=9, cached_input=8, output=7, reasoning=6),
]  # fmt: skip
"""None for model m2 but one of its versions. Version 2 of m1 has its own from November on, at first with no input."""


class Known:
    """What the query API needs of the bucket's mirror."""

    currency = "USD"


class Issued:
    """What the query API needs of the bucket of invoices: here none is ever kept (tests/bus has the real one)."""

    async def of(self, tenant: str) -> dict[str, Invoice]:
        return {}

    async def issue(self, made: Invoice) -> Invoice:
        return made


class ThroughEndpoint(Store):
    """Asks as an analyst's program does: clickhouse-connect over HTTP, of the SQL endpoint."""

    async def open(self) -> None:
        await super().open()
        sessions = Sessions(urlsplit(self._url).path, "headrace", "ann", "secret")
        self.endpoint = SqlEndpoint(sessions, "127.0.0.1:0")
        await asyncio.to_thread(self.endpoint.start)
        host, port = self.endpoint.address.split(":")
        connect = {"host": host, "port": int(port), "username": "ann", "password": "secret"}
        self.client = await asyncio.to_thread(clickhouse_connect.get_client, **connect)

    async def select(self, query: queries.Query) -> list[tuple[Any, ...]]:
        answer = await asyncio.to_thread(self.client.query, query.text, parameters=query.parameters)
        return [tuple(row) for row in answer.result_rows]

    async def close(self) -> None:
        self.client.close()
        await asyncio.to_thread(self.endpoint.close)
        await super().close()


@pytest.fixture(params=[Store, ThroughEndpoint], ids=["chdb", "sql_endpoint"])
async def store(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Store]:
    store: Store = request.param(f"chdb://{tmp_path}/chdb", "headrace")
    await store.open()
    rows = [prices.price_row(price) for price in PRICES]
    await store.insert_prices(
        [
            (model, version, tier, datetime.fromisoformat(day).date(), *rest, 1, 0)
            for model, version, tier, day, *rest in rows
        ]
    )
    yield store
    await store.close()


@pytest.fixture
def query_api(store: Store) -> QueryApi:
    return QueryApi(store, Known(), Issued(), 1 << 22)  # type: ignore[arg-type]


def events(chance: random.Random, count: int) -> list[AttemptEvent]:
    """Over a month's edge; one in ten requests is tried twice."""
    made = []
    for _ in range(count):
        at_ms = chance.randrange(START, END)
        prompt, completion = chance.randrange(4000), chance.randrange(500)
        first = AttemptEvent(
            request_id=ids.request_id(at_ms - chance.randrange(2000)),
            attempt=1,
            tenant=f"t{chance.randrange(3)}",
            key_id=f"k{chance.randrange(2)}",
            model=f"m{chance.randrange(1, 3)}",
            version=chance.choice("12"),
            endpoint="completions",
            priority=chance.choice(["interactive", "batch"]),
            outcome="completed",
            reporter="worker",
            billable=True,
            prompt_tokens=prompt,
            cached_tokens=prompt // 3,
            completion_tokens=completion,
            reasoning_tokens=completion // 4,
            admitted_at_ms=at_ms,
            dispatched_at_ms=at_ms + chance.randrange(100),
            first_token_at_ms=at_ms + 100 + chance.randrange(400),
            ended_at_ms=at_ms + 500 + chance.randrange(9000),
        )
        if chance.random() < 0.1:
            lost = {"outcome": "lost", "billable": False, "version": "0", "reporter": "scheduler"}
            made.append(msgspec.structs.replace(first, **lost))
            first = msgspec.structs.replace(first, attempt=2)
        made.append(first)
    return made


def row(event: AttemptEvent, stored_ms: int = STORED) -> Row:
    subject = subjects.attempt(event.model, event.request_id, event.attempt)
    return row_of(Source(subject, msgspec.json.encode(event), 1, stored_ms))


def price_of(event: AttemptEvent) -> Price | None:
    day = datetime.fromtimestamp(event.admitted_at_ms // 1000, UTC).date().isoformat()
    fitting = [
        price
        for price in PRICES
        if (price.model, price.tier) == (event.model, event.priority)
        and price.version in ("", event.version)
        and price.valid_from <= day
    ]
    return max(fitting, key=lambda price: (price.version, price.valid_from), default=None)


def amount(event: AttemptEvent) -> int:
    """In picounits, as the README says it."""
    price = price_of(event)
    if not event.billable or price is None:
        return 0
    return (
        (event.prompt_tokens - event.cached_tokens) * price.input
        + event.cached_tokens * price.cached_input
        + (event.completion_tokens - event.reasoning_tokens) * price.output
        + event.reasoning_tokens * price.reasoning
    )


def expected(events: list[AttemptEvent], by: list[str], start: int = START, end: int = END) -> dict[Any, list[Any]]:
    """Requests, attempts, prompt, completion and unbilled tokens, amount, tokens without a price."""
    last = {event.request_id: event.attempt for event in sorted(events, key=lambda event: event.attempt)}
    sums: dict[Any, list[Any]] = defaultdict(lambda: [0] * 7)
    for event in {(event.request_id, event.attempt): event for event in events}.values():
        if not start <= event.admitted_at_ms < end:
            continue
        at = datetime.fromtimestamp(event.admitted_at_ms // 1000, UTC)
        shown = {"day": f"{at:%Y-%m-%d}", "hour": f"{at:%Y-%m-%dT%H}:00:00Z", "key": event.key_id}
        key = tuple(shown.get(name) or getattr(event, name) for name in by)
        tokens = event.prompt_tokens + event.completion_tokens
        for index, number in enumerate(
            (
                last[event.request_id] == event.attempt,
                1,
                event.billable and event.prompt_tokens,
                event.billable and event.completion_tokens,
                not event.billable and tokens,
                amount(event),
                event.billable and price_of(event) is None and tokens,
            )
        ):
            sums[key][index] += number
    return {key: [*found[:5], money.decimal(found[5]), found[6]] for key, found in sums.items()}


async def asked(query_api: QueryApi, by: list[str], start: int = START, end: int = END) -> dict[Any, list[Any]]:
    answer = await query_api.usage(UsageQuery(from_at_ms=start, to_at_ms=end, by=by))  # type: ignore[arg-type]
    assert not answer.has_more
    return {
        tuple(getattr(row, name) for name in by): [
            row.requests,
            row.attempts,
            row.prompt_tokens,
            row.completion_tokens,
            row.unbilled_tokens,
            row.amount,
            row.unpriced_tokens,
        ]
        for row in answer.rows
    }


GROUPINGS = [[], ["day"], ["hour"], ["tenant", "key"], ["model", "version", "day"], ["endpoint", "priority", "outcome"]]


@pytest.mark.parametrize("seed", [1])
async def test_answers_are_right_whatever_is_built_doubled_or_late(
    store: Store, query_api: QueryApi, seed: int
) -> None:
    """Events come shuffled and doubled, builds happen in between: every answer is that of the events so far."""
    chance = random.Random(seed)
    stream = events(chance, 200)
    stream += chance.sample(stream, 20)
    chance.shuffle(stream)
    rollups = Rollups(store)
    seen: list[AttemptEvent] = []
    while stream:
        count = chance.randrange(40, 150)
        batch, stream = stream[:count], stream[count:]
        seen += batch
        await store.insert([row(event) for event in batch])
        if chance.random() < 0.7:
            await rollups.step(NOW_S)
            await rollups.step(NOW_S)
        start, end = sorted((chance.randrange(START, END), chance.randrange(START, END)))
        for by in ([], *chance.sample(GROUPINGS, 2)):
            assert await asked(query_api, by) == expected(seen, by), by
            assert await asked(query_api, by, start, end + 1) == (
                expected(seen, by, start, end + 1) or ({(): [0, 0, 0, 0, 0, "0", 0]} if not by else {})
            )
    await rollups.step(NOW_S)
    await rollups.step(NOW_S)
    found = await plan(store, START, END)
    assert len(found.days) == 4
    assert not found.hours and not found.raw
    await rollups.sweep(1 << 63)
    for by in GROUPINGS:
        assert await asked(query_api, by) == expected(seen, by), by
    by_build = "SELECT uniqExact(start), count(DISTINCT start, build) FROM usage_days"
    assert await store.select(queries.Query(by_build, {})) == [(4, 4)]


async def test_pages_by_hour_join_up(store: Store, query_api: QueryApi) -> None:
    """Built and unbuilt hours; the page is found by its first and last key."""
    stream = events(random.Random(13), 120)
    await store.insert([row(event) for event in stream[:90]])
    for _ in range(2):
        await Rollups(store).step(NOW_S)
    await store.insert([row(event) for event in stream[60:]])
    for by in (["hour", "tenant"], ["tenant", "day", "hour"]):
        whole = expected(stream, by)
        seen: list[Any] = []
        more = True
        while more:
            query = UsageQuery(from_at_ms=START, to_at_ms=END, by=by, limit=17, offset=len(seen))  # type: ignore[arg-type]
            answer = await query_api.usage(query)
            seen += [(tuple(getattr(row, name) for name in by), row.requests, row.amount) for row in answer.rows]
            more = answer.has_more
        assert seen == [(key, whole[key][0], whole[key][5]) for key in sorted(whole)]
        beyond = UsageQuery(from_at_ms=START, to_at_ms=END, by=by, offset=len(seen))  # type: ignore[arg-type]
        assert (await query_api.usage(beyond)).rows == []


async def test_a_late_event_is_in_the_answer_at_once_and_in_the_next_build(store: Store, query_api: QueryApi) -> None:
    [early, late] = events(random.Random(9), 2)[:2]
    await store.insert([row(early)])
    rollups = Rollups(store)
    for _ in range(2):
        await rollups.step(NOW_S)
    assert (await plan(store, START, END)).raw == []
    await store.insert([row(late)])
    assert (await plan(store, START, END)).raw
    assert await asked(query_api, ["hour"]) == expected([early, late], ["hour"])
    for _ in range(2):
        await rollups.step(NOW_S)
    assert (await plan(store, START, END)).raw == []
    assert await asked(query_api, ["hour"]) == expected([early, late], ["hour"])


async def test_what_is_not_over_is_not_built(store: Store) -> None:
    [event] = events(random.Random(3), 1)[:1]
    await store.insert([row(event)])
    hour_s = event.admitted_at_ms // 1000 // HOUR_S * HOUR_S
    rollups = Rollups(store)
    for _ in range(2):
        await rollups.step(hour_s + HOUR_S - 1)
    assert (await plan(store, START, END)).raw
    for _ in range(2):
        await rollups.step(hour_s + HOUR_S + 60)
    found = await plan(store, START, END)
    assert found.hours and not found.days and not found.raw
    built = [metric("headrace_ledger_built_total", level=level) for level in ("hour", "day")]
    for _ in range(2):
        await rollups.step(hour_s // DAY_S * DAY_S + DAY_S + 60)
    assert (await plan(store, START, END)).days
    assert [metric("headrace_ledger_built_total", level=level) for level in ("hour", "day")] == [built[0], built[1] + 1]


async def test_latencies_are_the_same_raw_and_built(store: Store, query_api: QueryApi) -> None:
    stream = events(random.Random(5), 300)
    await store.insert([row(event) for event in stream])

    async def ask(**changes: Any) -> Any:
        return (
            await query_api.latency(LatencyQuery(**{"from_at_ms": START, "to_at_ms": END, "by": [], **changes}))
        ).rows

    shapes: list[dict[str, Any]] = [
        {},
        {"by": ["model", "day"]},
        {"by": ["tenant"]},
        {"by": ["tenant", "version", "priority"]},
        {"by": ["day", "tenant"]},
        {"by": ["hour"], "tenant": "t1"},
        {"tenant": "t1"},
    ]
    raw = [await ask(**shape) for shape in shapes]
    rollups = Rollups(store)
    for _ in range(2):
        await rollups.step(NOW_S)
    assert [await ask(**shape) for shape in shapes] == raw
    [[total], *_] = raw
    done = sorted(event.ended_at_ms - event.admitted_at_ms for event in stream if event.outcome == "completed")
    assert total.end_to_end_ms.count == len(done)
    assert total.end_to_end_ms.p50 == pytest.approx(done[len(done) // 2], rel=0.03)
    assert total.end_to_end_ms.p99 == pytest.approx(done[int(len(done) * 0.99)], rel=0.05)
    assert total.queue_wait_ms.count == len(stream)


async def test_invoice_daily_usage_and_raw_events_agree_to_the_smallest_unit(store: Store, query_api: QueryApi) -> None:
    stream = events(random.Random(11), 500)
    await store.insert([row(event) for event in stream])
    for month, start, end in (
        ("2026-10", START, ms("2026-11-01T00:00:00")),
        ("2026-11", ms("2026-11-01T00:00:00"), END),
    ):
        invoice = (await query_api.invoice("t1", month)).invoice
        assert invoice is not None
        mine = [event for event in stream if event.tenant == "t1" and start <= event.admitted_at_ms < end]
        exact = sum(amount(event) for event in mine)
        lines = [line for line in invoice.lines if line.kind != "rounding"]
        assert sum(pico(line.amount) for line in lines) == exact == pico(invoice.usage_amount)
        assert sum(pico(line.amount) for line in invoice.lines) == pico(invoice.total)
        assert abs(pico(invoice.total) - exact) <= money.UNIT_PICO // 200
        assert sum(line.tokens for line in lines) == sum(
            event.prompt_tokens + event.completion_tokens for event in mine if event.billable
        )
        query = UsageQuery(from_at_ms=start, to_at_ms=end, by=["day"], tenant="t1")
        for model, version in {(event.model, event.version) for event in mine}:
            of_it = [line.amount for line in lines if (line.model, line.version) == (model, version)]
            costs = [amount(event) for event in mine if (event.model, event.version) == (model, version)]
            assert sum(map(pico, of_it)) == sum(costs)
        days = (await query_api.usage(query)).rows
        assert sum(pico(day.amount) for day in days) == exact
        assert sum(day.requests for day in days) == invoice.requests
        view = (
            "SELECT sum(amount_pico) FROM billed WHERE tenant = 't1'"
            f" AND admitted_at >= fromUnixTimestamp64Milli({start}) AND admitted_at < fromUnixTimestamp64Milli({end})"
        )
        assert await store.select(queries.Query(view, {})) == [(exact,)]
        assert invoice.unpriced_tokens == sum(
            event.prompt_tokens + event.completion_tokens for event in mine if event.billable and not price_of(event)
        )


def pico(text: str) -> int:
    """Not money.pico, which is under test too."""
    return int(Decimal(text) * 10**12)


async def test_an_invoice_keeps_prices_apart_whatever_comes_twice_late_or_again(
    store: Store, query_api: QueryApi
) -> None:
    """A price that changes within the month, to nothing; a model without a price; events at the month's edges."""
    day = datetime.fromisoformat
    await store.insert_prices(
        [
            ("m3", "", "interactive", day("2026-10-01").date(), "USD", 100, 10, 200, 400, 1, 0),
            ("m3", "", "interactive", day("2026-11-16").date(), "USD", 0, 0, 0, 0, 1, 0),
        ]
    )
    [any_event] = events(random.Random(2), 1)[:1]
    fields = {"tenant": "t1", "model": "m3", "priority": "interactive", "billable": True, "outcome": "completed"}
    fields |= {"prompt_tokens": 1000, "cached_tokens": 400, "completion_tokens": 50, "reasoning_tokens": 20}

    def at(time: str, **changes: Any) -> AttemptEvent:
        at_ms = ms(time)
        changes = {"request_id": ids.request_id(at_ms), "admitted_at_ms": at_ms, "ended_at_ms": at_ms + 9} | changes
        return msgspec.structs.replace(any_event, **{**fields, **changes})

    before, first = at("2026-10-31T23:59:59.999"), at("2026-11-01T00:00:00.000")
    priced, free = at("2026-11-15T23:59:59.999"), at("2026-11-16T00:00:00.000")
    last, after = at("2026-11-30T23:59:59.999"), at("2026-12-01T00:00:00.000")
    unpriced = at("2026-11-20T12:00:00", model="m4")
    dated = [("2026-10-01", (100, 10, 200, 400)), ("2026-11-16", (0, 0, 0, 0))]

    async def check(with_price: int, without: int) -> None:
        """``with_price`` and ``without``: events at the first price and at no cost."""
        found = (await query_api.invoice("t1", "2026-11")).invoice
        assert found is not None
        wanted = [
            (kind, "m3", since, tokens * count, money.decimal(tokens * count * price))
            for (since, prices_then), count in zip(dated, (with_price, without), strict=True)
            for kind, tokens, price in zip(
                ("input", "cached_input", "output", "reasoning"), (600, 400, 30, 20), prices_then, strict=True
            )
            if count
        ]
        lines = [line for line in found.lines if line.kind != "rounding" and line.model == "m3"]
        assert [(line.kind, line.model, line.valid_from, line.tokens, line.amount) for line in lines] == wanted
        assert {(line.valid_from, line.amount) for line in found.lines if line.model == "m4"} == {("", "0")}
        assert (found.requests, found.unpriced_tokens) == (with_price + without + 1, 1050)
        assert sum(pico(line.amount) for line in found.lines) == pico(found.total)

    stored_ms, late_s = ms("2026-12-02T00:00:00"), ms("2026-12-10T00:00:00") / 1000
    stream = [before, priced, free, unpriced, after]
    await store.insert([row(event, stored_ms) for event in (*stream, *reversed(stream))])
    await check(1, 1)
    rollups = Rollups(store)
    for _ in range(2):
        await rollups.step(late_s)
    await check(1, 1)
    await store.insert([row(first, stored_ms), row(last, stored_ms)])
    await check(2, 2)
    await store.insert([row(event, stored_ms) for event in reversed([*stream, first, last])])
    await check(2, 2)
    for _ in range(2):
        await rollups.step(late_s)
    assert not (await plan(store, ms("2026-11-01T00:00:00"), ms("2026-12-01T00:00:00"))).raw
    await check(2, 2)


async def test_an_invoice_of_nothing_is_zero(query_api: QueryApi) -> None:
    invoice = (await query_api.invoice("nobody", "2026-12")).invoice
    assert invoice is not None
    assert (invoice.lines, invoice.total, invoice.closed) == ([], "0.00", False)
    for month in ("2026-13", "2026-1", "nope", "0000-01", "2026-00"):
        with pytest.raises(BadQuery):
            await query_api.invoice("t1", month)


# The billing rule -----------------------------------------------------------------------------------------


def ended(outcome: str, completion: int, **changes: Any) -> AttemptEvent:
    """The event that a worker makes of such an end."""
    at_ms = ms("2026-11-02T10:00:00")
    request = RequestEnvelope(
        request_id=ids.request_id(at_ms), tenant="t1", key_id="k", model="m1", endpoint="completions", stream=True,
        prompt_tokens=100, max_output_tokens=50, choices=1, priority="interactive", admitted_at_ms=at_ms,
        publish_within_ms=0, deadline_ms=0, reply=Reply(subject="reply.v1.t1.x", stream="s"),
    )  # fmt: skip
    item = WorkItem(epoch=Epoch(), attempt=1, version="1", worker="w", dispatched_at_ms=at_ms, request=request)
    counts = Counts(prompt_tokens=100, cached_tokens=40, completion_tokens=completion, reasoning_tokens=0)
    ended = outcomes.AttemptOutcome(kind=outcome, **changes)  # type: ignore[arg-type]
    return outcomes.terminal_event(
        item, counts, ended, worker="w", frames=1, chunks=1, pulled_at_ms=0, started_at_ms=0, now_ms=900
    )


FULL = 60 * 140_000 + 40 * 35_000


async def test_the_billing_rule(store: Store, query_api: QueryApi) -> None:
    """One tenant for each case."""
    cases = {
        "completed": (ended("completed", 10), FULL + 10 * 500_000),
        "no output": (ended("completed", 0), FULL),
        "cancelled": (ended("cancelled", 10, code="cancelled"), FULL + 10 * 500_000),
        "cancelled before the first token": (ended("cancelled", 0, code="cancelled"), 0),
        "failed": (ended("failed", 10, code="engine_error"), 0),
        "engine died": (ended("failed", 10, code="engine_error", engine_death=True), 0),
        "lost": (
            msgspec.structs.replace(ended("failed", 10, code="worker_lost"), outcome="lost", reporter="scheduler"),
            0,
        ),
        "expired": (
            msgspec.structs.replace(
                ended("cancelled", 0, code="cancelled"), attempt=0, outcome="expired", prompt_tokens=0, cached_tokens=0
            ),
            0,
        ),
    }
    await store.insert([row(msgspec.structs.replace(event, tenant=case)) for case, (event, _) in cases.items()])
    found = (await query_api.usage(UsageQuery(from_at_ms=START, to_at_ms=END, by=["tenant"]))).rows
    assert {row.tenant: pico(row.amount) for row in found} == {case: charged for case, (_, charged) in cases.items()}
    for total in found:
        event, charged = cases[total.tenant or ""]
        produced = event.prompt_tokens + event.completion_tokens
        assert total.prompt_tokens + total.completion_tokens == (produced if charged else 0)
        assert total.unbilled_tokens == (0 if charged else produced)


async def test_a_retried_request_is_billed_once(store: Store, query_api: QueryApi) -> None:
    done = ended("completed", 10)
    lost = msgspec.structs.replace(done, outcome="lost", billable=False)
    won = msgspec.structs.replace(done, attempt=2)
    await store.insert([row(lost), row(won)])
    [total] = (await query_api.usage(UsageQuery(from_at_ms=START, to_at_ms=END, by=[]))).rows
    assert (total.requests, total.attempts, pico(total.amount)) == (1, 2, FULL + 10 * 500_000)
    found = await query_api.explain(done.request_id, None)
    assert (len(found.attempts), pico(found.amount), found.currency) == (2, FULL + 10 * 500_000, "USD")
    # What only limits are settled by is not kept.
    kept = msgspec.structs.replace(won, spent_input_tokens=0, requested_model="m1")
    assert msgspec.structs.asdict(found.attempts[1]) == msgspec.structs.asdict(kept)


async def test_a_request_is_explained_to_its_own_tenant_only(store: Store, query_api: QueryApi) -> None:
    event = ended("completed", 10)
    await store.insert([row(event)])
    assert (await query_api.explain(event.request_id, "t1")).text
    other = await query_api.explain(event.request_id, "t2")
    assert other == await query_api.explain(ids.request_id(), "t2")
    assert (other.code, other.attempts) == ("not_found", [])
    assert await query_api.explain("' OR '' = '", None) == other
    for text in ("", "x" * 257):
        with pytest.raises(BadQuery):
            await query_api.explain(text, None)


async def test_an_id_of_the_callers_finds_the_newest_of_its_own_tenant(store: Store, query_api: QueryApi) -> None:
    at_ms, event = ms("2026-11-02T10:00:00"), ended("completed", 10)
    mine = [
        msgspec.structs.replace(event, client_request_id="mine", request_id=ids.request_id(at_ms + number))
        for number in range(4)
    ]
    theirs = msgspec.structs.replace(mine.pop(), tenant="t2")
    await store.insert([row(event) for event in (*mine, theirs)])
    newest, *before = sorted((event.request_id for event in mine), reverse=True)
    found = await query_api.explain("mine", "t1")
    assert [attempt.request_id for attempt in found.attempts] == [newest]
    assert f"before, too: {', '.join(before)}." in "\n".join(found.text)
    assert (await query_api.explain("mine", "t3")).code == "not_found"
    body_id = await query_api.explain(f"chatcmpl-{before[0]}", "t1")
    assert [attempt.request_id for attempt in body_id.attempts] == [before[0]]
