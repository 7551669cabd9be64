"""What of a body goes to the engine: only what its structs name, at any depth, and of template variables those read."""

import json
from typing import Any

import msgspec
import pytest

from contracts import template_variables
from contracts.errors import HeadraceError
from contracts.messages.base import Endpoint
from contracts.messages.records import Manifest
from gateway.apis import json_limits
from gateway.apis.api import ValidBody
from gateway.apis.messages import COUNT
from gateway.apis.table import APIS
from gateway.prompt.chat_template import ChatTemplate

REAL = Manifest(name="m", version="1", engine="vllm", context=4096, default_output_tokens=16)
CANARY = "http://169.254.169.254/latest"
EXTRA: dict[str, Any] = {
    "image_url": {"url": CANARY},
    "video_url": {"url": "file:///etc/passwd"},
    "input_audio": {"data": CANARY},
    "source": {"type": "url", "url": CANARY},
    "prompt_embeds": CANARY,
    "uuid": CANARY,
    "_backend": CANARY,
}
"""What vLLM might follow, wherever it stands."""

PART = {"type": "text", "text": "hi"}
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
TOOL = {"name": "f", "parameters": {"type": "object", "properties": {"image_url": {"default": None}}}}
TAG = {"type": "structural_tag", "structures": [{"begin": "<a>", "schema": {}, "end": "</a>"}], "triggers": ["<a"]}
FULL: dict[Endpoint, dict[str, Any]] = {
    "chat/completions": {
        "model": "m",
        "messages": [
            {"role": "system", "content": [PART]},
            {"role": "user", "content": [PART, {"type": "refusal", "refusal": "no"}], "name": "Ann"},
            {"role": "assistant", "content": None, "tool_calls": [CALL], "reasoning": "r"},
            {"role": "tool", "tool_call_id": "c", "content": [PART]},
        ],
        "tools": [{"type": "function", "function": TOOL}],
        "tool_choice": {"type": "function", "function": {"name": "f"}},
        "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}}},
        "stream": True,
        "stream_options": {"include_usage": True},
    },
    "completions": {"model": "m", "prompt": ["a", "b"], "structured_outputs": {"regex": "a"}, "response_format": TAG},
    "responses": {
        "model": "m",
        "input": [
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "hi"}]},
            {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c", "output": [{"type": "input_text", "text": "hi"}]},
            {"type": "reasoning", "summary": [{"type": "summary_text", "text": "t"}]},
        ],
        "tools": [{"type": "function", **TOOL}],
        "tool_choice": {"type": "function", "name": "f"},
        "reasoning": {"effort": "low"},
        "text": {"format": {"type": "json_schema", "name": "x", "schema": {"type": "object"}}},
    },
    "messages": {
        "model": "m",
        "max_tokens": 2000,
        "system": [PART],
        "messages": [
            {"role": "user", "content": [PART]},
            {"role": "assistant", "content": [{"type": "tool_use", "id": "c", "name": "f", "input": {"a": None}}]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c", "content": [PART]}]},
        ],
        "tools": [{"name": "f", "input_schema": {"type": "object", "properties": {}}}],
        "tool_choice": {"type": "tool", "name": "f"},
        "thinking": {"type": "enabled", "budget_tokens": 1024},
        "output_config": {"effort": "low", "format": {"type": "json_schema", "schema": {"type": "object"}}},
    },
    "embeddings": {"model": "m", "input": ["a", "b"]},
}
"""Every object of each API that is not the caller's own data."""

DATA = {"parameters", "input_schema", "schema", "structures"}
"""Fields whose objects are the caller's data, which the engine reads as such: schemas."""


each_api = pytest.mark.parametrize("endpoint", list(FULL))


def valid(endpoint: Endpoint, body: dict[str, Any], variables: tuple[str, ...] = ()) -> ValidBody:
    return APIS[endpoint].validate(json_limits.decode(json.dumps(body).encode()), REAL, None, variables)


def spiked(value: Any, name: str = "") -> Any:
    """``value`` with EXTRA in each of its objects, but for DATA and the arguments of a call."""
    if isinstance(value, list):
        return [spiked(item, name) for item in value]
    if not isinstance(value, dict) or name in DATA or value == {"a": None}:
        return value
    return EXTRA | {key: spiked(item, key) if key not in DATA else item for key, item in value.items()}


def least(endpoint: Endpoint) -> dict[str, Any]:
    body = dict(FULL[endpoint])
    if endpoint == "completions":
        del body["response_format"]
    return body


@each_api
def test_no_nested_field_travels_that_its_struct_does_not_name(endpoint: Endpoint) -> None:
    body = least(endpoint)
    plain = valid(endpoint, body).fields
    sent = spiked(body)
    assert CANARY in json.dumps(sent)
    fields = valid(endpoint, sent).fields
    assert fields == plain
    assert "169.254" not in json.dumps(fields) and "passwd" not in json.dumps(fields)


@each_api
def test_all_that_is_named_travels_as_it_was(endpoint: Endpoint) -> None:
    body = least(endpoint)
    travelled = valid(endpoint, body).fields
    expected = {name: value for name, value in body.items() if name != "max_tokens"}
    if endpoint == "chat/completions":
        expected["messages"][2] = {k: v for k, v in expected["messages"][2].items() if v is not None}
    assert travelled == expected
    assert msgspec.json.decode(msgspec.json.encode(travelled)) == expected


