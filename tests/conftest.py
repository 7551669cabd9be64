"""What tests of several folders share: NATS servers and simulated stacks."""

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import structlog

from tests.support.nats_server import NatsServer, nats_server_binary
from tests.support.stack import Stack, StartStack


def pytest_configure() -> None:
    """Plain tracebacks: rich ones take a second each."""
    renderer = structlog.dev.ConsoleRenderer(exception_formatter=structlog.dev.plain_traceback)
    structlog.configure(processors=[structlog.stdlib.add_log_level, renderer])


@pytest.fixture(scope="session")
def nats_binary() -> str:
    return nats_server_binary()


@pytest.fixture
def nats(nats_binary: str, tmp_path: Path) -> Iterator[NatsServer]:
    """A running nats-server with JetStream, gone with its store after the test."""
    server = NatsServer(nats_binary, tmp_path)
    server.start()
    yield server
    server.stop()


@pytest.fixture
def nats_url(nats: NatsServer) -> str:
    """Address of the test's own nats-server."""
    return nats.url


@pytest.fixture
def start_stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StartStack]:
    """``start_stack("--workers", "2", ...)`` gives the test a stack of its own, ready; stopped afterwards."""
    stacks: list[Stack] = []

    def start(*options: str, data_dir: Path | None = None, ready: bool = True, **environment: str) -> Stack:
        directory = data_dir or tmp_path_factory.mktemp("stack") / "data"
        stack = Stack(directory, "--engine", "simulated", *options, **environment)
        stacks.append(stack)
        return stack.wait_ready() if ready else stack

    yield start
    for stack in stacks:
        stack.stop(signal.SIGTERM)


@pytest.fixture(scope="session")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """The session's stack with the defaults; leave it as it is."""
    stack = Stack(tmp_path_factory.mktemp("stack") / "data", "--engine", "simulated").wait_ready()
    yield stack
    stack.stop(signal.SIGTERM)
