"""API keys: how a secret is kept, and what its holder may do. Pure.

A secret is shown once; what is stored is its HMAC under a pepper, which lies in a file and never on the bus: who reads
the bucket of keys can try none of them.
"""

import hashlib
import hmac

import msgspec

PEPPER_CHARS_MIN = 32
"""128 bits as hexadecimal digits; ``openssl rand -hex 32`` gives 64."""


class Peppers(msgspec.Struct, frozen=True):
    """What keys the HMACs: the current one, and the one before it while keys are still kept under that."""

    current: bytes
    previous: bytes | None = None

    @classmethod
    def parse(cls, text: str) -> "Peppers":
        """From a file's text: the current pepper, and on a second line the one before. Raises ValueError."""
        lines = [line.strip() for line in text.splitlines() if line.strip()]
        if not lines:
            raise ValueError("the key pepper is empty; make one with: openssl rand -hex 32")
        if len(lines) > 2:
            raise ValueError(f"there are {len(lines)} key peppers; the current one and the one before it are taken")
        for line in lines:
            if len(line) < PEPPER_CHARS_MIN:
                raise ValueError(
                    f"a key pepper has {len(line)} characters, and must have at least {PEPPER_CHARS_MIN}; "
                    "make one with: openssl rand -hex 32"
                )
        return cls(*(line.encode() for line in lines))

    def hashes(self, secret: bytes) -> list[str]:
        """Where a key may be kept, the current place first: hexadecimal HMAC-SHA256."""
        peppers = [self.current] if self.previous is None else [self.current, self.previous]
        return [hmac.digest(pepper, secret, hashlib.sha256).hex() for pepper in peppers]
