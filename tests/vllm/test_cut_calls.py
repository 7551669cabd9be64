"""A tool call that the limit or a stop text cuts: a whole answer shows what its stream shows, by every API."""

import json
from pathlib import Path
from typing import Any

import anthropic
import pytest

from tests.support.polling import wait_until
from tests.support.stack import Stack
from tests.support.vllm import MODEL

ASK = "How is the weather in Paris, and how in Rome?"
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 40}, "why": {"type": "string", "maxLength": 40}},
    "required": ["city", "why"],
    "additionalProperties": False,
}
CHAT: dict[str, Any] = {
    "model": MODEL,
    "temperature": 0,
    "messages": [{"role": "user", "content": ASK}],
    "tools": [{"type": "function", "function": {"name": "f", "parameters": SCHEMA}}],
}
RESPONSES: dict[str, Any] = {
    "model": MODEL,
    "temperature": 0,
    "input": ASK,
    "tools": [{"type": "function", "name": "f", "parameters": SCHEMA, "strict": True}],
}
MESSAGES: dict[str, Any] = {
    "model": MODEL,
    "messages": [{"role": "user", "content": ASK}],
    "tools": [{"name": "f", "input_schema": SCHEMA}],
}
LIMITS = [1, 4, 8, 16, 24]
"""Tokens: in the mark before a call, in its name, in its first argument, in its second."""


def is_json(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "f"}}])
def test_d08_a_chats_cut_call(vllm_stack: Stack, choice: Any) -> None:
    with vllm_stack.sdk() as client:
        for limit in LIMITS:
            whole = client.chat.completions.create(**CHAT, tool_choice=choice, max_tokens=limit)
            message = whole.choices[0].message
            calls = [
                (it.function.name, it.function.arguments) for it in message.tool_calls or () if it.type == "function"
            ]
            text, streamed, ends = "", dict[int, tuple[str, str]](), []
            for chunk in client.chat.completions.create(**CHAT, tool_choice=choice, max_tokens=limit, stream=True):
                text += chunk.choices[0].delta.content or ""
                ends += [it for it in [chunk.choices[0].finish_reason] if it]
                for piece in chunk.choices[0].delta.tool_calls or ():
                    assert piece.function
                    name, arguments = streamed.get(piece.index, ("", ""))
                    streamed[piece.index] = (
                        name + (piece.function.name or ""),
                        arguments + (piece.function.arguments or ""),
                    )
            assert (message.content or "", calls) == (text, list(streamed.values())), limit
            assert "<" not in text
            assert whole.choices[0].finish_reason == "length" and ends == ["length"]
            assert whole.usage and whole.usage.completion_tokens == limit
            assert not any(is_json(arguments) for _, arguments in calls)
    assert calls and calls[0][0] == "f" and '"city"' in calls[0][1]  # of the longest


@pytest.mark.parametrize("choice", ["required", {"type": "function", "name": "f"}])
def test_d08_a_responses_cut_call(vllm_stack: Stack, choice: Any) -> None:
    def shape(items: list[Any]) -> list[Any]:
        return [it.model_dump(include={"type", "name", "arguments", "status", "content"}) for it in items]

    with vllm_stack.sdk() as client:
        for limit in LIMITS:
            body = RESPONSES | {"tool_choice": choice, "max_output_tokens": limit}
            whole = client.responses.create(**body)
            events = list(client.responses.create(**body, stream=True))
            last = events[-1].response
            assert whole.status == last.status == "incomplete"
            assert shape(whole.output) == shape(last.output), limit
            assert shape(whole.output) == shape([it.item for it in events if it.type == "response.output_item.done"])
            assert all(it.type == "function_call" and it.status == "incomplete" for it in whole.output)
            assert whole.usage and whole.usage.output_tokens == limit
    assert whole.output and whole.output[0].type == "function_call" and '"city"' in whole.output[0].arguments


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "f"}])
def test_d08_a_messages_cut_call(vllm_stack: Stack, choice: Any) -> None:
    run = vllm_stack.run
    with anthropic.Anthropic(base_url=run.url, api_key=run.key, max_retries=0) as client:
        for limit in LIMITS:
            body = MESSAGES | {"tool_choice": choice, "max_tokens": limit, "extra_body": {"temperature": 0}}
            whole = client.messages.create(**body)
            with client.messages.stream(**body) as stream:
                streamed = stream.get_final_message()
            assert whole.stop_reason == streamed.stop_reason == "max_tokens"
            assert blocks(whole) == blocks(streamed), limit
            assert "<" not in json.dumps(blocks(whole))
            assert whole.usage.output_tokens == streamed.usage.output_tokens == limit
    assert [it.type for it in whole.content] == ["tool_use"]


