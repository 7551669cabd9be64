"""What a request reserves in tokens: the one rule for admission, quotas, a worker's KV cache and the ledger."""

import msgspec

from contracts.messages.base import RequestDemand


class Cost(msgspec.Struct, frozen=True, order=True):
    """Tokens that a request reserves or has used: of all its prompts, and of all its choices together."""

    input_tokens: int
    output_tokens: int

    @property
    def total(self) -> int:
        """Input and output together."""
        return self.input_tokens + self.output_tokens


def reserved(demand: RequestDemand) -> Cost:
    """What a request may occupy at most. Each prompt counts once, for its choices share it."""
    return Cost(demand.prompt_tokens, demand.max_output_tokens * demand.choices)
