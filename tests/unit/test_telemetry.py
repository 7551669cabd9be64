"""The small server of metrics and health, and what logs leave out."""

import http.client
import io
import json
import logging
import socket
from collections.abc import Iterator

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


@pytest.fixture
def logged(monkeypatch: pytest.MonkeyPatch) -> Iterator[io.StringIO]:
    """What a service writes to standard error."""
    text, root, before = io.StringIO(), logging.getLogger(), structlog.get_config()
    handlers, level = root.handlers, root.level
    monkeypatch.setattr("sys.stderr", text)
    telemetry.configure_logging(ServiceConfig(metrics_port=0), "test")
    yield text
    structlog.configure(**before)
    root.handlers = handlers
    root.setLevel(level)


def test_a_key_is_blotted_out_wherever_it_stands(logged: io.StringIO) -> None:
    logging.getLogger("library").warning("GET /hr_aBcDeFgHiJkLmNoPqRsTuV?x=hr_%s of hr_", "x" * 43)
    structlog.get_logger().warning("ours", path="/hr_aBcDeFgHiJkLmNoPqRsTuV", headers=[{"x": f"hr_{'x' * 43}"}])
    text = logged.getvalue()
    assert "aBcDeFgHi" not in text and "xxxx" not in text
    assert text.count("hr_***") == 4


def test_lines_of_ours_and_of_libraries_are_alike_and_one_each(logged: io.StringIO) -> None:
    logging.getLogger("library").warning("theirs\nof two lines")
    try:
        raise ValueError("broken\nin two")
    except ValueError:
        structlog.get_logger().exception("ours", tenant="t")
    theirs, ours = (json.loads(line) for line in logged.getvalue().splitlines())
    assert theirs.keys() == {"event", "level", "timestamp", "service"}
    assert ours["service"] == theirs["service"] == "test" and ours["level"] == "error"
    assert ours["event"] == "ours" and ours["tenant"] == "t" and "ValueError: broken" in ours["exception"]


def test_a_service_goes_on_when_nobody_reads_its_log(logged: io.StringIO) -> None:
    logged.close()
    structlog.get_logger().warning("unread")


VALUES = [
    *("", "plain", 'quotes " and \\', "two\nlines", "\x00\x7f", "é \u2028 \U0001f600", "lone \ud800"),
    *(0, -1, 2**63, 2**70, 0.1, True, None, ["a", {"b": 1}], b"bytes", KeyError("x")),
]


@pytest.mark.parametrize("value", VALUES, ids=repr)
def test_a_line_is_what_json_has_for_it(logged: io.StringIO, value: object) -> None:
    structlog.get_logger().info("ours", first="a", value=value)
    [line] = logged.getvalue().splitlines()
    found = json.loads(line)
    assert line == json.dumps(found)
    if isinstance(value, str | int | float | list | None):
        assert found["value"] == value
    else:
        assert found["value"] == repr(value)
