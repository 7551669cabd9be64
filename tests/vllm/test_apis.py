"""Responses, Anthropic's Messages and embeddings by the real vLLM: its own answers, through the whole stack."""

import json
import re
from typing import Any

import anthropic
import httpx
import openai
import pytest

from tests.support.stack import Stack
from tests.support.vllm import CITY, MODEL, Direct, counted, post

QUESTION = "What is the capital of France?"
FUNCTION: dict[str, Any] = {"type": "function", "name": "remember_city", "parameters": CITY, "strict": True}
TOOL: dict[str, Any] = {"name": "remember_city", "description": "Keep a city.", "input_schema": CITY}

RESPONSES: dict[str, dict[str, Any]] = {
    "text": {"input": QUESTION},
    "instructions": {"input": QUESTION, "instructions": "Be brief."},
    "messages": {
        "input": [
            {"role": "developer", "content": "D"},
            {"role": "user", "content": [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "ü"}]},
            {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Paris."}]},
            {"role": "system", "content": "S2"},
            {"role": "user", "content": "Sure?"},
        ]
    },
    "tools": {"input": QUESTION, "tools": [FUNCTION]},
    "history": {
        "input": [
            {"role": "user", "content": QUESTION},
            {"type": "reasoning", "id": "rs_1", "summary": [{"type": "summary_text", "text": "Hm."}]},
            {"role": "assistant", "content": "Let me see."},
            {"type": "function_call", "call_id": "c1", "name": "remember_city", "arguments": '{"city": "Paris"}'},
            {"type": "function_call", "call_id": "c2", "name": "remember_city", "arguments": '{"city": "Lyon"}'},
            {"type": "function_call_output", "call_id": "c1", "output": "kept"},
            {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "kept"}]},
            {"role": "user", "content": "Sure?"},
        ],
        "tools": [FUNCTION],
    },
}
MESSAGES: dict[str, dict[str, Any]] = {
    "text": {"messages": [{"role": "user", "content": QUESTION}]},
    "system": {"messages": [{"role": "user", "content": QUESTION}], "system": "Be brief."},
    "blocks": {
        "system": [{"type": "text", "text": "x-anthropic-billing-header: 1"}, {"type": "text", "text": "S"}],
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "ü"}]},
            {"role": "assistant", "content": [{"type": "text", "text": "Paris."}]},
            {"role": "system", "content": "S2"},
            {"role": "user", "content": "Sure?"},
        ],
    },
    "tools": {"messages": [{"role": "user", "content": QUESTION}], "tools": [TOOL]},
    "history": {
        "messages": [
            {"role": "user", "content": QUESTION},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "Hm.", "signature": "s"},
                    {"type": "text", "text": "Let me see."},
                    {"type": "tool_use", "id": "c1", "name": "remember_city", "input": {"city": "Paris", "a": "ü"}},
                    {"type": "tool_use", "id": "c2", "name": "remember_city", "input": {}},
                ],
            },
            {
                "role": "user",
                "content": [
                    {"type": "tool_result", "tool_use_id": "c1", "content": "kept"},
                    {"type": "tool_result", "tool_use_id": "c2", "content": [{"type": "text", "text": "kept"}]},
                    {"type": "text", "text": "Sure?"},
                ],
            },
        ],
        "tools": [TOOL],
        "thinking": {"type": "disabled"},
    },
}


def claude(stack: Stack, key: str | None = None, **options: Any) -> anthropic.Anthropic:
    """The official SDK; httpx2 is what its third generation is built on."""
    return anthropic.Anthropic(base_url=stack.run.url, api_key=key or stack.run.key, **({"max_retries": 0} | options))


def events(client: httpx.Client, path: str, body: dict[str, Any]) -> str:
    """The whole stream as it came."""
    with client.stream("POST", path, json=body, timeout=120) as response:
        assert response.status_code == 200, response.read()
        assert response.headers["content-type"].startswith("text/event-stream")
        return response.read().decode()


def masked(text: str) -> str:
    """Without what differs from request to request: ids, times, and what the prefix cache held. And without the state
    of an item: one that was cut is ``incomplete`` here (test_cut_calls), as OpenAI has it, and complete for vLLM.
    """
    text = re.sub(r'"status":"\w+","type":"(message|function_call)"', r'"type":"\1"', text)
    text = re.sub(r'"(id|item_id|call_id)":"[^"]*"', r'"\1":"..."', text)
    return re.sub(r'"(created_at|cached_tokens|cache\w*_tokens|input_tokens|sequence_number)":\d+', r'"\1":0', text)


