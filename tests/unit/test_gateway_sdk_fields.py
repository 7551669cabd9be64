"""Every field that the official SDKs' present types know is honoured, refused by name, or ignored for a stated reason.

A new release of theirs that has a new one is red here, until somebody has decided.
"""

from typing import Any

import pytest
from anthropic.types.beta.message_create_params import MessageCreateParamsBase as BetaMessage
from anthropic.types.message_create_params import MessageCreateParamsBase as Message
from openai.types.chat.completion_create_params import CompletionCreateParamsBase as Chat
from openai.types.completion_create_params import CompletionCreateParamsBase as Completion
from openai.types.embedding_create_params import EmbeddingCreateParams as Embedding
from openai.types.responses.input_token_count_params import InputTokenCountParams as TokenCount
from openai.types.responses.response_create_params import ResponseCreateParamsBase as Response

from contracts.errors import HeadraceError
from contracts.messages.records import Manifest
from gateway.apis.table import APIS

IGNORED = {
    "who asks, for the vendor's statistics": (
        "user",
        "safety_identifier",
        "metadata",
        "user_profile_id",
        "workspace_id",
    ),
    "nothing is kept, so nothing more is than asked for": ("store", "cache_control", "diagnostics"),
    "how the vendor keeps its caches": ("prompt_cache_key", "prompt_cache_options", "prompt_cache_retention"),
    "speed and price of the vendor's": ("service_tier", "speed", "prediction", "fallback_credit_token"),
    "a hint at style or size, which models of other vendors know nothing of": ("verbosity", "personality"),
    "what is too long is refused, never cut": ("truncation", "context_management"),
    "of tools that the vendor's servers run, which are left out": (
        "max_tool_calls",
        "container",
        "mcp_servers",
        "image",
    ),
    "padding of events, which is left out as if it had been switched off": ("stream_options",),
    "of fields that are refused": ("background_options", "function_call"),
    "rights and fallbacks within the vendor's house": ("access_programs", "fallbacks", "betas"),
    "``global`` and ``self``, the only values that are taken, are what there is": ("inference_geo", "billing_policy"),
}
REFUSED: dict[str, dict[str, Any]] = {
    "chat/completions": {
        "audio": {"voice": "alloy", "format": "wav"},
        "modalities": ["audio"],
        "moderation": {"model": "omni-moderation-latest"},
        "web_search_options": {},
        "functions": [{"name": "f"}],
        "function_call": {"name": "f"},
    },
    "completions": {},
    "embeddings": {},
    "responses": {
        "background": True,
        "conversation": "conv_1",
        "moderation": {"model": "omni-moderation-latest"},
        "previous_response_id": "resp_1",
        "prompt": {"id": "p"},
    },
    "messages": {
        "compaction": {"type": "summary"},
        "thread": {"id": "t"},
        "inference_geo": "us",
        "billing_policy": {"type": "billing_policy", "bill_to": "user_profile"},
    },
}
MESSAGES = {"messages": [{"role": "user", "content": "hi"}]}
LEAST: dict[str, dict[str, Any]] = {
    "chat/completions": MESSAGES,
    "completions": {"prompt": "hi"},
    "embeddings": {"input": "hi"},
    "responses": {"input": "hi"},
    "messages": MESSAGES | {"max_tokens": 4},
}
MANIFEST = Manifest(name="m", version="v1", engine="vllm", context=8192, default_output_tokens=16)


@pytest.mark.parametrize(
    ("endpoint", "theirs"),
    [
        ("chat/completions", Chat),
        ("completions", Completion),
        ("embeddings", Embedding),
        ("responses", Response),
        ("responses", TokenCount),
        ("messages", Message),
        ("messages", BetaMessage),
    ],
)
def test_every_field_of_an_sdk_is_decided(endpoint: Any, theirs: type) -> None:
    ignored = {name for names in IGNORED.values() for name in names}
    ours = set(APIS[endpoint].body.__struct_fields__) | REFUSED[endpoint].keys() | ignored
    fields = {name for base in theirs.__mro__ for name in getattr(base, "__annotations__", {})}
    assert len(fields) > 3
    assert fields <= ours, f"decide what becomes of {fields - ours}"


@pytest.mark.parametrize(("endpoint", "name"), [(api, name) for api, names in REFUSED.items() for name in names])
def test_what_would_be_another_answer_is_refused_by_name(endpoint: Any, name: str) -> None:
    body = {"model": "m"} | LEAST[endpoint]
    APIS[endpoint].validate(body, MANIFEST, None)
    with pytest.raises(HeadraceError) as refused:
        APIS[endpoint].validate(body | {name: REFUSED[endpoint][name]}, MANIFEST, None)
    assert refused.value.code == "invalid_request"
    assert (refused.value.param or "").split(".")[0] == name, refused.value.message


@pytest.mark.parametrize(
    ("endpoint", "fields"),
    [
        ("chat/completions", {"function_call": "none", "modalities": ["text"], "service_tier": "flex"}),
        ("messages", {"inference_geo": "global", "billing_policy": {"type": "billing_policy", "bill_to": "self"}}),
    ],
)
def test_what_asks_for_what_there_is_passes(endpoint: Any, fields: dict[str, Any]) -> None:
    APIS[endpoint].validate({"model": "m"} | LEAST[endpoint] | fields, MANIFEST, None)
