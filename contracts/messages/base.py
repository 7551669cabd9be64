"""What messages share: their base, fields that several of them have, the words of the protocol, and the codec."""

from collections.abc import Callable
from functools import cache
from operator import attrgetter
from typing import Any, Generic, Literal, TypeVar

import msgspec

M = TypeVar("M")

NOTHING = msgspec.Raw()
"""The absent raw field. Only this object is left out of the JSON; another empty Raw would make it invalid."""

Endpoint = Literal["chat/completions", "completions", "responses", "messages", "embeddings"]

Priority = Literal["interactive", "batch"]

Outcome = Literal["completed", "cancelled", "failed", "lost", "expired"]


class Message(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Base of all messages."""


IDEMPOTENCY_KEY_MAX = 255
"""Longest idempotency key, in printable ASCII characters; the usual bound."""


class IdempotencyKey(Message, frozen=True, kw_only=True):
    """A caller's own name for a request: asked for again under it, the request is joined and not run twice."""

    key: str
    digest: str
    """Of what was asked for, to tell it from something else under the same key."""


class RequestFacts(Message, frozen=True, kw_only=True):
    """What never changes of a request, from admission to the ledger."""

    request_id: str
    tenant: str
    key_id: str
    model: str
    endpoint: Endpoint
    priority: Priority
    stream: bool = False
    choices: int = 1
    """Answers generated in all: prompts times ``n``."""
    idempotency: IdempotencyKey | None = None


class RequestDemand(RequestFacts, frozen=True, kw_only=True):
    """What a request asks for: admission decides on it, and nothing later widens it."""

    prompt_tokens: int
    """Exact; over all prompts of the request."""
    max_output_tokens: int
    """Per choice."""
    stream_owner: str = ""
    """Name on the bus of the stream owner (gateway or client service); empty when it sends no heartbeats."""
    version: str = ""
    """Pinned version; empty for the scheduler's choice."""
    body_bytes: int = 0
    """Of a body too large for a message, which lies in BODIES; 0: it is in the message."""


class TokenCounts(Message, frozen=True, kw_only=True):
    """Tokens that an attempt has used, over all choices."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    """Those of the prompt that the prefix cache had."""
    completion_tokens: int = 0
    """Above 0 once the first token exists."""


def fields_of(kind: type[msgspec.Struct], source: object) -> dict[str, Any]:
    """The fields of ``kind`` by name, as ``source`` has them: for a message that repeats them."""
    return dict(zip(kind.__struct_fields__, _values_of(kind)(source), strict=True))


@cache
def _values_of(kind: type[msgspec.Struct]) -> Callable[[object], tuple[Any, ...]]:
    return attrgetter(*kind.__struct_fields__)


class Epoch(msgspec.Struct, frozen=True, array_like=True, order=True):
    """Term of a model's owner: (era, revision of the acquiring write).

    Constant for a term and greater for every later one; receivers refuse lower epochs. The era is the creation of the
    lease bucket in ns, or one more than an era that an owner met above its own, after a restore of the bus.
    """

    era: int = 0
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