def story(stream: str) -> list[tuple[str, str]]:
    """Name and data of each event. Pieces of a text are joined: how many tokens come at once is a matter of load."""
    told: list[tuple[str, str]] = []
    blocks = stream.split("\n\n")
    assert blocks.pop() == ""
    for block in blocks:
        event = re.fullmatch(r"event: (\S+)\ndata: (\{.*\})", block)
        assert event, block
        name, data = event[1], json.loads(event[2])
        assert data["type"] == name
        piece = data.get("delta")
        if isinstance(piece, dict):
            key = next((key for key in ("text", "partial_json", "thinking") if key in piece), "")
            text, piece = piece.get(key), {**piece, key: ""}
        else:
            text, piece = piece, ""
        if isinstance(text, str) and told and told[-1][0] == f"{name} {masked(json.dumps(piece))}":
            told[-1] = (told[-1][0], told[-1][1] + text)
        elif isinstance(text, str):
            told.append((f"{name} {masked(json.dumps(piece))}", text))
        else:
            told.append((name, masked(json.dumps(data, separators=(",", ":")))))
    return told


# Responses -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", list(RESPONSES))
def test_a_response_is_vllms_own_event_for_event(vllm_stack: Stack, direct: Direct, kind: str) -> None:
    body = {"model": MODEL, "temperature": 0, "max_output_tokens": 8, **RESPONSES[kind]}
    with vllm_stack.client() as ours, direct.client() as theirs:
        answer, alone = (client.post("/v1/responses", json=body, timeout=120).json() for client in (ours, theirs))
        assert answer["usage"]["input_tokens"] == alone["usage"]["input_tokens"], answer
        assert masked(json.dumps(answer, separators=(",", ":"))) == masked(json.dumps(alone, separators=(",", ":")))
        streamed = body | {"stream": True}
        assert story(events(ours, "/v1/responses", streamed)) == story(events(theirs, "/v1/responses", streamed))
    assert counted(vllm_stack, body, "/v1/responses", "max_output_tokens") == alone["usage"]["input_tokens"]


def test_the_openai_sdk_reads_responses(vllm_stack: Stack) -> None:
    with vllm_stack.sdk() as client:
        whole = client.responses.create(model=MODEL, input=QUESTION, temperature=0, store=True)
        assert "Paris" in whole.output_text and whole.status == "completed"
        with client.responses.stream(model=MODEL, input=QUESTION, temperature=0) as stream:
            kinds = [event.type for event in stream]
            assert stream.get_final_response().output_text == whole.output_text
        assert kinds[0] == "response.created" and kinds[-1] == "response.completed"
        create: Any = client.responses.create
        called = create(
            model=MODEL,
            input=QUESTION,
            temperature=0,
            tools=[FUNCTION],
            tool_choice={"type": "function", "name": "remember_city"},
        )
        (call,) = [item for item in called.output if item.type == "function_call"]
        assert set(json.loads(call.arguments)) == {"city", "people"}
        form: Any = {"format": {"type": "json_schema", "name": "city", "schema": CITY, "strict": True}}
        structured = client.responses.create(model=MODEL, input=QUESTION, text=form, max_output_tokens=200)
        assert set(json.loads(structured.output_text)) == {"city", "people"}


@pytest.mark.parametrize("name", ["background", "previous_response_id", "conversation", "prompt"])
def test_what_needs_a_memory_is_refused_by_name(vllm_stack: Stack, name: str) -> None:
    with vllm_stack.client() as client:
        value: Any = True if name == "background" else {"id": "x"} if name == "prompt" else "resp_1"
        response = client.post("/v1/responses", json={"model": MODEL, "input": "x", name: value})
    assert (response.status_code, response.json()["error"]["param"]) == (400, name)


def test_a_schema_that_cannot_be_kept_is_the_callers_fault_everywhere(vllm_stack: Stack) -> None:
    wrong = {"type": "no-such-type"}
    response = {"input": "x", "text": {"format": {"type": "json_schema", "name": "w", "schema": wrong}}}
    message = {
        "messages": [{"role": "user", "content": "x"}],
        "max_tokens": 5,
        "output_config": {"format": {"type": "json_schema", "schema": wrong}},
    }
    with vllm_stack.client() as client:
        for path, body in (("/v1/responses", response), ("/v1/messages", message)):
            for stream in (False, True):
                answer = client.post(path, json=body | {"model": MODEL, "stream": stream})
                assert answer.status_code == 400, answer.text
                assert answer.json()["error"]["type"] == "invalid_request_error"


