"""Responses, Messages and embeddings at the edge: what travels, what is counted, how events and errors look.

The answers themselves are vLLM's; here a scripted worker gives them.
"""

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from contracts.messages.frames import EndData, ErrorData
from contracts.messages.request import RequestEnvelope
from tests.support.gateway_world import K1, MODEL, World, ended, error_of, serve, simulated
from tests.support.polling import until

TEMPLATE = """{% for message in messages %}<{{ message.role }}> {{ message.content }} {% endfor %}
{%- if tools %}{% for tool in tools %}{{ tool.function.name }} {% endfor %}{% endif %}"""
MESSAGE: dict[str, Any] = {"model": MODEL, "max_tokens": 7, "messages": [{"role": "user", "content": "one two"}]}
RESPONSE: dict[str, Any] = {"model": MODEL, "input": "one two three"}
FORBIDDEN = {"cache_salt": "x", "priority": 1, "request_id": "x", "kv_transfer_params": {}, "vllm_xargs": {"a": 1}}


@pytest.fixture
async def world(nats_url: str, tmp_path: Path) -> AsyncIterator[World]:
    directory = tmp_path / "model"
    directory.mkdir()
    tokenizer = Tokenizer(models.WordLevel({"?": 0, "one": 1}, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "chat_template.jinja").write_text(TEMPLATE)
    text = ("chat/completions", "responses", "messages")
    async with serve(nats_url, tmp_path, hold_s=0.5) as world:
        await world.put_model(simulated(engine="vllm", path=str(directory), endpoints=text))
        await world.put_model(simulated("e", engine="vllm", path=str(directory), endpoints=("embeddings",)))

        async def known() -> bool:
            listed = (await world.client.get("/v1/models")).json()["data"]
            return [model["endpoints"] for model in listed] == [["embeddings"], list(text)]

        await until(known)
        yield world


def anthropic_error(response: Any) -> dict[str, Any]:
    body: dict[str, Any] = response.json()
    assert set(body) == {"type", "error", "request_id"} and body["type"] == "error"
    assert set(body["error"]) == {"type", "message"}
    assert body["request_id"] == response.headers["x-request-id"] == response.headers["request-id"]
    error: dict[str, Any] = body["error"]
    return error


async def test_only_known_fields_travel_and_the_limit_has_the_apis_own_name(world: World) -> None:
    extra = FORBIDDEN | {"metadata": {"user_id": "u"}, "foo": 1, "store": True, "truncation": "auto"}
    await world.post(MESSAGE | extra | {"top_k": None, "tools": []}, "/v1/messages")
    await world.post(RESPONSE | extra | {"metadata": {"a": "b"}, "max_output_tokens": 9}, "/v1/responses")
    await world.post(RESPONSE, "/v1/responses")
    await world.post({"model": "e", "input": ["one two", "three"], "user": "u"} | FORBIDDEN, "/v1/embeddings")
    message, response, bare, embedding = [await world.body_of(envelope) for envelope in world.stored]
    assert message == MESSAGE
    assert response == RESPONSE | {"metadata": {"a": "b"}, "max_output_tokens": 9}
    assert bare == RESPONSE | {"max_output_tokens": 16}
    assert embedding == {"model": "e", "input": ["one two", "three"]}
    asked = [(it.endpoint, it.prompt_tokens, it.max_output_tokens, it.choices) for it in world.admissions]
    assert asked == [("messages", 3, 7, 1), ("responses", 4, 9, 1), ("responses", 4, 16, 1), ("embeddings", 3, 0, 1)]


async def test_tokens_of_a_message_are_counted_without_admission(world: World) -> None:
    body = {name: value for name, value in MESSAGE.items() if name != "max_tokens"} | {"system": "be brief"}
    response = await world.post(body, "/v1/messages/count_tokens")
    assert response.json() == {"input_tokens": 6}
    assert world.admissions == []
    assert (await world.post(body | {"messages": []}, "/v1/messages/count_tokens")).status_code == 400


@pytest.mark.parametrize(
    ("path", "body"), [("/v1/messages", MESSAGE), ("/v1/responses", RESPONSE)], ids=["messages", "responses"]
)
async def test_events_have_their_types_as_names_and_nothing_follows_the_last(
    world: World, path: str, body: dict[str, Any]
) -> None:
    chunks = [{"type": "a.start", "x": {"type": "inner"}}, {"delta": "\n\nü", "type": "b"}, {"type": "c.stop"}]

    async def play(envelope: RequestEnvelope) -> None:
        await world.send(envelope, [("accepted", None), *(("chunk", chunk) for chunk in chunks), ("end", ended())])

    world.play = play
    response = await world.post(body | {"stream": True}, path)
    blocks = response.text.split("\n\n")
    assert blocks.pop() == ""
    assert [block.split("\n")[0] for block in blocks] == ["event: a.start", "event: b", "event: c.stop"]
    assert [json.loads(block.split("\n")[1].removeprefix("data: ")) for block in blocks] == chunks


async def test_a_failure_inside_a_stream_is_the_apis_own_error_event(world: World) -> None:
    async def play(envelope: RequestEnvelope) -> None:
        error = ErrorData(code="worker_lost", message="Gone.")
        await world.send(envelope, [("chunk", {"type": "start"}), ("error", error)])

    world.play = play

    async def last(path: str, body: dict[str, Any]) -> dict[str, Any]:
        response = await world.post(body | {"stream": True}, path)
        assert response.status_code == 200
        name, data = response.text.removesuffix("\n\n").split("\n\n")[-1].split("\n")
        assert name == "event: error"
        event: dict[str, Any] = json.loads(data.removeprefix("data: "))
        assert event["type"] == "error"
        return event

    event = await last("/v1/messages", MESSAGE)
    assert event["error"] == {"type": "api_error", "message": "Gone."}
    assert event["request_id"] == world.stored[0].request_id
    event = await last("/v1/responses", RESPONSE)
    assert (event["code"], event["message"], event["sequence_number"]) == ("worker_lost", "Gone.", 1)
    assert event["error"]["request_id"] == world.stored[1].request_id


async def test_a_cancelled_embedding_is_an_error(world: World) -> None:
    async def play(envelope: RequestEnvelope) -> None:
        await world.send(envelope, [("end", EndData(outcome="cancelled"))])

    world.play = play
    assert error_of(await world.post({"model": "e", "input": "one"}, "/v1/embeddings"))["code"] == "cancelled"


async def test_an_anthropic_key_header_is_as_good_and_errors_have_anthropics_shape(world: World) -> None:
    def headers(**given: str) -> dict[str, str]:
        return {"authorization": "", **{name.replace("_", "-"): value for name, value in given.items()}}

    del world.client.headers["authorization"]
    assert (await world.post(MESSAGE, "/v1/messages", headers={"x-api-key": K1})).status_code == 200
    assert (await world.post(RESPONSE, "/v1/responses", headers={"x-api-key": K1})).status_code == 200
    for wrong in ({}, {"x-api-key": "hr_no"}, {"x-api-key": K1, "authorization": "Bearer hr_no"}):
        response = await world.post(MESSAGE, "/v1/messages", headers=wrong)
        assert response.status_code == 401
        assert anthropic_error(response)["type"] == "authentication_error"
    world.client.headers["authorization"] = f"Bearer {K1}"
    for body, status, kind in (
        (MESSAGE | {"model": "none"}, 404, "not_found_error"),
        (MESSAGE | {"max_tokens": 0}, 400, "invalid_request_error"),
        (MESSAGE | {"max_tokens": 5000}, 400, "invalid_request_error"),
        ({"model": MODEL, "messages": MESSAGE["messages"]}, 400, "invalid_request_error"),
    ):
        response = await world.post(body, "/v1/messages")
        assert response.status_code == status
        assert anthropic_error(response)["type"] == kind
    assert anthropic_error(await world.client.get("/v1/messages"))["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    ("path", "change", "param"),
    [
        ("messages", {"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
        ("messages", {"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "messages[0].content[0].type"),
        ("messages", {"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0]"),
        ("messages", {"tools": [{"type": "web_search_1", "name": "w", "input_schema": {}}]}, "tools[0].type"),
        ("messages", {"tool_choice": {"type": "any"}}, "tool_choice"),
        ("messages", {"thinking": {"type": "enabled", "budget_tokens": 1024}}, "thinking.budget_tokens"),
        ("messages", {"stop_sequences": [""]}, "stop_sequences[0]"),
        ("messages", {"system": ""}, None),
        ("responses", {"input": []}, "input"),
        ("responses", {"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type"),
        ("responses", {"input": [{"role": "user"}]}, "input[0]"),
        ("responses", {"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0].type"),
        ("responses", {"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ("responses", {"tool_choice": {"type": "function", "name": "f"}}, "tool_choice"),
        ("responses", {"text": {"format": {"type": "json_schema"}}}, "text.format"),
        ("responses", {"previous_response_id": "resp_1"}, "previous_response_id"),
        ("responses", {"background": True}, "background"),
        ("responses", {"logit_bias": {"9": 1}}, "logit_bias"),
        ("embeddings", {"model": "e", "input": []}, "input"),
        ("embeddings", {"model": "e", "input": [[]]}, "input[0]"),
        ("embeddings", {"model": "e", "input": ""}, "input"),
        ("embeddings", {"model": "e", "input": ["a"] * 2049}, "input"),
        ("embeddings", {"model": "e", "input": "one " * 4097}, "input"),
        ("embeddings", {"model": MODEL, "input": "x"}, "model"),
    ],
)
async def test_what_only_the_engine_would_trip_over_is_refused(
    world: World, path: str, change: dict[str, Any], param: str | None
) -> None:
    base = {"messages": MESSAGE, "responses": RESPONSE, "embeddings": {}}[path]
    response = await world.post(base | change, f"/v1/{path}")
    if param is None:
        assert response.status_code == 200
        return
    assert response.status_code == 400, response.text
    assert world.admissions == []
    if path == "messages":
        assert anthropic_error(response)["message"].startswith(f"{param}: ")
    else:
        assert error_of(response)["param"] == param
