"""Which worker's cache holds which blocks of prompts, as far as the owner can tell: a prediction, never more.

A worker holds what was dispatched to it, from the dispatch on, so that siblings of a burst meet; what was used least
recently goes when its KV cache is full. What an attempt's end says of its cache corrects this: where a block was
missing, what was used before it is gone, too. A worker that is lost, or whose engine starts again, holds nothing.

A wrong prediction costs time and nothing else. Keys are those of ``contracts.prefix``.
"""

from array import array
from collections import deque
from collections.abc import Iterable, Sequence

from contracts.prefix import BLOCK_TOKENS, BLOCKS

BLOCKS_MAX = 1_000_000
"""Of all workers of a model: 100 MB (measured, bench_placement)."""

TIME = 32
"""More than the most blocks that one key stands for."""

QUEUED_MORE = 1_000
"""Void keys that are kept beside as many as there are others."""

Run = tuple[int, int]
"""Workers as bits, and how many keys of a prompt they hold."""


class Cache:
    """One worker's: when each of its keys was last used, and the uses, the earliest first."""

    __slots__ = ("bit", "blocks", "blocks_max", "full_at", "keys", "queued", "uses")

    def __init__(self, bit: int) -> None:
        self.bit = bit
        self.keys: dict[int, int] = {}
        """Key -> TIME x the number of its last use + how many blocks it stands for."""
        self.uses: deque[tuple[int, array[int]]] = deque()
        """Number and keys; those that were used again since are void there."""
        self.queued = 0
        """Keys in ``uses``, void ones included."""
        self.blocks = 0
        self.blocks_max = 0
        self.full_at = 1
        """With so many blocks it counts as full: new ones drive out others, or soon will."""

    def held_of(self, keys: Sequence[int]) -> int:
        """How many of the prompt's keys it holds."""
        least, most = 0, len(keys)
        while least < most:
            middle = (least + most + 1) // 2
            if keys[middle - 1] in self.keys:
                least = middle
            else:
                most = middle - 1
        return least

    def used_at(self, key: int) -> int:
        """The time of the last use; 0 when it does not hold it."""
        return self.keys.get(key, 0) // TIME


class PrefixIndex:
    """``runs`` costs O(log keys) for each different answer, all else O(keys)."""

    def __init__(self, blocks_max: int = BLOCKS_MAX) -> None:
        self._blocks_max = blocks_max
        self._holders: dict[int, int] = {}
        """Key -> the workers that hold it, as bits."""
        self.caches: list[Cache] = []
        self._uses = 0

    def __len__(self) -> int:
        """Keys held, over all workers."""
        return sum(len(cache.keys) for cache in self.caches)

    @property
    def blocks(self) -> int:
        """Held, over all workers."""
        return sum(cache.blocks for cache in self.caches)

    def join(self) -> Cache:
        """A new worker's, empty."""
        taken = {each.bit for each in self.caches}
        cache = Cache(next(1 << n for n in range(len(taken) + 1) if 1 << n not in taken))
        self.caches.append(cache)
        return cache

    def leave(self, cache: Cache) -> None:
        """The worker is no more."""
        self.clear(cache)
        self.caches.remove(cache)

    def runs(self, keys: Sequence[int]) -> list[Run]:
        """Who holds how many of the prompt's keys, the most first; who holds none is left out."""
        holders = self._holders.get
        found: list[Run] = []
        seen, most = 0, len(keys)
        while most:
            least = 0  # Of ``least`` keys somebody new holds the last one, of more than ``most`` nobody.
            while least < most:
                middle = (least + most + 1) // 2
                if holders(keys[middle - 1], 0) & ~seen:
                    least = middle
                else:
                    most = middle - 1
            if most:
                bits = holders(keys[most - 1], 0) & ~seen
                found.append((bits, most))
                seen |= bits
                most -= 1
        return found

    def use(self, cache: Cache, keys: "array[int]", kv_tokens: int, *, first: int = 0) -> int:
        """The worker's cache, of ``kv_tokens``, holds these from now on; gives the number of this use, no other's.

        ``first``: how many keys of the prompt come before them.
        """
        weights = BLOCKS[first : first + len(keys)]
        keys = keys[: len(weights)]
        holders, bit, known = self._holders, cache.bit, cache.keys
        self._uses += 1
        value = TIME * self._uses
        numbers = keys.tolist()
        for key, blocks in zip(numbers, weights, strict=True):
            if key not in known:  # Of those after it some may be: what an engine says of its cache can have holes.
                others = holders.setdefault(key, bit)
                if others != bit:
                    holders[key] = others | bit
                cache.blocks += blocks
        known.update(zip(numbers, [value + blocks for blocks in weights], strict=True))
        cache.uses.append((self._uses, keys))
        cache.queued += len(keys)
        cache.blocks_max = min(kv_tokens // BLOCK_TOKENS, self._blocks_max // len(self.caches))
        cache.full_at = cache.blocks_max * 19 // 20
        while cache.blocks > cache.blocks_max and cache.uses:
            self._drop_earliest(cache)
        if cache.queued > 2 * len(known) + QUEUED_MORE:
            _compact(cache)
        return self._uses

    def drop(self, cache: Cache, keys: Iterable[int], used_at: int | None = None) -> None:
        """It does not hold these; with ``used_at`` those of them whose last use was then."""
        for key in keys:
            if key in cache.keys and (used_at is None or cache.used_at(key) == used_at):
                self._drop(cache, key)

    def drop_until(self, cache: Cache, used_at: int) -> None:
        """It holds nothing whose last use was no later than that."""
        while cache.uses and cache.uses[0][0] <= used_at:
            self._drop_earliest(cache)

    def clear(self, cache: Cache) -> None:
        """It holds nothing."""
        for key in list(cache.keys):
            self._drop(cache, key)
        cache.uses.clear()
        cache.queued = 0

    def _drop_earliest(self, cache: Cache) -> None:
        """What nobody used after the earliest use: ends of prompts sooner than their heads, which others share."""
        used_at, keys = cache.uses.popleft()
        cache.queued -= len(keys)
        least, known, holders, bit = TIME * used_at, cache.keys, self._holders, cache.bit
        for key in keys:
            value = known.get(key, 0)
            if value // TIME == used_at:
                del known[key]
                cache.blocks -= value - least
                if left := holders.pop(key) ^ bit:
                    holders[key] = left

    def _drop(self, cache: Cache, key: int) -> None:
        cache.blocks -= cache.keys.pop(key) % TIME
        if left := self._holders.pop(key) ^ cache.bit:
            self._holders[key] = left


def _compact(cache: Cache) -> None:
    """Without what is void."""
    live = ((used_at, [key for key in keys if cache.used_at(key) == used_at]) for used_at, keys in cache.uses)
    cache.uses = deque((used_at, array("Q", keys)) for used_at, keys in live if keys)
    cache.queued = sum(len(keys) for _, keys in cache.uses)
