"""The engines that the suite runs over: one of each kind for all tests, since vLLM takes long to start."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from tests.support.asking import MODEL, SLOTS, VLLM_MARKS, Asker, running
from worker.engines.simulated.engine import SimConfig, SimulatedEngine
from worker.engines.vllm.arguments import VllmConfig
from worker.engines.vllm.engine import VllmEngine

KINDS = ["simulated", pytest.param("vllm", marks=VLLM_MARKS)]


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def simulated() -> AsyncIterator[Asker]:
    async with running(SimulatedEngine(SimConfig(model=MODEL, slots=SLOTS, itl_ms=5, context=8192))) as engine:
        yield Asker("simulated", engine)


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def vllm(model_path: Path) -> AsyncIterator[Asker]:
    config = VllmConfig(model_path=str(model_path), public_name=MODEL, slots=SLOTS, check_timeout_s=5)
    async with running(VllmEngine(config)) as engine:
        yield Asker("vllm", engine)


@pytest.fixture(scope="session", params=KINDS)
def asker(request: pytest.FixtureRequest) -> Asker:
    """Each kind."""
    asker: Asker = request.getfixturevalue(request.param)
    return asker
