"""The ledger's queries as SQL: pure builders that return text and parameters.

A query reads what a plan (rollup_plan.py) names: built days and hours, and ``attempts`` with FINAL for the rest. So
every answer is right before any merge. Values of others are parameters; numbers of our own stand in the text.
"""

from collections.abc import Collection, Sequence
from typing import NamedTuple, get_args

from contracts.messages.usage import (
    SLOWEST_MAX,
    LatencyDimension,
    LatencyQuery,
    LatencyRow,
    SlowestQuery,
    UsageDimension,
    UsageQuery,
)
from ledger.core.rollup_plan import DAY_S, HOUR_S, Level, Piece, Plan
from ledger.core.rows import request_number, requested_at_ms

SETTINGS = {"do_not_merge_across_partitions_select_final": 1, "max_execution_time": 30, "max_query_size": 1 << 20}
"""Of every reader. Partitions may be read apart, because copies of one event share a partition."""

_COLUMN: dict[str, str] = {name: name for name in get_args(UsageDimension)} | {
    "key": "key_id",
    "day": "toDate(start, 'UTC')",
    "hour": "start",
}
KEYS = tuple(column for name, column in _COLUMN.items() if name not in ("day", "hour"))
"""Columns of ``attempts`` that usage is kept by."""
SUMS = (
    "requests",
    "attempts",
    "prompt_tokens",
    "cached_tokens",
    "completion_tokens",
    "reasoning_tokens",
    "unbilled_tokens",
)
"""Columns of the tables of usage after KEYS, in the tables' order."""

LATENCY_KEYS = tuple(name for name in get_args(LatencyDimension) if name not in ("day", "hour"))
"""Columns of the tables of latencies before SPANS."""
SPANS = tuple(name.removesuffix("_ms") for name in LatencyRow.__struct_fields__ if name.endswith("_ms"))
_LEVELS = "(0.02, 0.5, 0.9, 0.95, 0.99)"
"""Relative error, then the quantiles; the columns' type says the same."""

_SHOWN = {"day": "toString({})", "hour": "formatDateTime({}, '%Y-%m-%dT%H:00:00Z', 'UTC')"}
"""Days read ``2026-11-29`` and hours ``2026-11-29T18:00:00Z``, in UTC whatever the server's time zone."""

_HOUR = "toStartOfHour(admitted_at, 'UTC')"

# A request counts once in an hour, in the group of its highest attempt (all attempts of a request have one time of
# admission). Nearly all have attempt 1 alone, so the set of the others is small, which is cheaper than distinct ids.
# It is read without FINAL, at a third of the cost: which attempts there are is the same whichever copy counts.
_REQUESTS = (
    f"countIf((request_id, {_HOUR}) NOT IN (SELECT request_id, {_HOUR} FROM attempts WHERE {{others}})"
    f" OR (request_id, {_HOUR}, attempt) IN (SELECT request_id, {_HOUR}, max(attempt) FROM attempts"
    f" WHERE {{others}} GROUP BY request_id, {_HOUR}))"
)


_PRICED = ("valid_from", "currency", "input", "cached_input", "output", "reasoning")
"""Columns of a price that ``_with_prices`` gives, named ``price_*``."""


def _with_prices(source: str) -> str:
    """A source with ``of_model``, ``of_version``, ``of_tier`` and ``of_day``, each row with the price that holds: its
    version's where one does, else its model's.
    """
    chosen = ", ".join(f"if(v_currency != '', v_{name}, m_{name}) AS price_{name}" for name in _PRICED)

    def prices(prefix: str, compared: str) -> str:
        """Under names of their own: a source may have a model, too."""
        columns = ", ".join(f"{name} AS {prefix}_{name}" for name in ("model", "version", "tier", *_PRICED))
        return f"(SELECT {columns} FROM prices FINAL WHERE version {compared} '')"

    return (
        f"(SELECT u.*, {chosen} FROM {source} AS u"
        f" ASOF LEFT JOIN {prices('m', '=')} AS m"
        " ON u.of_model = m.m_model AND u.of_tier = m.m_tier AND u.of_day >= m.m_valid_from"
        f" ASOF LEFT JOIN {prices('v', '!=')} AS v"
        " ON u.of_model = v.v_model AND u.of_version = v.v_version AND u.of_tier = v.v_tier"
        " AND u.of_day >= v.v_valid_from)"
    )


