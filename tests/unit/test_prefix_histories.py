"""Random histories of placement: engines with caches of their own, tellings lost or late, workers that come and go.

After each step the index is bounded and agrees with itself; in the end it believes what is true, and leaves nothing.
"""

import random
from array import array
from collections import OrderedDict, deque
from itertools import count

import msgspec
import pytest

from contracts.messages.attempts import AttemptEvent
from contracts.messages.base import Epoch
from contracts.messages.control import CacheChange, WorkerHeartbeat
from contracts.messages.request import Reply, RequestEnvelope
from contracts.prefix import BLOCK_TOKENS, COVERED, KEYS_MAX, keys_of
from scheduler.core.prefix_index import QUEUED_MORE
from scheduler.core.request import Request
from scheduler.core.settings import Settings
from scheduler.core.worker_pool import Worker, WorkerPool
from worker.engines.cached_blocks import CachedBlocks

EPOCH = Epoch(1, 1)
SALT = "t."
ENGINE_BLOCKS = 120
"""Of 64 tokens: about three prompts."""


class Engine:
    """A worker's, whose cache drops what was used least recently, ends of prompts first, as vLLM's does."""

    def __init__(self) -> None:
        self.numbers = count(1)
        self.told = 0
        self.on_the_way: deque[CacheChange] = deque()
        self.restart()

    def restart(self) -> None:
        self.kept = CachedBlocks()
        self.blocks: OrderedDict[bytes, None] = OrderedDict()
        self.anew = True

    def serve(self, tokens: list[int]) -> int:
        """Prompt tokens that were in its cache; they all are from now on."""
        whole = (len(tokens) - 1) // BLOCK_TOKENS
        names = [array("I", tokens[: (number + 1) * BLOCK_TOKENS]).tobytes() for number in range(whole)]
        held = next((number for number, name in enumerate(names) if name not in self.blocks), whole)
        self.kept.stored(names[:whole], None, tokens, BLOCK_TOKENS, SALT)
        for name in reversed(names):
            self.blocks[name] = None
            self.blocks.move_to_end(name)
        gone = [self.blocks.popitem(last=False)[0] for _ in range(len(self.blocks) - ENGINE_BLOCKS)]
        self.kept.removed(gone)
        return held * BLOCK_TOKENS

    def tell(self, name: str, lost: bool) -> None:
        anew, tellings = self.kept.take(anew=self.anew)
        self.anew = False
        changes = [CacheChange(worker=name, number=0, stored=each.stored, removed=each.removed) for each in tellings]
        for change in [*([CacheChange(worker=name, number=0, anew=True)] if anew else []), *changes]:
            self.told = next(self.numbers)
            if not lost:
                self.on_the_way.append(msgspec.structs.replace(change, number=self.told))

    @property
    def keys(self) -> set[int]:
        """What its cache really holds."""
        _, tellings = self.kept.take(anew=True)
        self.anew = True  # What has changed was taken, too.
        return {key for each in tellings for run in each.stored for key in array("Q", run.keys)}


