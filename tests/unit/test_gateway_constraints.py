"""Constraints on answers that would hold an engine up, or that are none, are refused with the place at fault."""

import json
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from contracts.errors import HeadraceError
from contracts.messages.base import Endpoint
from contracts.messages.records import Manifest
from gateway.apis import json_limits
from gateway.apis.api import ValidBody
from gateway.apis.table import APIS

MANIFEST = Manifest(name="m", version="1", engine="vllm", context=4096, default_output_tokens=16)
CHAT: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
SCHEMA = "response_format.json_schema.schema"


def check(endpoint: Endpoint = "chat/completions", **fields: Any) -> ValidBody:
    return APIS[endpoint].validate(json_limits.decode(msgspec.json.encode(CHAT | fields)), MANIFEST, 49152)


def refused(endpoint: Endpoint = "chat/completions", **fields: Any) -> str:
    with pytest.raises(HeadraceError) as caught:
        check(endpoint, **fields)
    assert caught.value.code == "invalid_request"
    assert caught.value.param is not None
    return caught.value.param


def form(schema: object) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": schema}}}


def tool(schema: object) -> list[dict[str, Any]]:
    return [{"type": "function", "function": {"name": "f", "parameters": schema}}]


def properties(count: int, *, required: bool) -> dict[str, Any]:
    named = {f"p{number}": {"type": "string"} for number in range(count)}
    return {"type": "object", "properties": named, "required": list(named) if required else []}


REAL = {
    "$defs": {"step": {"type": "object", "properties": {"next": {"$ref": "#/$defs/step"}, "a/b": {"const": 1}}}},
    "type": ["object", "null"],
    "properties": {
        "steps": {"type": "array", "items": {"$ref": "#/$defs/step"}, "minItems": 1, "maxItems": 9},
        "same": {"$ref": "#/$defs/step/properties/a~1b"},
        "type": {"enum": ["x", 1, None]},
        "pair": {"prefixItems": [{"type": "integer"}, True], "items": False},
        "code": {"type": "string", "pattern": "^[A-Z]{3}$"},
        "any": {"anyOf": [{"type": "number", "minimum": -0.5}, {"$ref": "#"}]},
    },
    "required": ["steps"],
    "additionalProperties": False,
    "x-unknown": {"type": "banana"},
}


def test_real_schemas_pass_wherever_they_stand() -> None:
    for schema in (REAL, {}, properties(1000, required=True), properties(200, required=False)):
        assert check(**form(schema)).fields["response_format"] == form(schema)["response_format"]
        assert check(tools=tool(schema)).fields["tools"] == tool(schema)
        assert check(structured_outputs={"json": schema}).fields["structured_outputs"] == {"json": schema}
        check("messages", max_tokens=5, tools=[{"name": "f", "input_schema": schema}])
        check("responses", input="x", tools=[{"type": "function", "name": "f", "parameters": schema}])


@pytest.mark.parametrize(
    ("schema", "place"),
    [
        ({"type": "banana"}, ".type"),
        ({"type": 5}, ".type"),
        ({"type": ["string", None]}, ".type"),
        ({"enum": []}, ".enum"),
        ({"enum": list(range(1001))}, ".enum"),
        ({"enum": ["x" * 130_000]}, ".enum"),
        ({"const": "x" * 130_000}, ".const"),
        ({"required": "a"}, ".required"),
        ({"required": [1]}, ".required"),
        ({"properties": []}, ".properties"),
        ({"properties": {"a": "x"}}, ".properties.a"),
        ({"properties": {"a": {"items": [{"type": "x"}]}}}, ".properties.a.items[0].type"),
        ({"anyOf": {}}, ".anyOf"),
        ({"anyOf": [{"not": {"type": 1}}]}, ".anyOf[0].not.type"),
        ({"additionalProperties": "no"}, ".additionalProperties"),
        ({"$ref": "#/$defs/none"}, ".$ref"),
        ({"$ref": "http://example.com/x.json"}, ".$ref"),
        ({"$ref": 1}, ".$ref"),
        ({"maxLength": -1}, ".maxLength"),
        ({"maxItems": 10**8}, ".maxItems"),
        ({"minItems": True}, ".minItems"),
        ({"pattern": "a\0"}, ".pattern"),
        ({"pattern": "a" * 9000}, ".pattern"),
        ({"patternProperties": {"a" * 9000: {}}}, ".patternProperties"),
        (properties(1001, required=True), ".properties"),
        (properties(201, required=False), ".properties"),
        ({"anyOf": [properties(501, required=True)] * 2}, ".anyOf[0].properties"),
    ],
)
def test_what_no_engine_can_compile_in_time_is_refused_by_its_place(schema: dict[str, Any], place: str) -> None:
    assert refused(**form(schema)) == SCHEMA + place
    assert refused(structured_outputs={"json": schema}) == f"structured_outputs.json{place}"
    assert refused(structured_outputs={"json": json.dumps(schema)}) == f"structured_outputs.json{place}"
    assert refused(tools=tool(schema)) == f"tools[0].function.parameters{place}"
    check(tools=tool(schema), tool_choice="none")  # Nothing is compiled then.
    tools = [{"type": "function", "name": "f", "parameters": schema}]
    assert refused("responses", input="x", tools=tools) == f"tools[0].parameters{place}"
    text = {"format": {"type": "json_schema", "name": "s", "schema": schema}}
    assert refused("responses", input="x", text=text) == f"text.format.schema{place}"
    tools = [{"name": "f", "input_schema": schema}]
    assert refused("messages", max_tokens=5, tools=tools) == f"tools[0].input_schema{place}"
    config = {"format": {"type": "json_schema", "schema": schema}}
    assert refused("messages", max_tokens=5, output_config=config) == f"output_config.format.schema{place}"


