"""A gateway's metrics. A name stands for one thing in all services, with one set of labels; names follow vLLM's."""

from functools import cache

from prometheus_client import Counter, Gauge
from prometheus_client import Histogram as CoarseHistogram

from contracts.errors import TABLE
from contracts.histograms import Histogram
from contracts.workload import LABELS

REQUESTS = Counter("headrace_http_requests", "HTTP requests answered", ["route", "status"])
FINISHED = Counter(
    "headrace_requests",
    "Inference requests of known callers that were answered or refused",
    [*LABELS, "outcome", "code"],
)
E2E = Histogram(
    "headrace_e2e_request_latency_seconds",
    "From a request's first byte to its last answer byte, completed requests",
    LABELS,
    least=0.001,
    most=3600.0,
)
FIRST_TOKEN = Histogram(
    "headrace_time_to_first_token_seconds",
    "From a request's first byte to the first chunk, streaming requests",
    LABELS,
    least=0.001,
    most=600.0,
)
INTER_TOKEN = Histogram(
    "headrace_inter_token_latency_seconds", "Time between chunks of a stream", LABELS, least=0.0005, most=30.0
)
PHASE = Histogram(
    "headrace_request_phase_seconds",
    "What the gateway's side took of a request: edge, admission, upload and reading (the caller's own time)",
    ("phase",),
    least=0.0005,
    most=600.0,
)
DELIVERIES_DROPPED = Counter("headrace_deliveries_dropped", "Finished requests that the ledger was not told of")
CONNECTIONS = Gauge("headrace_connections", "Open connections of callers")
SUBMITS_REFUSED = Counter("headrace_submits_refused", "Submits beyond what one tenant may have under way")
SHED = Counter("headrace_shed", "Requests refused because this gateway's event loop was late")
CONNECTIONS_REFUSED = Counter("headrace_connections_refused", "Connections beyond a bound", ["bound"])
FAILED_LOGINS = Counter("headrace_failed_logins", "Callers that were not let in, by reason", ["reason"])
STREAMS = Gauge("headrace_streams", "Answers under way")
ERRORS = Counter("headrace_http_errors", "HTTP answers that are errors, and streams that ended with one", ["code"])
TOKENIZER_MISMATCHES = Counter(
    "headrace_gateway_tokenizer_mismatches", "Requests refused because prompts are counted otherwise here", ["model"]
)
COUNTING = CoarseHistogram(
    "headrace_prompt_counting_seconds",
    "Counting of prompt tokens",
    buckets=(0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40),
)

for _code in TABLE:  # From the beginning: an increase from nothing is none to Prometheus.
    ERRORS.labels(_code)

finished = cache(FINISHED.labels)
"""Children by label values, all of which are the operator's or of a table."""
http_requests = cache(REQUESTS.labels)
tokenizer_mismatches = cache(TOKENIZER_MISMATCHES.labels)
