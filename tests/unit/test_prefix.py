"""Keys of prompts, the index of who holds them, and the choice of a worker by it."""

import random
from array import array
from typing import Any

import msgspec
import pytest

from contracts import prefix
from contracts.messages.attempts import AttemptEvent
from contracts.messages.base import Epoch, fields_of
from contracts.messages.control import CacheChange, WorkerHeartbeat
from contracts.messages.records import ModelRecord, PoolLimits, TenantLimits, TenantRecord
from contracts.messages.request import Reply, RequestEnvelope
from contracts.prefix import BLOCK_TOKENS, COVERED, cache_salt, keys_of, unshared_salt
from contracts.tokens import Cost
from scheduler.core import events, outcomes, placement
from scheduler.core.prefix_index import PrefixIndex
from scheduler.core.request import Request
from scheduler.core.settings import Settings
from scheduler.core.worker_pool import Worker, WorkerPool
from tests.support.fleet import Fleet
from worker.engines.cached_blocks import CachedBlocks
from worker.engines.vllm.cache_events import take

EPOCH = Epoch(1, 1)
SYSTEM = list(range(2_000))


def keys(tokens: list[int], salt: str = "t.") -> "array[int]":
    return array("Q", keys_of(salt, tokens))


def request(tokens: list[int], name: str = "r", **more: object) -> Request:
    fields = {
        **{"request_id": name, "tenant": "t", "key_id": "k", "model": "m", "endpoint": "chat/completions"},
        **{"priority": "interactive", "stream": True, "choices": 1, "prompt_tokens": len(tokens)},
        **{"max_output_tokens": 10, "admitted_at_ms": 0, "publish_within_ms": 0, "deadline_ms": 0},
        **{"reply": Reply(subject="", stream="s"), "prefix_keys": keys_of("t.", tokens)},
    }
    return Request(RequestEnvelope(**fields | more))  # type: ignore[arg-type]


class Pool:
    """Workers of which all is known."""

    def __init__(self, workers: int = 2, kv_tokens: int = 100_000) -> None:
        self.pool = WorkerPool(epoch=EPOCH, settings=Settings(), kv_overbooking=1.0)
        self.kv_tokens = kv_tokens
        for number in range(workers):
            self.beat(f"w{number}")

    def beat(self, name: str, state: str = "ready") -> Worker:
        beat = WorkerHeartbeat(
            worker=name,
            model="m",
            version="v",
            state=state,  # type: ignore[arg-type]
            epoch=EPOCH,
            slots=64,
            kv_tokens=self.kv_tokens,
        )
        return self.pool.seen(beat)[0]

    def send(self, asked: Request) -> str:
        worker = self.pool.place(asked, 0)
        assert worker is not None
        self.pool.assign(worker, asked, 0)
        return worker.beat.worker

    def end(self, asked: Request, worker: str, cached: int, *, first_token: bool = True) -> None:
        event = AttemptEvent(
            **{name: getattr(asked.envelope, name) for name in ("request_id", "tenant", "key_id", "model", "endpoint")},
            priority="interactive",
            attempt=1,
            version="v",
            outcome="completed",
            reporter="worker",
            prompt_tokens=asked.envelope.prompt_tokens if first_token else 0,
            cached_tokens=cached,
            first_token_at_ms=int(first_token),
        )
        self.pool.release(asked, self.pool.workers[worker], event, 0)

    def serve(self, tokens: list[int], cached: int | None = None) -> str:
        """It ends before anything else comes; ``cached``: what the engine found, else what was expected."""
        asked = request(tokens)
        worker = self.send(asked)
        expected = self.pool.workers[worker].load.attempts["r"].cached_tokens
        self.end(asked, worker, expected if cached is None else cached)
        return worker

    def held(self, worker: str, tokens: list[int]) -> int:
        return COVERED[self.pool.workers[worker].load.cache.held_of(keys(tokens))]