def test_all_schemas_of_a_request_share_the_bounds() -> None:
    schema = properties(600, required=True)
    assert refused(tools=tool(schema) + tool(schema)) == "tools[1].function.parameters.properties"
    assert refused(tools=tool(schema), **form(schema)) == f"{SCHEMA}.properties"
    assert refused(structured_outputs={"json": {"allOf": [{"pattern": "a" * 1000}] * 9}}).endswith(".pattern")


@pytest.mark.parametrize(
    "part",
    [
        lambda number: {"type": "string", "maxLength": 100 + number},
        lambda number: {"type": "string", "minLength": 32 + number},
        lambda number: {"type": "array", "maxItems": 32 + number},
        lambda number: {"type": "string", "pattern": f"^[a-z]{{1,{50 + number}}}$"},
    ],
)
def test_few_different_repetitions_are_allowed_and_any_number_of_the_same(part: Callable[[int], object]) -> None:
    def named(count: int, different: int) -> dict[str, Any]:
        return form({"properties": {f"p{number}": part(number % different) for number in range(count)}})

    check(**named(16, 16))
    check(**named(100, 16))
    assert refused(**named(17, 17)).startswith(f"{SCHEMA}.properties.p")


@pytest.mark.parametrize(
    ("value", "param"),
    [
        ({}, "structured_outputs"),
        ({"foo": 1}, "structured_outputs"),
        ({"regex": "a", "choice": ["a"]}, "structured_outputs"),
        ({"regex": 5}, "structured_outputs.regex"),
        ({"regex": "a\0b"}, "structured_outputs.regex"),
        ({"regex": "a" * 9000}, "structured_outputs.regex"),
        ({"choice": []}, "structured_outputs.choice"),
        ({"choice": [1]}, "structured_outputs.choice[0]"),
        ({"choice": ["x"] * 1001}, "structured_outputs.choice"),
        ({"choice": ["x" * 200] * 1000}, "structured_outputs.choice"),
        ({"grammar": ""}, "structured_outputs.grammar"),
        ({"grammar": "x" * 40_000}, "structured_outputs.grammar"),
        ({"json": "{"}, "structured_outputs.json"),
        ({"json": "[" * 100_000}, "structured_outputs.json"),
        ({"json": "[]"}, "structured_outputs.json"),
        ({"structural_tag": "{"}, "structured_outputs.structural_tag"),
        ({"structural_tag": '{"format":{"json_schema":{"type":1}}}'}, "structured_outputs.structural_tag.json_schema"),
    ],
)
def test_a_constraint_is_one_and_bounded(value: dict[str, Any], param: str) -> None:
    found = refused(structured_outputs=value)
    assert found.startswith(param.split("[", maxsplit=1)[0])


def test_each_kind_of_constraint_passes() -> None:
    for kind, value in (
        ("regex", "[a-z]+"),
        ("choice", ["a", "b"]),
        ("grammar", 'root ::= "a"'),
        ("json_object", True),
        ("structural_tag", '{"format":{"type":"json_schema","json_schema":{"type":"object"}}}'),
    ):
        assert check(structured_outputs={kind: value}).fields["structured_outputs"] == {kind: value}


def test_a_structural_tag_is_looked_through() -> None:
    structures = [{"begin": "<a>", "schema": {"type": "object"}, "end": "</a>"}]
    good = {"type": "structural_tag", "structures": structures, "triggers": ["<a>"]}
    assert check(response_format=good).fields["response_format"] == good
    assert refused(response_format={"type": "structural_tag"}) == "response_format"
    structures[0]["schema"] = {"type": "banana"}
    assert refused(response_format=good) == "response_format.schema.type"
    deep = {"type": "structural_tag", "format": {"elements": [{"pattern": "a" * 9000}]}}
    assert refused(response_format=deep) == "response_format.pattern"


MANY = " ".join(f'[a-z]{{{times}}} "x"' for times in range(30, 55))
"""25 counted repetitions in some 350 characters: compiled in seconds, and with larger numbers in minutes."""
NESTED = "(((a{100}){100}){100}){100}"