def _amount(prompt: str, cached: str, completion: str, reasoning: str) -> str:
    """What such columns cost at the price of ``_with_prices``, in picounits."""
    return (
        f"toInt128({prompt} - {cached}) * price_input + toInt128({cached}) * price_cached_input"
        f" + toInt128({completion} - {reasoning}) * price_output + toInt128({reasoning}) * price_reasoning"
    )


class Query(NamedTuple):
    """``text`` in ClickHouse's SQL; ``parameters`` by the names that it holds in braces."""

    text: str
    parameters: dict[str, object]


def state(from_ms: int, to_ms: int) -> Query:
    """Marks and builds of the days that a range touches.

    Columns: level ('' for a mark), start, marks or watermark, build, bounds in the key of ``attempts``.
    """
    start_s, end_s = from_ms // 1000 // DAY_S * DAY_S, -(-to_ms // 1000 // DAY_S) * DAY_S
    text = (
        "SELECT '' AS level, toInt64(toUnixTimestamp(hour)), sum(marks), toUInt64(0),"
        " toUnixTimestamp64Milli(min(requested_from)), toUnixTimestamp64Milli(max(requested_to))"
        f" FROM rollup_marks WHERE hour >= {_time(start_s)} AND hour < {_time(end_s)} GROUP BY hour"
        " UNION ALL SELECT toString(level), toInt64(toUnixTimestamp(start)), covers, build, toInt64(0), toInt64(0)"
        f" FROM rollup_builds FINAL WHERE start >= {_time(start_s)} AND start < {_time(end_s)}"
    )
    return Query(text, {})


def unbuilt(level: Level) -> Query:
    """Periods whose marks are beyond their build's watermark. Columns: start, marks."""
    start = "hour" if level == "hour" else "toStartOfDay(hour, 'UTC')"
    text = (
        "SELECT toInt64(toUnixTimestamp(m.start)), m.marks FROM"
        f" (SELECT {start} AS start, sum(marks) AS marks FROM rollup_marks GROUP BY start) AS m"
        f" LEFT JOIN (SELECT start, covers FROM rollup_builds FINAL WHERE level = '{level}') AS b ON m.start = b.start"
        " WHERE m.marks != b.covers"
    )
    return Query(text, {})


def _time(at_s: int) -> str:
    """Bounded by what the column can hold."""
    return f"toDateTime({min(max(at_s, 0), (1 << 32) - 1)}, 'UTC')"


def _built(periods: Sequence[tuple[int, int]]) -> str:
    """A build's number is its period's alone, so that one column tells whether a row counts (the pair of start and
    number takes four times as long)."""
    starts = [start_s for start_s, _ in periods]
    numbers = ",".join(str(build) for _, build in periods)
    return f"start >= {_time(min(starts))} AND start <= {_time(max(starts))} AND build IN ({numbers})"


def _in_pieces(raw: Sequence[Piece]) -> str:
    def milli(at_ms: int) -> str:
        return f"fromUnixTimestamp64Milli({at_ms}, 'UTC')"

    return " OR ".join(
        f"(admitted_at >= {milli(piece.from_ms)} AND admitted_at < {milli(piece.to_ms)}"
        f" AND requested_at >= {milli(piece.requested_from_ms)} AND requested_at <= {milli(piece.requested_to_ms)})"
        for piece in raw
    )


def usage_source(plan: Plan, condition: str = "1") -> str:
    """All that the plan names, as a SELECT: ``start``, KEYS, and SUMS with ``n_`` before their names.

    Tokens are those of billable attempts; the others' are ``unbilled_tokens``.
    """
    keys = ", ".join(KEYS)
    kept = ", ".join(f"{name} AS n_{name}" for name in SUMS)
    parts = [
        f"SELECT start, {keys}, {kept} FROM {table} WHERE {_built(periods)} AND {condition}"
        for table, periods in (("usage_days", plan.days), ("usage_hours", plan.hours))
        if periods
    ]
    if plan.raw or not parts:
        where = f"({_in_pieces(plan.raw) or '0'}) AND {condition}"
        tokens = ", ".join(f"sumIf({name}, billable) AS n_{name}" for name in SUMS[2:6])
        parts.append(
            f"SELECT {_HOUR} AS start, {keys}, {_REQUESTS.format(others=f'attempt != 1 AND {where}')} AS n_requests,"
            f" count() AS n_attempts, {tokens},"
            " sumIf(toUInt64(prompt_tokens) + completion_tokens, NOT billable) AS n_unbilled_tokens"
            f" FROM attempts FINAL WHERE {where} GROUP BY start, {keys}"
        )
    return " UNION ALL ".join(parts)


