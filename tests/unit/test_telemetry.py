"""The small server of metrics and health, and what logs leave out."""

import http.client
import io
import logging
import socket

import pytest
import structlog

from contracts.service import telemetry
from contracts.service.config import ServiceConfig


@pytest.fixture(scope="module")
def port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as found:
        free: int = found.getsockname()[1]
    telemetry.serve(ServiceConfig(metrics_port=free), lambda: "")
    return free


def test_who_is_silent_keeps_no_probe_out(port: int) -> None:
    silent = [socket.create_connection(("127.0.0.1", port), 10) for _ in range(200)]
    for path in ("/health/live", "/health/ready", "/metrics"):
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
        connection.request("GET", path)
        assert connection.getresponse().status == 200
        connection.close()
    assert sum(ended(each) for each in silent[: -telemetry.CONNECTIONS_MAX]) == 200 - telemetry.CONNECTIONS_MAX
    for each in silent:
        each.close()


def ended(connection: socket.socket) -> bool:
    try:
        return connection.recv(1) == b""
    except ConnectionResetError:
        return True


def test_a_key_is_blotted_out_wherever_it_stands() -> None:
    text = io.StringIO()
    handler = logging.StreamHandler(text)
    handler.setFormatter(telemetry._Formatter(processor=structlog.processors.KeyValueRenderer()))
    logger = logging.getLogger("test_telemetry")
    logger.addHandler(handler)
    try:
        logger.warning("GET /hr_aBcDeFgHiJkLmNoPqRsTuV?x=hr_%s of hr_", "x" * 43)
    finally:
        logger.removeHandler(handler)
    assert "aBcDeFgHi" not in text.getvalue() and "xxxx" not in text.getvalue()
    assert "hr_***" in text.getvalue()
