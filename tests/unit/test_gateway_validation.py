"""What a body may hold. Cases are named after CASES.md where they come from there."""

import json
from typing import Any

import msgspec
import pytest

from contracts.errors import TABLE, HeadraceError
from contracts.messages.base import Endpoint
from contracts.messages.records import Manifest, TenantLimits
from gateway.apis import json_limits
from gateway.apis.api import ValidBody
from gateway.apis.table import APIS
from gateway.intake.admission import output_limit

SIMULATED = Manifest(name="m", version="1", engine="simulated", context=4096, default_output_tokens=16)
REAL = Manifest(name="m", version="1", engine="vllm", context=4096, default_output_tokens=16)
BASE: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
TEXT: dict[str, Any] = {"model": "m", "prompt": "hi"}
UNLIMITED = TenantLimits()


CHAT, COMPLETIONS = APIS["chat/completions"], APIS["completions"]


def check(body: dict[str, Any], endpoint: Endpoint = "chat/completions", manifest: Manifest = SIMULATED) -> ValidBody:
    return APIS[endpoint].validate(json_limits.decode(json.dumps(body).encode()), manifest, None)


def refused(body: dict[str, Any], endpoint: Endpoint = "chat/completions", **options: Any) -> HeadraceError:
    with pytest.raises(HeadraceError) as caught:
        check(body, endpoint, **options)
    assert caught.value.status == 400
    assert TABLE[caught.value.code].type == "invalid_request_error"
    return caught.value


# Numbers ---------------------------------------------------------------------------------------------------


def sent(numbers: str, endpoint: Endpoint = "chat/completions", manifest: Manifest = REAL) -> ValidBody:
    """The body as a caller writes it: ``numbers`` are its last fields."""
    start = {
        "chat/completions": '"messages":[{"role":"user","content":"hi"}]',
        "completions": '"prompt":"hi"',
        "responses": '"input":"hi"',
        "messages": '"max_tokens":4096,"messages":[{"role":"user","content":"hi"}]',
        "embeddings": '"input":"hi"',
    }[endpoint]
    return APIS[endpoint].validate(json_limits.decode(f'{{"model":"m",{start},{numbers}}}'.encode()), manifest, None)


@pytest.mark.parametrize(
    ("numbers", "name", "value"),
    [
        ('"n":1.0', "n", 1),
        ('"seed":42.0', "seed", 42),
        ('"seed":-0.0', "seed", 0),
        ('"seed":9e18', "seed", 9 * 10**18),
        ('"top_k":40.0', "top_k", 40),
        ('"logprobs":true,"top_logprobs":2.0', "top_logprobs", 2),
        ('"stop_token_ids":[2.0,3e0]', "stop_token_ids", [2, 3]),
        ('"min_tokens":1e0', "min_tokens", 1),
    ],
)
def test_d23_an_integer_is_a_number_without_a_fraction(numbers: str, name: str, value: object) -> None:
    found = sent(numbers).fields[name]
    assert found == value and repr(found) == repr(value)


@pytest.mark.parametrize("endpoint", ["chat/completions", "completions", "messages"])
@pytest.mark.parametrize("written", ["16.0", "1.6e1", "16"])
def test_d23_limits_are_whole_numbers_in_every_api(endpoint: Endpoint, written: str) -> None:
    assert sent(f'"max_tokens":{written}', endpoint).max_output_tokens == 16


def test_d23_numbers_of_other_fields() -> None:
    assert sent('"max_output_tokens":16.0', "responses").max_output_tokens == 16
    assert sent('"dimensions":8.0', "embeddings").fields["dimensions"] == 8
    thinking = sent('"thinking":{"type":"enabled","budget_tokens":2048.0}', "messages").fields["thinking"]
    assert repr(thinking["budget_tokens"]) == "2048"
    assert repr(sent('"prompt":[1.0,2e0]', "completions").fields["prompt"]) == "[1, 2]"
    assert repr(sent('"prompt":[[1.0],[2]]', "completions").fields["prompt"]) == "[[1], [2]]"
    kept = sent('"tools":[{"type":"function","function":{"name":"f","parameters":{"properties":{"a":{"const":1.0}}}}}]')
    assert repr(kept.fields["tools"][0]["function"]["parameters"]["properties"]["a"]["const"]) == "1.0"


