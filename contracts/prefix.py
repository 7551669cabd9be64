"""What two prompts begin with in common: keys of their blocks, by which a request finds the worker that knows it.

Each key stands for a block of BLOCK_TOKENS tokens and all before it: a chain of hashes that begins with the salt, so
that equal text of two tenants has nothing in common. Gateways make them, workers that follow their engine's cache make
the same ones, and schedulers only compare them. Few travel: each of the first 16 blocks, each fourth up to 128, and
then each 16th, KEYS_MAX at most (225,280 tokens). Who holds a block holds those before it, so that tells enough.

Pure.
"""

from array import array
from collections.abc import Sequence
from hashlib import blake2b
from itertools import count, islice, pairwise

from contracts import subjects

BLOCK_TOKENS = 64
KEY_BYTES = 8
KEYS_MAX = 256


def is_keyed(blocks: int) -> bool:
    """Whether the key of the last of so many blocks travels."""
    return blocks <= 16 or (blocks % 4 == 0 and blocks <= 128) or blocks % 16 == 0


COVERED = (0, *(BLOCK_TOKENS * blocks for blocks in islice(filter(is_keyed, count(1)), KEYS_MAX)))
"""Tokens of a prompt that its first n keys stand for."""
BLOCKS = tuple((after - before) // BLOCK_TOKENS for before, after in pairwise(COVERED))
"""How many blocks each of the keys adds."""
NUMBERS = {tokens // BLOCK_TOKENS: number for number, tokens in enumerate(COVERED) if number}
"""Whole blocks of a prompt -> how many keys they have, where the last one has one."""
_BLOCKS_MAX = COVERED[-1] // BLOCK_TOKENS
TOKENS_KEYED = COVERED[-1] + 1
"""What comes after these of a prompt changes no key."""


def cache_salt(tenant: str, own: str = "") -> str:
    """What prompts must share to share a cache: their tenant, and what the caller has named beside it (its digest)."""
    return f"{subjects.encode(tenant)}.{own}"


def unshared_salt(request_id: str) -> str:
    """Of a request that shares with nobody; no tenant's begins so."""
    return f".{request_id}"


def is_shared(salt: str) -> bool:
    """Whether another request can have the salt."""
    return bool(salt) and not salt.startswith(".")


def root(salt: str) -> bytes:
    """Where the chain of a salt begins."""
    return blake2b(salt.encode(), digest_size=KEY_BYTES).digest()


def following(key: bytes, block: Sequence[int]) -> bytes:
    """The key of the block of token ids after that of ``key``."""
    return blake2b(key + array("I", block).tobytes(), digest_size=KEY_BYTES).digest()


def keys_of(salt: str, tokens: Sequence[int]) -> bytes:
    """Keys of a prompt, one after the other. Its last token is computed whatever is known, so it is in no block."""
    key, keys = root(salt), bytearray()
    for number in range(1, min((len(tokens) - 1) // BLOCK_TOKENS, _BLOCKS_MAX) + 1):
        key = following(key, tokens[(number - 1) * BLOCK_TOKENS : number * BLOCK_TOKENS])
        if is_keyed(number):
            keys += key
    return bytes(keys)
