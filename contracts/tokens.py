"""What a request reserves in tokens: the one rule for admission, quotas, a worker's KV cache and the ledger."""

import msgspec


class Cost(msgspec.Struct, frozen=True, order=True):
    """Tokens that a request reserves or has used: of all its prompts, and of all its choices together."""

    input_tokens: int
    output_tokens: int

    @property
    def total(self) -> int:
        return self.input_tokens + self.output_tokens


def reserved(*, prompt_tokens: int, max_output_tokens: int, choices: int) -> Cost:
    """What a request may occupy at most.

    ``prompt_tokens``: over all prompts, each counted once, for the choices of one prompt share it.
    ``max_output_tokens``: per choice. ``choices``: prompts times ``n``.
    """
    return Cost(prompt_tokens, max_output_tokens * choices)