def test_keys_of_a_longer_prompt_begin_with_those_of_a_shorter_one() -> None:
    long = random.Random(1).choices(range(50_000), k=20_000)
    whole = keys(long)
    for length in (0, 1, 64, 65, 1_000, 1_025, 5_000, 9_000):
        part = keys(long[:length])
        assert part == whole[: len(part)]
        assert length - COVERED[len(part)] <= 16 * BLOCK_TOKENS
    other = [*long[:1_000], long[1_000] + 1, *long[1_001:]]
    same = sum(a == b for a, b in zip(whole, keys(other), strict=True))
    assert COVERED[same] == 960


def test_the_last_token_is_in_no_block_and_few_keys_travel() -> None:
    assert len(keys([1] * 64)) == 0 and len(keys([1] * 65)) == 1
    assert len(keys([1] * 1_000_000)) == prefix.KEYS_MAX
    assert keys([1] * prefix.TOKENS_KEYED) == keys([1] * 1_000_000)


def test_prompts_of_two_tenants_or_salts_have_no_key_in_common() -> None:
    salts = [cache_salt("a"), cache_salt("b"), cache_salt("a", "own"), cache_salt("a.own"), unshared_salt("a")]
    all_keys = [set(keys(SYSTEM, salt)) for salt in salts]
    assert len(set.union(*all_keys)) == sum(map(len, all_keys))
    assert [prefix.is_shared(salt) for salt in salts] == [True, True, True, True, False]


def test_who_holds_most_comes_first_and_who_holds_nothing_is_left_out() -> None:
    index = PrefixIndex()
    caches = [index.join() for _ in range(4)]
    prompt = keys(list(range(5_000)))
    for cache, number in zip(caches, (5, len(prompt), 5, 0), strict=True):
        index.use(cache, prompt[:number], 100_000)
    assert index.runs(prompt) == [(caches[1].bit, len(prompt)), (caches[0].bit | caches[2].bit, 5)]
    index.leave(caches[1])
    assert index.runs(prompt) == [(caches[0].bit | caches[2].bit, 5)]
    assert index.join().bit == caches[1].bit


def test_the_index_agrees_with_a_plain_model_of_itself() -> None:
    """Random uses, drops and losses: who holds what, how many blocks that is, and nothing left at the end."""
    source = random.Random(7)
    index = PrefixIndex()
    caches = [index.join() for _ in range(5)]
    texts = [[source.randrange(9) for _ in range(source.randrange(65, 3_000))] for _ in range(20)]
    for _ in range(600):
        cache = source.choice(caches)
        prompt = keys(source.choice(texts))
        what = source.randrange(10)
        if what < 7:
            index.use(cache, prompt[: source.randrange(len(prompt)) + 1], 8_000)
        elif what < 8:
            index.drop(cache, prompt[source.randrange(len(prompt)) :])
        elif what < 9:
            index.drop_until(cache, cache.used_at(prompt[0]))
            assert not cache.used_at(prompt[0])
        else:
            index.clear(cache)
        holders: dict[int, int] = {}
        for each in caches:
            assert each.blocks == sum(value % 32 for value in each.keys.values()) <= 8_000 // 64
            assert each.queued == sum(len(used) for _, used in each.uses)
            for key in each.keys:
                holders[key] = holders.get(key, 0) | each.bit
        assert holders == index._holders
    for cache in caches:
        index.leave(cache)
    assert not len(index) and not index._holders


def test_what_has_a_hole_is_counted_as_all_else_is() -> None:
    index = PrefixIndex()
    cache = index.join()
    prompt = keys(list(range(1_000)))
    index.use(cache, prompt, 100_000)
    index.drop(cache, prompt[2:3])
    assert cache.blocks == len(prompt) - 1
    index.use(cache, prompt, 100_000)
    assert cache.blocks == len(prompt) and index.runs(prompt) == [(cache.bit, len(prompt))]
    index.leave(cache)
    assert not len(index) and not index._holders