def usage(query: UsageQuery, plan: Plan) -> Query:
    """Usage by ``query.by``; one row more than the limit, if there is one, says that there is more.

    Columns: the dimensions asked for, in their order, then USAGE_FIGURES, the amount in picounits.
    """
    parameters: dict[str, object] = {"limit": query.limit + 1, "offset": query.offset}
    condition = "1"
    if query.tenant is not None:
        condition = "tenant = {tenant:String}"
        parameters["tenant"] = query.tenant
    columns = "".join(f"{_SHOWN.get(name, '{}').format(f'by_{name}')} AS shown_{name}, " for name in query.by)
    keys = ", ".join(f"by_{name}" for name in query.by)
    grouping = f" GROUP BY {keys} ORDER BY {keys}" if keys else ""
    cut = " LIMIT {limit:UInt64} OFFSET {offset:UInt64}"
    source = usage_source(plan, condition)
    page = ""
    if query.tenant is None and "hour" in query.by and len(query.by) > 1:
        # So many groups that it pays to find first and last of the page, by keys alone, and sum up only what lies
        # between. The first key alone is compared too: it costs less, and the tables are ordered by it.
        first, key = _COLUMN[query.by[0]], f"({', '.join(_COLUMN[name] for name in query.by)})"
        ends = f"SELECT (min(k), max(k)) FROM (SELECT {key} AS k FROM ({source}) GROUP BY k ORDER BY k{cut})"
        page = f"WITH ({ends}) AS page "
        source = (
            f"SELECT * FROM ({source}) WHERE {first} >= page.1.1 AND {first} <= page.2.1"
            f" AND {key} >= page.1 AND {key} <= page.2"
        )
        cut = " LIMIT {limit:UInt64}"
    amount = _amount("prompt", "cached", "completion", "reasoning")
    text = (
        f"{page}SELECT {columns}sum(requests), sum(prompt), sum(cached), sum(completion), sum(reasoning),"
        f" sum(attempts), sum(unbilled), sum({amount}), sumIf(prompt + completion, price_currency = '')"
        f" FROM {_priced(source, query.by)}{grouping}{cut}"
    )
    return Query(text, parameters)


def _priced(source: str, by: Sequence[UsageDimension]) -> str:
    """Usage of ``usage_source``, summed by the dimensions and what prices depend on, each with the price that holds."""
    columns = "".join(f"{_COLUMN[name]} AS by_{name}, " for name in by)
    keys = ", ".join([*(f"by_{name}" for name in by), "of_model", "of_version", "of_tier", "of_day"])
    return _with_prices(
        f"(SELECT {columns}model AS of_model, version AS of_version, priority AS of_tier,"
        " toDate(start, 'UTC') AS of_day,"
        " sum(n_requests) AS requests, sum(n_attempts) AS attempts, sum(n_prompt_tokens) AS prompt,"
        " sum(n_cached_tokens) AS cached, sum(n_completion_tokens) AS completion,"
        " sum(n_reasoning_tokens) AS reasoning, sum(n_unbilled_tokens) AS unbilled"
        f" FROM ({source}) GROUP BY {keys})"
    )


def levels(by: Sequence[str]) -> Sequence[Level]:
    """The sums that can answer a query by these dimensions."""
    return ("hour",) if "hour" in by else ("hour", "day")


def month_tokens(plan: Plan, tenants: Collection[str] | None) -> Query:
    """Billed prompt and completion tokens of each tenant; None: of all tenants."""
    condition = "1" if tenants is None else "tenant IN {tenants:Array(String)}"
    parameters: dict[str, object] = {} if tenants is None else {"tenants": sorted(tenants)}
    text = (
        "SELECT tenant, sum(n_prompt_tokens + n_completion_tokens)"
        f" FROM ({usage_source(plan, condition)}) GROUP BY tenant"
    )
    return Query(text, parameters)


