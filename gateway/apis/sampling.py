"""The fields by which OpenAI's text APIs steer a generation alike, and vLLM's own beside them."""

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from contracts.messages.records import Manifest
from contracts.simulated import simulate_field
from gateway.apis.api import ValidBody
from gateway.apis.fields import (
    INT_MAX,
    Positive,
    Temperature,
    Text,
    TopK,
    TopP,
    check_token_ids,
    make_greedy,
    refuse,
    refuse_fields,
    travelling,
)
from gateway.apis.structured_outputs import ComplexityLimit, ResponseFormatParam, StructuredOutputs

CHOICES_MAX = 128
"""Answers that one request may ask for: prompts times ``n``."""
BAD_WORDS_MAX = 128
ALLOWED_MAX = 1024

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
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
Bias = Annotated[dict[str, Annotated[float, Meta(ge=-100, le=100)]], Meta(max_length=BIASES_MAX)]


class Sampling(msgspec.Struct, kw_only=True):
    """What chat, completions and responses share."""

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

    def check(self, vocabulary: int, complexity: ComplexityLimit) -> None:
        """What types do not express; raises HeadraceError."""
        make_greedy(self)
        for key in self.logit_bias or ():
            # isdecimal alone would let other scripts' digits through.
            if not (key.isascii() and key.isdecimal()) or int(key[:12]) >= vocabulary:
                refuse("logit_bias", f"{key[:24]!r} is not a token id below {vocabulary}.")
        check_token_ids("stop_token_ids", self.stop_token_ids, vocabulary)
        if self.structured_outputs is not None:
            self.structured_outputs.check("structured_outputs", complexity)


class StreamOptions(msgspec.Struct):
    """What a stream tells beside the answer."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    """vLLM's: usage so far in every chunk, and at the end."""


class TextBody(Sampling, kw_only=True):
    """Base of the bodies of chat and completions."""

    stream_options: StreamOptions | None = None
    n: Annotated[int, Meta(ge=1, le=CHOICES_MAX)] | None = None
    max_tokens: Positive | None = None
    min_tokens: Annotated[int, Meta(ge=0, le=INT_MAX)] | None = None
    bad_words: Annotated[list[Text], Meta(max_length=BAD_WORDS_MAX)] | None = None
    allowed_token_ids: Annotated[list[int], Meta(min_length=1, max_length=ALLOWED_MAX)] | None = None
    prompt_logprobs: LogprobCount | None = None
    spaces_between_special_tokens: bool | None = None
    response_format: ResponseFormatParam | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    simulate: dict[str, Any] | None = None

    def check_all(self, manifest: Manifest, vocabulary: int, complexity: ComplexityLimit) -> None:
        """What types do not express; raises HeadraceError."""
        self.check(vocabulary, complexity)
        check_token_ids("allowed_token_ids", self.allowed_token_ids, vocabulary)
        if not all(map(str.strip, self.bad_words or ())):
            refuse("bad_words", "A word is more than white space.")
        if self.prompt_logprobs is not None and self.stream:
            refuse("prompt_logprobs", "These are not to be had with 'stream': true.")
        if manifest.engine == "vllm" and self.temperature == 0 and (self.n or 1) > 1:
            refuse("n", "With a temperature of 0 all answers are the same: ask for one.")
        if self.response_format is not None:
            self.response_format.check("response_format", complexity)
            if self.structured_outputs is not None and self.response_format.type != "text":
                refuse("structured_outputs", "Give 'response_format' or 'structured_outputs', not both.")

    @property
    def logprobs_per_prompt_token(self) -> int:
        """See ValidBody."""
        return 0 if self.prompt_logprobs is None else 1 + self.prompt_logprobs

    def valid(self, fields: dict[str, Any], *, prompts: int, limit: int | None) -> ValidBody:
        """The checked body; ``limit`` is what the caller stated per choice. Raises HeadraceError.

        Output limits do not travel, nor does what is an option of something that is absent.
        """
        n, least = self.n or 1, self.min_tokens or 0
        if prompts * n > CHOICES_MAX:
            refuse("n", f"{prompts} prompts times n = {n} is more than {CHOICES_MAX} answers.")
        if limit is not None and least > limit:
            refuse("min_tokens", f"This is more than the {limit} tokens that the answer may have.")
        left_out = {"max_tokens", "max_completion_tokens", "best_of"}
        if self.stream_options is not None and self.stream_options.continuous_usage_stats:
            self.stream_options.include_usage = True
        if not self.stream:
            left_out.add("stream_options")
        if "tools" not in fields:
            left_out |= {"tool_choice", "parallel_tool_calls"}
        script = simulate_field(fields)
        return ValidBody(
            fields=travelling(self, left_out),
            stream=bool(self.stream),
            choices=prompts * n,
            max_output_tokens=limit,
            logprobs_per_prompt_token=self.logprobs_per_prompt_token,
            least_output_tokens=max(1, least, len(script.script() or ()) if script is not None else 0),
        )


_NOT_OFFERED = {
    "functions": "This field is not supported. Send 'tools' instead.",
    "use_beam_search": "This field is not supported. Beam search is not offered.",
    "truncate_prompt_tokens": "This field is not supported. Prompts are not cut: send what fits the model's context.",
}

_GUIDED = {f"guided_{kind}": kind for kind in ("json", "regex", "choice", "grammar")}
"""vLLM's former names, which it no longer looks at, for kinds of ``structured_outputs``."""


def only_offered(fields: dict[str, Any]) -> dict[str, Any]:
    """``fields`` by their present names; raises HeadraceError for those that are not offered."""
    refuse_fields(fields, _NOT_OFFERED)
    for name in _GUIDED.keys() & fields.keys():
        if "structured_outputs" in fields:
            refuse(name, "Give one constraint, in 'structured_outputs'.")
        fields["structured_outputs"] = {_GUIDED[name]: fields.pop(name)}
    return fields


class CompletionUsage(msgspec.Struct):
    """Tokens of a request."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class Completion(msgspec.Struct):
    """An answer of either, as far as the OpenAPI document describes it."""

    id: str
    object: str
    created: int
    model: str
    choices: list[dict[str, Any]]
    usage: CompletionUsage
