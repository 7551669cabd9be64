"""OpenAI's chat (``/v1/chat/completions``)."""

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from contracts.messages.records import Manifest
from gateway.apis.api import Api, ValidBody
from gateway.apis.fields import INT_MAX, Positive, Text, check_parts, converted, leave_out, refuse, refuse_fields
from gateway.apis.json_limits import check_text
from gateway.apis.sampling import Completion, Effort, LogprobCount, TextBody, only_offered
from gateway.apis.structured_outputs import ComplexityLimit, check_tools


class ChatPart(msgspec.Struct):
    """A part of a message; images are not taken."""

    type: Literal["text", "refusal"]
    text: str | None = None
    refusal: str | None = None


class FunctionCall(msgspec.Struct):
    """What the assistant called, its arguments as JSON text."""

    name: Text
    arguments: str


class ToolCall(msgspec.Struct):
    """A call in the assistant's message."""

    function: FunctionCall
    id: str
    type: Literal["function"] = "function"


class ChatMessage(msgspec.Struct):
    """A message of the conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | list[ChatPart] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None


class Function(msgspec.Struct):
    """A function that the model may call."""

    name: Text
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ChatTool(msgspec.Struct):
    """A tool; only functions are taken."""

    function: Function
    type: Literal["function"] = "function"


class NamedFunction(msgspec.Struct):
    """Which function must be called."""

    name: Text


class ChatToolChoice(msgspec.Struct):
    """A call of one function."""

    function: NamedFunction
    type: Literal["function"] = "function"


class ChatBody(TextBody, kw_only=True):
    """The body of ``/v1/chat/completions``."""

    messages: Annotated[list[ChatMessage], Meta(min_length=1)]
    max_completion_tokens: Positive | None = None
    logprobs: bool | None = None
    top_logprobs: LogprobCount | None = None
    tools: list[ChatTool] | None = None
    tool_choice: Literal["none", "auto", "required"] | ChatToolChoice | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: Effort | None = None
    include_reasoning: bool | None = None
    thinking_token_budget: Annotated[int, Meta(ge=-1, le=INT_MAX)] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None


def _check(fields: dict[str, Any], manifest: Manifest, vocabulary: int) -> ValidBody:
    fields = only_offered(fields)
    refuse_fields(fields, {"audio": "Answers are text.", "moderation": "Moderation is not offered."})
    if fields.get("modalities", ["text"]) != ["text"]:
        refuse("modalities", "Answers are text.")
    if "web_search_options" in fields:
        refuse("web_search_options", "Nobody searches the web here: offer a function for it in 'tools'.")
    if isinstance(fields.get("function_call"), dict):
        refuse("function_call", "This field is not supported. Send 'tools' and 'tool_choice' instead.")
    leave_out(fields, "tools", lambda kind: isinstance(kind, str) and kind != "function")
    body, complexity = converted(fields, ChatBody), ComplexityLimit()
    for index, message in enumerate(body.messages):
        _check_message(f"messages[{index}]", message)
    if body.top_logprobs and not body.logprobs:
        refuse("top_logprobs", "'top_logprobs' needs 'logprobs': true.")
    if body.continue_final_message and (body.add_generation_prompt is not False or body.messages[-1].content is None):
        refuse("continue_final_message", "This needs content to continue, and 'add_generation_prompt': false.")
    choice = body.tool_choice
    mode, named = (None, choice.function.name) if isinstance(choice, ChatToolChoice) else (choice, None)
    tools = [(tool.function.name, tool.function.parameters, tool.function.strict) for tool in body.tools or ()]
    check_tools("tools[{}].function.parameters", tools, mode, named, complexity)
    body.check_all(manifest, vocabulary, complexity)
    limits = [limit for limit in (body.max_tokens, body.max_completion_tokens) if limit is not None]
    return body.valid(fields, prompts=1, limit=min(limits, default=None))


def _check_message(where: str, message: ChatMessage) -> None:
    if message.content is None and message.role != "assistant":
        refuse(f"{where}.content", f"A message with the role {message.role!r} needs content.")
    if message.tool_calls and message.role != "assistant":
        refuse(f"{where}.tool_calls", "Only messages with the role 'assistant' may hold tool calls.")
    for number, call in enumerate(message.tool_calls or ()):
        check_text(f"{where}.tool_calls[{number}].function.arguments", call.function.arguments)
    check_parts(f"{where}.content", message.content)


API = Api(
    endpoint="chat/completions",
    summary="OpenAI: chat",
    body=ChatBody,
    answer=Completion,
    check=_check,
    prompt_field="messages",
    chat=lambda fields, system_first: fields,
)
