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
from tests.support.schemas import BROKEN, KEPT

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
    assert refused(tools=tool(schema), tool_choice="required") == f"tools[0].function.parameters{place}"
    check(tools=tool(schema), tool_choice="none")  # Nothing is compiled then, nor where nobody asked for strictness.
    check(tools=tool(schema))
    tools = [{"type": "function", "name": "f", "parameters": schema}]
    assert refused("responses", input="x", tools=tools, tool_choice="required") == f"tools[0].parameters{place}"
    text = {"format": {"type": "json_schema", "name": "s", "schema": schema}}
    assert refused("responses", input="x", text=text) == f"text.format.schema{place}"
    tools = [{"name": "f", "input_schema": schema}]
    assert (
        refused("messages", max_tokens=5, tools=tools, tool_choice={"type": "any"}) == f"tools[0].input_schema{place}"
    )
    config = {"format": {"type": "json_schema", "schema": schema}}
    assert refused("messages", max_tokens=5, output_config=config) == f"output_config.format.schema{place}"


def test_all_schemas_of_a_request_share_the_bounds() -> None:
    schema = properties(600, required=True)
    assert (
        refused(tools=tool(schema) + tool(schema), tool_choice="required") == "tools[1].function.parameters.properties"
    )
    assert refused(tools=tool(schema), tool_choice="required", **form(schema)) == f"{SCHEMA}.properties"
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
            {"tools": [{"type": "function", "function": {"name": "f", "strict": True, "parameters": _schema}}]},
            "tools[0]",
        ),
        (
            "responses",
            {"input": "hi", "text": {"format": {"type": "json_schema", "name": "x", "schema": _schema}}},
            "text.format",
        ),
        ("messages", {"max_tokens": 5, "tools": [{"name": "f", "strict": True, "input_schema": _schema}]}, "tools[0]"),
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


# Keywords that no answer would be held to -------------------------------------------------------------------


@pytest.mark.parametrize(("schema", "keyword", "_"), BROKEN)
def test_d12_a_keyword_that_is_not_kept_is_refused_by_name(schema: dict[str, Any], keyword: str, _: Any) -> None:
    assert refused(**form(schema)) == f"{SCHEMA}.{keyword}"
    inside = {"type": "object", "properties": {"x": schema | {"$defs": {}}}} if "$ref" not in schema else schema
    assert refused(tools=tool(inside), tool_choice="required").endswith(f".{keyword}")
    strict = [{"type": "function", "name": "f", "strict": True, "parameters": inside}]
    assert refused("responses", input="x", tools=strict).endswith(f".{keyword}")
    config = {"format": {"type": "json_schema", "schema": schema}}
    assert refused("messages", max_tokens=5, output_config=config).endswith(f".{keyword}")


@pytest.mark.parametrize("schema", KEPT)
def test_d12_what_is_kept_passes(schema: dict[str, Any]) -> None:
    check(**form(schema))


def test_d29_a_big_tool_belt_passes_where_nobody_asks_for_strictness() -> None:
    names = {f"p{number}": {"type": "string", "uniqueItems": True} for number in range(10)}
    belt = tool({"type": "object", "properties": names}) * 128
    choices: list[Any] = [{}, {"tool_choice": "auto"}, {"tool_choice": "none"}]
    for choice in choices:
        assert len(check(tools=belt, **choice).fields["tools"]) == 128
    assert refused(tools=belt, tool_choice="required")


S = {"type": "object"}


@pytest.mark.parametrize(
    ("endpoint", "fields", "param"),
    [
        ("chat/completions", {"response_format": {"type": "json_object", "schema": S}}, "response_format.schema"),
        (
            "chat/completions",
            {"response_format": {"type": "json_object", "json_schema": {"name": "x", "schema": S}}},
            "response_format.json_schema",
        ),
        *(
            (endpoint, {name: "x"}, name)
            for endpoint in ("chat/completions", "completions", "responses", "messages")
            for name in ("json_schema", "format", "grammar", "regex", "ebnf", "output_format")
        ),
        ("chat/completions", {"extra_body": {"structured_outputs": {"json": S}}}, "extra_body"),
        ("chat/completions", {"nvext": {"guided_json": S}}, "nvext.guided_json"),
        ("chat/completions", {"text": {"format": {"type": "json_schema"}}}, "text.format"),
        ("chat/completions", {"output_config": {"format": {}}}, "output_config.format"),
        ("completions", {"add_special_tokens": False}, "add_special_tokens"),
        ("chat/completions", {"add_special_tokens": True}, "add_special_tokens"),
        ("responses", {"response_format": {"type": "json_object"}}, "response_format"),
        ("responses", {"guided_json": S}, "guided_json"),
        ("messages", {"response_format": {"type": "json_object"}}, "response_format"),
        ("messages", {"structured_outputs": {"json": S}}, "structured_outputs"),
    ],
)
def test_d13_a_constraint_in_another_dialect_is_named(endpoint: Endpoint, fields: dict[str, Any], param: str) -> None:
    start: dict[str, dict[str, Any]] = {
        "responses": {"input": "x"},
        "messages": {"max_tokens": 5},
        "completions": {"prompt": "x"},
    }
    assert refused(endpoint, **start.get(endpoint, {}), **fields) == param


