"""An OpenTelemetry collector's way in: OTLP over HTTP, kept as it came."""

import gzip
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple, Self

from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest


class Received(NamedTuple):
    """A span as it came. ``links``: span ids."""

    name: str
    trace_id: str
    span_id: str
    parent: str
    error: str
    links: tuple[str, ...]
    attributes: dict[str, Any]
    start_ns: int
    end_ns: int


class Point(NamedTuple):
    """A histogram of one set of attributes, as it came last."""

    values: int
    sum: float
    most: float
    """The largest value."""
    unit: str
    exponential: bool


class OtlpReceiver:
    """``with OtlpReceiver() as receiver``: what comes to ``receiver.url`` is in ``receiver.spans``.

    What comes to ``metrics_url`` is in ``histograms``, by name and attributes.
    """

    def __init__(self) -> None:
        self.spans: list[Received] = []
        self.histograms: dict[tuple[str, frozenset[tuple[str, Any]]], Point] = {}
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                body = gzip.decompress(body) if self.headers.get("content-encoding") == "gzip" else body
                (receiver._keep_metrics if self.path == "/v1/metrics" else receiver._keep)(body)
                self.send_response(200)
                self.send_header("content-length", "0")
                self.end_headers()

            def log_message(self, format: str, *args: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}/v1/traces"
        self.metrics_url = f"http://127.0.0.1:{self._server.server_port}/v1/metrics"

    def __enter__(self) -> Self:
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *error: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    def of(self, trace_id: str) -> list[Received]:
        """The spans of one trace, by their start."""
        return sorted((span for span in self.spans if span.trace_id == trace_id), key=lambda span: span.start_ns)

    def histogram(self, name: str, **attributes: str) -> Point | None:
        """That of this name with these attributes among others (``__`` for a dot); None until it comes."""
        wanted = {(key.replace("__", "."), value) for key, value in attributes.items()}
        found = [point for (of, has), point in list(self.histograms.items()) if of == name and wanted <= has]
        return found[0] if len(found) == 1 else None

    def _keep_metrics(self, body: bytes) -> None:
        request = ExportMetricsServiceRequest()
        request.ParseFromString(body)
        for resource in request.resource_metrics:
            for scope in resource.scope_metrics:
                for metric in scope.metrics:
                    kind = metric.WhichOneof("data")
                    for each in getattr(metric, kind).data_points:
                        key = metric.name, frozenset(_values(each.attributes).items())
                        exponential = kind == "exponential_histogram"
                        self.histograms[key] = Point(each.count, each.sum, each.max, metric.unit, exponential)

    def _keep(self, body: bytes) -> None:
        request = ExportTraceServiceRequest()
        request.ParseFromString(body)
        for resource in request.resource_spans:
            for scope in resource.scope_spans:
                self.spans += [_read(span) for span in scope.spans]


def _values(attributes: Any) -> dict[str, Any]:
    return {each.key: getattr(each.value, each.value.WhichOneof("value")) for each in attributes}


def _read(span: Any) -> Received:
    return Received(
        name=span.name,
        trace_id=span.trace_id.hex(),
        span_id=span.span_id.hex(),
        parent=span.parent_span_id.hex(),
        error=span.status.message if span.status.code == 2 else "",
        links=tuple(link.span_id.hex() for link in span.links),
        attributes=_values(span.attributes),
        start_ns=span.start_time_unix_nano,
        end_ns=span.end_time_unix_nano,
    )
