"""The ledger's metrics."""

from prometheus_client import Counter, Gauge, Histogram

ROWS = Counter("headrace_ledger_rows", "Rows inserted, repetitions included.")
BATCHES = Counter("headrace_ledger_batches", "Inserts that succeeded.")
INSERT_SECONDS = Histogram(
    "headrace_ledger_insert_seconds",
    "Duration of one insert.",
    buckets=(0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10),
)
FAILURES = Counter("headrace_ledger_failures", "Inserts and connections that failed and are tried again.")
CONNECTED = Gauge("headrace_ledger_connected", "1 when the last call to ClickHouse succeeded.")
PENDING = Gauge("headrace_ledger_pending", "Events of ATTEMPTS that wait behind the last batch.")
DEAD_LETTERS = Counter("headrace_ledger_dead_letters", "Events that were refused and set aside.")
LAG_SECONDS = Gauge(
    "headrace_ledger_lag_seconds", "Age of the oldest event in hand that is not stored yet; 0 when there is none."
)
DELIVERIES = Counter("headrace_ledger_deliveries", "Rows of what gateways saw, repetitions included.")
DELIVERIES_DROPPED = Counter(
    "headrace_ledger_deliveries_dropped", "What gateways saw and the ledger could not store soon enough."
)
SPANS = Counter("headrace_ledger_spans", "Spans of traces, by what became of them.", ["result"])
PURGED = Counter("headrace_ledger_purged", "Events removed from ATTEMPTS once stored and old.")
QUERY_SECONDS = Histogram(
    "headrace_ledger_query_seconds",
    "Duration of one query about usage.",
    buckets=(0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10),
)
BUILT = Counter("headrace_ledger_built", "Hours and days summed up, repetitions included.", ["level"])
SQL_SECONDS = Histogram(
    "headrace_ledger_sql_seconds",
    "Duration of one query at the SQL endpoint.",
    buckets=(0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30),
)
SQL_ABANDONED = Counter("headrace_ledger_sql_abandoned", "Queries that were ended because their client had left.")
SQL_REFUSED = Counter("headrace_ledger_sql_refused", "Requests with a wrong SQL password.")
