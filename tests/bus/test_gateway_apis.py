"""Responses, Messages and embeddings at the edge: what travels, what is counted, how events and errors look.

The answers themselves are vLLM's; here a scripted worker gives them.
"""

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from contracts import subjects
from contracts.messages.admission import AdmissionAnswer, RateLimit, RateLimits
from contracts.messages.frames import EndData, ErrorData
from contracts.messages.records import TenantLimits, TenantRecord
from contracts.messages.request import Reply, RequestEnvelope, SubmitAnswer, SubmitRequest
from tests.support.gateway_world import K1, MODEL, World, admitted, decode, encode, ended, error_of, serve, simulated
from tests.support.polling import until

TEMPLATE = """{% for message in messages %}<{{ message.role }}> {{ message.content }} {% endfor %}
{%- if tools %}{% for tool in tools %}{{ tool.function.name }} {% endfor %}{% endif %}"""
MESSAGE: dict[str, Any] = {"model": MODEL, "max_tokens": 7, "messages": [{"role": "user", "content": "one two"}]}
RESPONSE: dict[str, Any] = {"model": MODEL, "input": "one two three"}
HOSTED = [{"type": "web_search", "name": "w"}]
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
            models = [model["endpoints"] for model in listed if not model["alias_of"]]
            return models == [["embeddings"], list(text)]

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


async def test_tokens_of_a_response_are_counted_as_it_would_be_admitted(world: World) -> None:
    body = RESPONSE | {"instructions": "be brief", "tool_choice": "none", "parallel_tool_calls": None}
    response = await world.post(body, "/v1/responses/input_tokens")
    assert response.json() == {"object": "response.input_tokens", "input_tokens": 7}
    assert world.admissions == []
    await world.post(body, "/v1/responses")
    assert [asked.prompt_tokens for asked in world.admissions] == [7]
    refused = await world.post(body | {"previous_response_id": "resp_1"}, "/v1/responses/input_tokens")
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "previous_response_id")


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
        ("messages", {"tools": HOSTED, "tool_choice": {"type": "tool", "name": "w"}}, "tool_choice"),
        ("messages", {"tool_choice": {"type": "any"}}, "tool_choice"),
        ("messages", {"thinking": {"type": "enabled", "budget_tokens": 1024}}, "thinking.budget_tokens"),
        ("messages", {"stop_sequences": [""]}, "stop_sequences[0]"),
        ("messages", {"system": ""}, None),
        ("responses", {"input": []}, "input"),
        ("responses", {"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type"),
        ("responses", {"input": [{"role": "user"}]}, "input[0]"),
        ("responses", {"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0].type"),
        ("responses", {"tools": HOSTED, "tool_choice": {"type": "web_search"}}, "tool_choice.type"),
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


# Rate limits -------------------------------------------------------------------------------------------------

CHAT_BODY = {"model": MODEL, "max_tokens": 5, "messages": MESSAGE["messages"]}
TOLD = RateLimits(
    requests=RateLimit(limit=60, remaining=7, reset_ms=53_000),
    input_tokens=RateLimit(limit=6000, remaining=5000, reset_ms=10_000),
    output_tokens=RateLimit(limit=1000, remaining=500, reset_ms=30_000),
)


@pytest.mark.parametrize(
    ("path", "body", "remaining"),
    [
        ("/v1/chat/completions", CHAT_BODY, "x-ratelimit-remaining-{}"),
        ("/v1/responses", RESPONSE, "x-ratelimit-remaining-{}"),
        ("/v1/messages", MESSAGE, "anthropic-ratelimit-{}-remaining"),
        ("/v1/embeddings", {"model": "e", "input": "one"}, "x-ratelimit-remaining-{}"),
    ],
)
async def test_e04_every_answer_tells_the_limits(world: World, path: str, body: dict[str, Any], remaining: str) -> None:
    """Admitted, refused by the scheduler, and refused before anybody is asked; in the API's own names."""

    def told(response: httpx.Response) -> tuple[int, int]:
        foreign = "x-ratelimit" if remaining.startswith("anthropic") else "anthropic-ratelimit"
        assert not [name for name in response.headers if name.startswith(foreign)]
        requests, tokens = (int(response.headers[remaining.format(kind)]) for kind in ("requests", "tokens"))
        return requests, tokens

    limits = TenantLimits(rpm=60, input_tpm=6000, output_tpm=1000)
    await world.put_tenant(TenantRecord(name="T1", limits=limits))

    async def limited() -> bool:
        return "x-ratelimit-limit-tokens" in (await world.client.get("/v1/models")).headers

    await until(limited)
    response = await world.post({"model": body["model"], "messages": 3, "input": {}}, path)
    assert response.status_code == 400 and told(response) == (60, 6000), "nothing is known to be used"
    world.decide = lambda request: admitted(limits=TOLD)
    for stream in (True, False) if path != "/v1/embeddings" else (False,):
        response = await world.post(body | {"stream": stream}, path)
        assert response.status_code == 200 and told(response) == (7, 500), response.text
    world.decide = lambda request: AdmissionAnswer(
        admitted=False, code="rate_limit_exceeded", message="No.", retry_after_s=1, limits=TOLD
    )
    response = await world.post(body, path)
    assert response.status_code == 429 and told(response) == (7, 500)
    for wrong, status in ((body | {"model": "nobody"}, 404), ({"model": body["model"], "input": {}}, 400)):
        response = await world.post(wrong, path)
        assert response.status_code == status
        requests, tokens = told(response)
        assert 7 <= requests <= 60 and 500 <= tokens <= 1000, "as the scheduler said, and refilled since"
    unknown = await world.post(body, path, headers={"Authorization": "Bearer hr_nobodys"})
    assert unknown.status_code == 401 and not [name for name in unknown.headers if "ratelimit" in name]


async def test_e04_a_service_on_the_bus_reads_the_same_numbers(world: World) -> None:
    limits = TenantLimits(rpm=60, output_tpm=0)
    await world.put_tenant(TenantRecord(name="T1", limits=limits))

    async def submitted(body: dict[str, Any]) -> SubmitAnswer:
        reply = Reply(subject="reply.v1.T1.inbox", stream="7")
        asked = SubmitRequest(endpoint="chat/completions", reply=reply, body=msgspec.Raw(encode(body)))
        data = await world.bus.request(subjects.submit("T1", MODEL), encode(asked), timeout_s=10)
        return decode(data, type=SubmitAnswer)

    async def limited() -> bool:
        found = (await submitted({"messages": 3})).limits
        return found is not None and found.requests == RateLimit(limit=60, remaining=60, reset_ms=0)

    await until(limited)
    world.decide = lambda request: admitted(limits=TOLD)
    assert (await submitted(CHAT_BODY)).limits == TOLD