class History:
    def __init__(self, seed: int, *, events: bool) -> None:
        self.source, self.events = random.Random(seed), events
        self.pool = WorkerPool(epoch=EPOCH, settings=Settings(), kv_overbooking=100.0)
        self.engines: dict[str, Engine] = {}
        self.open: dict[str, tuple[Request, list[int], str]] = {}
        self.numbers = count()
        heads = [self.text(self.source.randrange(1, 12)) for _ in range(3)]
        self.texts = [[*self.source.choice(heads), *self.text(self.source.randrange(1, 30))] for _ in range(25)]

    def text(self, blocks: int) -> list[int]:
        return [self.source.randrange(50_000) for _ in range(blocks * BLOCK_TOKENS + self.source.randrange(60))]

    def beat(self, name: str, state: str = "ready") -> Worker:
        """What the core does with it (``core._worker_seen``) included."""
        beat = WorkerHeartbeat(
            worker=name,
            model="m",
            version="v",
            state=state,  # type: ignore[arg-type]
            epoch=EPOCH,
            slots=64,
            kv_tokens=ENGINE_BLOCKS * BLOCK_TOKENS,
            cache_number=self.engines[name].told,
        )
        worker, _ = self.pool.seen(beat)
        if beat.cache_number != max(0, worker.cache_number):
            self.pool.cache_missed(worker)
            self.engines[name].anew = True
        return worker

    def join(self) -> None:
        name = f"w{next(self.numbers)}"
        self.engines[name] = Engine()
        self.beat(name)

    def leave(self, name: str) -> None:
        self.pool.evict(self.pool.workers[name])
        del self.engines[name]
        self.open = {each: asked for each, asked in self.open.items() if asked[2] != name}

    def ask(self, tokens: list[int]) -> str:
        request = Request(
            RequestEnvelope(
                request_id=f"r{next(self.numbers)}",
                tenant="t",
                key_id="k",
                model="m",
                endpoint="chat/completions",
                priority="interactive",
                stream=True,
                choices=1,
                prompt_tokens=len(tokens),
                max_output_tokens=1,
                admitted_at_ms=0,
                publish_within_ms=0,
                deadline_ms=0,
                reply=Reply(subject="", stream="s"),
                prefix_keys=keys_of(SALT, tokens),
            )
        )
        worker = self.pool.place(request, 0)
        if worker is not None:
            self.pool.assign(worker, request, 0)
            self.open[request.id] = request, tokens, worker.beat.worker
        return request.id

    def end(self, request_id: str, *, computed: bool = True) -> tuple[int, int]:
        """Tokens that were expected in the cache, and that were there."""
        request, tokens, name = self.open.pop(request_id)
        worker = self.pool.workers[name]
        cached = self.engines[name].serve(tokens) if computed else 0
        expected = worker.load.attempts[request_id].cached_tokens
        event = AttemptEvent(
            **{key: getattr(request.envelope, key) for key in ("request_id", "tenant", "key_id", "model", "endpoint")},
            priority="interactive",
            attempt=1,
            version="v",
            outcome="completed" if computed else "failed",
            reporter="worker",
            prompt_tokens=len(tokens) if computed else 0,
            cached_tokens=cached,
            first_token_at_ms=int(computed),
        )
        self.pool.release(request, worker, event if self.source.random() < 0.9 or computed else None, 0)
        return expected, cached

    def hear(self, name: str) -> None:
        """The next thing that it told."""
        engine = self.engines[name]
        if engine.on_the_way and not self.pool.cache_changed(self.pool.workers[name], engine.on_the_way.popleft()):
            engine.anew = True

    def step(self) -> None:
        what = self.source.choices(
            ("ask", "end", "tell", "hear", "beat", "restart", "leave", "join"), (40, 30, 20, 20, 5, 1, 1, 2)
        )[0]
        names = list(self.engines)
        if what == "join" or not names:
            if len(names) < 5:
                self.join()
            return
        name = self.source.choice(names)
        if what == "ask":
            self.ask(self.source.choice(self.texts))
        elif what == "end" and self.open:
            self.end(self.source.choice(list(self.open)), computed=self.source.random() < 0.8)
        elif what == "tell" and self.events:
            self.engines[name].tell(name, lost=self.source.random() < 0.1)
        elif what == "hear":
            self.hear(name)
        elif what == "beat" and not self.engines[name].on_the_way:
            self.beat(name)
        elif what == "restart":
            self.engines[name].restart()
            if self.source.random() < 0.5:
                self.beat(name, "engine_down")
        elif what == "leave":
            self.leave(name)

    def check(self) -> None:
        index, holders = self.pool.placement.index, dict[int, int]()
        assert len({cache.bit for cache in index.caches}) == len(index.caches) == len(self.engines)
        for worker in self.pool.workers.values():
            load, cache = worker.load, worker.load.cache
            mine = [each for each, (_, _, name) in self.open.items() if name == worker.beat.worker]
            assert sorted(load.attempts) == sorted(mine) and load.count == len(mine)
            assert load.prompts.tokens == sum(load.prompts._left.values()) >= 0 and load.work_tokens > 0
            assert cache.blocks == sum(value % 32 for value in cache.keys.values()) <= ENGINE_BLOCKS
            assert cache.queued == sum(len(keys) for _, keys in cache.uses)
            assert cache.queued <= 2 * len(cache.keys) + QUEUED_MORE + KEYS_MAX
            for key in cache.keys:
                holders[key] = holders.get(key, 0) | cache.bit
        assert holders == index._holders


@pytest.mark.parametrize("events", [True, False], ids=["told", "not told"])
@pytest.mark.parametrize("seed", range(6))
def test_whatever_happens_the_index_is_bounded_and_comes_to_believe_what_is_true(seed: int, events: bool) -> None:
    history = History(seed, events=events)
    for _ in range(500):
        history.step()
        history.check()
    for each in list(history.open):
        history.end(each)
    if events:
        for name, engine in history.engines.items():
            for _ in range(3):  # What is on the way, the gap in it, and all anew.
                engine.tell(name, lost=False)
                while engine.on_the_way:
                    history.hear(name)
                worker = history.beat(name)
            cache, real = worker.load.cache, engine.keys
            assert set(cache.keys) <= real
            assert set(cache.keys) == real or cache.blocks > cache.blocks_max - 32, "it counts some blocks twice"
    for tokens in history.texts:
        for _ in range(len(history.engines)):  # A worker that is wrong about it is corrected, and another one chosen.
            history.end(history.ask(tokens))
        expected, cached = history.end(history.ask(tokens))
        assert expected == cached - cached % BLOCK_TOKENS or expected == max(at for at in COVERED if at <= cached)
    history.check()
    for name in list(history.engines):
        history.leave(name)
    index = history.pool.placement.index
    assert not len(index) and not index.caches and not index._holders and not history.pool.placement._loads
