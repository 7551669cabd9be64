"""A request on its way: submitted by a service, stored in REQUESTS, dispatched in WORK."""

import msgspec

from contracts.messages.admission import RateLimits
from contracts.messages.base import (
    NOTHING,
    Endpoint,
    Epoch,
    Line,
    Message,
    Name,
    PrefixKeys,
    RequestDemand,
    RequestId,
    Subject,
    Whole,
)
from contracts.messages.frames import ErrorData
from contracts.messages.records import PriceTier
from contracts.messages.rollouts import Arm


class Reply(Message, frozen=True, kw_only=True):
    """Where frames go: a subject under ``reply.v1.`` and the caller's own name for the stream."""

    subject: Subject
    stream: Name


class RequestEnvelope(RequestDemand, frozen=True, kw_only=True):
    """Gateway -> REQUESTS: an admitted request. ``body`` or, when BODIES has it, ``body_bytes`` and ``body_digest``."""

    stream: bool
    choices: int
    admitted_at_ms: int
    """As the admission's answer says; only owners compare it, for their clocks all start from the bus's."""
    publish_within_ms: int
    """From admission until REQUESTS must have stored it."""
    deadline_ms: int
    """From admission until its first token must come."""
    reply: Reply
    pinned: bool = False
    """Whether the caller asked for its version; else the scheduler chose it."""
    arm: Arm = ""
    """Which version a roll-out gave it, and how that is counted."""
    tokenizer_fingerprint: Line = ""
    """Of what counted its prompts (contracts.fingerprint); empty where there are no files to count by."""
    prompt_digest: Line = ""
    """Of their token ids: the engine must make the same. Empty: the number of tokens alone is compared."""
    client_request_id: Line = ""
    traceparent: Line = ""
    """The caller's, as W3C has it; empty when it gave none."""
    body: msgspec.Raw = NOTHING
    body_digest: Line = ""
    """SHA-256 (hex) of the body in BODIES."""
    prefix_caching: bool = True
    """Whether the engine may reuse this tenant's earlier prompts; never another tenant's."""
    cache_salt: Name = ""
    """Digest of what the caller named beside its tenant: only prompts under the same are reused."""
    prefix_keys: PrefixKeys = b""
    """Of the prompt's blocks (contracts.prefix), by which a worker is found that knows them; empty: none is looked
    for."""

    @property
    def publish_by_ms(self) -> int:
        """Until when REQUESTS must have stored it, by the owner's clock."""
        return self.admitted_at_ms + self.publish_within_ms

    @property
    def deadline_at_ms(self) -> int:
        """Until when its first token must come, by the owner's clock."""
        return self.admitted_at_ms + self.deadline_ms


class WorkItem(Message, frozen=True, kw_only=True):
    """Scheduler -> WORK: one attempt for one worker incarnation."""

    epoch: Epoch
    attempt: int
    version: Name
    worker: Name
    dispatched_at_ms: int
    """By the owner's clock; the worker's event counts on from here."""
    suspect_tokens: Whole = 0
    """Its body died with an engine or worker before: until it has given so many tokens the next death here is put down
    to it. 0: it is no suspect."""
    request: RequestEnvelope


class SubmitRequest(Message, frozen=True, kw_only=True):
    """Service -> any gateway, ``submit.v1.<tenant>.<model>``; the tenant is the subject's, never the body's."""

    endpoint: Endpoint
    reply: Reply
    body: msgspec.Raw = NOTHING
    """OpenAI body; its ``model`` may be left out."""
    deadline_ms: int | None = None
    price_ceiling: PriceTier | None = None
    """Nothing dearer answers; the tenant's own ceiling holds all the same."""
    prefix_caching: bool = True
    """Whether the engine may reuse the tenant's earlier prompts, and keep this one."""
    stream_owner: Subject = ""
    """Incarnation under which the service sends heartbeats, if it does."""
    idempotency_key: Line = ""
    """The sender's own name for the request: sent again under it, the request is joined and not run twice. Kept for ten
    minutes after the end; 1 to 255 printable ASCII characters."""


class SubmitAnswer(Message, frozen=True, kw_only=True):
    """Admitted, with the request's id, or refused with an error of errors.TABLE."""

    admitted: bool
    request_id: RequestId
    joined: bool = False
    """``request_id`` runs or ran already, under the same key. Its frames go to who submitted it first: ask its worker
    (StatusAnswer.worker) for them."""
    model: Name = ""
    """Whose scheduler owns the request, for cancel and status: a model, or one of its shards (contracts.shards); empty
    when it is the model asked for."""
    choice_reason: Line = ""
    """Why that one answers, where the model asked for is an alias, or a fallback answers."""
    status: int = 200
    error: ErrorData | None = None
    limits: RateLimits | None = None