def invoice(plan: Plan, tenant: str) -> Query:
    """A tenant's usage by UTC month, model (an adapter is one), version, tier and price.

    Columns: these (the price's first day; empty when no price holds), currency, the four prices, then requests,
    prompt, cached, completion and reasoning tokens.
    """
    keys = "month, of_model, of_version, of_tier, since"
    text = (
        "SELECT formatDateTime(of_day, '%Y-%m') AS month, of_model, of_version, of_tier,"
        " if(price_currency = '', '', toString(price_valid_from)) AS since, any(price_currency),"
        " any(price_input), any(price_cached_input), any(price_output), any(price_reasoning),"
        " sum(requests), sum(prompt), sum(cached), sum(completion), sum(reasoning)"
        f" FROM {_priced(usage_source(plan, 'tenant = {tenant:String}'), [])} GROUP BY {keys} ORDER BY {keys}"
    )
    return Query(text, {"tenant": tenant})


def request(request_id: int, requested_at_ms: int, tenant: str | None, columns: Sequence[str]) -> Query:
    """All attempts of one request, in order: ``columns`` (instants in Unix ms), then currency and amount."""
    shown = [f"toUnixTimestamp64Milli({name})" if name.endswith("_at") else name for name in columns]
    where = f"requested_at = fromUnixTimestamp64Milli({requested_at_ms}, 'UTC') AND request_id = toUUID({{id:String}})"
    parameters: dict[str, object] = {"id": f"{request_id:032x}"}
    # The tenant stands first in the key: with it, ClickHouse reads one place.
    of_tenant = f"tenant IN (SELECT tenant FROM attempts WHERE {where})"
    if tenant is not None:
        of_tenant = "tenant = {tenant:String}"
        parameters["tenant"] = tenant
    amount = _amount("prompt_tokens", "cached_tokens", "completion_tokens", "reasoning_tokens")
    source = (
        "(SELECT *, model AS of_model, version AS of_version, priority AS of_tier, toDate(admitted_at, 'UTC') AS of_day"
        f" FROM attempts FINAL WHERE {where} AND {of_tenant})"
    )
    text = (
        f"SELECT {', '.join(shown)}, price_currency, if(billable, {amount}, 0)"
        f" FROM {_with_prices(source)} ORDER BY attempt"
    )
    return Query(text, parameters)


def own_id(text: str, tenant: str | None, limit: int) -> Query:
    """Requests that their callers gave this id, refused ones too, the newest first. One column: the request id."""
    of_tenant = "" if tenant is None else " AND tenant = {tenant:String}"
    parameters: dict[str, object] = {"id": text, "limit": limit} | ({} if tenant is None else {"tenant": tenant})
    where = f"WHERE client_request_id = {{id:String}}{of_tenant}"
    sql = (
        "SELECT toString(request_id) FROM ("
        f"SELECT request_id, requested_at FROM attempts {where}"
        f" UNION ALL SELECT request_id, requested_at FROM deliveries {where}"
        ") GROUP BY request_id ORDER BY max(requested_at) DESC LIMIT {limit:UInt64}"
    )
    return Query(sql, parameters)


def deliveries(request_ids: Sequence[str], columns: Sequence[str]) -> Query:
    """``columns`` of what gateways saw of these requests; the request id first."""
    requested = [requested_at_ms(request_number(each)) for each in request_ids]
    text = (
        f"SELECT {', '.join(columns)} FROM deliveries FINAL WHERE request_id IN {{ids:Array(UUID)}}"
        f" AND requested_at >= fromUnixTimestamp64Milli({min(requested)}, 'UTC')"
        f" AND requested_at <= fromUnixTimestamp64Milli({max(requested)}, 'UTC')"
    )
    return Query(text, {"ids": list(request_ids)})


def attempts_of(request_ids: Sequence[str], columns: Sequence[str]) -> Query:
    """``columns`` of all attempts of these requests, in order; instants in Unix ms."""
    requested = [requested_at_ms(request_number(each)) for each in request_ids]
    shown = [f"toUnixTimestamp64Milli({name})" if name.endswith("_at") else name for name in columns]
    text = (
        f"SELECT {', '.join(shown)} FROM attempts FINAL WHERE request_id IN {{ids:Array(UUID)}}"
        f" AND requested_at >= fromUnixTimestamp64Milli({min(requested)}, 'UTC')"
        f" AND requested_at <= fromUnixTimestamp64Milli({max(requested)}, 'UTC') ORDER BY request_id, attempt"
    )
    return Query(text, {"ids": list(request_ids)})


_SLOW = {
    "total": ("max(toUnixTimestamp64Milli(ended_at)) - min(toUnixTimestamp64Milli(admitted_at))", "total_ms"),
    "first_token": (
        "max(toUnixTimestamp64Milli(first_token_at)) - min(toUnixTimestamp64Milli(admitted_at))",
        "first_chunk_ms",
    ),
}
"""Milliseconds by the attempts, and by the gateway."""


