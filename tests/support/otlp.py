"""An OpenTelemetry collector's way in: OTLP over HTTP, kept as it came."""

import gzip
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple, Self

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


class OtlpReceiver:
    """``with OtlpReceiver() as receiver``: what comes to ``receiver.url`` is in ``receiver.spans``."""

    def __init__(self) -> None:
        self.spans: list[Received] = []
        keep = self._keep

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                keep(gzip.decompress(body) if self.headers.get("content-encoding") == "gzip" else body)
                self.send_response(200)
                self.send_header("content-length", "0")
                self.end_headers()

            def log_message(self, format: str, *args: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}/v1/traces"

    def __enter__(self) -> Self:
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *error: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    def of(self, trace_id: str) -> list[Received]:
        """The spans of one trace, by their start."""
        return sorted((span for span in self.spans if span.trace_id == trace_id), key=lambda span: span.start_ns)

    def _keep(self, body: bytes) -> None:
        request = ExportTraceServiceRequest()
        request.ParseFromString(body)
        for resource in request.resource_spans:
            for scope in resource.scope_spans:
                self.spans += [_read(span) for span in scope.spans]


def _read(span: Any) -> Received:
    values = {each.key: getattr(each.value, each.value.WhichOneof("value")) for each in span.attributes}
    return Received(
        name=span.name,
        trace_id=span.trace_id.hex(),
        span_id=span.span_id.hex(),
        parent=span.parent_span_id.hex(),
        error=span.status.message if span.status.code == 2 else "",
        links=tuple(link.span_id.hex() for link in span.links),
        attributes=values,
        start_ns=span.start_time_unix_nano,
        end_ns=span.end_time_unix_nano,
    )
