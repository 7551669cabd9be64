"""Configuration of the ledger."""

import importlib.util
import re
from typing import Annotated
from urllib.parse import urlsplit

from msgspec import Meta

from contracts.service.config import Secret, ServiceConfig, empty_password


class LedgerConfig(ServiceConfig, frozen=True, kw_only=True):
    """The ledger's variables, ``HEADRACE_`` and the field's name."""

    clickhouse_url: Secret
    """``chdb:///directory``, or ``http(s)://user:password@host:port`` of a server. Never logged."""
    clickhouse_database: str = "headrace"
    clickhouse_replicated: bool = False
    """The server is one of several replicas: tables are replicated, inserts wait for a majority."""
    ledger_batch_rows: Annotated[int, Meta(ge=1, le=100_000)] = 10_000
    """Measured: larger inserts are no faster per row, and take longer to gather and to repeat."""
    ledger_batch_wait_ms: Annotated[int, Meta(ge=1, le=10_000)] = 500
    """How long a batch gathers: delay at a low rate. While events never end it is a second (``ingest``)."""

    sql_listen: str = ""
    """``host:port`` of the read-only SQL endpoint to the embedded engine; empty: none. 0 takes a free port."""
    sql_user: str = "analyst"
    sql_password: Secret = ""
    """Of the SQL endpoint."""

    otlp_endpoint: str = ""
    """Of a collector's OTLP over HTTP, ``http://host:4318/v1/traces``: spans of requests go there; empty: none are
    made. What it asks of clients stands in ``OTEL_EXPORTER_OTLP_HEADERS``."""
    trace_sample: Annotated[float, Meta(ge=0, le=1)] = 0.01
    """Share of the requests that is traced; those that failed, were tried again or were slow all are."""
    trace_slow_s: Annotated[float, Meta(gt=0)] = 30.0
    """A request is slow from here on. A guess: most answers of a thousand tokens take less."""
    otlp_metrics_endpoint: str = ""
    """The same for metrics, ``http://host:4318/v1/metrics``; empty: none are sent."""

    def problems(self) -> list[str]:
        """Values that are out of range or do not go together."""
        wrong = super().problems()
        if self.sql_listen:
            if not self.clickhouse_url.startswith("chdb:"):
                wrong.append("HEADRACE_SQL_LISTEN: a ClickHouse server has an SQL endpoint of its own")
            if not re.fullmatch(r".+:\d{1,5}", self.sql_listen):
                wrong.append("HEADRACE_SQL_LISTEN: not host:port")
            if not self.sql_password:
                wrong.append("HEADRACE_SQL_PASSWORD_FILE is not set, and HEADRACE_SQL_LISTEN is")
        for name, endpoint, path in (
            ("HEADRACE_OTLP_ENDPOINT", self.otlp_endpoint, "traces"),
            ("HEADRACE_OTLP_METRICS_ENDPOINT", self.otlp_metrics_endpoint, "metrics"),
        ):
            if endpoint and urlsplit(endpoint).scheme not in ("http", "https"):
                wrong.append(f"{name}: no http(s) address, such as http://host:4318/v1/{path}")
            if endpoint and importlib.util.find_spec("opentelemetry.exporter") is None:
                wrong.append(f"{name}: the exporter is not installed: pip install 'headrace[traces]'")
        if empty_password(self.clickhouse_url):
            wrong.append("HEADRACE_CLICKHOUSE_URL: the password is empty")
        url = urlsplit(self.clickhouse_url)
        if url.scheme == "chdb":
            if url.netloc or len(url.path) < 2:
                wrong.append("HEADRACE_CLICKHOUSE_URL: chDB needs an absolute directory, chdb:///directory")
            if self.clickhouse_replicated:
                wrong.append("HEADRACE_CLICKHOUSE_REPLICATED: chDB has no replicas")
        elif url.scheme not in ("http", "https"):
            wrong.append("HEADRACE_CLICKHOUSE_URL: the scheme is none of chdb, http, https")
        elif url.path not in ("", "/"):
            wrong.append("HEADRACE_CLICKHOUSE_URL: the database is named by HEADRACE_CLICKHOUSE_DATABASE")
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]{0,63}", self.clickhouse_database):
            wrong.append("HEADRACE_CLICKHOUSE_DATABASE: not a plain name")
        return wrong
