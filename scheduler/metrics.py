"""The scheduler's figures for Prometheus, read from the cores when they are scraped."""

from collections.abc import Callable, Iterator

from prometheus_client import REGISTRY
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from scheduler.core.core import Core

GAUGES: dict[str, tuple[str, Callable[[Core], float]]] = {
    "headrace_requests_waiting": ("Requests admitted and not dispatched.", lambda core: core.admission.waiting),
    "headrace_requests_running": (
        "Requests dispatched and not settled.",
        lambda core: len(core.requests) - core.admission.waiting,
    ),
    "headrace_reserved_tokens": ("Tokens reserved by open requests.", lambda core: core.admission.reserved_tokens),
    "headrace_waiting_tokens": ("Tokens reserved by waiting requests.", lambda core: core.admission.waiting_tokens),
    "headrace_workers": ("Workers that are heard.", lambda core: len(core.pool.workers)),
}
"""Name -> (help, figure of one model)."""


class Collector:
    """Figures of every model that this process owns; a standby exports none of them."""

    def __init__(self, cores: Callable[[], list[Core]]) -> None:
        self._cores = cores

    def register(self) -> None:
        """Show the figures on this process's metrics page."""
        REGISTRY.register(self)

    def describe(self) -> list[Metric]:
        """Nothing: the cores do not exist yet when the collector is registered."""
        return []

    def collect(self) -> Iterator[Metric]:
        """What Prometheus reads now."""
        cores = self._cores()
        for name, (text, figure) in GAUGES.items():
            family = GaugeMetricFamily(name, text, labels=["model"])
            for core in cores:
                family.add_metric([core.model], figure(core))
            yield family
        lost = CounterMetricFamily("headrace_lost_workers", "Workers declared lost.", labels=["model"])
        refusals = CounterMetricFamily("headrace_refusals", "Refused admissions.", labels=["model", "code"])
        mended = CounterMetricFamily(
            "headrace_mended", "Differences from WORK and ATTEMPTS that were set right.", labels=["model", "stream"]
        )
        ended = CounterMetricFamily("headrace_requests_ended", "Settled requests.", labels=["model", "outcome"])
        skew = GaugeMetricFamily(
            "headrace_clock_skew_seconds",
            "How far a process's wall clock is ahead of the bus's, as its model's owner counts it.",
            labels=["model", "process"],
        )
        for core in cores:
            lost.add_metric([core.model], core.lost_workers)
            for code, count in core.refusals.items():
                refusals.add_metric([core.model, code], count)
            for stream, count in core.mended.items():
                mended.add_metric([core.model, stream], count)
            for outcome, count in core.outcomes.items():
                ended.add_metric([core.model, outcome], count)
            for process, ahead_ms in core.clocks.ahead_ms().items():
                skew.add_metric([core.model, process], ahead_ms / 1000)
        yield from (lost, refusals, mended, ended, skew)
