"""The engines that the suite runs over."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from compose.stack import models
from tests.support.asking import MODEL, SLOTS, VLLM_MARKS, Asker
from worker.engines.base import Engine
from worker.engines.simulated.engine import SimConfig, SimulatedEngine
from worker.engines.vllm.arguments import VllmConfig
from worker.engines.vllm.engine import VllmEngine

KINDS = ["simulated", pytest.param("vllm", marks=VLLM_MARKS)]


@pytest.fixture(scope="session")
def model_path() -> Path:
    """The small real model, converted once and cached."""
    return models.prepare(models.DEFAULT_MODEL, progress=print).path


def make_engine(kind: str, request: pytest.FixtureRequest) -> Engine:
    if kind == "simulated":
        return SimulatedEngine(SimConfig(model=MODEL, slots=SLOTS, itl_ms=5, context=8192))
    path = request.getfixturevalue("model_path")
    return VllmEngine(VllmConfig(model_path=str(path), public_name=MODEL, slots=SLOTS))


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=KINDS)
async def asker(request: pytest.FixtureRequest) -> AsyncIterator[Asker]:
    """One engine for all tests of a module: vLLM takes half a minute to start."""
    engine = make_engine(request.param, request)
    await engine.start()
    try:
        yield Asker(request.param, engine)
    finally:
        await engine.close()
