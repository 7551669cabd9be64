"""The table of APIs. A new one is a file beside this one, a row here, and its name in ``contracts``' Endpoint."""

from collections.abc import Iterable

from contracts.messages.base import Endpoint
from gateway.apis import chat, completions, embeddings, messages, responses
from gateway.apis.api import Api
from gateway.apis.response_format import OPENAI, ResponseFormat

APIS: dict[Endpoint, Api] = {
    api.endpoint: api for api in (chat.API, completions.API, responses.API, messages.API, embeddings.API)
}


def is_anthropics(headers: Iterable[tuple[bytes, bytes]]) -> bool:
    """Whether the caller speaks Anthropic's dialect, where both have the same path."""
    return any(name == b"anthropic-version" for name, _ in headers)


def format_of(path: str, headers: Iterable[tuple[bytes, bytes]] = ()) -> ResponseFormat:
    """For answers that are given before, or without, knowing the API: what lies below an API's path looks like it."""
    for api in APIS.values():
        if path == api.path or path.startswith(f"{api.path}/"):
            return api.format
    return messages.FORMAT if is_anthropics(headers) else OPENAI