def test_d13_what_is_harmless_stays_ignored() -> None:
    harmless: dict[str, Any] = {
        "foo": 1,
        "text": {"verbosity": "low"},
        "nvext": {"annotations": []},
        "extra_body": {},
        "add_special_tokens": False,
    }
    assert check(**harmless).fields.keys().isdisjoint(harmless)
    check(response_format={"type": "json_object"})


# Agents ----------------------------------------------------------------------------------------------------

FUNCTION = {"type": "function", "name": "f", "parameters": {"type": "object"}}
HOSTED: list[dict[str, Any]] = [
    {"type": "web_search"},
    {"type": "custom", "name": "apply_patch", "format": {"type": "grammar", "syntax": "lark", "definition": "x"}},
    {"type": "namespace", "name": "n", "tools": []},
]


def test_d06_a_coding_agents_request_is_taken() -> None:
    history = [
        {"type": "message", "role": "user", "content": "hi"},
        {"type": "reasoning", "summary": [], "encrypted_content": None},
        {"type": "web_search_call", "id": "w", "status": "completed"},
        {"type": "custom_tool_call", "call_id": "c", "name": "apply_patch", "input": 'a "b" ü'},
        {"type": "custom_tool_call_output", "call_id": "c", "output": "done"},
    ]
    agents = {
        "include": ["reasoning.encrypted_content"],
        "text": {"verbosity": "low"},
        "reasoning": {"effort": "low", "summary": "auto"},
        "tools": [FUNCTION, *HOSTED],
    }
    fields = check("responses", input=history, tool_choice="auto", **agents).fields
    assert [tool["name"] for tool in fields["tools"]] == ["f"]
    call, output = fields["input"][2:]
    assert json.loads(call["arguments"]) == {"input": 'a "b" ü'}
    assert (call["type"], output["type"], output["output"]) == ("function_call", "function_call_output", "done")
    forced: list[Any] = [{"type": "web_search"}, {"type": "custom", "name": "apply_patch"}]
    for choice in forced:
        assert refused("responses", input="x", tool_choice=choice, **agents).startswith("tool_choice")
    assert refused("responses", input="x", tools=HOSTED, tool_choice="required") == "tool_choice"
    assert refused("responses", input=[], **agents) == "input"
    assert "tools" not in check(tools=[{"type": "custom", "custom": {"name": "x"}}]).fields


def test_d07_what_an_agents_release_adds_is_left_out() -> None:
    texts: list[Any] = [{"type": "text", "text": "a"}, {"type": "tool_reference", "tool_name": "t"}]
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "x"}}
    results = [
        {"type": "tool_result", "tool_use_id": "u1", "content": texts},
        {"type": "tool_result", "tool_use_id": "u2", "is_error": True},
    ]
    tools = [
        {"name": "t", "input_schema": {"type": "object"}, "cache_control": {}, "defer_loading": True},
        {"type": "web_search_20250305", "name": "web_search"},
    ]
    ask: dict[str, Any] = {
        "max_tokens": 5,
        "system": [{"type": "text", "text": "A", "cache_control": {"type": "ephemeral", "scope": "global"}}],
        "context_management": {"edits": []},
        "thinking": {"type": "adaptive"},
        "output_config": {"effort": "medium"},
        "tools": tools,
        "messages": [{"role": "user", "content": results}],
    }
    fields = check("messages", **ask).fields
    assert fields["tools"] == [{"name": "t", "input_schema": {"type": "object"}}]
    first, second = fields["messages"][0]["content"]
    assert first["content"] == texts[:1] and "content" not in second
    assert refused("messages", **ask | {"tool_choice": {"type": "tool", "name": "web_search"}}) == "tool_choice"
    for content in ([image], [{"type": "tool_result", "tool_use_id": "u", "content": [image]}]):
        assert refused("messages", **ask | {"messages": [{"role": "user", "content": content}]}).endswith(".type")


def test_d07_a_conversation_that_a_server_would_keep_is_refused_by_name() -> None:
    """What the caller leaves out would be missing. The tool runner of Anthropic's SDK asks so first, and goes on with
    whole conversations when it is told in these words.
    """
    ask: dict[str, Any] = {"max_tokens": 5, "messages": [{"role": "user", "content": "hi"}]}
    for thread in ({"type": "create"}, {"type": "continue", "previous_message_id": "msg_1"}):
        assert refused("messages", **ask, thread=thread) == "thread"
    assert refused("messages", **ask, compaction={"type": "auto"}) == "compaction"
    assert check("messages", **ask, thread=None, compaction=None).max_output_tokens == 5
    body = APIS["messages"].format.error_body("invalid_request", "no", "thread", "id")
    assert body["error"]["details"] == {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}
    assert "details" not in APIS["messages"].format.error_body("invalid_request", "no", "tools", "id")["error"]


def test_an_answer_of_another_kind_than_text_is_refused() -> None:
    for kinds in (["text", "audio"], ["audio"], "audio", []):
        assert refused(modalities=kinds) == "modalities"
    assert "modalities" not in check(modalities=["text"]).fields
