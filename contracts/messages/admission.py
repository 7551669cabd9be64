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


class RateLimit(Message, frozen=True, kw_only=True):
    """One of the tenant's token buckets: what a minute gives, what is left, and after how long it is full again."""

    limit: int
    remaining: int
    reset_ms: int


class RateLimits(Message, frozen=True, kw_only=True):
    """The tenant's buckets after a decision, for the headers of the answer. None: no limit."""

    requests: RateLimit | None = None
    input_tokens: RateLimit | None = None
    output_tokens: RateLimit | None = None

    @property
    def tokens(self) -> RateLimit | None:
        """Of both token buckets the one with less left."""
        both = [limit for limit in (self.input_tokens, self.output_tokens) if limit is not None]
        return min(both, key=lambda bucket: bucket.remaining / bucket.limit if bucket.limit else 0.0, default=None)


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
