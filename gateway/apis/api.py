"""One API of inference as a row: all that the gateway does otherwise for one API than for another.

Whoever serves a request asks its row and never looks at the endpoint's name. The rows stand in ``gateway.apis.table``.
"""

from collections.abc import Callable, Collection
from typing import Any

import msgspec

from contracts import template_variables as variables
from contracts.messages.base import Endpoint
from contracts.messages.records import Manifest
from gateway.apis.dialects import refuse_dialects
from gateway.apis.fields import VOCABULARY_MAX, present, refuse
from gateway.apis.response_format import OPENAI, ResponseFormat

Json = dict[str, Any]


class ValidBody(msgspec.Struct):
    """A body that may be served."""

    fields: Json
    """What travels to the engine, but for the output limit, which admission sets."""
    stream: bool
    choices: int
    """Answers in all: prompts times ``n``."""
    max_output_tokens: int | None
    """Per choice; None when the caller stated none."""
    least_output_tokens: int = 1
    """What the default must not go below: a scripted answer states its own length."""

    logprobs_per_prompt_token: int = 0
    """Log-probabilities asked for of each token of the prompts, its own among them."""


class Api(msgspec.Struct, frozen=True, kw_only=True):
    """What is particular to one API."""

    endpoint: Endpoint
    """Its name on the bus, and its path below ``/v1/``."""
    summary: str
    body: type[msgspec.Struct]
    """The whole list of fields that travel, for the OpenAPI document; ``check`` converts to it."""
    answer: Any
    """Type of an answer that is not streamed, for the document."""
    check: Callable[[Json, Manifest, int], ValidBody]
    """From a body without nulls, the model, and its number of token ids; raises HeadraceError that names the field."""
    prompt_field: str
    """Where the prompt is; without ``chat`` it is text, token ids, or a list of either."""
    chat: Callable[[Json, bool], Json] | None = None
    """The chat body that renders to a valid body's prompt. True: the template takes system text at the start only."""
    limit_field: str = "max_tokens"
    """Where the engine gets the output limit; empty for an API that generates nothing."""
    format: ResponseFormat = OPENAI
    streams: bool = True
    """Whether the answer may be server-sent events."""

    @property
    def path(self) -> str:
        return f"/v1/{self.endpoint}"

    def validate(
        self, body: Json, manifest: Manifest, vocabulary: int | None, template_variables: Collection[str] = ()
    ) -> ValidBody:
        """The request in ``body``; ``vocabulary`` is None where it is not known. Raises HeadraceError.

        ``template_variables``: what the model's chat template reads; others of the caller do not travel.

        A null is as if absent. A field that ``self.body`` does not name is ignored and does not travel, and with it
        those that no caller may set (``cache_salt``, ``priority``, ``request_id``, ``kv_transfer_params``,
        ``vllm_xargs``). Values that only an engine would trip over are refused here.
        """
        fields = present(body)
        if "simulate" in fields and manifest.engine != "simulated":
            refuse("simulate", "Only models of the simulated engine understand 'simulate'.")
        valid = self.check(fields, manifest, vocabulary or VOCABULARY_MAX)
        refuse_dialects(self.endpoint, fields, self.body.__struct_fields__)
        if given := valid.fields.pop(variables.FIELD, None):
            variables.check(given)
            if read := {name: value for name, value in given.items() if name in template_variables}:
                valid.fields[variables.FIELD] = read
        return valid