# Messages --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", list(MESSAGES))
def test_a_message_is_vllms_own_event_for_event(vllm_stack: Stack, direct: Direct, kind: str) -> None:
    body = {"model": MODEL, "temperature": 0, "max_tokens": 8, **MESSAGES[kind]}
    with vllm_stack.client() as ours, direct.client() as theirs:
        answer, alone = (client.post("/v1/messages", json=body, timeout=120).json() for client in (ours, theirs))
        assert answer["content"] == alone["content"], answer
        streamed = body | {"stream": True}
        assert story(events(ours, "/v1/messages", streamed)) == story(events(theirs, "/v1/messages", streamed))
        prompt = {name: value for name, value in body.items() if name not in ("max_tokens", "temperature")}
        count = theirs.post("/v1/messages/count_tokens", json=prompt).json()["input_tokens"]
        assert ours.post("/v1/messages/count_tokens", json=prompt).json() == {"input_tokens": count}
    used = answer["usage"]
    cached = used["cache_read_input_tokens"] + used["cache_creation_input_tokens"]
    assert used["input_tokens"] + cached == count


def test_the_anthropic_sdk_chats_streams_and_calls_tools(vllm_stack: Stack) -> None:
    body: dict[str, Any] = {"model": MODEL, "max_tokens": 100, "messages": [{"role": "user", "content": QUESTION}]}
    greedy: dict[str, Any] = {"extra_body": {"temperature": 0}}
    with claude(vllm_stack) as client:
        whole = client.messages.create(**body, **greedy)
        assert whole.content[0].type == "text" and "Paris" in whole.content[0].text
        assert whole.stop_reason == "end_turn" and whole._request_id
        with client.messages.stream(**body, **greedy) as stream:
            assert "".join(stream.text_stream) == whole.content[0].text
            assert stream.get_final_message().usage.output_tokens == whole.usage.output_tokens
        choice: Any = {"type": "tool", "name": "remember_city"}
        called = client.messages.create(**body, tools=[TOOL], tool_choice=choice)  # type: ignore[list-item]
        assert called.content[0].type == "tool_use" and called.stop_reason == "tool_use"
        assert set(called.content[0].input) == {"city", "people"}
        counted = client.messages.count_tokens(model=MODEL, messages=body["messages"])
        assert counted.input_tokens > 20


def test_the_anthropic_sdk_raises_its_own_errors(vllm_stack: Stack) -> None:
    body: dict[str, Any] = {"model": MODEL, "max_tokens": 5, "messages": [{"role": "user", "content": "x"}]}
    with claude(vllm_stack, "hr_wrong") as client, pytest.raises(anthropic.AuthenticationError) as denied:
        client.messages.create(**body)
    assert denied.value.body["error"]["type"] == "authentication_error"  # type: ignore[index]
    with claude(vllm_stack) as client:
        with pytest.raises(anthropic.NotFoundError) as unknown:
            client.messages.create(**body | {"model": "none"})
        assert unknown.value.body["error"]["type"] == "not_found_error"  # type: ignore[index]
        with pytest.raises(anthropic.BadRequestError, match=r"messages\[0\].role"):
            client.messages.create(**body | {"messages": [{"role": "banana", "content": "x"}]})
        image = {"type": "image", "source": {"type": "url", "url": "http://x/"}}
        with pytest.raises(anthropic.BadRequestError, match=r"messages\[0\].content\[0\].type"):
            client.messages.create(**body | {"messages": [{"role": "user", "content": [image]}]})


# Embeddings ------------------------------------------------------------------------------------------------


def test_embeddings_come_where_the_model_offers_them(vllm_stack: Stack) -> None:
    with vllm_stack.sdk() as client:
        two = client.embeddings.create(model="embedder", input=["Hello world", "Paris"])
        assert [len(it.embedding) for it in two.data] == [576, 576]
        plain = client.embeddings.create(model="embedder", input="Hello world", encoding_format="float")
        assert plain.data[0].embedding == pytest.approx(two.data[0].embedding, abs=0.2)
        assert two.usage.prompt_tokens == plain.usage.prompt_tokens + 1
        calls: list[tuple[str, Any]] = [(MODEL, client.embeddings.create), ("embedder", client.completions.create)]
        for model, call in calls:
            with pytest.raises(openai.BadRequestError) as refused:
                call(model=model, **{"input" if model == MODEL else "prompt": "x"})
            assert refused.value.param == "model"
        with pytest.raises(openai.BadRequestError) as long:
            client.embeddings.create(model="embedder", input="word " * 9000)
        assert (long.value.code, long.value.param) == ("context_length_exceeded", "input")
    ids = post(vllm_stack, "/v1/embeddings", model="embedder", input=[[1, 2, 3], [4]], encoding_format="base64")
    assert ids["usage"]["prompt_tokens"] == 4