def test_memory_is_bounded_by_the_cache_and_by_the_index() -> None:
    index = PrefixIndex(blocks_max=500)
    caches = [index.join(), index.join()]
    for number in range(400):
        for cache in caches:
            index.use(cache, keys([number] * 1_000), 64 * 1_000)
            index.use(cache, keys([0] * 1_000), 64 * 1_000)  # Used again and again, and kept once.
    assert all(cache.blocks <= 250 and cache.queued < 3_000 for cache in caches)
    assert all(cache.held_of(keys([0] * 1_000)) for cache in caches)


def test_a_conversation_stays_where_it_is_known_and_others_go_elsewhere() -> None:
    pool = Pool()
    first = pool.serve(SYSTEM + [1] * 500)
    assert pool.serve(SYSTEM + [1] * 900) == first
    busy = request([7] * 3_000, "busy")
    pool.send(busy)
    pool.send(request([8] * 3_000, "other"))
    assert {pool.pool.workers[name].load.count for name in ("w0", "w1")} == {1}


def test_who_has_done_more_of_late_gets_less_of_what_is_new_and_keeps_what_it_knows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(placement, "LATE_TOKENS", 40_000)
    pool = Pool(kv_tokens=10_000_000)
    busy = pool.serve(SYSTEM + [1] * 500)
    pool.serve([2] * 500)
    assert pool.serve([3] * 1_000) != busy
    for number in range(120):
        assert pool.serve(SYSTEM + [1] * 500 + list(range(number * 10, number * 10 + 900))) == busy
    loads = {name: worker.load for name, worker in pool.pool.workers.items()}
    assert loads.pop(busy).work_share == placement.SHARE_MAX
    [other] = loads.values()
    assert other.work_share == placement.SHARE_MIN and other.work_tokens < placement.NEW_TOKENS
    assert pool.serve([4] * 1_000) != busy


def test_siblings_of_a_burst_meet_and_a_hot_prefix_spreads() -> None:
    """The first of each worker computes the prefix, and nobody has much more to do than the others."""
    pool = Pool(workers=4)
    sent = [pool.send(request([*SYSTEM, number], f"r{number}")) for number in range(40)]
    counts = [sent.count(f"w{number}") for number in range(4)]
    assert max(counts) <= 1.25 * 10 + 1, counts
    computed = sum(worker.load.prompts.tokens for worker in pool.pool.workers.values())
    assert computed == 4 * 2_001 + 36 * (2_001 - 1_792)


def test_a_new_engine_holds_nothing() -> None:
    pool = Pool()
    first = pool.serve(SYSTEM)
    pool.beat(first, "engine_down")
    pool.beat(first)
    assert pool.held(first, SYSTEM) == 0


def test_what_an_engine_did_not_find_is_believed_no_more_nor_what_is_older() -> None:
    pool = Pool(workers=1)
    old, system = [5] * 1_000, SYSTEM
    pool.serve(old)
    pool.serve(system)
    pool.serve([9] * 1_000)
    pool.serve(system, cached=0)
    assert pool.held("w0", old) == 0, "used before what was found missing"
    assert pool.held("w0", system) > 0 and pool.held("w0", [9] * 1_000) > 0


def test_a_sibling_that_was_too_early_takes_nothing_from_the_index() -> None:
    pool = Pool(workers=1)
    pool.serve([5] * 1_000)
    twins = [request(SYSTEM, "a"), request(SYSTEM, "b")]
    for each in twins:
        pool.send(each)
    for each in twins:
        pool.end(each, "w0", cached=0)
    assert pool.held("w0", [5] * 1_000) > 0


def test_what_was_never_computed_is_not_held() -> None:
    pool = Pool(workers=1)
    pool.serve(SYSTEM)
    asked = request(SYSTEM + [3] * 1_000)
    pool.end(asked, pool.send(asked), 0, first_token=False)
    assert pool.held("w0", SYSTEM + [3] * 1_000) == pool.held("w0", SYSTEM) > 0


@pytest.mark.parametrize("tokens", [[4] * 60, [4] * 2_000])
def test_who_has_no_keys_goes_by_load(tokens: list[int]) -> None:
    pool = Pool(workers=3)
    sent = [pool.send(request(tokens, f"r{number}", prefix_keys=b"")) for number in range(9)]
    assert sorted(sent.count(f"w{number}") for number in range(3)) == [3, 3, 3]