def test_what_is_data_keeps_its_nulls() -> None:
    tools = valid("chat/completions", least("chat/completions")).fields["tools"]
    assert tools[0]["function"]["parameters"]["properties"] == {"image_url": {"default": None}}


MEDIA: list[dict[str, Any]] = [
    {"type": "image_url", "image_url": {"url": CANARY}},
    {"type": "image_url", "image_url": {"url": "file:///etc/passwd"}},
    {"type": "video_url", "video_url": {"url": CANARY}},
    {"type": "input_audio", "input_audio": {"data": "x", "format": "wav"}},
    {"type": "input_image", "image_url": CANARY},
    {"type": "image", "source": {"type": "url", "url": CANARY}},
    {"type": "image_embeds", "image_embeds": "x"},
    {"type": "file", "file": {"file_id": "x"}},
]


@pytest.mark.parametrize("part", MEDIA, ids=[part["type"] for part in MEDIA])
def test_media_are_refused_by_name(part: dict[str, Any]) -> None:
    bodies: list[tuple[Endpoint, str, dict[str, Any]]] = [
        ("chat/completions", "messages", {"model": "m"}),
        ("messages", "messages", {"model": "m", "max_tokens": 1}),
        ("responses", "input", {"model": "m"}),
    ]
    for endpoint, field, body in bodies:
        with pytest.raises(HeadraceError) as caught:
            valid(endpoint, body | {field: [{"role": "user", "content": [part]}]})
        assert caught.value.status == 400 and (caught.value.param or "").startswith(f"{field}[0].content[0].type")


# Template variables ----------------------------------------------------------------------------------------

CHATS: list[tuple[Endpoint, dict[str, Any]]] = [
    ("chat/completions", {"model": "m", "messages": [{"role": "user", "content": "hi"}]}),
    ("responses", {"model": "m", "input": "hi"}),
    ("messages", {"model": "m", "max_tokens": 1, "messages": [{"role": "user", "content": "hi"}]}),
]
each_chat = pytest.mark.parametrize(("endpoint", "body"), CHATS, ids=[endpoint for endpoint, _ in CHATS])

ATTACKS: list[dict[str, Any]] = [
    {"tokenize": True, "padding": "max_length", "max_length": 20_000_000},
    {"tools": [{"type": "function", "function": {"name": "f", "description": "word " * 100}}]},
    {"documents": [{"title": "t", "text": "word " * 100}]},
    {"messages": [{"role": "user", "content": "other"}]},
    {"conversation": []},
    {"chat_template": "{{ 'x' * 1000 }}"},
    {"truncation": True},
    {"return_tensors": "pt"},
    {"return_dict": True},
    {"return_assistant_tokens_mask": True},
    {"tokenizer_kwargs": {"padding": "max_length"}},
    {"add_generation_prompt": False},
    {"continue_final_message": True},
    {"bos_token": "x" * 1000},
]


@each_chat
@pytest.mark.parametrize("attack", ATTACKS, ids=[next(iter(attack)) for attack in ATTACKS])
def test_arguments_of_the_renderer_are_no_template_variables(
    endpoint: Endpoint, body: dict[str, Any], attack: dict[str, Any]
) -> None:
    with pytest.raises(HeadraceError) as caught:
        valid(endpoint, body | {"chat_template_kwargs": attack}, tuple(attack))
    assert caught.value.status == 400 and caught.value.param == f"chat_template_kwargs.{next(iter(attack))}"


@each_chat
def test_only_variables_that_the_template_reads_travel(endpoint: Endpoint, body: dict[str, Any]) -> None:
    given = {"enable_thinking": False, "no_such_variable": "x" * 100}
    fields = valid(endpoint, body | {"chat_template_kwargs": given}, ("enable_thinking",)).fields
    assert fields["chat_template_kwargs"] == {"enable_thinking": False}
    assert "chat_template_kwargs" not in valid(endpoint, body | {"chat_template_kwargs": given}).fields


@each_chat
def test_template_variables_are_bounded(endpoint: Endpoint, body: dict[str, Any]) -> None:
    deep: Any = 1
    for _ in range(template_variables.LEVELS_MAX):
        deep = [deep]
    for value in (deep, "x" * template_variables.BYTES_MAX, [1] * template_variables.BYTES_MAX):
        with pytest.raises(HeadraceError) as caught:
            valid(endpoint, body | {"chat_template_kwargs": {"v": value}}, ("v",))
        assert caught.value.param == "chat_template_kwargs"
    assert valid(endpoint, body | {"chat_template_kwargs": {"v": deep[0]}}, ("v",)).fields["chat_template_kwargs"]


def test_counting_checks_them_too() -> None:
    [body] = [body for endpoint, body in CHATS if endpoint == "messages"]
    body = body | {"chat_template_kwargs": {"tools": []}}
    with pytest.raises(HeadraceError):
        COUNT.validate(body, REAL, None, ("tools",))


def test_a_templates_variables_are_those_it_reads_and_no_renderers_argument_or_function() -> None:
    source = (
        "{% for m in messages %}{{ bos_token }}{{ m.content }}{% endfor %}{% if tools %}{{ tools }}{% endif %}"
        "{% if enable_thinking is defined and add_generation_prompt %}{{ raise_exception(persona) }}{% endif %}"
        "{{ strftime_now('%Y') }}{{ range(3) }}{% set ns = namespace(x=1) %}{{ ns.x }}{{ sep }}"
    )
    assert ChatTemplate(source, {"bos_token": "<s>", "sep": "|"}).variables == {"enable_thinking", "persona"}
