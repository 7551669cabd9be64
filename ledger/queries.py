"""The ledger's questions as SQL: pure builders that return text and parameters.

All read ``attempts`` with FINAL: right before any merge, and the fastest of the right forms (README).
"""

from collections.abc import Collection
from typing import NamedTuple

from contracts.messages import UsageDimension, UsageQuery

ROWS_MAX = 10_000
"""Most rows of one answer."""
OFFSET_MAX = 10_000_000

DIMENSIONS: dict[UsageDimension, str] = {
    "tenant": "tenant",
    "key": "key_id",
    "model": "model",
    "version": "version",
    "day": "toString(toDate(admitted_at, 'UTC'))",
    "hour": "formatDateTime(toStartOfHour(admitted_at, 'UTC'), '%Y-%m-%dT%H:00:00Z', 'UTC')",
}
"""Days read ``2026-11-29`` and hours ``2026-11-29T18:00:00Z``, in UTC whatever the server's time zone."""

FIGURES = ("requests", "prompt_tokens", "cached_tokens", "completion_tokens", "reasoning_tokens")

SETTINGS = {"do_not_merge_across_partitions_select_final": 1, "max_execution_time": 30}
"""Of every reader. Partitions may be read apart, because copies of one event share a partition."""

_IN_RANGE = (
    "admitted_at >= fromUnixTimestamp64Milli({from_at_ms:Int64}, 'UTC')"
    " AND admitted_at < fromUnixTimestamp64Milli({to_at_ms:Int64}, 'UTC')"
)

# A request counts once, in the group of its highest attempt. Nearly all have attempt 1 alone, so the set of
# the others is small, which is cheaper than counting distinct ids.
_REQUESTS = (
    "countIf(request_id NOT IN (SELECT request_id FROM attempts WHERE {others})"
    " OR (request_id, attempt) IN"
    " (SELECT request_id, max(attempt) FROM attempts WHERE {others} GROUP BY request_id))"
)


class Query(NamedTuple):
    text: str
    parameters: dict[str, object]


class BadQuery(ValueError):
    """The question cannot be answered; the text says why."""


def usage(query: UsageQuery) -> Query:
    """Usage by ``query.by``; one row more than the limit, if there is one, says that there is more.

    Columns: the dimensions asked for, in their order, then FIGURES. Tokens are those of billable attempts.
    Raises BadQuery.
    """
    _check(query)
    parameters: dict[str, object] = {
        "from_at_ms": query.from_at_ms,
        "to_at_ms": query.to_at_ms,
        "limit": query.limit + 1,
        "offset": query.offset,
    }
    where = _IN_RANGE
    if query.tenant is not None:
        where += " AND tenant = {tenant:String}"
        parameters["tenant"] = query.tenant
    tokens = [f"sumIf({name}, billable) AS {name}_sum" for name in FIGURES[1:]]
    requests = _REQUESTS.format(others=f"attempt != 1 AND {where}")
    columns = [f"{DIMENSIONS[name]} AS by_{name}" for name in query.by]
    columns += [f"{requests} AS requests", *tokens]
    keys = ", ".join(f"by_{name}" for name in query.by)
    grouping = f" GROUP BY {keys} ORDER BY {keys}" if keys else ""
    text = (
        f"SELECT {', '.join(columns)} FROM attempts FINAL WHERE {where}{grouping}"
        f" LIMIT {{limit:UInt64}} OFFSET {{offset:UInt64}}"
    )
    return Query(text, parameters)


def _check(query: UsageQuery) -> None:
    if not 0 <= query.from_at_ms < query.to_at_ms:
        raise BadQuery("the range [from, to) is empty or reversed")
    if query.to_at_ms > 10_413_792_000_000:
        raise BadQuery("the range ends after the year 2299")
    if len(set(query.by)) < len(query.by):
        raise BadQuery("a dimension is named twice")
    if not 1 <= query.limit <= ROWS_MAX:
        raise BadQuery(f"limit is {query.limit}; 1 to {ROWS_MAX} are possible")
    if not 0 <= query.offset <= OFFSET_MAX:
        raise BadQuery(f"offset is {query.offset}; 0 to {OFFSET_MAX} are possible")


def month_tokens(from_at_ms: int, to_at_ms: int, tenants: Collection[str] | None) -> Query:
    """Billable prompt and completion tokens of each tenant in a range; None: of all tenants."""
    parameters: dict[str, object] = {"from_at_ms": from_at_ms, "to_at_ms": to_at_ms}
    where = _IN_RANGE
    if tenants is not None:
        where += " AND tenant IN {tenants:Array(String)}"
        parameters["tenants"] = sorted(tenants)
    text = (
        "SELECT tenant, sumIf(toUInt64(prompt_tokens) + completion_tokens, billable) AS tokens"
        f" FROM attempts FINAL WHERE {where} GROUP BY tenant"
    )
    return Query(text, parameters)
