"""What a query may ask: which ranges, pages and dimensions; pure."""

from contracts.messages.usage import SLOWEST_MAX, LatencyQuery, SlowestQuery, UsageQuery

ROWS_MAX = 10_000
"""Most rows of one answer."""
OFFSET_MAX = 10_000_000
HOURS_RANGE_MS_MAX = 92 * 86_400_000
"""Longest range by hour: the plan names each hour, and ClickHouse reads at most 256 KB of text."""
TENANTS_HOURS_RANGE_MS_MAX = 6 * 3_600_000
"""Longest range of latencies of all tenants by hour: there is a sketch for each, and merging takes microseconds."""


SLOWEST_RANGE_MS_MAX = 86_400_000
"""A day: each request of the range is looked at."""


class BadQuery(ValueError):
    """The query cannot be answered; the text says why."""


def check_slowest(query: SlowestQuery) -> None:
    """Raises BadQuery unless range and limit are possible."""
    if not 0 <= query.from_at_ms < query.to_at_ms:
        raise BadQuery("the range [from, to) is empty or reversed")
    if query.to_at_ms - query.from_at_ms > SLOWEST_RANGE_MS_MAX:
        raise BadQuery("the slowest are looked for in a day at most")
    if not 1 <= query.limit <= SLOWEST_MAX:
        raise BadQuery(f"limit is {query.limit}; 1 to {SLOWEST_MAX} are possible")


def check(query: UsageQuery | LatencyQuery) -> None:
    """Raises BadQuery unless range, page and dimensions are possible."""
    length_ms, by = query.to_at_ms - query.from_at_ms, set(query.by)
    if not 0 <= query.from_at_ms < query.to_at_ms:
        raise BadQuery("the range [from, to) is empty or reversed")
    if query.to_at_ms > 10_413_792_000_000:
        raise BadQuery("the range ends after the year 2299")
    if len(by) < len(query.by):
        raise BadQuery("a dimension is named twice")
    if not 1 <= query.limit <= ROWS_MAX:
        raise BadQuery(f"limit is {query.limit}; 1 to {ROWS_MAX} are possible")
    if not 0 <= query.offset <= OFFSET_MAX:
        raise BadQuery(f"offset is {query.offset}; 0 to {OFFSET_MAX} are possible")
    if "hour" in by and length_ms > HOURS_RANGE_MS_MAX:
        raise BadQuery("by hour a range has at most 92 days")
    sketches = isinstance(query, LatencyQuery) and {"hour", "tenant"} <= by and query.tenant is None
    if sketches and length_ms > TENANTS_HOURS_RANGE_MS_MAX:
        raise BadQuery("by hour and tenant a range has at most 6 hours, unless one tenant is named")
