"""Anthropic's Messages API (``/v1/messages``): what a body may hold, and the chat that vLLM will render of it.

vLLM answers it; nothing is translated on the way. ``chat`` repeats what vLLM 0.32 makes of the messages
(``vllm.entrypoints.anthropic.serving``) for the count of prompt tokens alone, and tests compare both.
"""

import json
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from contracts import errors
from contracts.messages.frames import ErrorData
from gateway.apis import rate_limit_headers
from gateway.apis.api import Api, ValidBody
from gateway.apis.fields import (
    Positive,
    Temperature,
    Text,
    TopK,
    TopP,
    converted,
    leave_out,
    make_greedy,
    refuse,
    refuse_fields,
    travelling,
)
from gateway.apis.response_format import ResponseFormat, named_event
from gateway.apis.sampling import Stops
from gateway.apis.structured_outputs import ComplexityLimit, check_schema, check_tools

BILLING_HEADER = "x-anthropic-billing-header"
"""Claude Code's first system text, which vLLM leaves out."""


_TRACES = (
    "tool_reference",
    "server_tool_use",
    "web_search_tool_result",
    "web_fetch_tool_result",
    "code_execution_tool_result",
    "tool_search_tool_result",
    "container_upload",
)


_STATEFUL = {"thread": "Conversations are not kept: send all of it in 'messages'."}
_NO_THREADS = {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}
"""By which the SDK's tool runner knows that it must send the whole conversation each time."""
_COMPACTION = {"compaction": "Summaries of conversations are not made: ask for one in 'messages'."}
"""Asks for no answer, but for a summary in a form of its own."""


class TextBlock(msgspec.Struct):
    """Text of the system, or of a tool."""

    type: Literal["text"]
    text: str


class ContentBlock(msgspec.Struct):
    """A part of a message."""

    type: Literal["text", "tool_use", "tool_result", "thinking", "redacted_thinking"]
    id: str | None = None
    text: str | None = None
    thinking: str | None = None
    name: str | None = None
    input: dict[str, Any] | None = None
    content: str | list[TextBlock] | None = None
    tool_use_id: str | None = None


class MessageParam(msgspec.Struct):
    """A message of the conversation."""

    role: Literal["user", "assistant", "system"]
    content: str | list[ContentBlock]


class MessagesTool(msgspec.Struct):
    """A tool that the caller runs."""

    name: Text
    input_schema: dict[str, Any]
    type: Literal["custom"] | None = None
    description: str | None = None
    strict: bool | None = None


class MessagesToolChoice(msgspec.Struct):
    """Which tool must or may be called."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(msgspec.Struct):
    """Whether the model thinks first."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Annotated[int, Meta(ge=1024)] | None = None


class OutputFormat(msgspec.Struct):
    """A JSON schema that the answer obeys."""

    schema: dict[str, Any]
    type: Literal["json_schema"] = "json_schema"


class OutputConfig(msgspec.Struct):
    """Effort and form of the answer."""

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: OutputFormat | None = None


class CountBody(msgspec.Struct, kw_only=True):
    """What ``/v1/messages/count_tokens`` takes: a message whose output limit is of no account."""

    model: str
    messages: Annotated[list[MessageParam], Meta(min_length=1)]
    stream: bool | None = None
    system: str | list[TextBlock] | None = None
    stop_sequences: Stops | None = None
    temperature: Temperature | None = None
    top_p: TopP | None = None
    top_k: TopK | None = None
    tools: list[MessagesTool] | None = None
    tool_choice: MessagesToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class MessagesBody(CountBody, kw_only=True):
    """The body of ``/v1/messages``."""

    max_tokens: Positive