@pytest.mark.parametrize(
    "numbers", ['"max_tokens":2.5', '"n":1.5', '"seed":1e30', '"max_tokens":1e12', '"max_tokens":"5"', '"n":true']
)
def test_d23_what_is_no_integer_stays_refused(numbers: str) -> None:
    with pytest.raises(HeadraceError) as caught:
        sent(numbers)
    assert caught.value.param == numbers.split('"')[1]


@pytest.mark.parametrize("endpoint", ["chat/completions", "completions", "responses", "messages"])
@pytest.mark.parametrize("numbers", ['"temperature":1e-6', '"temperature":1e-9', '"top_p":0', '"top_p":0.0'])
def test_d23_what_surely_means_greedy_is_greedy(endpoint: Endpoint, numbers: str) -> None:
    fields = sent(numbers, endpoint).fields
    assert fields["temperature"] == 0 and "top_p" not in fields


def test_e02_a_prompt_may_be_scored_without_output() -> None:
    valid = sent('"max_tokens":0,"echo":true,"logprobs":1', "completions")
    assert valid.max_output_tokens == 0
    assert output_limit(COMPLETIONS, REAL, TenantLimits(), [4095], valid) == 0
    with pytest.raises(HeadraceError, match="at least one must be left"):
        output_limit(COMPLETIONS, REAL, TenantLimits(), [4096], valid)
    assert refused(TEXT | {"max_tokens": 0}, "completions").param == "max_tokens"
    assert refused(BASE | {"max_tokens": 0}).param == "max_tokens"


# JSON ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lone", ["\\ud83d", "\\ude00", "\\ud83dx", "\\ud83d\\ud83d", "\\ud83d\\n"])
@pytest.mark.parametrize(
    "body",
    [
        '{"model":"m","messages":[{"role":"user","content":"%s"}]}',
        '{"model":"m","messages":[{"role":"user","content":[{"type":"text","text":"%s"}]}]}',
        '{"model":"m","messages":[{"role":"user","content":"x"}],"stop":"%s"}',
        '{"model":"m","messages":[{"role":"user","content":"x"}],"tools":[{"function":{"name":"%s"}}]}',
        '{"model":"m","prompt":"%s"}',
        '{"model":"m","%s":1}',
    ],
)
def test_c06_a_lone_surrogate_is_refused(lone: str, body: str) -> None:
    with pytest.raises(HeadraceError, match="not valid JSON") as caught:
        json_limits.decode((body % lone).encode())
    assert caught.value.code == "invalid_json"


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "it is empty"),
        (b" \r\n", "it is empty"),
        (b'{"a":"x\\ud800"}', r"\\ud800 is half of a surrogate pair \(byte 7\)"),
        (b'{"a":"\\\\ud800","b":"\\uDFFF"}', r"\\uDFFF is half of a surrogate pair \(byte 20\)"),
        (b'{"a":"\\ud83d\\ude00\\ud83d"}', r"\\ud83d is half of a surrogate pair \(byte 18\)"),
        (b'{"a":"\xed\xa0\x80"}', r"not UTF-8 \(byte 6\)"),
    ],
)
def test_e03_what_is_no_text_is_named_with_its_place(data: bytes, words: str) -> None:
    with pytest.raises(HeadraceError, match=words):
        json_limits.decode(data)


def test_c06_a_pair_is_a_character() -> None:
    body = json_limits.decode(b'{"model":"m","prompt":"\\ud83d\\ude00"}')
    assert body["prompt"] == "😀"


@pytest.mark.parametrize(
    "data",
    [b"", b"{bad", b"[1,]", b'{"a":NaN}', b'{"a":Infinity}', b'{"a":1e999}', b'"\xff"', b'{"a":1}x', b"]]]]", b'{"'],
)
def test_what_is_not_json_is_refused(data: bytes) -> None:
    with pytest.raises(HeadraceError) as caught:
        json_limits.decode(data)
    assert caught.value.code == "invalid_json"


