"""The engines that the suite runs over: one of each kind for all tests, since vLLM takes long to start."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from tests.support.asking import VLLM_MARKS, Asker, configuration, running
from worker.engines import table

KINDS = ["simulated", pytest.param("vllm", marks=VLLM_MARKS)]


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def simulated() -> AsyncIterator[Asker]:
    async with running(table.build(*configuration("simulated"))) as engine:
        yield Asker("simulated", engine)


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def vllm(model_path: Path) -> AsyncIterator[Asker]:
    async with running(table.build(*configuration("vllm", str(model_path)))) as engine:
        yield Asker("vllm", engine)


@pytest.fixture(scope="session", params=KINDS)
def asker(request: pytest.FixtureRequest) -> Asker:
    """Each kind."""
    asker: Asker = request.getfixturevalue(request.param)
    return asker
