"""OpenAI's embeddings (``/v1/embeddings``), for models that give them. Generates nothing: one slot, and its prompt."""

from typing import Any, Literal

import msgspec

from contracts.messages.records import Manifest
from gateway.apis.api import Api, ValidBody
from gateway.apis.fields import Positive, converted, count_prompts, refuse, travelling, whole_ids

INPUTS_MAX = 2048
"""Texts of one request, as OpenAI has it."""


class EmbeddingsBody(msgspec.Struct, kw_only=True):
    """The body of ``/v1/embeddings``."""

    model: str
    input: str | list[Any]
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Positive | None = None


class Embedding(msgspec.Struct):
    """The vector of one text: numbers, or base64 of float32."""

    index: int
    embedding: list[float] | str


class Embeddings(msgspec.Struct):
    """An answer."""

    object: Literal["list"]
    data: list[Embedding]


def _check(fields: dict[str, Any], manifest: Manifest, vocabulary: int) -> ValidBody:
    body = converted(fields, EmbeddingsBody)
    body.input = whole_ids(body.input)
    if count_prompts("input", body.input, vocabulary) > INPUTS_MAX:
        refuse("input", f"More than {INPUTS_MAX} texts in one request.")
    return ValidBody(fields=travelling(body), stream=False, choices=1, max_output_tokens=0)


API = Api(
    endpoint="embeddings",
    summary="OpenAI: embeddings",
    body=EmbeddingsBody,
    answer=Embeddings,
    check=_check,
    prompt_field="input",
    limit_field="",
    streams=False,
)