KINDS: list[tuple[Endpoint, dict[str, Any], str]] = []
for _text in (MANY.replace('"', ""), NESTED):
    KINDS += [
        ("chat/completions", {"structured_outputs": {"regex": _text}}, "structured_outputs.regex"),
        ("chat/completions", {"structured_outputs": {"grammar": f"root ::= {_text}"}}, "structured_outputs.grammar"),
        ("chat/completions", {"guided_grammar": f"root ::= {_text}"}, "structured_outputs.grammar"),
        ("chat/completions", {"guided_regex": _text}, "structured_outputs.regex"),
        ("completions", {"structured_outputs": {"grammar": f"root ::= {_text}"}}, "structured_outputs.grammar"),
        ("responses", {"input": "hi", "structured_outputs": {"regex": _text}}, "structured_outputs.regex"),
    ]
    for _format in (
        {"type": "regex", "pattern": _text},
        {"type": "grammar", "grammar": f"root ::= {_text}"},
        {"type": "json_schema", "json_schema": {"type": "string", "pattern": _text}},
    ):
        _tag = {"type": "structural_tag", "format": {"type": "sequence", "elements": [_format]}}
        KINDS += [
            ("chat/completions", {"structured_outputs": {"structural_tag": json.dumps(_tag)}}, "structured_outputs"),
            ("chat/completions", {"response_format": _tag}, "response_format"),
        ]
    _schema = {"type": "object", "properties": {"a": {"type": "string", "pattern": _text}}, "required": ["a"]}
    KINDS += [
        (
            "chat/completions",
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": _schema}}},
            SCHEMA,
        ),
        ("chat/completions", {"structured_outputs": {"json": json.dumps(_schema)}}, "structured_outputs.json"),
        (
            "chat/completions",
            {"tools": [{"type": "function", "function": {"name": "f", "parameters": _schema}}]},
            "tools[0]",
        ),
        (
            "responses",
            {"input": "hi", "text": {"format": {"type": "json_schema", "name": "x", "schema": _schema}}},
            "text.format",
        ),
        ("messages", {"max_tokens": 5, "tools": [{"name": "f", "input_schema": _schema}]}, "tools[0]"),
        ("messages", {"max_tokens": 5, "output_config": {"format": {"schema": _schema}}}, "output_config"),
    ]


@pytest.mark.parametrize(("endpoint", "fields", "param"), KINDS)
def test_counted_repetitions_have_one_budget_in_every_kind(
    endpoint: Endpoint, fields: dict[str, Any], param: str
) -> None:
    if endpoint == "completions":
        fields = {"prompt": "hi", **fields}
    assert refused(endpoint, **fields).startswith(param)


def test_what_is_escaped_or_quoted_is_no_repetition() -> None:
    for text in (r"\{99\}" * 50, "[{1,99}]" * 50, "x{3}" * 50, "(ab){2,5}" * 20, '"a{99}" ' * 50):
        check(structured_outputs={"grammar": f"root ::= {text}"})
    check(structured_outputs={"regex": r"\d{3}-\d{4}|[A-Z]{2,31}"})


def test_former_names_of_constraints_still_hold() -> None:
    for kind, value in (("json", {"type": "object"}), ("regex", "a+"), ("choice", ["a"]), ("grammar", "root ::= x")):
        guided: dict[str, Any] = {f"guided_{kind}": value}
        fields = check(**guided).fields
        assert fields["structured_outputs"] == {kind: value}
        assert f"guided_{kind}" not in fields
    assert refused(guided_regex="a", guided_choice=["a"]).startswith("guided_")
    assert refused(guided_json=5) == "structured_outputs.json"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"functions": [{"name": "f"}]}, "functions"),
        ({"use_beam_search": True}, "use_beam_search"),
        ({"truncate_prompt_tokens": 5}, "truncate_prompt_tokens"),
        ({"continue_final_message": True}, "continue_final_message"),
        ({"min_tokens": 9, "max_tokens": 8}, "min_tokens"),
        ({"n": 2, "temperature": 0}, "n"),
        ({"bad_words": [" "]}, "bad_words"),
        ({"bad_words": [""]}, "bad_words[0]"),
        ({"allowed_token_ids": []}, "allowed_token_ids"),
        ({"allowed_token_ids": [49152]}, "allowed_token_ids"),
        ({"prompt_logprobs": 5, "stream": True}, "prompt_logprobs"),
        ({"prompt_logprobs": -1}, "prompt_logprobs"),
        ({"thinking_token_budget": -2}, "thinking_token_budget"),
        ({"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}}, "structured_outputs"),
    ],
)
def test_what_changes_the_answer_is_held_or_refused(fields: dict[str, Any], param: str) -> None:
    assert refused(**fields).startswith(param.split("[", maxsplit=1)[0])


def test_vllms_own_fields_travel() -> None:
    own: dict[str, Any] = {
        "bad_words": ["no"],
        "allowed_token_ids": [1, 2],
        "prompt_logprobs": 1,
        "min_tokens": 300,
        "add_generation_prompt": False,
        "continue_final_message": True,
    }
    valid = check(**own)
    assert own.items() <= valid.fields.items()
    assert valid.least_output_tokens == 300
