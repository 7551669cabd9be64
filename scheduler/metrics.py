"""The scheduler's figures for Prometheus, read from the cores when they are scraped."""

from collections.abc import Callable, Iterator

from prometheus_client import REGISTRY
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from scheduler.core.core import Core


class Collector:
    """Figures of every model that this process owns; a standby exports none of them."""

    def __init__(self, cores: Callable[[], list[Core]]) -> None:
        self._cores = cores

    def register(self) -> None:
        REGISTRY.register(self)

    def describe(self) -> list[Metric]:
        """Nothing: the cores do not exist yet when the collector is registered."""
        return []

    def collect(self) -> Iterator[Metric]:
        gauges: list[tuple[str, str, Callable[[Core], float]]] = [
            ("waiting", "Requests admitted and not dispatched.", lambda core: core.admission.waiting),
            ("running", "Requests dispatched and not ended.", lambda core: len(core.requests) - core.admission.waiting),
        ]
        cores = self._cores()
        for name, text, figure in gauges:
            family = GaugeMetricFamily(f"headrace_requests_{name}", text, labels=["model"])
            for core in cores:
                family.add_metric([core.model], figure(core))
            yield family
        for name, text, figure in (
            (
                "headrace_reserved_tokens",
                "Tokens reserved by open requests.",
                lambda core: core.admission.reserved_tokens,
            ),
            (
                "headrace_waiting_tokens",
                "Tokens reserved by waiting requests.",
                lambda core: core.admission.waiting_tokens,
            ),
            ("headrace_workers", "Workers that are heard.", lambda core: len(core.pool.workers)),
        ):
            family = GaugeMetricFamily(name, text, labels=["model"])
            for core in cores:
                family.add_metric([core.model], figure(core))
            yield family
        lost = CounterMetricFamily("headrace_lost_workers", "Workers declared lost.", labels=["model"])
        refusals = CounterMetricFamily("headrace_refusals", "Refused admissions.", labels=["model", "code"])
        ended = CounterMetricFamily("headrace_requests_ended", "Ended requests.", labels=["model", "outcome"])
        for core in cores:
            lost.add_metric([core.model], core.lost_workers)
            for code, count in core.refusals.items():
                refusals.add_metric([core.model, code], count)
            for outcome, count in core.outcomes.items():
                ended.add_metric([core.model, outcome], count)
        yield from (lost, refusals, ended)
