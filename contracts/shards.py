"""Shards: a model too hot for one owner has several, each with a name, queue and workers of its own.

A shard is on the bus what a model is: its name stands in subjects, in leases and in messages about its requests. The
first one has the model's own name, so that a model of one shard is a model; the others are ``model#1``, ``model#2``.
What is of the model itself (its record and versions, limits, prices, the ledger's rows) goes by ``model_of``.
"""

import hashlib
import re

SHARDS_MAX = 16
"""Above 50,000 requests a second of one model, by what one owner was measured to do: beyond that there are cells."""
_SHARD = re.compile(r"(.+)#([1-9][0-9]?)\Z", re.DOTALL)


def names(model: str, shards: int) -> list[str]:
    """Of all its shards."""
    return [model, *(f"{model}#{number}" for number in range(1, shards))]


def model_of(name: str) -> str:
    """The model of a shard's name."""
    found = _SHARD.match(name) if "#" in name else None
    return found[1] if found else name


def number_of(name: str) -> int:
    """Which of its model's shards has that name."""
    found = _SHARD.match(name) if "#" in name else None
    return int(found[2]) if found else 0


def choose(model: str, shards: int, key: str) -> str:
    """The shard for ``key``: always the same while there are so many; of one more each gives it its part alone."""
    return model if shards == 1 else names(model, shards)[_jump(key, shards)]


def others(model: str, shards: int, key: str) -> list[str]:
    """The shards that ``key`` does not have, in the order in which it turns to them; each key of one has its own."""
    left = names(model, shards)
    left.remove(choose(model, shards, key))
    return [left.pop(_jump(f"{key} {turn}", len(left))) for turn in range(len(left))]


def _jump(key: str, buckets: int) -> int:
    """Jump consistent hash (Lamping and Veach, 2014)."""
    state = int.from_bytes(hashlib.blake2b(key.encode("utf-8", "surrogatepass"), digest_size=8).digest(), "big")
    found, following = 0, 0
    while following < buckets:
        found = following
        state = (state * 2862933555777941757 + 1) % 2**64
        following = int((found + 1) * (2**31 / ((state >> 33) + 1)))
    return found