def slowest(query: SlowestQuery) -> Query:
    """Ids of the slowest requests that came in [from, to), the slowest first."""
    parameters: dict[str, object] = {"limit": query.limit, "all": SLOWEST_MAX}
    where = (
        f"requested_at >= fromUnixTimestamp64Milli({query.from_at_ms}, 'UTC')"
        f" AND requested_at < fromUnixTimestamp64Milli({query.to_at_ms}, 'UTC')"
    )
    for name, value in (("tenant", query.tenant), ("model", query.model)):
        if value is not None:
            where += f" AND {name} = {{{name}:String}}"
            parameters[name] = value
    if query.order == "failed":
        return Query(_FAILED.format(where=where), parameters)
    attempts, delivery = _SLOW[query.order]
    text = (
        "SELECT toString(request_id) FROM (SELECT request_id, max(ms) AS slow, any(t) AS of, any(m) AS by FROM ("
        f"SELECT request_id, toString(any(tenant)) AS t, toString(any(model)) AS m, toFloat64({attempts}) AS ms"
        f" FROM attempts FINAL WHERE {where} GROUP BY request_id"
        f" UNION ALL SELECT request_id, toString(tenant), toString(model), toFloat64({delivery}) FROM deliveries"
        f" WHERE {where}"
        ") GROUP BY request_id) WHERE slow > 0 ORDER BY slow DESC, request_id"
        " LIMIT {limit:UInt64} BY of, by LIMIT {all:UInt64}"
    )
    return Query(text, parameters)


_FAILED = (
    "SELECT toString(request_id) FROM (SELECT request_id, any(tenant) AS of, any(model) AS by, max(ended_at) AS at,"
    " argMax(outcome, attempt) AS last FROM attempts FINAL WHERE {where} GROUP BY request_id)"
    " WHERE last IN ('failed', 'lost', 'expired') ORDER BY at DESC, request_id"
    " LIMIT {{limit:UInt64}} BY of, by LIMIT {{all:UInt64}}"
)
"""By how the last attempt ended, which is how the request did."""

_HAPPENED = "toUnixTimestamp64Milli({}) > 0"
_SPAN = "greatest(0., toFloat64(toUnixTimestamp64Milli({1}) - toUnixTimestamp64Milli({0})))"
_PER_CHOICE = "completion_tokens / greatest(choices, 1)"
_SAMPLES = {
    "queue_wait": (_SPAN.format("admitted_at", "dispatched_at"), _HAPPENED.format("dispatched_at")),
    "first_token": (_SPAN.format("admitted_at", "first_token_at"), _HAPPENED.format("first_token_at")),
    "inter_token": (
        f"{_SPAN.format('first_token_at', 'ended_at')} / greatest({_PER_CHOICE} - 1, 0.001)",
        f"outcome IN ('completed', 'cancelled') AND {_HAPPENED.format('first_token_at')} AND {_PER_CHOICE} >= 2",
    ),
    "end_to_end": (_SPAN.format("admitted_at", "ended_at"), "outcome = 'completed'"),
}
"""Each span in ms, and of which attempts it is taken."""


def latency_source(plan: Plan, condition: str, whole: Collection[str] = ()) -> str:
    """All that the plan names, as a SELECT: ``start``, LATENCY_KEYS, and for each span its count and sketch.

    ``whole``: keys that are not told apart, and are empty; ``tenant``, or all the others, or all.
    """
    rows = "".join(f" AND {key} {'=' if key in whole else '!='} ''" for key in ("tenant", "model"))
    keys = ", ".join(LATENCY_KEYS)
    kept = ", ".join(f"{span}_count, {span}" for span in SPANS)
    parts = [
        f"SELECT start, {keys}, {kept} FROM {table} WHERE {_built(periods)} AND {condition}{rows}"
        for table, periods in (("latency_days", plan.days), ("latency_hours", plan.hours))
        if periods
    ]
    if plan.raw or not parts:
        samples = ", ".join(
            f"countIf({taken}) AS {span}_count, quantilesDDStateIf{_LEVELS}({value}, {taken}) AS {span}"
            for span, (value, taken) in _SAMPLES.items()
        )
        # Attempts have a tenant and a model each, so the rows of all are made here, if they are what is asked for.
        shown = ", ".join(f"'' AS {key}" if key in whole else key for key in LATENCY_KEYS)
        parts.append(
            f"SELECT {_HOUR} AS start, {shown}, {samples} FROM attempts FINAL"
            f" WHERE ({_in_pieces(plan.raw) or '0'}) AND {condition} GROUP BY start, {keys}"
        )
    return " UNION ALL ".join(parts)


