"""What a gateway saw of the requests that came to it: the part of their time that no attempt knows."""

from typing import Annotated

import msgspec

from contracts.messages.base import Line, Message, Name, RequestId

SUBMITTED = "submitted"
"""Outcome of a request that the bus took: its frames go past the gateway."""
DELIVERIES_MAX = 500
"""Of one message: some 300 KB."""


class Delivery(Message, frozen=True, kw_only=True):
    """One request of a known caller: a finished one over HTTP, an admitted or refused one of the bus.

    Lost with its gateway. Spans are milliseconds, 0 when there was none. All are of the gateway's monotonic clock, from
    the request's first byte where nothing else is said.
    """

    request_id: RequestId
    tenant: Name
    key_id: Name = ""
    model: Name = ""
    version: Name = ""
    endpoint: Name = ""
    outcome: Name
    """completed, cancelled, failed or refused; of the bus SUBMITTED or refused."""
    code: Name = ""
    status: int = 0
    """Of HTTP, and 0 where the bus took it; 499: the caller left before the answer began."""
    stream: bool = False
    attempt: int = 0
    """The one that answered."""
    prompt_tokens: int = 0
    upload_ms: float = 0.0
    """The body was waited for."""
    edge_ms: float = 0.0
    """Until the scheduler was asked, without ``upload_ms``: checking and counting."""
    admission_ms: float = 0.0
    """From the question to the scheduler's leave."""
    first_chunk_ms: float = 0.0
    ended_ms: float = 0.0
    """Until the end had come from the worker."""
    blocked_ms: float = 0.0
    """Writing waited for the caller, all in all."""
    total_ms: float = 0.0
    """Until the last byte was written; of the bus until it was answered."""
    client_request_id: Line = ""
    traceparent: Line = ""
    """The caller's, as W3C has it."""

    @property
    def saw_the_end(self) -> bool:
        """Whether ``outcome`` is how it ended. Of what the bus took that is its last attempt's to say."""
        return self.outcome != SUBMITTED


class Deliveries(Message, frozen=True, kw_only=True):
    """Gateway -> ledger, about once a second."""

    deliveries: Annotated[list[Delivery], msgspec.Meta(max_length=DELIVERIES_MAX)]
