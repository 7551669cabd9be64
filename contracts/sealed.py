"""What only an operator can read: sealed boxes, libsodium's X25519 with XSalsa20-Poly1305. Keys are text in base64.

Whoever holds the public key can seal and not open.
"""

import binascii
from typing import TypeVar

from nacl.encoding import Base64Encoder
from nacl.exceptions import CryptoError
from nacl.public import PrivateKey, PublicKey, SealedBox

K = TypeVar("K", PublicKey, PrivateKey)


class BadKey(ValueError):
    """Text that is no key, or a key that does not open this."""


def new_keys() -> tuple[str, str]:
    """Private and public key."""
    private = PrivateKey.generate()
    return private.encode(Base64Encoder).decode(), private.public_key.encode(Base64Encoder).decode()


def seal(data: bytes, public: str) -> bytes:
    """48 bytes longer than ``data``; raises BadKey."""
    return SealedBox(_key(PublicKey, public)).encrypt(data)


def unseal(data: bytes, private: str) -> bytes:
    """Raises BadKey, also when ``data`` was changed."""
    try:
        return SealedBox(_key(PrivateKey, private)).decrypt(data)
    except CryptoError as error:
        raise BadKey("this key does not open it") from error


def _key(kind: type[K], text: str) -> K:
    try:
        return kind(text.encode(), Base64Encoder)
    except (binascii.Error, ValueError, CryptoError, TypeError) as error:
        raise BadKey("not a key: 32 bytes in base64") from error
