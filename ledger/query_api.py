"""The query API over the bus: who may ask about whom, what is asked of ClickHouse, and the answer's shape.

The subject says about whom: ``usage.v1.of.<tenant>.<query>`` is answered about that tenant alone, so leave to publish
there is leave to know that tenant's usage; ``usage.v1.all.<query>`` is for operators.
"""

import time
from collections.abc import Sequence
from typing import Any, TypeVar

import msgspec
import structlog

from contracts import clock, instants, subjects
from contracts.bus import BusError, Incoming
from contracts.messages.attempts import AttemptEvent
from contracts.messages.base import Codec
from contracts.messages.deliveries import Delivery
from contracts.messages.usage import (
    USAGE_FIGURES,
    ExplainAnswer,
    ExplainQuery,
    InvoiceAnswer,
    InvoiceQuery,
    LatencyAnswer,
    LatencyQuery,
    LatencyRow,
    LedgerAnswer,
    Quantiles,
    SlowestAnswer,
    SlowestQuery,
    UsageAnswer,
    UsageQuery,
    UsageRow,
)
from ledger import metrics, rollups
from ledger.core import deliveries, explain, invoices, money, phases, queries, query_limits, rows
from ledger.core.query_limits import BadQuery
from ledger.invoices import Invoices
from ledger.prices import Prices
from ledger.rollouts import Rollouts
from ledger.store import Store, StoreError

log = structlog.get_logger(__name__)

_usage_queries: Codec[UsageQuery] = Codec(UsageQuery)
_latency_queries: Codec[LatencyQuery] = Codec(LatencyQuery)
_invoice_queries: Codec[InvoiceQuery] = Codec(InvoiceQuery)
_slowest_queries: Codec[SlowestQuery] = Codec(SlowestQuery)
_explain_queries: Codec[ExplainQuery] = Codec(ExplainQuery)
_encode = msgspec.json.Encoder().encode

ID_CHARS_MAX = 256
"""Longer than any id that a gateway takes or gives."""
OTHERS_MAX = 5
"""How many other requests with the same id of a caller's are named."""

Q = TypeVar("Q", UsageQuery, LatencyQuery, InvoiceQuery)


