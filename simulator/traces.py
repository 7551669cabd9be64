"""Lengths of public traces, and draws that a name decides: for the simulator and for ``headrace bench``."""

import math
import random
from typing import NamedTuple

BLOCK_TOKENS = 512
"""Tokens that one hash of a Mooncake trace stands for."""
LENGTH_MAX = 1_000_000


class Lognormal(NamedTuple):
    """A length in tokens: e to the power of a normal variable."""

    mu: float
    sigma: float

    def draw(self, source: random.Random) -> int:
        return min(LENGTH_MAX, max(1, round(source.lognormvariate(self.mu, self.sigma))))


class Lengths(NamedTuple):
    """Of prompt and output."""

    prompt: Lognormal
    output: Lognormal


def fixed(prompt: int, output: int) -> Lengths:
    """Always the same."""
    return Lengths(Lognormal(math.log(prompt), 0), Lognormal(math.log(output), 0))


TRACES = {
    "azure-conversation": Lengths(Lognormal(6.63, 0.99), Lognormal(5.02, 0.86)),
    "azure-code": Lengths(Lognormal(7.29, 0.70), Lognormal(2.57, 1.27)),
    "mooncake-conversation": Lengths(Lognormal(8.84, 1.08), Lognormal(5.84, 0)),
}
"""Lognormal fits to public traces: Azure's of 2023 (Azure/AzurePublicDataset), Mooncake's (kvcache-ai/Mooncake), of
whose outputs only the mean is used. Means are within 10 % of theirs, medians lower."""


def seeded(name: str) -> random.Random:
    """The same draws for the same name."""
    return random.Random(name)  # noqa: S311
