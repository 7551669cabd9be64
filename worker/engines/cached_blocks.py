"""What an engine keeps of prompts, by the keys that the scheduler compares (contracts.prefix).

An engine tells of its own blocks, each by a name of its own, of whatever size, and which one came before it. Here they
become blocks of contracts.prefix; what has another salt than a tenant's is left out. One thread tells, another one
takes: all calls are safe.
"""

import threading
from collections.abc import Sequence

from contracts.messages.control import CacheRun
from contracts.prefix import BLOCK_TOKENS, NUMBERS, following, is_shared, root

KEYS_A_TELLING = 4_096
"""Of one message: 44 KB."""

Name = bytes | int
"""An engine's of a block of its own."""


class _After:
    """Where a chain of blocks stands: whole blocks of ours, the key of the last one, and what tokens came since."""

    __slots__ = ("blocks", "key", "keyed", "tokens")

    def __init__(self, blocks: int, key: bytes, tokens: list[int]) -> None:
        self.blocks, self.key, self.tokens = blocks, key, tokens
        self.keyed: list[tuple[int, bytes]] = []
        """Keys that end in this block of the engine's, each with how many come before it."""


class Telling:
    """What has changed, for one message."""

    __slots__ = ("removed", "stored")

    def __init__(self) -> None:
        self.stored: list[CacheRun] = []
        self.removed = b""


class CachedBlocks:
    """Of one engine."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._blocks: dict[Name, _After] = {}
        self._changed: dict[bytes, int] = {}
        """Key -> how many come before it, or -1 when it is gone."""
        self._anew = True

    def stored(self, names: Sequence[Name], parent: Name | None, tokens: Sequence[int], size: int, salt: str) -> None:
        """The engine keeps blocks of ``size`` tokens; of ``salt`` only the first of a prompt tells."""
        with self._lock:
            if parent is None:
                before = _After(0, root(salt), []) if is_shared(salt) else None
            else:
                before = self._blocks.get(parent)
            if before is None:
                return  # Nobody can ask for it, or its beginning was missed.
            for number, name in enumerate(names):
                before = self._add(name, before, tokens[number * size : (number + 1) * size])

    def removed(self, names: Sequence[Name]) -> None:
        """The engine keeps these no more."""
        with self._lock:
            for name in names:
                block = self._blocks.pop(name, None)
                for _, key in block.keyed if block is not None else ():
                    self._changed[key] = -1

    def cleared(self) -> None:
        """It keeps nothing."""
        with self._lock:
            self._blocks.clear()
            self._changed.clear()
            self._anew = True

    def take(self, *, anew: bool) -> tuple[bool, list[Telling]]:
        """What has changed since it was taken last, or with ``anew`` all that is kept; whether it is all."""
        with self._lock:
            changed, self._changed = self._changed, {}
            anew, self._anew = anew or self._anew, False
            if anew:
                changed = {key: number for block in self._blocks.values() for number, key in block.keyed}
        return anew, _tellings(changed)

    def _add(self, name: Name, before: _After, tokens: Sequence[int]) -> _After:
        known = self._blocks.get(name)
        if known is None:
            known = _After(before.blocks, before.key, [*before.tokens, *tokens])
            while len(known.tokens) >= BLOCK_TOKENS:
                known.key = following(known.key, known.tokens[:BLOCK_TOKENS])
                known.tokens = known.tokens[BLOCK_TOKENS:]
                known.blocks += 1
                if number := NUMBERS.get(known.blocks):
                    known.keyed.append((number - 1, known.key))
            self._blocks[name] = known
        for number, key in known.keyed:
            self._changed[key] = number
        return known


def _tellings(changed: dict[bytes, int]) -> list[Telling]:
    """By messages of a bounded size, runs of one prompt together."""
    tellings: list[Telling] = []
    items = list(changed.items())
    for start in range(0, len(items), KEYS_A_TELLING):
        telling = Telling()
        runs: list[tuple[int, bytearray]] = []
        removed = bytearray()
        for key, number in items[start : start + KEYS_A_TELLING]:
            if number < 0:
                removed += key
            elif runs and runs[-1][0] + len(runs[-1][1]) // len(key) == number:
                runs[-1][1].extend(key)
            else:
                runs.append((number, bytearray(key)))
        telling.stored = [CacheRun(first=first, keys=bytes(keys)) for first, keys in runs]
        telling.removed = bytes(removed)
        tellings.append(telling)
    return tellings