@pytest.mark.parametrize("data", [b"[]", b"1", b"null", b'"x"'])
def test_json_that_is_no_object_is_refused(data: bytes) -> None:
    with pytest.raises(HeadraceError, match="JSON object"):
        json_limits.decode(data)


@pytest.mark.parametrize(
    ("data", "deep"),
    [
        (b"[" * 100_000, True),
        (b"[" * 100_000 + b"]" * 100_000, True),
        (b'{"a":' * 65 + b"1" + b"}" * 65, True),
        (b'{"a":[' * 33 + b"]}" * 33, True),
        (b'{"x":"' + b"[" * 1000 + b'"}', False),
        (b'{"x":"\\\\","y":"\\"[[' + b"[{" * 1000 + b'"}', False),
        (b'{"a":' * 64 + b"1" + b"}" * 64, False),
        (b'{"a":[' + b"[]," * 1000 + b"1]}", False),
    ],
)
def test_c13_nesting_is_bounded_and_brackets_in_text_do_not_count(data: bytes, deep: bool) -> None:
    if deep:
        with pytest.raises(HeadraceError, match="nested deeper"):
            json_limits.decode(data)
    else:
        assert json_limits.decode(data)


@pytest.mark.parametrize(
    "data",
    [
        b'{"x":[' + b"[]," * 300_000 + b"1]}",
        b'{"x":[' + b'"[",[],' * 300_000 + b"1]}",
        b'{"x":' + b'{"a":1},' * 300_000,
    ],
)
def test_the_number_of_values_is_bounded(data: bytes) -> None:
    with pytest.raises(HeadraceError, match="The body holds"):
        json_limits.decode(data)


def test_many_plain_texts_and_numbers_are_fine() -> None:
    assert json_limits.decode(b'{"x":[' + b'"a","",1,' * 100_000 + b"1]}")
    assert json_limits.decode(b'{"x":["' + b"[{" * 300_000 + b'"]}')
    assert json_limits.decode(b'{"x":[' + b'"[",' * 300_000 + b"1]}")


@pytest.mark.parametrize("depth", [1000, 2000])
@pytest.mark.parametrize("place", ["x", "metadata", "tools", "response_format"])
def test_c13_nesting_is_refused_wherever_it_stands(depth: int, place: str) -> None:
    deep = '{"a":' * depth + "1" + "}" * depth
    value = {
        "tools": f'[{{"type":"function","function":{{"name":"f","parameters":{deep}}}}}]',
        "response_format": f'{{"type":"json_schema","json_schema":{{"name":"s","schema":{deep}}}}}',
    }.get(place, deep)
    with pytest.raises(HeadraceError, match="nested deeper"):
        json_limits.decode(f'{{"model":"m","prompt":"x","{place}":{value}}}'.encode())


def test_c13_fifty_levels_work() -> None:
    schema: dict[str, Any] = {}
    for _ in range(45):
        schema = {"a": schema}
    tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
    assert check(BASE | {"tools": [tool]}).fields["tools"] == [tool]