def test_the_work_before_a_first_token_is_counted_until_it_comes() -> None:
    pool = Pool(workers=1)
    asked = request(SYSTEM)
    load = pool.pool.workers[pool.send(asked)].load
    assert load.prompts.tokens == 2_000
    pool.pool.placement.prefilled(asked, load, 0)
    assert (load.prompts.tokens, load.count) == (0, 1)
    pool.end(asked, "w0", 0)
    assert (load.prompts.tokens, load.count) == (0, 0)
    assert fields_of(RequestEnvelope, asked.envelope)["prefix_keys"] == asked.prefix.tobytes()


@pytest.mark.parametrize(("share", "input_tokens"), [(1.0, 1_000), (0.25, 400), (0.0, 200)])
def test_a_cached_token_counts_its_share_in_the_limit_of_input(share: float, input_tokens: int) -> None:
    event = AttemptEvent(
        request_id="r",
        attempt=1,
        tenant="t",
        key_id="k",
        model="m",
        version="v",
        endpoint="chat/completions",
        priority="interactive",
        outcome="completed",
        reporter="worker",
        prompt_tokens=1_000,
        cached_tokens=800,
        completion_tokens=7,
        spent_input_tokens=1_000,
    )
    assert outcomes.used(event, share) == Cost(input_tokens, 7)
    lost = msgspec.structs.replace(event, outcome="lost", spent_input_tokens=0)
    assert outcomes.used(lost, share) == Cost(0, 0)


def test_what_was_cached_comes_back_to_its_tenants_bucket() -> None:
    left, cached = {}, 0
    for share in (1.0, 0.5, 0.0):
        fleet = Fleet(workers=1, slots=4, kv_tokens=10_000, prefill_tps=4_000)
        tenant = TenantRecord(name="t", limits=TenantLimits(input_tpm=6_000))
        fleet.feed(events.TenantChanged("t", tenant))
        limits = PoolLimits(cached_input_share=share)
        fleet.feed(events.ModelChanged(ModelRecord(name="m", stable="v", limits=limits)))
        fleet.at(fleet.now + 1, lambda fleet=fleet: fleet.ask(SYSTEM, 5))  # type: ignore[misc]
        fleet.at(fleet.now + 3, lambda fleet=fleet: fleet.ask(SYSTEM, 5))  # type: ignore[misc]
        cached = fleet.run(2)[1].cached
        left[share] = fleet.core.admission.quotas["t"].input_bucket.level(round(fleet.now * 1000))
    assert cached > 1_900
    assert left[0.0] - left[1.0] == pytest.approx(cached, abs=1)
    assert left[0.5] - left[1.0] == pytest.approx(cached / 2, abs=1)


def test_an_end_that_is_lost_and_a_new_owner_leave_no_wrong_index() -> None:
    """A new owner begins with what WORK holds, and places as well as it knows."""
    pool = Pool(workers=1)
    asked = request(SYSTEM)
    worker = pool.send(asked)
    pool.pool.evict(pool.pool.workers[worker])
    assert not len(pool.pool.placement.index)
    heir = Pool(workers=0)
    adopted = heir.pool.expect("w0", "m", "v")
    heir.pool.assign(adopted, request(SYSTEM), 0)
    assert (adopted.load.count, adopted.load.prompts.tokens) == (1, 2_000)
    heir.beat("w0")
    heir.end(asked, "w0", 0)
    assert heir.serve(SYSTEM) == "w0" and heir.held("w0", SYSTEM) > 0


