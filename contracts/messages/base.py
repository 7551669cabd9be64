"""What all messages share: their base, the words of the protocol, and the codec."""

from typing import Generic, Literal, TypeVar

import msgspec

M = TypeVar("M")

NOTHING = msgspec.Raw()
"""The absent raw field. Only this object is left out of the JSON; another empty Raw would make it invalid."""

Endpoint = Literal["chat/completions", "completions", "responses", "messages", "embeddings"]

Priority = Literal["interactive", "batch"]

Outcome = Literal["completed", "cancelled", "failed", "lost", "expired"]


class Message(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Base of all messages."""


class Epoch(msgspec.Struct, frozen=True, array_like=True, order=True):
    """Term of a model's owner: (creation of the lease bucket in ns, revision of the acquiring write).

    Constant for a term and greater for every later one; receivers refuse lower epochs (DESIGN.md section 6).
    """

    bucket_created_ns: int = 0
    revision: int = 0


class Codec(Generic[M]):
    """Encoder and decoder of one message type, built once."""

    def __init__(self, kind: type[M]) -> None:
        self._encoder = msgspec.json.Encoder()
        self._decoder = msgspec.json.Decoder(kind)
        self.encode = self._encoder.encode

    def decode(self, data: bytes | memoryview | msgspec.Raw) -> M:
        """Raises msgspec.MsgspecError when ``data`` is not such a message."""
        return self._decoder.decode(data)
