"""What was used: ``/v1/usage`` for the caller's own tenant, ``/admin/v1/usage`` for all.

A caller's tenant is its key's: it stands in the subject that the ledger is asked on, and no parameter changes it.
"""

import time
from collections.abc import Sequence
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from fastapi import APIRouter, Depends, Query
from pydantic import BaseModel, BeforeValidator, Field, WithJsonSchema

from contracts import clock, instants, subjects
from contracts.bus import Bus, Unavailable
from contracts.errors import HeadraceError
from contracts.messages.base import Message
from contracts.messages.usage import (
    LATENCY_SPANS,
    SLOWEST_MAX,
    USAGE_FIGURES,
    ExplainAnswer,
    ExplainQuery,
    LatencyAnswer,
    LatencyDimension,
    LatencyQuery,
    LedgerAnswer,
    RequestTimes,
    SlowestAnswer,
    SlowestQuery,
    UsageAnswer,
    UsageDimension,
    UsageQuery,
)
from gateway.http.typed import Name, ServicesDep, TypedRoute, caller_for, refusals
from gateway.intake.auth import Identity

TIMEOUT_S = 35.0
"""Longer than a ledger lets a question take."""
LIMIT = 1000
LIMIT_MAX = 10_000
OFFSET_MAX = 10_000_000

A = TypeVar("A", bound=LedgerAnswer)


def _split(given: list[str]) -> list[str]:
    """From ``by=day&by=model`` or ``by=day,model``: each name once. An empty one is refused as no such name."""
    return list(dict.fromkeys(name.strip() for part in given for name in part.split(",")))


def _parsed(text: str) -> int:
    at_ms = instants.parse(text)
    if at_ms < 0:
        raise ValueError("this is before 1970")
    return at_ms


def _digits(given: str | int) -> str | int:
    """A number as it must be written, or the default; pydantic alone would take ``1_0`` and ``+5.0``, too."""
    if isinstance(given, str) and not (given.isascii() and given.isdigit()):
        raise ValueError("this is a whole number")
    return given


Whole = Annotated[int, BeforeValidator(_digits)]
Instant = Annotated[int | None, BeforeValidator(_parsed), WithJsonSchema({"type": "string"})]
_INSTANT = "An instant or a day, such as `2026-11-29T12:00:00Z` or `2026-11-29`; UTC without an offset."
_BY = "What rows are summed by, also separated by commas; default {}."


class Range(BaseModel):
    """Which time, and which page of the rows."""

    start: Instant = Field(
        None, alias="from", description=f"First instant; default: start of the UTC month. {_INSTANT}"
    )
    end: Instant = Field(
        None, alias="to", description=f"First instant that is left out; default: end of the month. {_INSTANT}"
    )
    limit: Whole = Field(LIMIT, ge=1, le=LIMIT_MAX, description="Rows of the answer.")
    after: Whole = Field(0, ge=0, le=OFFSET_MAX, description="`next` of the answer before.")

    def instants(self) -> tuple[int, int]:
        """[from, to) in Unix ms. Without both the current UTC month; with one alone, the rest of that one's month."""
        try:
            return instants.month_or_range(self.start, self.end, clock.now_ms())
        except ValueError as error:
            raise HeadraceError("invalid_request", f"'to': {error}.", param="to") from error


class OwnUsage(Range):
    """Of ``/v1/usage``."""

    by: Annotated[list[UsageDimension], BeforeValidator(_split)] = Field(
        [], description=_BY.format("day,model,version")
    )


class OwnLatency(Range):
    """Of ``/v1/usage/latency``."""

    by: Annotated[list[LatencyDimension], BeforeValidator(_split)] = Field([], description=_BY.format("model"))


class AllUsage(OwnUsage, extra="forbid"):
    """Of ``/admin/v1/usage``."""

    tenant: str | None = Field(None, min_length=1, description="Only this tenant's usage.")


class AllLatency(OwnLatency, extra="forbid"):
    """Of ``/admin/v1/usage/latency``."""

    tenant: str | None = Field(None, min_length=1, description="Only this tenant's usage.")


HOUR_MS = 3_600_000


