"""contracts.service.process: how every service starts, is ready and stops, seen from outside."""

import json
import os
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.nats_server import NatsServer, free_port

SERVICE = """
import asyncio, sys
from contracts.service.config import ServiceConfig
from contracts.service.process import run_service

class Config(ServiceConfig, frozen=True, kw_only=True):
    mode: str
    number: int = 0

class Probe:
    def __init__(self, config, bus):
        self.config, self.bus, self.stopping = config, bus, asyncio.Event()
    def not_ready(self):
        return ""
    def stop(self):
        print("stop", flush=True)
        self.stopping.set()
    async def run(self):
        print("serving", flush=True)
        if self.config.mode == "break":
            raise ValueError("out of order")
        if self.config.mode == "lose":
            self.bus.closed.set()
            await asyncio.Event().wait()
        await self.stopping.wait()
        print("drained", flush=True)

async def build(config, bus):
    print("building", flush=True)
    if config.mode == "wait":
        await asyncio.Event().wait()
    return Probe(config, bus)

sys.exit(run_service("scheduler", Config, build))
"""

Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """``start(nats_url="...", mode="...")`` runs a service that prints what happens to it."""
    script = tmp_path / "service.py"
    script.write_text(SERVICE)
    started: list[subprocess.Popen[str]] = []

    def run(**settings: object) -> "subprocess.Popen[str]":
        process = subprocess.Popen(
            [sys.executable, script],
            env=os.environ | {f"HEADRACE_{name.upper()}": str(value) for name, value in settings.items()},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        return process

    yield run
    for process in started:
        process.kill()
        process.communicate()


def read_until(process: "subprocess.Popen[str]", line: str) -> None:
    assert process.stdout
    for found in process.stdout:
        if found.strip() == line:
            return
    raise AssertionError(f"the process ended and never said {line!r}")


def end(process: "subprocess.Popen[str]") -> tuple[int, list[str], list[dict[str, str]]]:
    """Exit code, what it said, and its log."""
    said, log = process.communicate(timeout=20)
    return process.returncode, said.split(), [json.loads(line) for line in log.splitlines()]


def test_bad_configuration_is_exit_code_2_and_names_every_bad_value(start: Start) -> None:
    process = start(number="many", log_level="loud")
    _, errors = process.communicate(timeout=20)
    assert process.returncode == 2
    assert [line.split(":")[0] for line in errors.splitlines()] == [
        "HEADRACE_LOG_LEVEL",
        "HEADRACE_MODE is not set",
        "HEADRACE_NUMBER",
    ]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_drains_and_ends_with_0(start: Start, nats: NatsServer, number: signal.Signals) -> None:
    process = start(nats_url=nats.url, mode="serve")
    read_until(process, "serving")
    process.send_signal(number)
    assert end(process) == (0, ["stop", "drained"], [])


def test_a_signal_before_the_service_is_built_ends_with_0(start: Start, nats: NatsServer) -> None:
    process = start(nats_url=nats.url, mode="wait")
    read_until(process, "building")
    process.terminate()
    assert end(process) == (0, [], [])


def test_what_breaks_is_logged_and_ends_with_1(start: Start, nats: NatsServer) -> None:
    code, said, log = end(start(nats_url=nats.url, mode="break"))
    assert (code, said) == (1, ["building", "serving"])
    assert (log[-1]["event"], log[-1]["service"], log[-1]["level"]) == ("service_failed", "scheduler", "error")
    assert "out of order" in log[-1]["exception"]


def test_a_service_whose_bus_is_lost_for_good_is_stopped_and_ends_with_1(start: Start, nats: NatsServer) -> None:
    """The service here never ends by itself."""
    code, said, log = end(start(nats_url=nats.url, mode="lose"))
    assert (code, said) == (1, ["building", "serving", "stop"])
    assert (log[-1]["event"], log[-1]["reason"]) == ("service_failed", "the bus is lost for good")


def test_health_says_why_a_service_is_not_ready(start: Start, nats: NatsServer) -> None:
    port = free_port()
    process = start(nats_url=nats.url, mode="wait", metrics_port=port)
    read_until(process, "building")
    assert asked(port, "live") == (200, "ok")
    assert asked(port, "ready") == (503, "starting")


def asked(port: int, what: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health/{what}", timeout=10) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()
