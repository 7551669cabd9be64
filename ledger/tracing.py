"""Spans of finished requests to an OpenTelemetry collector (OTLP over HTTP), once a second; off without an address.

Nothing waits for it: what the collector does not take in time is dropped, and counted.
"""

import asyncio
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import structlog

from contracts import clock
from contracts.messages.deliveries import Delivery
from ledger import metrics
from ledger.core import rows
from ledger.core.rows import Row
from ledger.core.spans import Span
from ledger.core.traces import Traces

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import ReadableSpan

EVERY_S = 1.0
EXPORT_S = 5.0
"""How long the collector may take for one batch."""
BATCH_MAX = 512
"""Spans of one message, the default of OpenTelemetry's own SDK."""
ROUND_MAX = 20 * BATCH_MAX
"""Spans of one round; beyond it they are dropped: whoever asks for tracing of everything must have a lower share."""

_log = structlog.get_logger(__name__)


class Tracing:
    """``attempts`` and ``deliveries`` are told what was stored; ``run`` must be running. Raises ImportError."""

    def __init__(self, endpoint: str, *, sample: float, slow_s: float) -> None:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

        self._exporter = OTLPSpanExporter(endpoint=endpoint, timeout=EXPORT_S)
        self._traces = Traces(sample=sample, slow_ms=slow_s * 1000)

    def attempts(self, stored: Iterable[Row]) -> None:
        """Rows that ClickHouse has."""
        now_ms = clock.now_ms()
        for row in stored:
            self._traces.attempt(rows.event_of_row(row), row.stored_at, now_ms)

    def deliveries(self, told: Iterable[Delivery]) -> None:
        """What gateways saw."""
        now_ms = clock.now_ms()
        for each in told:
            self._traces.delivery(each, now_ms)

    async def run(self) -> None:
        """Export what is whole, until cancelled."""
        while True:
            await asyncio.sleep(EVERY_S)
            found = self._traces.take(clock.now_ms())
            metrics.SPANS.labels("dropped").inc(max(0, len(found) - ROUND_MAX))
            for start in range(0, min(len(found), ROUND_MAX), BATCH_MAX):
                await asyncio.to_thread(self._export, found[start : start + BATCH_MAX])

    def _export(self, batch: Sequence[Span]) -> None:
        from opentelemetry.sdk.trace.export import SpanExportResult

        result = self._exporter.export([readable(span) for span in batch])
        sent = result is SpanExportResult.SUCCESS
        metrics.SPANS.labels("sent" if sent else "failed").inc(len(batch))
        if not sent:
            _log.warning("spans_not_sent", count=len(batch))


def readable(span: Span) -> "ReadableSpan":
    """As OpenTelemetry's exporters take it."""
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import ReadableSpan
    from opentelemetry.trace import Link, SpanContext, SpanKind, Status, StatusCode, TraceFlags

    def context(span_id: int, *, remote: bool = False) -> SpanContext:
        return SpanContext(span.trace_id, span_id, remote, TraceFlags(TraceFlags.SAMPLED))

    return ReadableSpan(
        span.name,
        context=context(span.span_id),
        parent=context(span.parent) if span.parent else None,
        resource=Resource({"service.name": "headrace"}),
        attributes=span.attributes,
        links=[Link(context(each)) for each in span.links],
        kind=SpanKind.SERVER if "gen_ai.operation.name" in span.attributes else SpanKind.INTERNAL,
        status=Status(StatusCode.ERROR, span.error) if span.error else Status(StatusCode.UNSET),
        start_time=int(span.start_ms * 1e6),
        end_time=int(span.end_ms * 1e6),
    )
