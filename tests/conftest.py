"""What tests of several folders share: NATS servers and simulated stacks."""

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import structlog

from compose.stack import models
from tests.support.nats_server import NatsServer, nats_server_binary
from tests.support.nginx import nginx_before
from tests.support.own_failure import own_failure
from tests.support.stack import Stack, StartStack
from tests.support.vllm import VLLM_START_LIMIT_S, Direct, embedder

pytest_plugins = ["tests.support.plugin"]


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
def stack(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """The session's stack with the defaults; leave it as it is."""
    stack = Stack(tmp_path_factory.mktemp("stack") / "data", "--engine", "simulated").wait_ready()
    yield stack
    with own_failure(request.config, "the session's stack: its end, and what its services were denied"):
        stack.stop(signal.SIGTERM)


@pytest.fixture
def nginx(stack: Stack, tmp_path: Path) -> Iterator[str]:
    """Address of an nginx before the session's stack."""
    with nginx_before(stack.run.url, tmp_path) as url:
        yield url


# The real vLLM ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def _vllm(
    request: pytest.FixtureRequest, model_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Stack, Direct]]:
    """All engines at once, so that their starts overlap."""
    directory = tmp_path_factory.mktemp("vllm")
    embedding_model = embedder(model_path, directory / "embedder")
    options = ("--model", models.DEFAULT_MODEL, "--model", str(embedding_model))
    direct = Direct(model_path, directory / "direct.log")
    try:
        stack = Stack(directory / "data", *options).wait_ready(VLLM_START_LIMIT_S)
        with own_failure(request.config, "vLLM's stack: its end, and what its services were denied"):
            try:
                direct.wait_ready()
                yield stack, direct
            finally:
                stack.stop(signal.SIGTERM)
    finally:
        if direct.process.poll() is None:
            direct.stop()


@pytest.fixture(scope="session")
def vllm_stack(_vllm: tuple[Stack, Direct]) -> Stack:
    """A stack that serves the small real model, and as ``embedder`` its embeddings; leave it as it is."""
    return _vllm[0]


@pytest.fixture(scope="session")
def direct(_vllm: tuple[Stack, Direct]) -> Direct:
    """vLLM's own server of the same model."""
    return _vllm[1]


@pytest.fixture(scope="session")
def real_stack(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """A stack that serves the small real model: ``vllm_stack`` where that is wanted too, else one with one engine."""
    if any("vllm_stack" in item.fixturenames for item in request.session.items if isinstance(item, pytest.Function)):
        yield request.getfixturevalue("vllm_stack")
        return
    directory = tmp_path_factory.mktemp("real") / "data"
    stack = Stack(directory, "--model", models.DEFAULT_MODEL).wait_ready(VLLM_START_LIMIT_S)
    yield stack
    with own_failure(request.config, "the real stack: its end, and what its services were denied"):
        stack.stop(signal.SIGTERM)


@pytest.fixture(scope="session")
def model_path() -> Path:
    """The small real model, converted once and cached."""
    return Path(models.prepare(models.DEFAULT_MODEL, progress=print).path)
