"""Clusters of real processes, one for each module of tests; after each test nothing may be left of its requests."""

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from tests.support.cluster import Cluster


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, nats_binary: str
) -> AsyncIterator[Cluster]:
    """The module's cluster, made as its ``CLUSTER`` says."""
    made = Cluster(tmp_path_factory.mktemp("cluster"), nats_binary, **request.module.CLUSTER)
    try:
        await made.start()
        yield made
    finally:
        await made.close()


@pytest_asyncio.fixture(loop_scope="module")
async def cluster(shared: Cluster) -> AsyncIterator[Cluster]:
    """The module's cluster with everything up; afterwards it must come to rest with no request left anywhere."""
    await shared.mend()
    yield shared
    for call in shared.calls:
        await call.leave()
    shared.calls.clear()
    await shared.mend()
    await shared.quiet()
