"""What messages share: their base, fields that several of them have, the words of the protocol, and the codec."""

from collections.abc import Callable
from functools import cache
from operator import attrgetter
from typing import Annotated, Any, ClassVar, Generic, Literal, TypeVar

import msgspec

M = TypeVar("M")

NOTHING = msgspec.Raw()
"""The absent raw field. Only this object is left out of the JSON; another empty Raw would make it invalid."""

# Bounds. Every field of every message has one by its type, so that nothing that a sender makes grow is kept or passed
# on (tests/unit/test_messages.py). Lengths are characters.

RequestId = Annotated[str, msgspec.Meta(max_length=36)]
"""A UUIDv7 in its usual form; empty where there is none."""
Name = Annotated[str, msgspec.Meta(max_length=64)]
"""Of a tenant, a model, a process, a stream; a code, a day, an exact number."""
Line = Annotated[str, msgspec.Meta(max_length=512)]
"""What a person or another system wrote in one line: a key, a digest, a path, an address."""
Subject = Annotated[str, msgspec.Meta(max_length=1024)]
"""A subject of the bus, or part of one; two encoded names and more."""
Text = Annotated[str, msgspec.Meta(max_length=4096)]
"""An error for a person."""
Body = Annotated[str, msgspec.Meta(max_length=12 * 2**20)]
"""A whole message of the bus, in base64 too."""
Sealed = Annotated[bytes, msgspec.Meta(max_length=12 * 2**20)]
PrefixKeys = Annotated[bytes, msgspec.Meta(max_length=2048)]
"""KEYS_MAX keys of KEY_BYTES bytes each (contracts.prefix)."""
FEW = msgspec.Meta(max_length=64)
"""What people list: scopes, addresses, dimensions."""
MANY = msgspec.Meta(max_length=100_000)
"""What programs list, in answers and heartbeats; a message has at most some MiB anyway."""
Whole = Annotated[int, msgspec.Meta(ge=0, le=2**53 - 1)]
"""A count or a number in a sequence, exact in every language's JSON."""

Endpoint = Literal["chat/completions", "completions", "responses", "messages", "embeddings"]

Priority = Literal["interactive", "batch"]

Outcome = Literal["completed", "cancelled", "failed", "lost", "expired"]


class Message(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Base of all messages."""

    BYTES_MAX: ClassVar[int | None] = None
    """Longest encoded form that is read; None: whatever the bus carries, for what has bodies or frames."""


SMALL = 4096
"""``BYTES_MAX`` of what tenants' services send beside their bodies: ids and names."""


IDEMPOTENCY_KEY_MAX = 255
"""Longest idempotency key, in printable ASCII characters; the usual bound."""


class IdempotencyKey(Message, frozen=True, kw_only=True):
    """A caller's own name for a request: asked for again under it, the request is joined and not run twice."""

    key: Line
    digest: Line
    """Of what was asked for, to tell it from something else under the same key."""


class RequestFacts(Message, frozen=True, kw_only=True):
    """What never changes of a request, from admission to the ledger."""

    request_id: RequestId
    tenant: Name
    key_id: Name
    model: Name
    """Whose owner decides: a model, or one of its shards (contracts.shards)."""
    endpoint: Endpoint
    priority: Priority
    stream: bool = False
    choices: int = 1
    """Answers generated in all: prompts times ``n``."""
    idempotency: IdempotencyKey | None = None
    requested_model: Name = ""
    """The model or alias that the caller named, where another model answers; else empty."""
    choice_reason: Line = ""
    """Why that one answers."""


class RequestDemand(RequestFacts, frozen=True, kw_only=True):
    """What a request asks for: admission decides on it, and nothing later widens it."""

    prompt_tokens: int
    """Exact; over all prompts of the request."""
    max_output_tokens: int
    """Per choice."""
    stream_owner: Subject = ""
    """Name on the bus of the stream owner (gateway or client service); empty when it sends no heartbeats."""
    version: Name = ""
    """Asked for: the pinned one, or empty. Once admitted: the one that the request has for its life."""
    conversation: Name = ""
    """What the requests of one conversation have in common, made by the gateway; empty where that is unknown."""
    body_bytes: int = 0
    """Of a body too large for a message, which lies in BODIES; 0: it is in the message."""
    body_hash: Line = ""
    """Equal for equal bodies: what ended engines is known again when its caller repeats it under another id."""


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
        self._bytes_max: int | None = getattr(kind, "BYTES_MAX", None)
        self._encoder = msgspec.json.Encoder()
        self._decoder = msgspec.json.Decoder(kind)
        self.encode = self._encoder.encode

    def decode(self, data: bytes | memoryview | msgspec.Raw) -> M:
        """Raises msgspec.MsgspecError when ``data`` is not such a message, whatever else it is."""
        if self._bytes_max is not None and memoryview(data).nbytes > self._bytes_max:
            raise msgspec.ValidationError(f"a message of this kind has at most {self._bytes_max} bytes")
        try:
            return self._decoder.decode(data)
        except (RecursionError, UnicodeDecodeError) as error:
            raise msgspec.DecodeError("nested too deeply, or no UTF-8") from error
