"""What a worker tells of its engine's cache, over a real server."""

from collections.abc import AsyncIterator
from functools import partial

import msgspec
import pytest

from contracts import subjects
from contracts.bus import Bus, Incoming
from contracts.messages.base import Epoch
from contracts.messages.control import Announce, CacheChange, ControlAnswer
from contracts.messages.records import Manifest
from contracts.prefix import KEY_BYTES, keys_of
from tests.support.polling import until
from tests.support.worker_harness import MODEL, Harness
from worker.config import WorkerConfig
from worker.engines import table
from worker.engines.base import Engine
from worker.engines.cached_blocks import CachedBlocks

TOKENS = list(range(1_000))


@pytest.fixture
async def harness(nats_url: str) -> AsyncIterator[Harness]:
    bus = await Bus.connect(nats_url, name="scheduler")
    made = Harness(bus, nats_url)
    await made.open()
    yield made
    await made.close()
    await bus.close()


async def test_it_tells_what_changed_and_all_of_it_to_who_asks(harness: Harness) -> None:
    kept, changes = CachedBlocks(), list[CacheChange]()

    def build(manifest: Manifest) -> Engine:
        engine = table.build(WorkerConfig(model=MODEL), manifest)
        engine.kept = kept
        return engine

    def on_change(incoming: Incoming) -> None:
        changes.append(msgspec.json.decode(incoming.data, type=CacheChange))

    async def announce(revision: int) -> None:
        order = msgspec.json.encode(Announce(epoch=Epoch(1, revision)))
        data = await harness.bus.request(subjects.control(worker), order, timeout_s=10)
        assert msgspec.json.decode(data, type=ControlAnswer).status == "ok"

    await harness.start(partial(build))
    worker = await harness.ready()
    await harness.bus.subscribe(subjects.worker_cache(MODEL, worker), on_change)
    await announce(2)
    await until(lambda: changes, "it begins anew for a new owner")
    first = changes[-1]
    assert first.anew and not first.stored
    kept.stored([b"all"], None, TOKENS, len(TOKENS), "t.")
    await until(lambda: changes[-1].stored, "what is new is told")
    last = changes[-1]
    [run] = last.stored
    assert (run.first, run.keys) == (0, keys_of("t.", TOKENS)) and not last.anew
    told = len(changes)
    await announce(2)
    await until(lambda: len(changes) >= told + 2, "all of it is told again")
    assert changes[told].anew and changes[told + 1].stored == [run]
    kept.removed([b"all"])
    await until(lambda: changes[-1].removed, "what is gone is told")
    assert len(changes[-1].removed) == len(run.keys) and len(run.keys) % KEY_BYTES == 0
    assert [change.number for change in changes] == list(range(changes[0].number, changes[-1].number + 1))
    await until(lambda: harness.beats[-1].cache_number == changes[-1].number, "its heartbeat names the last one")