def blocks(message: Any) -> list[Any]:
    """Without the empty text that stands for no content in a whole answer."""
    shown = [it.model_dump(include={"type", "text", "name", "input"}) for it in message.content]
    return [it for it in shown if it != {"type": "text", "text": ""}]


def test_d08_a_stop_text_in_a_call(vllm_stack: Stack) -> None:
    with vllm_stack.client() as client:
        body = CHAT | {"tool_choice": "required", "max_tokens": 60, "stop": ['"why']}
        chat = client.post("/v1/chat/completions", json=body).json()["choices"][0]
        assert chat["stop_reason"] == '"why' and not chat["message"]["content"]
        assert '"city"' in chat["message"]["tool_calls"][0]["function"]["arguments"]
        body = MESSAGES | {
            "tool_choice": {"type": "any"},
            "max_tokens": 60,
            "temperature": 0,
            "stop_sequences": ['"why'],
        }
        message = client.post("/v1/messages", json=body).json()
        assert (message["stop_reason"], message["stop_sequence"]) == ("stop_sequence", '"why')
        assert [it["type"] for it in message["content"]] == ["tool_use"]


def test_d08_what_is_cut_is_tried_once(vllm_stack: Stack) -> None:
    with vllm_stack.client() as client:
        body = MESSAGES | {"tool_choice": {"type": "any"}, "max_tokens": 8}
        answer = client.post("/v1/messages", json=body)
    found = wait_until(lambda: explained(vllm_stack, answer.json()["id"]), "the request is booked")
    assert "completed" in found and "attempt 2" not in found.lower()


def explained(stack: Stack, request_id: str) -> str:
    done = stack.cli("explain", request_id)
    return done.stdout if done.returncode == 0 and "completed" in done.stdout else ""


CUT_IN_AN_ARGUMENT = {
    "hermes": 'Well. <tool_call>\n{"name": "f", "arguments": {"city": "Par',
    "pythonic": '[f(city="Par',
    "qwen3_coder": "Well. <tool_call>\n<function=f>\n<parameter=city>\nPar",
    "glm45": "<tool_call>f\n<arg_key>city</arg_key>\n<arg_value>Par",
    "minimax_m2": '<minimax:tool_call>\n<invoke name="f">\n<parameter name="city">Par',
    "granite": '<|tool_call|>[{"name": "f", "arguments": {"city": "Par',
}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of what vLLM imports
@pytest.mark.parametrize("parser", list(CUT_IN_AN_ARGUMENT))
def test_d08_of_every_parser(model_path: Path, parser: str) -> None:
    """Those that read whole answers by another way give the markup as text, or a call that looks whole and is empty."""
    from transformers import AutoTokenizer
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.parser import ParserManager

    from worker.engines.vllm.cut_calls import Choice, reading_pieces

    tokenizer: Any = AutoTokenizer.from_pretrained(model_path)
    kind = ParserManager.get_parser(
        tool_parser_name=parser, enable_auto_tools=True, tool_strict_level="auto", model_name="m", tokenizer=tokenizer
    )
    text = CUT_IN_AN_ARGUMENT[parser]
    ids = tokenizer.encode(text, add_special_tokens=False)
    choice = Choice([1], ids, [(tokenizer.decode([token]), [token]) for token in ids], "length")
    reading: Any = reading_pieces(kind, lambda: {0: choice})
    request = ChatCompletionRequest.model_validate(CHAT | {"tool_choice": "auto"})
    _, content, calls = reading(tokenizer, request.tools).parse(text, request, True, ids)
    assert (content or "").strip() in ("", "Well.")
    assert [(call.name, call.arguments) for call in calls] == [("f", '{"city": "Par')]
