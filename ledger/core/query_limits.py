"""What a query may ask: which ranges, pages and dimensions; pure."""

from collections.abc import Sequence

from contracts.messages.usage import LatencyQuery, UsageQuery

ROWS_MAX = 10_000
"""Most rows of one answer."""
OFFSET_MAX = 10_000_000
HOURS_RANGE_MS_MAX = 92 * 86_400_000
"""Longest range by hour: the plan names each hour, and ClickHouse reads at most 256 KB of text."""
TENANTS_HOURS_RANGE_MS_MAX = 6 * 3_600_000
"""Longest range of latencies of all tenants by hour: there is a sketch for each, and merging takes microseconds."""


class BadQuery(ValueError):
    """The query cannot be answered; the text says why."""


def check_usage(query: UsageQuery) -> None:
    """Raises BadQuery."""
    _check_range(query.from_at_ms, query.to_at_ms)
    _check_page(query.by, query.limit, query.offset)
    if "hour" in query.by and query.to_at_ms - query.from_at_ms > HOURS_RANGE_MS_MAX:
        raise BadQuery("by hour a range has at most 92 days")


def _check_range(from_ms: int, to_ms: int) -> None:
    if not 0 <= from_ms < to_ms:
        raise BadQuery("the range [from, to) is empty or reversed")
    if to_ms > 10_413_792_000_000:
        raise BadQuery("the range ends after the year 2299")


def _check_page(by: Sequence[str], limit: int, offset: int) -> None:
    if len(set(by)) < len(by):
        raise BadQuery("a dimension is named twice")
    if not 1 <= limit <= ROWS_MAX:
        raise BadQuery(f"limit is {limit}; 1 to {ROWS_MAX} are possible")
    if not 0 <= offset <= OFFSET_MAX:
        raise BadQuery(f"offset is {offset}; 0 to {OFFSET_MAX} are possible")


def check_latency(query: LatencyQuery) -> None:
    """Raises BadQuery."""
    _check_range(query.from_at_ms, query.to_at_ms)
    _check_page(query.by, query.limit, query.offset)
    length_ms = query.to_at_ms - query.from_at_ms
    if "hour" in query.by and length_ms > HOURS_RANGE_MS_MAX:
        raise BadQuery("by hour a range has at most 92 days")
    if {"hour", "tenant"} <= set(query.by) and query.tenant is None and length_ms > TENANTS_HOURS_RANGE_MS_MAX:
        raise BadQuery("by hour and tenant a range has at most 6 hours, unless one tenant is named")