# Values ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("field", "value", "param"),
    [
        ("max_tokens", 0, "max_tokens"),
        ("max_tokens", -1, "max_tokens"),
        ("max_completion_tokens", 0, "max_completion_tokens"),
        ("max_completion_tokens", -1, "max_completion_tokens"),
        ("max_completion_tokens", "5", "max_completion_tokens"),
        ("max_completion_tokens", 2.5, "max_completion_tokens"),
        ("n", 0, "n"),
        ("n", 1000, "n"),
        ("temperature", -0.1, "temperature"),
        ("temperature", 2.1, "temperature"),
        ("temperature", "1", "temperature"),
        ("temperature", True, "temperature"),
        ("top_p", 1.1, "top_p"),
        ("top_p", -1, "top_p"),
        ("top_k", 0.01, "top_k"),
        ("top_k", -2, "top_k"),
        ("seed", 18446744073709551616, "seed"),
        ("seed", 2**63, "seed"),
        ("seed", 1.5, "seed"),
        ("frequency_penalty", 3, "frequency_penalty"),
        ("stream", "true", "stream"),
        ("stop", "", "stop"),
        ("stop", [""], "stop"),
        ("stop", ["a", ""], "stop"),
        ("stop", ["a"] * 5, "stop"),
        ("stop", [1], "stop"),
        ("logit_bias", {"999999999": 5}, "logit_bias"),
        ("logit_bias", {"AI": 1}, "logit_bias"),
        ("logit_bias", {"-1": 1}, "logit_bias"),
        ("logit_bias", {"٣": 1}, "logit_bias"),
        ("logit_bias", {"1": 101}, "logit_bias"),
        ("logit_bias", {"1": "a"}, "logit_bias"),
        ("messages", [], "messages"),
        ("messages", "x", "messages"),
        ("messages", None, "messages"),
        ("messages", [1], "messages[0]"),
        ("tool_choice", "required", "tool_choice"),
        ("tool_choice", "banana", "tool_choice"),
        ("tools", [{"type": "function"}], "tools[0].function"),
        ("tools", [{"type": "function", "function": {"name": ""}}], "tools[0].function.name"),
        ("response_format", {"type": "xml"}, "response_format.type"),
        ("response_format", {"type": "json_schema"}, "response_format.json_schema"),
        ("top_logprobs", 3, "top_logprobs"),
        ("stream_options", {"include_usage": "yes"}, "stream_options.include_usage"),
    ],
)
def test_c18_a_value_that_only_an_engine_would_trip_over_is_refused(field: str, value: object, param: str) -> None:
    error = refused(BASE | {field: value})
    assert error.param is not None
    assert error.param.split("[")[0] == param.split("[", maxsplit=1)[0]
    assert error.param.startswith(param)


def test_c33_prompts_times_n_is_bounded() -> None:
    assert check(TEXT | {"prompt": ["a"] * 64, "n": 2}, "completions").choices == 128
    assert refused(TEXT | {"prompt": ["a"] * 65, "n": 2}, "completions").param == "n"


def test_c22_stop_in_every_form() -> None:
    assert check(BASE | {"stop": "x"}).fields["stop"] == "x"
    assert check(BASE | {"stop": ["a"] * 4}).fields["stop"] == ["a"] * 4
    nothings: tuple[Any, ...] = (None, [])
    for nothing in nothings:
        assert "stop" not in check(BASE | {"stop": nothing}).fields


def test_c47_the_smaller_limit_wins_and_no_limit_is_none() -> None:
    assert check(BASE | {"max_completion_tokens": 5}).max_output_tokens == 5
    assert check(BASE | {"max_completion_tokens": 5, "max_tokens": 9}).max_output_tokens == 5
    assert check(BASE | {"max_completion_tokens": 9, "max_tokens": 5}).max_output_tokens == 5
    assert check(BASE).max_output_tokens is None
    assert not {"max_tokens", "max_completion_tokens"} & set(check(BASE | {"max_tokens": 5}).fields)


def test_c45_nulls_and_empties_are_as_if_absent() -> None:
    nulls = dict.fromkeys(
        [
            "max_tokens",
            "temperature",
            "top_p",
            "n",
            "stop",
            "seed",
            "stream",
            "stream_options",
            "tools",
            "tool_choice",
            "response_format",
            "logit_bias",
            "user",
            "logprobs",
            "metadata",
            "foo",
            "simulate",
        ]
    )
    plain = check(BASE)
    assert check(BASE | nulls) == plain
    assert check(BASE | {"logit_bias": {}, "tools": [], "stop": []}) == plain


def test_c45_unknown_and_privileged_fields_do_not_travel() -> None:
    extra = {"store": True, "service_tier": "auto", "parallel_tool_calls": False, "foo": {"a": 1}}
    privileged = {
        "cache_salt": "x",
        "priority": -5,
        "request_id": "y",
        "kv_transfer_params": {"prompt_token_ids": [1]},
        "vllm_xargs": {"a": 1},
        "user": "T2",
        "metadata": {"tenant_id": "T2"},
        "chat_template": "{{ 1 }}",
    }
    assert check(BASE | extra | privileged) == check(BASE)


