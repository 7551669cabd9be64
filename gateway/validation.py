"""What a request body may hold: checked once, before anything is counted, reserved or published.

The structs below are the whole list of fields that travel to an engine. A null is as if absent; a field that no
struct names is ignored and does not travel, and with it those that no caller may set (``cache_salt``, ``priority``,
``request_id``, ``kv_transfer_params``, ``vllm_xargs``). Values that only an engine would trip over are refused here.
"""

import re
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from contracts.errors import HeadraceError
from contracts.messages import Endpoint, Manifest
from contracts.simulated import simulate_field
from gateway import messages_api, responses_api
from gateway.fields import (
    Bias,
    LogprobCount,
    Penalty,
    Positive,
    Repetition,
    Seed,
    Share,
    StopIds,
    Stops,
    Temperature,
    Text,
    TopK,
    TopP,
    Valid,
    check_temperature,
    check_token_ids,
    converted,
    refuse,
    travelling,
)

NESTING_MAX = 64
"""Levels of a body; the same on every Python, and far below what any decoder trips over."""
CONTAINERS_MAX = 200_000
"""Objects and lists of a body: millions of them would cost seconds of garbage collection (measured)."""
CHOICES_MAX = 128
"""Answers that one request may ask for: prompts times ``n``."""
INPUTS_MAX = 2048
"""Texts of one embeddings request, as OpenAI has it."""
VOCABULARY_MAX = 1 << 20
"""Bound of token ids for models whose tokenizer is not known here."""


class _StreamOptions(msgspec.Struct):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class _ResponseFormat(msgspec.Struct):
    type: Literal["text", "json_object", "json_schema", "structural_tag"]
    json_schema: dict[str, Any] | None = None


class _Part(msgspec.Struct):
    type: Literal["text", "input_text", "output_text", "refusal"]
    text: str | None = None
    refusal: str | None = None


class _Call(msgspec.Struct):
    name: Text
    arguments: str | dict[str, Any] | None = None


class _ToolCall(msgspec.Struct):
    function: _Call
    id: str | None = None
    type: Literal["function"] = "function"


