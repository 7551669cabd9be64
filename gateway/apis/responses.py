"""OpenAI's Responses API (``/v1/responses``): what a body may hold, and the chat that vLLM will render of it.

vLLM answers it; nothing is translated on the way. ``chat`` repeats what vLLM 0.32 makes of the input
(``vllm.entrypoints.openai.responses.utils``) for the count of prompt tokens alone, and tests compare both.
Nothing is kept between requests: what asks for that is refused, but for ``store``, which clients send by habit.
"""

import json
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from contracts.messages.frames import ErrorData
from contracts.messages.records import Manifest
from gateway.apis.api import Api, ValidBody
from gateway.apis.fields import Positive, Text, check_parts, converted, leave_out, refuse, refuse_fields, travelling
from gateway.apis.json_limits import check_text
from gateway.apis.response_format import Error, ResponseFormat, named_event, openai_error, openai_error_body
from gateway.apis.sampling import Effort, LogprobCount, Sampling
from gateway.apis.structured_outputs import ComplexityLimit, check_schema, check_tools

_NOT_OFFERED = {
    "background": "Answers in the background are not offered.",
    "previous_response_id": "Responses are not kept: send the conversation in 'input'.",
    "conversation": "Conversations are not kept: send them in 'input'.",
    "moderation": "Moderation is not offered.",
    "prompt": "Stored prompts are not offered: send 'instructions' and 'input'.",
}


_HOSTED_CALLS = (
    "web_search_call",
    "file_search_call",
    "code_interpreter_call",
    "image_generation_call",
    "mcp_list_tools",
)
"""Items of a history that hold no text of the conversation: what a vendor's server did meanwhile."""


class ResponsesPart(msgspec.Struct):
    """A part of a message; images are not taken."""

    type: Literal["input_text", "output_text", "text", "refusal", "reasoning_text", "summary_text"]
    text: str | None = None
    refusal: str | None = None


class InputItem(msgspec.Struct):
    """A message, a call, its result, or reasoning."""

    type: Literal["message", "function_call", "function_call_output", "reasoning"] = "message"
    role: Literal["system", "developer", "user", "assistant"] | None = None
    content: str | list[ResponsesPart] | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    output: str | list[ResponsesPart] | None = None
    summary: list[ResponsesPart] | None = None
    encrypted_content: str | None = None


class ResponsesTool(msgspec.Struct):
    """A function that the model may call."""

    type: Literal["function"]
    name: Text
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ResponsesToolChoice(msgspec.Struct):
    """A call of one function."""

    name: Text
    type: Literal["function"] = "function"


class Reasoning(msgspec.Struct):
    """How long the model thinks."""

    effort: Effort | None = None


class TextFormat(msgspec.Struct):
    """The answer's form."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    schema: dict[str, Any] | None = None


class TextConfig(msgspec.Struct):
    """The answer's form."""

    format: TextFormat | None = None


class ResponsesBody(Sampling, kw_only=True):
    """The body of ``/v1/responses``."""

    input: str | Annotated[list[InputItem], Meta(min_length=1)]
    instructions: str | None = None
    max_output_tokens: Positive | None = None
    include: list[Literal["message.output_text.logprobs", "reasoning.encrypted_content"]] | None = None
    top_logprobs: LogprobCount | None = None
    text: TextConfig | None = None
    tools: list[ResponsesTool] | None = None
    tool_choice: Literal["none", "auto", "required"] | ResponsesToolChoice | None = None
    parallel_tool_calls: bool | None = None
    reasoning: Reasoning | None = None
    include_reasoning: bool | None = None
    metadata: Annotated[dict[str, str], Meta(max_length=16)] | None = None
    chat_template_kwargs: dict[str, Any] | None = None


def _check(fields: dict[str, Any], manifest: Manifest, vocabulary: int) -> ValidBody:
    refuse_fields(fields, _NOT_OFFERED)
    leave_out(fields, "tools", lambda kind: isinstance(kind, str) and kind != "function")
    leave_out(fields, "input", lambda kind: isinstance(kind, str) and kind in _HOSTED_CALLS)
    if isinstance(items := fields.get("input"), list):
        fields["input"] = list(map(_as_function_call, items))
    body, complexity = converted(fields, ResponsesBody), ComplexityLimit()
    body.check(vocabulary, complexity)
    if isinstance(body.input, list):
        for index, item in enumerate(body.input):
            _check_item(f"input[{index}]", item)
    form = body.text.format if body.text is not None else None
    if form is not None and form.type == "json_schema":
        if form.schema is None or form.name is None:
            refuse("text.format", "The type 'json_schema' needs a 'name' and a 'schema'.")
        check_schema("text.format.schema", form.schema, complexity)
    choice = body.tool_choice
    mode, named = (None, choice.name) if isinstance(choice, ResponsesToolChoice) else (choice, None)
    tools = [(tool.name, tool.parameters, tool.strict) for tool in body.tools or ()]
    check_tools("tools[{}].parameters", tools, mode, named, complexity)
    left_out = {"max_output_tokens"} if body.tools else {"max_output_tokens", "tool_choice", "parallel_tool_calls"}
    return ValidBody(
        fields=travelling(body, left_out), stream=bool(body.stream), choices=1, max_output_tokens=body.max_output_tokens
    )