class QueryApi:
    """Every query that the ledger answers. Methods raise BadQuery or StoreError.

    ``bytes_max``: of an answer; rows that do not fit are left to the next page.
    """

    def __init__(
        self, store: Store, prices: Prices, issued: Invoices, bytes_max: int, rollouts: Rollouts | None = None
    ) -> None:
        self._rollouts = rollouts
        self._store = store
        self._prices = prices
        self._invoices = issued
        self._bytes_max = bytes_max

    async def answer(self, message: Incoming) -> None:
        """Respond to one message under ``usage.v1.``."""
        started = time.monotonic()
        answer = await self._answer(message)
        if isinstance(answer, UsageAnswer | LatencyAnswer):
            message.respond(fitting(answer, self._bytes_max))
        else:
            message.respond(_encode(answer))
        metrics.QUERY_SECONDS.observe(time.monotonic() - started)

    async def _answer(self, message: Incoming) -> LedgerAnswer:
        try:
            tenant, name = subjects.scope_of_usage(message.subject)
            return await self._query(name, message.data, tenant)
        except (msgspec.MsgspecError, subjects.InvalidName, BadQuery) as error:
            return LedgerAnswer(error=str(error), code="invalid_request")
        except StoreError as error:
            log.warning("query_not_answered", error=str(error))
            return LedgerAnswer(error="the ledger's database does not answer", code="unavailable")
        except BusError as error:
            log.warning("query_not_answered", error=str(error))
            return LedgerAnswer(error="issued invoices cannot be read or written now", code="unavailable")

    async def _query(self, name: str, data: bytes, tenant: str | None) -> LedgerAnswer:
        """``tenant``: of whom the subject lets ask; None: of all."""
        match name:
            case "usage":
                return await self.usage(_of(_usage_queries.decode(data), tenant))
            case "latency":
                return await self.latency(_of(_latency_queries.decode(data), tenant))
            case "invoice":
                query = _of(_invoice_queries.decode(data), tenant)
                return await self.invoice(query.tenant, query.month)
            case "slowest":
                query_ = _slowest_queries.decode(data)
                return await self.slowest(query_ if tenant is None else msgspec.structs.replace(query_, tenant=tenant))
            case "explain":
                return await self.explain(_explain_queries.decode(data).request_id, tenant)
        raise BadQuery(f"there is no query {name!r}")

    async def usage(self, query: UsageQuery) -> UsageAnswer:
        """A page of usage by the dimensions asked for."""
        query_limits.check(query)
        plan = await rollups.plan(self._store, query.from_at_ms, query.to_at_ms, queries.levels(query.by))
        found = await self._store.select(queries.usage(query, plan))
        columns = (*query.by, *USAGE_FIGURES)
        answered = []
        for values in found[: query.limit]:
            fields: dict[str, Any] = dict(zip(columns, values, strict=True))
            answered.append(UsageRow(**fields | {"amount": money.decimal(fields["amount"])}))
        return UsageAnswer(rows=answered, has_more=len(found) > query.limit, currency=self._prices.currency)

    async def latency(self, query: LatencyQuery) -> LatencyAnswer:
        """A page of latencies by the dimensions asked for."""
        query_limits.check(query)
        plan = await rollups.plan(self._store, query.from_at_ms, query.to_at_ms, queries.levels(query.by))
        found = await self._store.select(queries.latency(query, plan))
        answered = []
        for values in found[: query.limit]:
            fields: dict[str, Any] = dict(zip(query.by, values, strict=False))
            spans = values[len(query.by) :]
            for span, count, quantiles in zip(queries.SPANS, spans[::2], spans[1::2], strict=True):
                fields[f"{span}_ms"] = _quantiles(count, quantiles)
            answered.append(LatencyRow(**fields))
        return LatencyAnswer(rows=answered, has_more=len(found) > query.limit)

    async def invoice(self, tenant: str, month: str) -> InvoiceAnswer:
        """A tenant's invoice of a UTC month (``2026-11``): the issued one, or one of a month that is still open."""
        subjects.encode(tenant)
        try:
            _, to_ms = instants.range_of_month(month)
        except ValueError as error:
            raise BadQuery(str(error)) from error
        issued = await self._invoices.of(tenant)
        if made := issued.get(month):
            return InvoiceAnswer(invoice=made)
        now_ms, currency = clock.now_ms(), self._prices.currency
        # From the beginning: what came late for months that are issued is corrected here.
        found = await self._store.select(queries.invoice(await rollups.plan(self._store, 0, to_ms), tenant))
        used = {each: [row[1:] for row in found if row[0] == each] for each in {row[0] for row in found}}
        for each in invoices.to_issue(month, used, issued, now_ms):
            made = invoices.make(tenant, each, used, issued, currency=currency, now_ms=now_ms)
            issued[each] = await self._invoices.issue(made)
        return InvoiceAnswer(
            invoice=issued.get(month) or invoices.make(tenant, month, used, issued, currency=currency, now_ms=now_ms)
        )

    async def explain(self, request_id: str, tenant: str | None) -> ExplainAnswer:
        """What became of a request; another tenant's is as one that does not exist. ``tenant`` None: for operators."""
        if not 0 < len(request_id) <= ID_CHARS_MAX:
            raise BadQuery(f"an id has 1 to {ID_CHARS_MAX} characters")
        others: list[str] = []
        asked = rows.request_id_at_the_end(request_id)
        found = await self._attempts(asked, tenant)
        if not found:
            same = await self._store.select(queries.own_id(request_id, tenant, OTHERS_MAX + 1))
            newest, *others = [of for (of,) in same] or [asked]
            found = await self._attempts(newest, tenant)
            if not found:
                return await self._explain_delivery(newest, tenant)
        events = [rows.event_of(values[:-2]) for values in found]
        delivery = (await self._deliveries([events[0].request_id])).get(events[0].request_id)
        told = phases.times(events, delivery)
        amount = sum(values[-1] for values in found)
        rollouts = await self._rollouts.of(events[0].model) if self._rollouts and events[0].arm else []
        currency = next((values[-2] for values in found if values[-2]), "")
        return ExplainAnswer(
            attempts=events,
            text=explain.explain(events, amount, currency, others, rollouts),
            times=told,
            amount=money.decimal(amount),
            currency=currency,
        )

    async def _explain_delivery(self, request_id: str, tenant: str | None) -> ExplainAnswer:
        """A request that has no attempt: refused, perhaps."""
        delivery = (await self._deliveries([request_id] if request_id else [])).get(request_id)
        if delivery is None or tenant not in (None, delivery.tenant):
            text = "the ledger holds no attempt of this request: it was refused, has not ended, or never came"
            return ExplainAnswer(error=text, code="not_found")
        told = phases.times([], delivery)
        return ExplainAnswer(text=explain.without_attempts(delivery), times=told)

    async def slowest(self, query: SlowestQuery) -> SlowestAnswer:
        """The slowest requests, with where their time went."""
        query_limits.check_slowest(query)
        ids = [of for (of,) in await self._store.select(queries.slowest(query))]
        if not ids:
            return SlowestAnswer()
        events: dict[str, list[AttemptEvent]] = {}
        for values in await self._store.select(queries.attempts_of(ids, list(rows.EVENT_COLUMNS.values()))):
            event = rows.event_of(values)
            events.setdefault(event.request_id, []).append(event)
        seen = await self._deliveries(ids)
        return SlowestAnswer(rows=[phases.times(events.get(each, []), seen.get(each)) for each in ids])

    async def _deliveries(self, request_ids: Sequence[str]) -> dict[str, Delivery]:
        """By request id: what gateways saw."""
        if not request_ids:
            return {}
        found = await self._store.select(queries.deliveries(request_ids, deliveries.SHOWN))
        return {each.request_id: each for each in map(deliveries.delivery_of, found)}

    async def _attempts(self, request_id: str, tenant: str | None) -> list[tuple[Any, ...]]:
        """Rows of ``queries.request``; none for an empty id."""
        if not request_id:
            return []
        number = rows.request_number(request_id)
        query = queries.request(number, rows.requested_at_ms(number), tenant, list(rows.EVENT_COLUMNS.values()))
        return await self._store.select(query)


def _of(query: Q, tenant: str | None) -> Q:
    return query if tenant is None else msgspec.structs.replace(query, tenant=tenant)


def fitting(answer: UsageAnswer | LatencyAnswer, bytes_max: int) -> bytes:
    """The answer as a message of at most ``bytes_max``; rows that do not fit are left to the next page."""
    data = _encode(answer)
    while len(data) > bytes_max and answer.rows:
        count = len(answer.rows) * bytes_max // len(data)
        rows = answer.rows[: min(count, len(answer.rows) - 1)]
        answer = msgspec.structs.replace(answer, rows=rows, has_more=True)
        data = _encode(answer)
    return data


def _quantiles(count: int, values: Sequence[float]) -> Quantiles:
    if not count:
        return Quantiles()
    p50, p90, p95, p99 = (round(value, 3) for value in values)
    return Quantiles(count=count, p50=p50, p90=p90, p95=p95, p99=p99)