def _valid(fields: dict[str, Any], kind: type[CountBody]) -> ValidBody:
    refuse_fields(fields, _STATEFUL if kind is CountBody else _STATEFUL | _COMPACTION)
    if fields.get("inference_geo") not in (None, "global"):
        refuse("inference_geo", "Where it is computed cannot be asked for here.")
    if isinstance(policy := fields.get("billing_policy"), dict) and policy.get("bill_to", "self") != "self":
        refuse("billing_policy", "The tenant of the API key pays, and nobody else.")
    leave_out(fields, "tools", lambda kind: isinstance(kind, str) and kind != "custom")
    if isinstance(messages := fields.get("messages"), list):
        fields["messages"] = list(map(_without_traces, messages))
    body = converted(fields, kind)
    max_tokens = body.max_tokens if isinstance(body, MessagesBody) else None
    make_greedy(body)
    for index, message in enumerate(body.messages):
        if isinstance(message.content, list):
            for number, block in enumerate(message.content):
                _check_block(f"messages[{index}].content[{number}]", message.role, block)
    choice, complexity = body.tool_choice, ComplexityLimit()
    named = choice.name or "" if choice is not None and choice.type == "tool" else None
    mode = choice.type if choice is not None and named is None else None
    tools = [(tool.name, tool.input_schema, tool.strict) for tool in body.tools or ()]
    check_tools("tools[{}].input_schema", tools, mode, named, complexity)
    if body.output_config is not None and body.output_config.format is not None:
        check_schema("output_config.format.schema", body.output_config.format.schema, complexity)
    thinking = body.thinking
    if thinking is not None and thinking.type == "enabled":
        if thinking.budget_tokens is None:
            refuse("thinking.budget_tokens", "Enabled thinking needs a budget of tokens.")
        if max_tokens is not None and thinking.budget_tokens >= max_tokens:
            refuse("thinking.budget_tokens", "The budget must be below 'max_tokens'.")
    return ValidBody(
        fields=travelling(body, {"max_tokens"} if body.tools else {"max_tokens", "tool_choice"}),
        stream=bool(body.stream),
        choices=1,
        max_output_tokens=max_tokens,
    )


def _without_traces(message: Any) -> Any:
    """The message without blocks that hold no text: what a vendor's server did, and references to tools."""
    if not isinstance(message, dict) or not isinstance(message.get("content"), list):
        return message
    blocks = [block for block in message["content"] if not _is_trace(block)]
    return message | {"content": [_with_texts(block) for block in blocks]}


def _with_texts(block: Any) -> Any:
    """The same for the result of a tool."""
    if isinstance(block, dict) and block.get("type") == "tool_result" and isinstance(block.get("content"), list):
        return block | {"content": [part for part in block["content"] if not _is_trace(part)]}
    return block


def _is_trace(block: Any) -> bool:
    return isinstance(block, dict) and block.get("type") in _TRACES


def _check_block(where: str, role: str, block: ContentBlock) -> None:
    needs = {"text": block.text, "thinking": block.thinking, "tool_use": block.name}
    if block.type in needs and needs[block.type] is None:
        refuse(where, f"A block of the type {block.type!r} needs its {'name' if block.name else block.type}.")
    if block.type == "tool_result" and role != "user":
        refuse(where, "Results of tools come in messages with the role 'user'.")
    if role == "system" and block.type != "text":
        refuse(where, "A message with the role 'system' holds text.")


def chat(fields: dict[str, Any], system_first: bool) -> dict[str, Any]:
    """The fields of a chat body that render to the same prompt.

    ``system_first``: the template takes system text only at the start, so that vLLM puts all of it there.
    """
    messages: list[dict[str, Any]] = []
    system = _system_texts(fields.get("system", ""))
    if system_first:
        for message in fields["messages"]:
            if message["role"] == "system":
                system += _system_texts(message["content"])
    if system:
        messages.append({"role": "system", "content": "".join(system)})
    for message in fields["messages"]:
        if message["role"] == "system":
            text = "".join(_system_texts(message["content"]))
            if text and not system_first:
                messages.append({"role": "system", "content": text})
        elif isinstance(message["content"], str):
            messages.append({"role": message["role"], "content": message["content"]})
        else:
            _add_blocks(message["role"], message["content"], messages)
    chat: dict[str, Any] = {"messages": messages}
    if tools := fields.get("tools"):
        chat["tools"] = [_function(tool) for tool in tools]
    if (effort := (fields.get("output_config") or {}).get("effort")) is not None:
        chat["reasoning_effort"] = effort
    if (fields.get("thinking") or {}).get("type") == "disabled":
        chat["reasoning_effort"] = "none"
    if "chat_template_kwargs" in fields:
        chat["chat_template_kwargs"] = fields["chat_template_kwargs"]
    return chat