def _as_function_call(item: Any) -> Any:
    """A free-form tool's call or output as vLLM writes those: a function of one text, ``input``."""
    kind = item.get("type") if isinstance(item, dict) else None
    if kind == "custom_tool_call_output":
        return item | {"type": "function_call_output"}
    if kind == "custom_tool_call" and isinstance(item.get("input"), str):
        arguments = json.dumps({"input": item["input"]}, ensure_ascii=False)
        return item | {"type": "function_call", "arguments": arguments}
    return item


def _check_item(where: str, item: InputItem) -> None:
    if item.type == "message" and (item.role is None or item.content is None):
        refuse(where, "A message needs a 'role' and 'content'.")
    if item.type == "function_call" and None in (item.call_id, item.name, item.arguments):
        refuse(where, "A function call needs 'call_id', 'name' and 'arguments'.")
    if item.arguments is not None:
        check_text(f"{where}.arguments", item.arguments)
    if item.type == "function_call_output" and None in (item.call_id, item.output):
        refuse(where, "A function call's output needs 'call_id' and 'output'.")
    if item.encrypted_content:
        refuse(f"{where}.encrypted_content", "Encrypted reasoning is not offered.")
    for name in ("content", "output", "summary"):
        check_parts(f"{where}.{name}", getattr(item, name))


def chat(fields: dict[str, Any], system_first: bool) -> dict[str, Any]:
    """The fields of a chat body that render to the same prompt.

    An item's ``status`` does not travel, so that vLLM never continues an unfinished message.
    """
    messages: list[dict[str, Any]] = []
    if instructions := fields.get("instructions"):
        messages.append({"role": "system", "content": instructions})
    if isinstance(fields["input"], str):
        messages.append({"role": "user", "content": fields["input"]})
    else:
        for item in fields["input"]:
            _add_item(item, messages)
    chat: dict[str, Any] = {"messages": messages}
    if tools := fields.get("tools"):
        chat["tools"] = [{"type": "function", "function": tool} for tool in tools]
    if (effort := (fields.get("reasoning") or {}).get("effort")) is not None:
        chat["reasoning_effort"] = effort
    if "chat_template_kwargs" in fields:
        chat["chat_template_kwargs"] = fields["chat_template_kwargs"]
    return chat


def _add_item(item: dict[str, Any], messages: list[dict[str, Any]]) -> None:
    """A message of its own, or the part of the assistant's last message that it lacks."""
    last = messages[-1] if messages and messages[-1]["role"] == "assistant" else None
    kind = item.get("type", "message")
    if kind == "function_call_output":
        messages.append({"role": "tool", "tool_call_id": item["call_id"], "content": item["output"]})
    elif kind == "function_call":
        function = {"name": item["name"], "arguments": item["arguments"]}
        call = {"id": item["call_id"], "type": "function", "function": function}
        if last is not None:
            last.setdefault("tool_calls", []).append(call)
        else:
            messages.append({"role": "assistant", "tool_calls": [call]})
    elif kind == "reasoning":
        texts = item.get("content") or item.get("summary") or [{"text": ""}]
        _add_to_assistant(last, "reasoning", texts if isinstance(texts, str) else texts[0]["text"], messages)
    elif item["role"] == "assistant" and item["content"]:
        _add_to_assistant(last, "content", _first_text(item["content"]), messages)
    else:
        messages.append({"role": item["role"], "content": item["content"]})


def _add_to_assistant(last: dict[str, Any] | None, name: str, text: str, messages: list[dict[str, Any]]) -> None:
    if last is not None and last.get(name) is None:
        last[name] = text
    else:
        messages.append({"role": "assistant", name: text})


def _first_text(content: str | list[dict[str, Any]]) -> str:
    """vLLM takes no more than the first part of what an assistant wrote."""
    if isinstance(content, str):
        return content
    text: str = content[0].get("text") or ""
    return text


def _error_event(error: ErrorData, request_id: str, attempt: int, number: int) -> bytes:
    """OpenAI's event, and the ``error`` object by which its SDKs raise: they only pass the event on."""
    event = {
        "type": "error",
        "code": error.code,
        "message": error.message,
        "param": error.param,
        "sequence_number": number,
        **openai_error(error, request_id, attempt),
    }
    return named_event(msgspec.json.encode(event))


API = Api(
    endpoint="responses",
    summary="OpenAI: responses, without stored state",
    body=ResponsesBody,
    answer=dict[str, Any],
    check=_check,
    prompt_field="input",
    chat=chat,
    limit_field="max_output_tokens",
    format=ResponseFormat(event=named_event, error=Error, error_body=openai_error_body, error_event=_error_event),
)
