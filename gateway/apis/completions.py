"""OpenAI's completions (``/v1/completions``): the prompt is text or token ids, and there may be several."""

from typing import Annotated, Any

from msgspec import Meta

from contracts.messages.records import Manifest
from gateway.apis.api import Api, ValidBody
from gateway.apis.fields import INT_MAX, Positive, converted, count_prompts, refuse, whole_ids
from gateway.apis.sampling import Completion, LogprobCount, TextBody, only_offered
from gateway.apis.structured_outputs import ComplexityLimit


class CompletionsBody(TextBody, kw_only=True):
    """The body of ``/v1/completions``."""

    prompt: str | list[Any]
    max_tokens: Annotated[int, Meta(ge=0, le=INT_MAX)] | None = None
    logprobs: LogprobCount | None = None
    echo: bool | None = None
    best_of: Positive | None = None
    suffix: str | None = None

    @property
    def logprobs_per_prompt_token(self) -> int:
        echoed = 1 + self.logprobs if self.echo and self.logprobs is not None else 0
        return max(super().logprobs_per_prompt_token, echoed)


def _check(fields: dict[str, Any], manifest: Manifest, vocabulary: int) -> ValidBody:
    fields = only_offered(fields)
    body = converted(fields, CompletionsBody)
    if body.best_of is not None and body.best_of > (body.n or 1):
        refuse("best_of", "'best_of' above 'n' is not supported.")
    if body.max_tokens == 0 and not body.echo:
        refuse("max_tokens", "0 is for scoring a prompt, with 'echo': true.")
    if body.suffix:
        refuse("suffix", "'suffix' is not supported.")
    body.prompt = whole_ids(body.prompt)
    prompts = count_prompts("prompt", body.prompt, vocabulary)
    body.check_all(manifest, vocabulary, ComplexityLimit())
    return body.valid(fields, prompts=prompts, limit=body.max_tokens)


API = Api(
    endpoint="completions",
    summary="OpenAI: completions",
    body=CompletionsBody,
    answer=Completion,
    check=_check,
    prompt_field="prompt",
)
