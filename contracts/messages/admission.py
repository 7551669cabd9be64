"""Admission: what the gateway asks of a model's scheduler, and its decision."""

from contracts.messages.base import Epoch, Line, Message, Name, Priority, RequestDemand, RequestId, Subject, Text
from contracts.messages.rollouts import Arm

DEADLINE_MS_MAX = 3_600_000
"""Longest time to the first token that a caller or a tenant may ask for: an hour."""


class AdmissionRequest(RequestDemand, frozen=True, kw_only=True):
    """Gateway -> scheduler, ``admit.v1.<model>``. Idempotent by ``request_id``."""

    priority: Priority = "interactive"
    deadline_ms: int | None = None
    """Time to the first token that the caller accepts; without it the tenant's default is taken."""
    reader: Subject = ""
    """Name of the stream by which the asker will read the answer (``Reply.stream``)."""
    join_only: bool = False
    """Only join what runs or ran under the idempotency key here; nothing new is admitted (``not_found``)."""


class RateLimits(Message, frozen=True, kw_only=True):
    """State of the tenant's buckets after a decision, for OpenAI's ``x-ratelimit-*`` headers. None: no limit."""

    limit_requests: int | None = None
    remaining_requests: int | None = None
    reset_requests_ms: int = 0
    limit_tokens: int | None = None
    remaining_tokens: int | None = None
    reset_tokens_ms: int = 0


class AdmissionAnswer(Message, frozen=True, kw_only=True):
    """Scheduler -> gateway. Refused: ``code`` (of errors.TABLE) and ``message`` say why; nothing was charged."""

    admitted: bool
    joined: RequestId = ""
    """Id of the request that runs or ran under the same idempotency key: the asker reads that one, and stores none."""
    epoch: Epoch = Epoch()
    admitted_at_ms: int = 0
    """When, by the owner's clock: for the record. Whoever waits counts the spans from when it asked."""
    publish_within_ms: int = 0
    """From admission until REQUESTS must have stored the request; later it is dropped as expired."""
    deadline_ms: int = 0
    """From admission until the first token must come."""
    version: Name = ""
    """The one that serves the request, for its life."""
    arm: Arm = ""
    """Whether a roll-out chose it."""
    code: Name = ""
    message: Text = ""
    param: Line | None = None
    retry_after_s: int | None = None
    limits: RateLimits | None = None
