"""The fields by which OpenAI's text endpoints steer a generation alike, and vLLM's own beside them."""

from typing import Annotated

import msgspec
from msgspec import Meta

from gateway.apis.fields import Temperature, Text, TopK, TopP, check_temperature, refuse
from gateway.apis.structured_outputs import Budget, StructuredOutputs

STOPS_MAX = 4
"""Texts that end an answer, as OpenAI and vLLM have it."""
STOP_IDS_MAX = 16
BIASES_MAX = 1024

Share = Annotated[float, Meta(ge=0, le=1)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
Repetition = Annotated[float, Meta(gt=0, le=2)]
Seed = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
LogprobCount = Annotated[int, Meta(ge=0, le=20)]
Stops = Annotated[list[Text], Meta(max_length=STOPS_MAX)]
StopIds = Annotated[list[int], Meta(max_length=STOP_IDS_MAX)]
Bias = Annotated[dict[str, Annotated[float, Meta(ge=-100, le=100)]], Meta(max_length=BIASES_MAX)]


class Sampling(msgspec.Struct, kw_only=True):
    """Base of a body's struct."""

    model: str
    stream: bool | None = None
    temperature: Temperature | None = None
    top_p: TopP | None = None
    top_k: TopK | None = None
    min_p: Share | None = None
    frequency_penalty: Penalty | None = None
    presence_penalty: Penalty | None = None
    repetition_penalty: Repetition | None = None
    seed: Seed | None = None
    stop: Text | Stops | None = None
    stop_token_ids: StopIds | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    logit_bias: Bias | None = None
    structured_outputs: StructuredOutputs | None = None

    def check(self, vocabulary: int, budget: Budget) -> None:
        """What types do not express; raises HeadraceError."""
        check_temperature(self.temperature)
        for key in self.logit_bias or ():
            # isdecimal alone would let other scripts' digits through.
            if not (key.isascii() and key.isdecimal()) or int(key[:12]) >= vocabulary:
                refuse("logit_bias", f"{key[:24]!r} is not a token id below {vocabulary}.")
        check_token_ids("stop_token_ids", self.stop_token_ids, vocabulary)
        if self.structured_outputs is not None:
            self.structured_outputs.check("structured_outputs", budget)


def check_token_ids(where: str, ids: list[int] | None, vocabulary: int) -> None:
    for token in ids or ():
        if not 0 <= token < vocabulary:
            refuse(where, f"{token} is not a token id below {vocabulary}.")