def latency(query: LatencyQuery, plan: Plan) -> Query:
    """Columns: the dimensions asked for, in their order, then for each span its count and four quantiles."""
    parameters: dict[str, object] = {"limit": query.limit + 1, "offset": query.offset}
    condition = "1"
    whole = {"tenant"} if query.tenant is None and "tenant" not in query.by else set()
    whole |= set() if set(query.by) & set(LATENCY_KEYS[1:]) else set(LATENCY_KEYS[1:])
    if query.tenant is not None:
        condition = "tenant = {tenant:String}"
        parameters["tenant"] = query.tenant
    names: Sequence[LatencyDimension] = query.by
    inner = "".join(f"{_COLUMN[name]} AS by_{name}, " for name in names)
    shown = "".join(f"{_SHOWN.get(name, '{}').format(f'by_{name}')}, " for name in names)
    keys = ", ".join(f"by_{name}" for name in names)
    grouping = f" GROUP BY {keys}" if keys else ""
    ordering = f" ORDER BY {keys}" if keys else ""
    merged = ", ".join(
        f"sum({span}_count) AS c_{span}, quantilesDDMerge{_LEVELS}({span}) AS q_{span}" for span in SPANS
    )
    figures = ", ".join(f"c_{span}, q_{span}" for span in SPANS)
    source = latency_source(plan, condition, whole)
    text = (
        f"SELECT {shown}{figures} FROM (SELECT {inner}{merged} FROM ({source}){grouping})"
        f"{ordering} LIMIT {{limit:UInt64}} OFFSET {{offset:UInt64}}"
    )
    return Query(text, parameters)


def build(level: Level, number: int, day_s: int, plan: Plan) -> list[Query]:
    """Statements that add the rows of builds; they count only when ``finish_build`` has been done.

    All periods lie in the day that starts at ``day_s``; hour 0 of it gets ``number``, hour 1 the next, and so on.
    """
    start = "start" if level == "hour" else "toStartOfDay(start, 'UTC')"
    numbers = f"{number} + intDiv(toUnixTimestamp(period) - {day_s}, {HOUR_S})"
    keys = ", ".join(KEYS)
    sums = ", ".join(f"sum(n_{name})" for name in SUMS)
    spans = ", ".join(f"sum({span}_count), quantilesDDMergeState{_LEVELS}({span})" for span in SPANS)
    of = ", ".join(LATENCY_KEYS[1:])
    return [
        Query(
            f"INSERT INTO usage_{level}s SELECT {start} AS period, {numbers}, {keys}, {sums}"
            f" FROM ({usage_source(plan)}) GROUP BY period, {keys}",
            {},
        ),
        Query(
            f"INSERT INTO latency_{level}s SELECT {start} AS period, {numbers}, tenant, {of}, {spans}"
            f" FROM ({latency_source(plan, '1')})"
            f" GROUP BY GROUPING SETS ((period, tenant, {of}), (period, {of}), (period, tenant), (period))",
            {},
        ),
    ]


def finish_build(level: Level, number: int, day_s: int, watermarks: Collection[tuple[int, int]]) -> Query:
    """From here on the builds count. ``watermarks``: (start, watermark); the column of these is ``covers``."""
    values = ", ".join(
        f"('{level}', {start_s}, {number + (start_s - day_s) // HOUR_S}, {watermark})"
        for start_s, watermark in watermarks
    )
    return Query(f"INSERT INTO rollup_builds (level, start, build, covers) VALUES {values}", {})


def stale(level: Level, before: int) -> str:
    """Condition of rows whose build counts no more and began before ``before``."""
    counting = f"SELECT start, build FROM rollup_builds FINAL WHERE level = '{level}'"
    return f"build < {before} AND (start, build) NOT IN ({counting})"


PRICE_COLUMNS = ("model", "version", "tier", "valid_from", "currency", "input", "cached_input", "output", "reasoning")

PRICES = Query(f"SELECT {', '.join(PRICE_COLUMNS).replace('valid_from', 'toString(valid_from)')} FROM prices FINAL", {})
PRICES_EDITION = Query("SELECT max(edition) FROM prices", {})
