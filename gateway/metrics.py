"""A gateway's metrics. A name stands for one thing in all services, with one set of labels."""

from bisect import bisect_left
from collections.abc import Iterator

from prometheus_client import Counter, Gauge, Histogram
from prometheus_client.core import REGISTRY, HistogramMetricFamily
from prometheus_client.registry import Collector

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80, 160, 320, 640)
_ITL_SECONDS = (0.002, 0.005, 0.01, 0.015, 0.02, 0.025, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.2, 0.4, 0.8, 2, 5)

REQUESTS = Counter("headrace_http_requests", "HTTP requests answered", ["route", "status"])
DURATION = Histogram(
    "headrace_request_duration_seconds",
    "From a request's first byte to its last answer byte",
    ["model"],
    buckets=_SECONDS,
)
FIRST_TOKEN = Histogram(
    "headrace_time_to_first_token_seconds",
    "From a request's first byte to the first chunk, streaming requests",
    ["model"],
    buckets=_SECONDS,
)
CONNECTIONS = Gauge("headrace_connections", "Open connections of callers")
SUBMITS_REFUSED = Counter("headrace_submits_refused", "Submits beyond what one tenant may have under way")
CONNECTIONS_REFUSED = Counter("headrace_connections_refused", "Connections beyond a bound", ["bound"])
FAILED_LOGINS = Counter("headrace_failed_logins", "Callers that were not let in, by reason", ["reason"])
STREAMS = Gauge("headrace_streams", "Answers under way")
ERRORS = Counter("headrace_http_errors", "HTTP answers that are errors, and streams that ended with one", ["code"])
COUNTING = Histogram("headrace_prompt_counting_seconds", "Counting of prompt tokens", buckets=_SECONDS)


class InterTokenLatency(Collector):
    """Histogram of the time between chunks, by model. A plain list of counts: an observation takes .3 us, not 2."""

    def __init__(self) -> None:
        self._counts: dict[str, list[int]] = {}
        self._sums: dict[str, list[float]] = {}

    def of(self, model: str) -> "ModelLatency":
        """The model's histogram, to observe many chunks by."""
        counts = self._counts.setdefault(model, [0] * (len(_ITL_SECONDS) + 1))
        return ModelLatency(counts, self._sums.setdefault(model, [0.0]))

    def collect(self) -> Iterator[HistogramMetricFamily]:
        family = HistogramMetricFamily(
            "headrace_inter_token_latency_seconds", "Time between chunks of a stream", labels=["model"]
        )
        for model, counts in list(self._counts.items()):
            total = 0
            buckets = []
            for bound, count in zip([*map(str, _ITL_SECONDS), "+Inf"], list(counts), strict=True):
                total += count
                buckets.append((bound, total))
            family.add_metric([model], buckets, self._sums[model][0])
        yield family


class ModelLatency:
    """One model's part of InterTokenLatency."""

    __slots__ = ("_counts", "_sum")

    def __init__(self, counts: list[int], total: list[float]) -> None:
        self._counts = counts
        self._sum = total

    def observe(self, seconds: float) -> None:
        """Time since the chunk before."""
        self._counts[bisect_left(_ITL_SECONDS, seconds)] += 1
        self._sum[0] += seconds


INTER_TOKEN = InterTokenLatency()
REGISTRY.register(INTER_TOKEN)
