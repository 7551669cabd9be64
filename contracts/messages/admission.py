"""Admission: what the gateway asks of a model's scheduler, and its decision."""

from contracts.messages.base import Endpoint, Epoch, Message, Priority


class AdmissionRequest(Message, frozen=True, kw_only=True):
    """Gateway -> scheduler, ``admit.v1.<model>``. Idempotent by ``request_id``."""

    request_id: str
    tenant: str
    key_id: str
    model: str
    endpoint: Endpoint
    prompt_tokens: int
    """Exact; over all prompts of the request."""
    max_output_tokens: int
    """Per choice."""
    choices: int = 1
    """Answers generated in all: prompts times ``n``."""
    stream: bool = False
    priority: Priority = "interactive"
    deadline_ms: int | None = None
    """Time to the first token that the caller accepts; without it the tenant's default holds."""
    stream_owner: str = ""
    """Name on the bus of the stream owner (gateway or client service); empty when it sends no heartbeats."""
    version: str = ""
    """Pinned version; empty for the scheduler's choice."""


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
    epoch: Epoch = Epoch()
    publish_by_ms: int = 0
    """Unix ms until which REQUESTS must have stored the request; later it is dropped as expired."""
    deadline_at_ms: int = 0
    """Unix ms until which the first token must come."""
    code: str = ""
    message: str = ""
    param: str | None = None
    retry_after_s: int | None = None
    limits: RateLimits | None = None
