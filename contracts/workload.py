"""By what latencies and tokens are told apart in metrics: a few values each, all of the operator's choosing."""

from contracts import shards
from contracts.messages.attempts import AttemptEvent
from contracts.messages.base import RequestDemand

LONG_TOKENS = 4_096
"""A prompt of so many tokens is long: above the 99th percentile of public chat traces (Azure 2023: 4,142), and some ten
times the prefill of a usual one."""
LABELS = ("model", "version", "priority", "workload")

Scope = tuple[str, str, str, str]
"""Values of LABELS."""


def scope(request: RequestDemand | AttemptEvent, version: str) -> Scope:
    """Where a request belongs that ``version`` of its model serves; empty while nobody has said which one."""
    return shards.model_of(request.model), version, request.priority, workload(request.prompt_tokens)


def workload(prompt_tokens: int) -> str:
    """The class of a request by its prompt."""
    return "long" if prompt_tokens >= LONG_TOKENS else "short"