class Told:
    """The engine's events, and what the scheduler makes of what the worker tells of them."""

    def __init__(self) -> None:
        self.kept = CachedBlocks()
        self.pool = Pool(workers=1)
        self.worker = self.pool.pool.workers["w0"]
        self.number = 0

    def store(self, tokens: list[int], size: int = 16, salt: str = "t.", first: int = 0) -> list[bytes]:
        """Names of the blocks from ``first`` on; those before it are known already."""
        names = [str(tokens[: end + size]).encode() for end in range(0, len(tokens) // size * size, size)]
        parent = names[first - 1] if first else None
        self.kept.stored(names[first:], parent, tokens[first * size :], size, "" if first else salt)
        return names

    def tell(self, *, lose: bool = False, anew: bool = False) -> bool:
        anew, tellings = self.kept.take(anew=anew)
        changes = [CacheChange(worker="w0", number=0, stored=each.stored, removed=each.removed) for each in tellings]
        taken = True
        for change in [*([CacheChange(worker="w0", number=0, anew=True)] if anew else []), *changes]:
            self.number += 1
            if not lose:
                taken &= self.pool.pool.cache_changed(self.worker, msgspec.structs.replace(change, number=self.number))
        return taken

    def held(self, tokens: list[int]) -> int:
        return self.pool.held("w0", tokens)


@pytest.mark.parametrize("size", [16, 32, 64, 128])
def test_blocks_of_an_engine_become_the_keys_of_the_gateway(size: int) -> None:
    heir, long = Told(), random.Random(3).choices(range(50_000), k=12_800)
    names = heir.store(long[:6_400], size)
    heir.store(long, size, first=len(names))
    assert heir.tell() and heir.held(long) == COVERED[len(keys(long[:12_800]))]
    heir.kept.removed(names[len(names) // 2 :])
    assert heir.tell() and 3_200 - 16 * 64 <= heir.held(long) <= 3_200


def test_what_no_tenant_can_ask_for_or_whose_beginning_was_missed_is_not_told() -> None:
    heir = Told()
    heir.store(SYSTEM, salt=unshared_salt("r"))
    heir.store(SYSTEM, salt="")
    heir.store(SYSTEM, first=4)
    assert heir.tell() and not len(heir.pool.pool.placement.index)


def test_a_gap_leads_to_all_anew_and_nothing_is_believed_meanwhile() -> None:
    heir = Told()
    heir.store(SYSTEM)
    assert heir.tell() and heir.held(SYSTEM) > 1_500
    heir.store([1] * 2_000)
    heir.tell(lose=True)
    heir.store([2] * 2_000)
    assert not heir.tell() and heir.held(SYSTEM) == 0 and heir.pool.pool.cache_gaps == 1
    heir.store([3] * 2_000)
    assert not heir.tell(), "until it tells anew"
    assert heir.tell(anew=True)
    assert all(heir.held(text) > 1_500 for text in (SYSTEM, [1] * 2_000, [2] * 2_000, [3] * 2_000))


def test_a_cleared_cache_is_cleared_here_too() -> None:
    heir = Told()
    heir.store(SYSTEM)
    heir.tell()
    heir.kept.cleared()
    heir.store([1] * 2_000)
    assert heir.tell() and heir.held(SYSTEM) == 0 and heir.held([1] * 2_000) > 1_500


def test_events_of_vllm_are_read_as_it_sends_them() -> None:
    heir = Told()
    stored: dict[str, Any] = {
        "type": "BlockStored",
        "parent_block_hash": None,
        "lora_id": None,
        "medium": "GPU",
        "lora_name": None,
    }
    stored |= {"lora_name": None, "block_hashes": [b"a", b"b"], "token_ids": SYSTEM[:128], "block_size": 64}
    other = stored | {"block_hashes": [b"c", b"d"], "extra_keys": [("t.",), None], "medium": "CPU"}
    take(heir.kept, [0.0, [stored | {"extra_keys": [("t.",), None]}, other], 0])
    assert heir.tell() and heir.held(SYSTEM[:129]) == 128
    take(heir.kept, [0.0, [{"type": "BlockRemoved", "block_hashes": [b"b"], "medium": "GPU"}]])
    assert heir.tell() and heir.held(SYSTEM[:129]) == 64
    take(heir.kept, [0.0, [{"type": "AllBlocksCleared"}]])
    assert heir.tell() and heir.held(SYSTEM[:129]) == 0