class OwnSlowest(BaseModel):
    """Of ``/v1/usage/slowest``."""

    start: Instant = Field(
        None, alias="from", description=f"First instant; default: an hour before the last. {_INSTANT}"
    )
    end: Instant = Field(None, alias="to", description=f"First instant that is left out; default: now. {_INSTANT}")
    model: str | None = Field(None, min_length=1, max_length=64, description="Only this model's requests.")
    order: Literal["total", "first_token", "failed"] = Field(
        "total", description="What is slow; `failed`: requests that failed instead, the newest first."
    )
    limit: Whole = Field(5, ge=1, le=SLOWEST_MAX, description="Requests of each tenant and model.")

    def query(self, tenant: str | None) -> SlowestQuery:
        """What the ledger is asked."""
        end = clock.now_ms() if self.end is None else self.end
        start = max(0, end - HOUR_MS) if self.start is None else self.start
        return SlowestQuery(
            from_at_ms=start, to_at_ms=end, tenant=tenant, model=self.model, order=self.order, limit=self.limit
        )


class AllSlowest(OwnSlowest, extra="forbid"):
    """Of ``/admin/v1/usage/slowest``."""

    tenant: str | None = Field(None, min_length=1, description="Only this tenant's requests.")


class Slowest(msgspec.Struct, kw_only=True):
    """The slowest first."""

    start: str = msgspec.field(name="from")
    end: str = msgspec.field(name="to")
    data: list[RequestTimes]
    object: str = "list"


class Explanation(msgspec.Struct, kw_only=True):
    """What became of a request, a line each, and where its time went."""

    text: list[str]
    times: RequestTimes | None
    amount: str
    currency: str


class Rows(msgspec.Struct, kw_only=True):
    """One page: rows of what was asked for by, and figures."""

    start: str = msgspec.field(name="from")
    end: str = msgspec.field(name="to")
    data: list[dict[str, Any]]
    has_more: bool
    next: str | None
    object: str = "list"


class PricedRows(Rows, kw_only=True):
    """With what they cost."""

    currency: str
    """Empty while there are no prices."""


UsageCaller = Annotated[Identity, Depends(caller_for("usage"))]

own = APIRouter(prefix="/v1/usage", tags=["Usage"], route_class=TypedRoute, responses=refusals(401, 403, 503))
everyones = APIRouter(
    prefix="/admin/v1/usage",
    tags=["Administration"],
    route_class=TypedRoute,
    dependencies=[Depends(caller_for("admin:usage"))],
    responses=refusals(401, 403, 503),
)


@own.get("")
async def own_usage(services: ServicesDep, caller: UsageCaller, asked: Annotated[OwnUsage, Query()]) -> PricedRows:
    """What was used and what it costs."""
    return await _usage(services.bus, asked, caller.tenant.name)


@own.get("/latency")
async def own_latency(services: ServicesDep, caller: UsageCaller, asked: Annotated[OwnLatency, Query()]) -> Rows:
    """How long requests took: quantiles of each span."""
    return await _latency(services.bus, asked, caller.tenant.name)


@everyones.get("")
async def all_usage(services: ServicesDep, asked: Annotated[AllUsage, Query()]) -> PricedRows:
    """What was used and what it costs."""
    return await _usage(services.bus, asked, asked.tenant)


@everyones.get("/latency")
async def all_latency(services: ServicesDep, asked: Annotated[AllLatency, Query()]) -> Rows:
    """How long requests took: quantiles of each span."""
    return await _latency(services.bus, asked, asked.tenant)


@own.get("/slowest")
async def own_slowest(services: ServicesDep, caller: UsageCaller, asked: Annotated[OwnSlowest, Query()]) -> Slowest:
    """The slowest requests, and where their time went."""
    return await _slowest(services.bus, asked.query(caller.tenant.name))


@own.get("/requests/{request_id}", responses=refusals(404))
async def own_request(services: ServicesDep, caller: UsageCaller, request_id: Name) -> RequestTimes:
    """Where the time of a request went. Its id is that of its answer, or the caller's own."""
    answer = await _explain(services.bus, request_id, caller.tenant.name)
    if answer.times is None:
        raise HeadraceError("unavailable", "The ledger does not say.", retry_after_s=5)
    return answer.times