class _Message(msgspec.Struct):
    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | list[_Part] | None = None
    name: str | None = None
    tool_calls: list[_ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None


class _Function(msgspec.Struct):
    name: Text
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class _Tool(msgspec.Struct):
    function: _Function
    type: Literal["function"] = "function"


class _Named(msgspec.Struct):
    name: Text


class _ToolChoice(msgspec.Struct):
    function: _Named
    type: Literal["function"] = "function"


class _Body(msgspec.Struct, kw_only=True):
    """Fields that both endpoints have."""

    model: str
    stream: bool | None = None
    stream_options: _StreamOptions | None = None
    n: Annotated[int, Meta(ge=1, le=CHOICES_MAX)] | None = None
    max_tokens: Positive | None = None
    temperature: Temperature | None = None
    top_p: TopP | None = None
    top_k: TopK | None = None
    min_p: Share | None = None
    frequency_penalty: Penalty | None = None
    presence_penalty: Penalty | None = None
    repetition_penalty: Repetition | None = None
    seed: Seed | None = None
    stop: Text | Stops | None = None
    stop_token_ids: StopIds | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    min_tokens: Annotated[int, Meta(ge=0, le=2**31 - 1)] | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    logit_bias: Bias | None = None
    response_format: _ResponseFormat | None = None
    structured_outputs: dict[str, Any] | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    simulate: dict[str, Any] | None = None


class _ChatBody(_Body, kw_only=True):
    messages: Annotated[list[_Message], Meta(min_length=1)]
    max_completion_tokens: Positive | None = None
    logprobs: bool | None = None
    top_logprobs: LogprobCount | None = None
    tools: list[_Tool] | None = None
    tool_choice: Literal["none", "auto", "required"] | _ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    include_reasoning: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class _CompletionBody(_Body, kw_only=True):
    prompt: str | list[Any]
    logprobs: LogprobCount | None = None
    echo: bool | None = None
    best_of: int | None = None
    suffix: str | None = None


class _EmbeddingBody(msgspec.Struct, kw_only=True):
    model: str
    input: str | list[Any]
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Positive | None = None


def decode(data: bytes | msgspec.Raw) -> dict[str, Any]:
    """The JSON object in ``data``; raises HeadraceError (invalid_json, invalid_request)."""
    check_shape(data)
    try:
        body = msgspec.json.decode(data)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise HeadraceError("invalid_json", f"The body is not valid JSON: {error}.") from error
    if not isinstance(body, dict):
        raise HeadraceError("invalid_request", "The body must be a JSON object.")
    return body


_QUOTED = re.compile(rb'"[^"]*"')
_NO_BRACKET = bytes(set(range(256)) - set(b'[]{}"'))
_ONE_KIND = bytes.maketrans(b"{}", b"[]")


def check_shape(data: bytes | msgspec.Raw) -> None:
    """Raises HeadraceError when ``data`` is nested deeper than NESTING_MAX or has more than CONTAINERS_MAX parts.

    Without recursion: strings are cut out, and what remains of brackets loses its innermost level in each round.
    """
    data = bytes(data)
    if data.count(b"[") + data.count(b"{") <= NESTING_MAX:
        return
    plain = data.replace(rb"\\", b"").replace(rb"\"", b"").translate(_ONE_KIND, _NO_BRACKET)
    plain = plain.replace(b'""', b"")  # Whether it is a string without brackets, or one's end and another's start.
    if plain.count(b'"') > 2 * CONTAINERS_MAX:
        raise HeadraceError("invalid_request", "The body holds too many values.")
    brackets = _QUOTED.sub(b"", plain)
    if len(brackets) > 2 * CONTAINERS_MAX:
        raise HeadraceError("invalid_request", f"The body holds more than {CONTAINERS_MAX} objects and lists.")
    for _ in range(NESTING_MAX):
        inner = brackets.replace(b"[]", b"")
        if len(inner) == len(brackets):
            break  # Nothing pairs: not JSON, which the decoder says better, unless there is much of it.
        brackets = inner
    if len(brackets) > NESTING_MAX or b"[]" in brackets:
        raise HeadraceError("invalid_request", f"The body is nested deeper than {NESTING_MAX} levels.")


def model_of(body: dict[str, Any]) -> str:
    """The name of the model asked for; raises HeadraceError."""
    model = body.get("model")
    if not isinstance(model, str) or not model:
        raise HeadraceError("invalid_request", "Name the model to use, as text.", param="model")
    return model


def validate(endpoint: Endpoint, body: dict[str, Any], manifest: Manifest, vocabulary: int | None) -> Valid:
    """The request in ``body``; raises HeadraceError that names the field at fault."""
    fields = _present(body)
    _check_simulate(fields, manifest)
    if endpoint == "messages":
        return messages_api.validate(fields)
    if endpoint == "responses":
        return responses_api.validate(fields, vocabulary or VOCABULARY_MAX)
    if endpoint == "embeddings":
        return _valid_embeddings(fields, vocabulary or VOCABULARY_MAX)
    if endpoint == "chat/completions":
        chat = converted(fields, _ChatBody)
        _check_chat(chat)
        prompts, asked = 1, [chat.max_tokens, chat.max_completion_tokens]
        common: _Body = chat
    else:
        completion = converted(fields, _CompletionBody)
        prompts, asked = _check_completion(completion, vocabulary or VOCABULARY_MAX), [completion.max_tokens]
        common = completion
    _check_common(common, vocabulary or VOCABULARY_MAX)
    choices = prompts * (common.n or 1)
    if choices > CHOICES_MAX:
        refuse("n", f"{prompts} prompts times n = {common.n or 1} is more than {CHOICES_MAX} answers.")
    stated = [limit for limit in asked if limit is not None]
    script = simulate_field(fields)
    return Valid(
        fields=_travelling(fields, common),
        stream=bool(common.stream),
        choices=choices,
        max_output_tokens=min(stated) if stated else None,
        least_output_tokens=max(1, len(script.script() or ())) if script is not None else 1,
        prompt_field="messages" if endpoint == "chat/completions" else "prompt",
    )


def _valid_embeddings(fields: dict[str, Any], vocabulary: int) -> Valid:
    """Generates nothing: one slot, and its prompt tokens."""
    body = converted(fields, _EmbeddingBody)
    if _count_prompts("input", body.input, vocabulary) > INPUTS_MAX:
        refuse("input", f"More than {INPUTS_MAX} texts in one request.")
    return Valid(
        fields=travelling(fields, _EmbeddingBody, set()),
        stream=False,
        choices=1,
        max_output_tokens=0,
        limit_field="",
        prompt_field="input",
    )


def _present(body: dict[str, Any]) -> dict[str, Any]:
    """The body without nulls and empty options; nulls inside messages are left out, too."""
    fields = {name: value for name, value in body.items() if value is not None}
    for name in ("tools", "stop", "logit_bias", "stop_token_ids"):
        if name in fields and fields[name] in ([], {}):
            del fields[name]
    if isinstance(messages := fields.get("messages"), list):
        fields["messages"] = [
            {name: value for name, value in message.items() if value is not None}
            if isinstance(message, dict) and None in message.values()
            else message
            for message in messages
        ]
    return fields


def _travelling(fields: dict[str, Any], body: _Body) -> dict[str, Any]:
    """Fields of the body's struct, without the output limits and without what stands only for its absence."""
    left_out = {"max_tokens", "max_completion_tokens", "best_of"}
    if not body.stream:
        left_out.add("stream_options")
    if "tools" not in fields:
        left_out |= {"tool_choice", "parallel_tool_calls"}
    return travelling(fields, type(body), left_out)


# Checks that types do not express --------------------------------------------------------------------------


def _check_simulate(fields: dict[str, Any], manifest: Manifest) -> None:
    if "simulate" in fields and manifest.engine != "simulated":
        refuse("simulate", "Only models of the simulated engine understand 'simulate'.")


def _check_common(body: _Body, vocabulary: int) -> None:
    check_token_ids(body.logit_bias, body.stop_token_ids, vocabulary)
    check_temperature(body.temperature)
    form = body.response_format
    if form is not None and form.type == "json_schema" and form.json_schema is None:
        refuse("response_format.json_schema", "The type 'json_schema' needs a 'json_schema'.")


def _check_chat(body: _ChatBody) -> None:
    for index, message in enumerate(body.messages):
        _check_message(f"messages[{index}]", message)
    if body.top_logprobs and not body.logprobs:
        refuse("top_logprobs", "'top_logprobs' needs 'logprobs': true.")
    _check_tool_choice(body)


def _check_message(where: str, message: _Message) -> None:
    if message.content is None and message.role != "assistant":
        refuse(f"{where}.content", f"A message with the role {message.role!r} needs content.")
    if message.tool_calls and message.role != "assistant":
        refuse(f"{where}.tool_calls", "Only messages with the role 'assistant' may hold tool calls.")
    if isinstance(message.content, list):
        for number, part in enumerate(message.content):
            if (part.refusal if part.type == "refusal" else part.text) is None:
                refuse(f"{where}.content[{number}]", f"A part of the type {part.type!r} needs its text.")


def _check_tool_choice(body: _ChatBody) -> None:
    if body.tools is None:
        if body.tool_choice not in (None, "none", "auto"):
            refuse("tool_choice", "'tool_choice' needs 'tools'.")
    elif isinstance(body.tool_choice, _ToolChoice) and not any(
        tool.function.name == body.tool_choice.function.name for tool in body.tools
    ):
        refuse("tool_choice", "'tool_choice' names a function that is not among 'tools'.")


def _check_completion(body: _CompletionBody, vocabulary: int) -> int:
    """Number of prompts."""
    if body.best_of is not None and body.best_of > (body.n or 1):
        refuse("best_of", "'best_of' above 'n' is not supported.")
    if body.suffix:
        refuse("suffix", "'suffix' is not supported.")
    return _count_prompts("prompt", body.prompt, vocabulary)


def _count_prompts(where: str, prompt: str | list[Any], vocabulary: int) -> int:
    """Number of prompts; raises HeadraceError when they are neither texts nor token ids."""
    if isinstance(prompt, str):
        return 1
    kinds = set(map(type, prompt))
    if kinds == {int}:
        _check_ids(where, prompt, vocabulary)
        return 1
    if kinds not in ({str}, {list}):
        refuse(where, "Expected text, a list of texts, a list of token ids, or a list of such lists.")
    for index, ids in enumerate(prompt):
        if isinstance(ids, list):
            if set(map(type, ids)) != {int}:
                refuse(f"{where}[{index}]", "Expected a list of token ids.")
            _check_ids(f"{where}[{index}]", ids, vocabulary)
    return len(prompt)


def _check_ids(where: str, ids: list[int], vocabulary: int) -> None:
    if min(ids) < 0 or max(ids) >= vocabulary:
        refuse(where, f"Token ids must be at least 0 and below {vocabulary}.")
