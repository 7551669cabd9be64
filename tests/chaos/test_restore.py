"""The bus's store is set back to a backup while everything runs: the services go on, and no epoch stays too low."""

import shutil
import signal

import pytest

from contracts.messages.base import Epoch
from tests.support.cluster import Cluster, counted
from tests.support.polling import until

pytestmark = pytest.mark.asyncio(loop_scope="module")
CLUSTER = {"schedulers": 2, "workers": 2, "sim_itl_ms": 20}


async def epoch_of(cluster: Cluster) -> Epoch:
    queue = await cluster.queue()
    return queue.epoch if queue else Epoch()


async def test_after_a_restore_everything_goes_on(cluster: Cluster) -> None:
    """Owners came after the backup, so that the workers know epochs that the restored bus will give again."""
    backup = cluster.directory / "backup"
    await cluster.serves()
    cluster.nats.stop(signal.SIGTERM)
    shutil.copytree(cluster.nats.store, backup)
    cluster.nats.start()
    await cluster.serves()
    for _ in range(2):
        before = await epoch_of(cluster)
        owner = await cluster.owner()
        owner.kill()
        owner.start()

        async def higher(before: Epoch = before) -> bool:
            return await epoch_of(cluster) > before

        await until(higher, "another term", 20)
        await cluster.serves()
    newest = await epoch_of(cluster)
    cut = cluster.ask(max_tokens=2000)
    await cut.shows(2)

    cluster.nats.stop()
    shutil.rmtree(cluster.nats.store)
    shutil.copytree(backup, cluster.nats.store)
    cluster.nats.start()

    async def above() -> bool:
        return await epoch_of(cluster) > newest

    await until(above, "a term that the workers obey", 30)
    await cluster.serves()
    calls = [cluster.ask(max_tokens=20) for _ in range(8)]
    for call in calls:
        await call.done()
        assert call.complete and call.text == counted(20), call.story()
    await cut.leave()
    epoch = await epoch_of(cluster)
    assert epoch.era > newest.era and epoch.revision < newest.revision, "revisions were given again"