def test_stream_options_travel_only_with_a_stream() -> None:
    options = {"stream_options": {"include_usage": True}}
    assert "stream_options" not in check(BASE | options).fields
    assert check(BASE | options | {"stream": True}).fields["stream_options"] == {"include_usage": True}


def test_c41_roles() -> None:
    messages = [{"role": role, "content": "x"} for role in ("system", "developer", "user", "system", "user")]
    assert check(BASE | {"messages": messages}).fields["messages"] == messages
    assert refused(BASE | {"messages": [{"role": "banana", "content": "x"}]}).param == "messages[0].role"


CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}


def test_c43_message_shapes_of_a_history() -> None:
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": [{"type": "text", "text": "S"}]},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "name": "Ann"},
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "r"}]},
        {"role": "assistant", "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "c1", "content": "r"},
        {"role": "assistant", "content": ""},
        {"role": "user", "content": "v"},
    ]
    travelling = check(BASE | {"messages": messages}).fields["messages"]
    assert "content" not in travelling[2]
    assert [message["role"] for message in travelling] == [message["role"] for message in messages]


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ({"role": "user"}, "messages[0].content"),
        ({"role": "user", "content": None}, "messages[0].content"),
        ({"role": "user", "content": 1}, "messages[0].content"),
        ({"role": "user", "content": [{"type": "image_url", "image_url": {}}]}, "messages[0].content[0].type"),
        ({"role": "user", "content": [{"type": "text"}]}, "messages[0].content[0]"),
        ({"role": "user", "content": ["x"]}, "messages[0].content[0]"),
        ({"role": "user", "content": [{"type": "input_text", "text": "x"}]}, "messages[0].content[0].type"),
        ({"role": "assistant", "tool_calls": [{"function": CALL["function"]}]}, "messages[0].tool_calls[0].id"),
        (
            {"role": "assistant", "tool_calls": [{"id": "c", "function": {"name": "f"}}]},
            "messages[0].tool_calls[0].function.arguments",
        ),
        (
            {"role": "assistant", "tool_calls": [{"id": "c", "function": {"name": "f", "arguments": "[" * 2000}}]},
            "messages[0].tool_calls[0].function.arguments",
        ),
        ({"content": "x"}, "messages[0].role"),
        ({"role": "user", "content": "x", "tool_calls": [CALL]}, "messages[0].tool_calls"),
        ({"role": "assistant", "tool_calls": [{"function": {}}]}, "messages[0].tool_calls[0].function.name"),
    ],
)
def test_c43_a_bad_message_is_named(message: dict[str, Any], param: str) -> None:
    assert refused(BASE | {"messages": [message]}).param == param


def test_tool_choice_needs_its_function() -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]
    named = {"type": "function", "function": {"name": "g"}}
    assert refused(BASE | {"tools": tools, "tool_choice": named}).param == "tool_choice"
    named["function"] = {"name": "f"}
    assert check(BASE | {"tools": tools, "tool_choice": named}).fields["tool_choice"] == named


# Completions -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompt", "choices"), [("x", 1), (["x", "y"], 2), ([1, 2, 3], 1), ([[1], [2, 3]], 2), (["", "x"], 2)]
)
def test_prompts_in_every_form(prompt: object, choices: int) -> None:
    assert check(TEXT | {"prompt": prompt}, "completions").choices == choices


@pytest.mark.parametrize(
    "prompt", [None, 1, [], [[]], ["x", 1], [1, [2]], [-1], [2**40], [[1], [2**40]], [1.5], [True], {"a": 1}]
)
def test_a_bad_prompt_is_refused(prompt: object) -> None:
    assert str(refused(TEXT | {"prompt": prompt}, "completions").param).startswith("prompt")


# The simulated engine --------------------------------------------------------------------------------------