@everyones.get("/slowest")
async def all_slowest(services: ServicesDep, asked: Annotated[AllSlowest, Query()]) -> Slowest:
    """The slowest requests, and where their time went."""
    return await _slowest(services.bus, asked.query(asked.tenant))


@everyones.get("/requests/{request_id}", responses=refusals(404))
async def any_request(services: ServicesDep, request_id: Name) -> Explanation:
    """What became of a request, and where its time went."""
    answer = await _explain(services.bus, request_id, None)
    return Explanation(text=answer.text, times=answer.times, amount=answer.amount, currency=answer.currency)


async def _slowest(bus: Bus, query: SlowestQuery) -> Slowest:
    answer = await _ask(bus, "slowest", query, query.tenant, SlowestAnswer)
    return Slowest(start=_shown(query.from_at_ms), end=_shown(query.to_at_ms), data=answer.rows)


async def _explain(bus: Bus, request_id: str, tenant: str | None) -> ExplainAnswer:
    try:
        query = msgspec.convert({"request_id": request_id}, ExplainQuery)
    except msgspec.ValidationError as error:
        raise HeadraceError("not_found", "There is no such request.") from error
    return await _ask(bus, "explain", query, tenant, ExplainAnswer)


async def _usage(bus: Bus, asked: OwnUsage, tenant: str | None) -> PricedRows:
    by: list[UsageDimension] = asked.by or ["day", "model", "version"]
    start, end = asked.instants()
    query = UsageQuery(from_at_ms=start, to_at_ms=end, by=by, tenant=tenant, limit=asked.limit, offset=asked.after)
    answer = await _ask(bus, "usage", query, tenant, UsageAnswer)
    return PricedRows(**_page(query, answer, (*by, *USAGE_FIGURES)), currency=answer.currency)


async def _latency(bus: Bus, asked: OwnLatency, tenant: str | None) -> Rows:
    by: list[LatencyDimension] = asked.by or ["model"]
    start, end = asked.instants()
    query = LatencyQuery(from_at_ms=start, to_at_ms=end, by=by, tenant=tenant, limit=asked.limit, offset=asked.after)
    return Rows(**_page(query, await _ask(bus, "latency", query, tenant, LatencyAnswer), (*by, *LATENCY_SPANS)))


def _page(
    query: UsageQuery | LatencyQuery, answer: UsageAnswer | LatencyAnswer, names: Sequence[str]
) -> dict[str, Any]:
    return {
        "start": _shown(query.from_at_ms),
        "end": _shown(query.to_at_ms),
        "data": [{name: getattr(row, name) for name in names} for row in answer.rows],
        "has_more": answer.has_more,
        "next": str(query.offset + len(answer.rows)) if answer.has_more else None,
    }


async def _ask(bus: Bus, question: str, query: Message, tenant: str | None, kind: type[A]) -> A:
    """The ledger's answer, about this tenant alone or (None) all; raises HeadraceError."""
    try:
        subject = subjects.usage_all(question) if tenant is None else subjects.usage_of(tenant, question)
    except subjects.InvalidName as error:
        raise HeadraceError("invalid_request", f"No such tenant: {error}.", param="tenant") from error
    try:
        data = await bus.request(subject, msgspec.json.encode(query), timeout_s=TIMEOUT_S)
        answer = msgspec.json.decode(data, type=kind)
    except (Unavailable, msgspec.MsgspecError) as error:
        raise HeadraceError("unavailable", "The ledger does not answer.", retry_after_s=5) from error
    if answer.code == "invalid_request":
        raise HeadraceError("invalid_request", f"{answer.error}.")
    if answer.code == "not_found":
        raise HeadraceError("not_found", f"There is no such request: {answer.error}.")
    if answer.error:
        raise HeadraceError("unavailable", f"The ledger says: {answer.error}.", retry_after_s=5)
    return answer


def _shown(at_ms: int) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(at_ms // 1000)) + f".{at_ms % 1000:03d}Z"
