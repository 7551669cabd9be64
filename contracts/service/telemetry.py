"""Logs, metrics and health of a service process: structlog, prometheus_client, and the small server for both."""

import contextlib
import json
import logging
import re
import socket
import sys
import threading
from collections.abc import Callable, Iterable
from datetime import UTC, datetime
from socketserver import ThreadingMixIn
from typing import Any, TextIO
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

import msgspec
import prometheus_client
import structlog

from contracts import histograms
from contracts.service.config import ServiceConfig

prometheus_client.disable_created_metrics()  # A third of the page, and nobody asks when a counter began.

CONNECTIONS_MAX = 16
CONNECTION_S = 10.0
"""A scrape or a probe takes some milliseconds."""
LOOK_S = 3600.0
"""How often the server looks whether it is to end, which it never is."""
_LEVELS = {"exception": "error", "warn": "warning"}
"""Names of a logger's methods that are none of its levels."""
_PLAIN = frozenset({str, int, float, bool, type(None)})
_API_KEY = re.compile(r"hr_[A-Za-z0-9_-]{16,}")


def _blotted(_logger: Any, _method: str, line: Any) -> str:
    """Without what looks like an API key, wherever a caller put it: into a request id, a model's name, a path."""
    return _API_KEY.sub("hr_***", line) if "hr_" in line else line


def _json(event: dict[str, Any], default: Callable[[Any], Any]) -> str:
    """What ``json.dumps`` gives, several times as fast for a line of plain values, as most are."""
    if all(type(value) in _PLAIN for value in event.values()):
        with contextlib.suppress(ValueError, OverflowError):  # A lone surrogate, a number of more than 64 bits.
            line = msgspec.json.format(msgspec.json.encode(event), indent=0)
            if line.isascii() and b"\x7f" not in line:
                return line.decode()
    return json.dumps(event, default=default)


class _Lines:
    """Writes what our own loggers give. Not by way of ``logging``, which costs as much again for each line; as there,
    nobody to read them is no reason to end."""

    def __init__(self, file: TextIO) -> None:
        self._file = file

    def write(self, line: str) -> None:
        with contextlib.suppress(OSError, ValueError):
            self._file.write(line + "\n")
            self._file.flush()

    debug = info = warning = error = critical = write


def configure_logging(config: ServiceConfig, service: str) -> None:
    """Every log record of this process, ours and the libraries', to standard error as JSON or pretty lines."""

    def begin(_logger: Any, method: str, event: structlog.typing.EventDict) -> structlog.typing.EventDict:
        """When, who and what come first, so that a line is read from its left."""
        now = datetime.now(UTC).isoformat().replace("+00:00", "Z")
        level = _LEVELS.get(method, method)
        return {"timestamp": now, "level": level, "event": event.pop("event"), "service": service, **event}

    shared: list[structlog.typing.Processor] = [begin]
    renderer: structlog.typing.Processor
    if config.log_format == "json":
        shared.append(structlog.processors.format_exc_info)
        renderer = structlog.processors.JSONRenderer(serializer=_json)
    else:
        renderer = structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty())
    lines = _Lines(sys.stderr)
    structlog.configure(
        processors=[*shared, renderer, _blotted],
        wrapper_class=structlog.make_filtering_bound_logger(logging.getLevelName(config.log_level.upper())),
        logger_factory=lambda *names: lines,
        cache_logger_on_first_use=True,
    )
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared,
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, renderer, _blotted],
        )
    )
    root = logging.getLogger()
    root.handlers = [handler]
    root.setLevel(config.log_level.upper())


class _Server(ThreadingMixIn, WSGIServer):
    """A thread for each of CONNECTIONS_MAX connections; one more ends the oldest: who is silent blocks nobody."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, *arguments: Any) -> None:
        self._open: dict[Any, None] = {}
        self._lock = threading.Lock()
        super().__init__(*arguments)

    def process_request(self, request: Any, client_address: Any) -> None:
        with self._lock:
            self._open[request] = None
            oldest = next(iter(self._open)) if len(self._open) > CONNECTIONS_MAX else None
            self._open.pop(oldest, None)
        if oldest is not None:
            with contextlib.suppress(OSError):
                oldest.shutdown(socket.SHUT_RDWR)  # wakes its thread, which closes it
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        with self._lock:
            self._open.pop(request, None)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Whoever hangs up is not worth a traceback."""
        if not isinstance(sys.exception(), OSError):
            super().handle_error(request, client_address)


class _Quiet(WSGIRequestHandler):
    timeout = CONNECTION_S

    def log_message(self, format: str, *args: Any) -> None:
        """Scrapes are not worth a line each."""


def page() -> bytes:
    """All metrics of this process in Prometheus' text format. Made on the thread of whoever asks for it."""
    fine = "".join(each.text() for each in histograms.FAMILIES)
    return prometheus_client.generate_latest() + fine.encode()


def serve(config: ServiceConfig, not_ready: Callable[[], str], gathered: Callable[[], bytes] | None = None) -> None:
    """Serve ``/metrics``, ``/health/live`` and ``/health/ready`` from a daemon thread; none when the port is 0.

    ``gathered`` makes the page of a whole stack, ``/metrics/stack``.

    ``not_ready`` gives the reason why the service is not ready, or an empty string.
    """
    if config.metrics_port == 0:
        return

    pages = {"/metrics": page} | ({"/metrics/stack": gathered} if gathered else {})

    def application(environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        path = environ.get("PATH_INFO", "")
        if (made := pages.get(path)) is not None:
            start_response("200 OK", [("Content-Type", prometheus_client.CONTENT_TYPE_LATEST)])
            return [b"" if environ["REQUEST_METHOD"] == "HEAD" else made()]
        if path == "/health/live":
            status, text = "200 OK", "ok"
        elif path == "/health/ready":
            reason = not_ready()
            status, text = ("503 Service Unavailable", reason) if reason else ("200 OK", "ok")
        else:
            status, text = "404 Not Found", "not found"
        start_response(status, [("Content-Type", "text/plain; charset=utf-8")])
        return [b"" if environ["REQUEST_METHOD"] == "HEAD" else text.encode()]

    server = make_server(config.metrics_host, config.metrics_port, application, _Server, _Quiet)
    threading.Thread(target=server.serve_forever, args=(LOOK_S,), name="metrics", daemon=True).start()