def test_simulate_is_for_the_simulated_engine_alone() -> None:
    body = BASE | {"simulate": {"tokens": ["a", "b"]}}
    assert check(body).fields["simulate"] == {"tokens": ["a", "b"]}
    assert refused(body, manifest=REAL).param == "simulate"
    assert refused(BASE | {"simulate": {"ttft_ms": -1}}).param == "simulate"


def test_a_scripted_answer_states_its_length() -> None:
    valid = check(BASE | {"simulate": {"tokens": ["a"] * 40}})
    assert output_limit(CHAT, SIMULATED, UNLIMITED, [5], valid) == 40


# The context -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("prompt", "asked"), [(5000, None), (4096, None), (4000, 500)])
def test_c35_what_does_not_fit_is_refused_with_both_numbers(prompt: int, asked: int | None) -> None:
    valid = check(BASE | {"max_tokens": asked})
    with pytest.raises(HeadraceError) as caught:
        output_limit(CHAT, SIMULATED, UNLIMITED, [prompt], valid)
    assert caught.value.code == "context_length_exceeded"
    assert "4096" in caught.value.message
    assert str(prompt) in caught.value.message


def test_the_default_limit_shrinks_to_the_room_that_is_left() -> None:
    assert output_limit(CHAT, SIMULATED, UNLIMITED, [4090], check(BASE)) == 6
    assert output_limit(CHAT, SIMULATED, UNLIMITED, [10], check(BASE)) == 16
    assert output_limit(COMPLETIONS, SIMULATED, UNLIMITED, [10, 4095], check(TEXT, "completions")) == 1
    assert output_limit(CHAT, SIMULATED, UNLIMITED, [4000], check(BASE | {"max_tokens": 96})) == 96


@pytest.mark.parametrize(
    ("limits", "choices", "expected"),
    [
        (TenantLimits(output_tpm=10), 1, 10),
        (TenantLimits(output_tpm=10), 3, 3),
        (TenantLimits(output_tpm=100), 1, 16),
        (TenantLimits(queued_tokens=25), 1, 5),
        (TenantLimits(output_tpm=2), 3, 1),
        (TenantLimits(output_tpm=0), 1, 1),
        (TenantLimits(queued_tokens=20), 1, 1),
    ],
)
def test_d10_the_default_limit_shrinks_to_what_the_tenants_limits_can_ever_hold(
    limits: TenantLimits, choices: int, expected: int
) -> None:
    """One at least: what cannot have that is refused by its limit's name, and not answered with nothing."""
    assert output_limit(CHAT, SIMULATED, limits, [20], check(BASE | {"n": choices})) == expected
    assert output_limit(CHAT, SIMULATED, limits, [20], check(BASE | {"n": choices, "max_tokens": 500})) == 500


def test_d10_a_scripted_answer_is_cut_where_a_limit_ends_it() -> None:
    valid = check(BASE | {"simulate": {"tokens": ["a"] * 40}})
    assert output_limit(CHAT, SIMULATED, TenantLimits(output_tpm=30), [5], valid) == 30


def test_a_prompt_without_tokens_is_refused() -> None:
    with pytest.raises(HeadraceError, match="no tokens"):
        output_limit(COMPLETIONS, SIMULATED, UNLIMITED, [3, 0], check(TEXT, "completions"))


def test_large_and_exact_numbers_survive() -> None:
    body = json_limits.decode(b'{"model":"m","prompt":"x","seed":9223372036854775807,"temperature":0.1}')
    fields = COMPLETIONS.validate(body, SIMULATED, None).fields
    assert msgspec.json.decode(msgspec.json.encode(fields)) == body


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
            "messages[0].content[0].type: 'image_url' is no part that is read here: send text.",
        ),
        ({"messages": [{"role": "root", "content": "x"}]}, "messages[0].role: 'root' is none of its values."),
    ],
)
def test_a_value_that_is_not_taken_is_said_in_words(change: dict[str, Any], said: str) -> None:
    assert refused({"model": "m", "messages": []} | change).message == said