def _system_texts(content: str | list[dict[str, Any]]) -> list[str]:
    texts = [content] if isinstance(content, str) else [block["text"] for block in content]
    return [text for text in texts if text and not text.startswith(BILLING_HEADER)]


def _add_blocks(role: str, blocks: list[dict[str, Any]], messages: list[dict[str, Any]]) -> None:
    """One message with all that is said in the blocks, after one message for each result of a tool."""
    parts: list[dict[str, Any]] = []
    thoughts: list[str] = []
    calls: list[dict[str, Any]] = []
    for block in blocks:
        if block["type"] == "text" and block["text"]:
            parts.append({"type": "text", "text": block["text"]})
        elif block["type"] == "thinking":
            thoughts.append(block["thinking"])
        elif block["type"] == "tool_use":
            arguments = json.dumps(block.get("input") or {})
            function = {"name": block["name"], "arguments": arguments}
            calls.append({"id": block.get("id"), "type": "function", "function": function})
        elif block["type"] == "tool_result":
            content = block.get("content") or ""
            text = content if isinstance(content, str) else "\n".join(part["text"] for part in content)
            messages.append({"role": "tool", "tool_call_id": block.get("tool_use_id") or "", "content": text})
    message: dict[str, Any] = {"role": role}
    if thoughts:
        message["reasoning"] = "".join(thoughts)
    if calls:
        message["tool_calls"] = calls
    if parts:
        message["content"] = parts
    if role != "user" or parts:
        messages.append(message)


def _function(tool: dict[str, Any]) -> dict[str, Any]:
    function = {
        "name": tool["name"],
        "description": tool.get("description"),
        "parameters": {**tool["input_schema"], "type": tool["input_schema"].get("type", "object")},
        "strict": tool.get("strict"),
    }
    return {"type": "function", "function": function}


class AnthropicErrorDetail(msgspec.Struct):
    """Its kind and its words."""

    type: str
    message: str
    details: dict[str, Any] | None = None


class AnthropicError(msgspec.Struct, kw_only=True):
    """Anthropic's error body."""

    type: Literal["error"]
    error: AnthropicErrorDetail
    request_id: str = ""


_ERROR_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    504: "timeout_error",
    529: "overloaded_error",
}


def _error_body(code: str, message: str, param: str | None, request_id: str) -> dict[str, Any]:
    status = errors.TABLE[code].status
    kind = _ERROR_TYPES.get(status, "api_error" if status >= 500 else "invalid_request_error")
    error: dict[str, Any] = {"type": kind, "message": message}
    if param == "thread":
        error["details"] = _NO_THREADS
    return {"type": "error", "error": error, "request_id": request_id}


def _error_event(error: ErrorData, request_id: str, attempt: int, number: int) -> bytes:
    return named_event(msgspec.json.encode(_error_body(error.code, error.message, error.param, request_id)))


FORMAT = ResponseFormat(
    event=named_event,
    error=AnthropicError,
    error_body=_error_body,
    error_event=_error_event,
    limit_headers=rate_limit_headers.anthropic,
    request_id_header=b"request-id",
)

API = Api(
    endpoint="messages",
    summary="Anthropic: messages",
    body=MessagesBody,
    answer=dict[str, Any],
    check=lambda fields, manifest, vocabulary: _valid(fields, MessagesBody),
    prompt_field="messages",
    chat=chat,
    format=FORMAT,
)
COUNT = msgspec.structs.replace(
    API, body=CountBody, check=lambda fields, manifest, vocabulary: _valid(fields, CountBody)
)
"""The same for the count of tokens, which is no API of its own: it is answered here, and nothing is admitted."""
