"""The real vLLM in a stack, and its own server beside it."""

import signal
from collections.abc import Iterator

import pytest

from compose.stack import models
from tests.support.stack import VLLM_START_LIMIT_S, Direct, Stack, embedder


@pytest.fixture(scope="package")
def _vllm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Stack, Direct]]:
    """All engines at once, so that their starts overlap."""
    path = models.prepare(models.DEFAULT_MODEL, progress=print).path
    directory = tmp_path_factory.mktemp("vllm")
    embedding_model = embedder(path, directory / "embedder")
    options = ("--model", models.DEFAULT_MODEL, "--model", str(embedding_model))
    direct = Direct(path, directory / "direct.log")
    try:
        stack = Stack(directory / "data", *options).wait_ready(VLLM_START_LIMIT_S)
        try:
            direct.wait_ready()
            yield stack, direct
        finally:
            stack.stop(signal.SIGTERM)
    finally:
        if direct.process.poll() is None:
            direct.stop()


@pytest.fixture(scope="package")
def vllm_stack(_vllm: tuple[Stack, Direct]) -> Stack:
    """A stack that serves the small real model, and as ``embedder`` its embeddings; leave it as it is."""
    return _vllm[0]


@pytest.fixture(scope="package")
def direct(_vllm: tuple[Stack, Direct]) -> Direct:
    return _vllm[1]
