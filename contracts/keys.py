"""API keys: how a secret is kept, and what its holder may do. Pure.

A secret is shown once; what is stored is its HMAC under a pepper, which lies in a file and never on the bus: who reads
the bucket of keys can try none of them.
"""

import hashlib
import hmac
import ipaddress
from collections.abc import Sequence
from functools import lru_cache
from typing import get_args

import msgspec

from contracts.messages.administration import LoginFailure
from contracts.messages.records import KeyRecord, Scope, TenantRecord

PEPPER_CHARS_MIN = 32
"""128 bits as hexadecimal digits; ``openssl rand -hex 32`` gives 64."""


SCOPES: tuple[Scope, ...] = get_args(Scope)
ADMIN_SCOPES: tuple[Scope, ...] = tuple(scope for scope in SCOPES if scope.startswith("admin:"))
ADDRESSES_MAX = 64
"""Networks of a key: each is looked at on every request."""


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

    def name(self) -> str:
        """What the current one is called in records: tells nothing of it."""
        return hmac.digest(self.current, b"name of this pepper", hashlib.sha256).hex()[:8]


def failure_of(
    records: Sequence[KeyRecord], tenant: TenantRecord | None, address: str, now_ms: int
) -> LoginFailure | None:
    """Why a secret with these records, of a tenant with this one, lets nobody in; None when it does.

    There are two records while a key moves to a new pepper: what one of them forbids is forbidden.
    """
    if not records:
        return "unknown"
    if any(record.revoked_at_ms for record in records):
        return "revoked"
    if any(0 < record.expires_at_ms <= now_ms for record in records):
        return "expired"
    if tenant is None or tenant.disabled:
        return "tenant"
    if not all(comes_from(address, record.addresses) for record in records):
        return "address"
    return None


def comes_from(address: str, networks: tuple[str, ...]) -> bool:
    """Whether an IP address is in one of the networks; in no network is everybody. What is no address is in none."""
    if not networks:
        return True
    try:
        given = plain_address(address)
    except ValueError:
        return False
    return any(given in network for network in _networks(networks))


def plain_address(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    """Without a zone, and IPv4 as such where a socket for both shows it within IPv6. Raises ValueError."""
    address = ipaddress.ip_address(text.partition("%")[0])
    return getattr(address, "ipv4_mapped", None) or address


@lru_cache(maxsize=4096)
def _networks(texts: tuple[str, ...]) -> list[ipaddress.IPv4Network | ipaddress.IPv6Network]:
    return [ipaddress.ip_network(text) for text in texts]


def problem_of(scopes: Sequence[Scope], addresses: Sequence[str], note: str) -> tuple[str, str] | None:
    """The field of a key that cannot be, and why."""
    if not scopes:
        return "scopes", "scopes must name at least one"
    if "inference" in scopes and set(scopes) & set(ADMIN_SCOPES):
        return "scopes", "an admin key does no inference: make two keys"
    if len(addresses) > ADDRESSES_MAX:
        return "addresses", f"addresses must be at most {ADDRESSES_MAX} networks"
    for text in addresses:
        try:
            ipaddress.ip_network(text)
        except ValueError as error:
            return "addresses", f"addresses: {error}"
    if len(note) > 128 or not note.isprintable():
        return "note", "note must be at most 128 printable characters"
    return None
