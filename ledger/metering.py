"""Metrics of finished requests to an OpenTelemetry collector (OTLP over HTTP); off without an address.

Histograms are exponential ones, whose quantiles are within a few per cent whatever the range. A thread of
OpenTelemetry's own sends them, every OTEL_METRIC_EXPORT_INTERVAL (60,000 ms). Nothing waits for it.
"""

import asyncio
from collections.abc import Iterable

from contracts.messages.deliveries import Delivery
from ledger.core import measures, rows
from ledger.core.measures import Measure
from ledger.core.rows import Row

EXPORT_S = 5.0
"""How long the collector may take, at the end, too."""


class Metering:
    """``attempts`` and ``deliveries`` are told what was stored, until ``close``. Raises ImportError."""

    def __init__(self, endpoint: str, instance: str) -> None:
        from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
        from opentelemetry.sdk.metrics import Histogram, MeterProvider
        from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader
        from opentelemetry.sdk.metrics.view import ExponentialBucketHistogramAggregation, View
        from opentelemetry.sdk.resources import Resource

        exporter = OTLPMetricExporter(endpoint=endpoint, timeout=EXPORT_S)
        self._provider = MeterProvider(
            [PeriodicExportingMetricReader(exporter, export_timeout_millis=EXPORT_S * 1000)],
            Resource({"service.name": "headrace", "service.instance.id": instance}),
            views=[View(instrument_type=Histogram, aggregation=ExponentialBucketHistogramAggregation())],
            shutdown_on_exit=False,
        )
        meter = self._provider.get_meter("headrace")
        self._histograms = {
            name: meter.create_histogram(name, unit, text) for name, (unit, text) in measures.INSTRUMENTS.items()
        }

    def attempts(self, stored: Iterable[Row]) -> None:
        """Rows that ClickHouse has. A batch that is stored again after a crash counts again."""
        for row in stored:
            self._record(measures.of_attempt(rows.event_of_row(row)))

    def deliveries(self, told: Iterable[Delivery]) -> None:
        """What gateways saw."""
        for each in told:
            self._record(measures.of_delivery(each))

    async def close(self) -> None:
        """Send what is left, once."""
        await asyncio.to_thread(self._provider.shutdown, EXPORT_S * 1000)

    def _record(self, found: Iterable[Measure]) -> None:
        for each in found:
            self._histograms[each.name].record(each.value, each.attributes)
