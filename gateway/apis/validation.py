"""What a request body may hold: checked once, before anything is counted, reserved or published.

The structs below are the whole list of fields that travel to an engine. A null is as if absent; a field that no
struct names is ignored and does not travel, and with it those that no caller may set (``cache_salt``, ``priority``,
``request_id``, ``kv_transfer_params``, ``vllm_xargs``). Values that only an engine would trip over are refused here.
"""

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from contracts.errors import HeadraceError
from contracts.messages.base import Endpoint
from contracts.messages.records import Manifest
from contracts.simulated import simulate_field
from gateway.apis import messages, responses
from gateway.apis.fields import Positive, Text, Valid, converted, refuse, travelling
from gateway.apis.json_limits import check_text
from gateway.apis.sampling import LogprobCount, Sampling, check_token_ids
from gateway.apis.structured_outputs import Budget, ResponseFormat, Tool, check_tools

CHOICES_MAX = 128
"""Answers that one request may ask for: prompts times ``n``."""
BAD_WORDS_MAX = 128
ALLOWED_MAX = 1024
INPUTS_MAX = 2048
"""Texts of one embeddings request, as OpenAI has it."""
VOCABULARY_MAX = 1 << 20
"""Bound of token ids for models whose tokenizer is not known here."""


class _StreamOptions(msgspec.Struct):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class _Part(msgspec.Struct):
    type: Literal["text", "refusal"]
    text: str | None = None
    refusal: str | None = None


class _Call(msgspec.Struct):
    name: Text
    arguments: str


class _ToolCall(msgspec.Struct):
    function: _Call
    id: str
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


class _Body(Sampling, kw_only=True):
    """Fields that both endpoints have."""

    stream_options: _StreamOptions | None = None
    n: Annotated[int, Meta(ge=1, le=CHOICES_MAX)] | None = None
    max_tokens: Positive | None = None
    min_tokens: Annotated[int, Meta(ge=0, le=2**31 - 1)] | None = None
    bad_words: Annotated[list[Text], Meta(max_length=BAD_WORDS_MAX)] | None = None
    allowed_token_ids: Annotated[list[int], Meta(min_length=1, max_length=ALLOWED_MAX)] | None = None
    prompt_logprobs: LogprobCount | None = None
    spaces_between_special_tokens: bool | None = None
    response_format: ResponseFormat | None = None
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
    thinking_token_budget: Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class _CompletionBody(_Body, kw_only=True):
    prompt: str | list[Any]
    logprobs: LogprobCount | None = None
    echo: bool | None = None
    best_of: Positive | None = None
    suffix: str | None = None


class _EmbeddingBody(msgspec.Struct, kw_only=True):
    model: str
    input: str | list[Any]
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Positive | None = None


_GUIDED = {f"guided_{kind}": kind for kind in ("json", "regex", "choice", "grammar")}
"""vLLM's former names, which it no longer looks at, for kinds of ``structured_outputs``."""

_NOT_OFFERED = {
    "functions": "Send 'tools' instead.",
    "use_beam_search": "Beam search is not offered.",
    "truncate_prompt_tokens": "Prompts are not cut: send what fits the model's context.",
}
"""Fields that would change the answer, so that ignoring them would be a lie."""


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
        return messages.validate(fields)
    if endpoint == "responses":
        return responses.validate(fields, vocabulary or VOCABULARY_MAX)
    if endpoint == "embeddings":
        return _valid_embeddings(fields, vocabulary or VOCABULARY_MAX)
    for name, instead in _NOT_OFFERED.items():
        if fields.get(name):
            refuse(name, f"This field is not supported. {instead}")
    _rename_guided(fields)
    vocabulary, budget = vocabulary or VOCABULARY_MAX, Budget()
    if endpoint == "chat/completions":
        chat = converted(fields, _ChatBody)
        _check_chat(chat, budget)
        prompts, asked = 1, [chat.max_tokens, chat.max_completion_tokens]
        common: _Body = chat
    else:
        completion = converted(fields, _CompletionBody)
        prompts, asked = _check_completion(completion, vocabulary), [completion.max_tokens]
        common = completion
    _check_common(common, manifest, vocabulary, budget)
    choices = prompts * (common.n or 1)
    if choices > CHOICES_MAX:
        refuse("n", f"{prompts} prompts times n = {common.n or 1} is more than {CHOICES_MAX} answers.")
    limit = min((limit for limit in asked if limit is not None), default=None)
    least = common.min_tokens or 0
    if limit is not None and least > limit:
        refuse("min_tokens", f"This is more than the {limit} tokens that the answer may have.")
    script = simulate_field(fields)
    return Valid(
        fields=_travelling(fields, common),
        stream=bool(common.stream),
        choices=choices,
        max_output_tokens=limit,
        least_output_tokens=max(1, least, len(script.script() or ()) if script is not None else 0),
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
    for name in ("tools", "stop", "logit_bias", "stop_token_ids", "bad_words"):
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


def _rename_guided(fields: dict[str, Any]) -> None:
    for name in _GUIDED.keys() & fields.keys():
        if "structured_outputs" in fields:
            refuse(name, "Give one constraint, in 'structured_outputs'.")
        fields["structured_outputs"] = {_GUIDED[name]: fields.pop(name)}


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


def _check_common(body: _Body, manifest: Manifest, vocabulary: int, budget: Budget) -> None:
    body.check(vocabulary, budget)
    check_token_ids("allowed_token_ids", body.allowed_token_ids, vocabulary)
    if not all(map(str.strip, body.bad_words or ())):
        refuse("bad_words", "A word is more than white space.")
    if body.prompt_logprobs is not None and body.stream:
        refuse("prompt_logprobs", "These are not to be had with 'stream': true.")
    if manifest.engine == "vllm" and body.temperature == 0 and (body.n or 1) > 1:
        refuse("n", "With a temperature of 0 all answers are the same: ask for one.")
    if body.response_format is not None:
        body.response_format.check("response_format", budget)
        if body.structured_outputs is not None and body.response_format.type != "text":
            refuse("structured_outputs", "Give 'response_format' or 'structured_outputs', not both.")


def _check_chat(body: _ChatBody, budget: Budget) -> None:
    for index, message in enumerate(body.messages):
        _check_message(f"messages[{index}]", message)
    if body.top_logprobs and not body.logprobs:
        refuse("top_logprobs", "'top_logprobs' needs 'logprobs': true.")
    if body.continue_final_message and (body.add_generation_prompt is not False or body.messages[-1].content is None):
        refuse("continue_final_message", "This needs content to continue, and 'add_generation_prompt': false.")
    choice = body.tool_choice
    named = choice.function.name if isinstance(choice, _ToolChoice) else None
    functions = [tool.function for tool in body.tools or ()]
    tools = [
        Tool(f"tools[{index}].function.parameters", each.name, each.parameters) for index, each in enumerate(functions)
    ]
    check_tools(tools, None if isinstance(choice, _ToolChoice) else choice, named, budget)


def _check_message(where: str, message: _Message) -> None:
    if message.content is None and message.role != "assistant":
        refuse(f"{where}.content", f"A message with the role {message.role!r} needs content.")
    if message.tool_calls and message.role != "assistant":
        refuse(f"{where}.tool_calls", "Only messages with the role 'assistant' may hold tool calls.")
    for number, call in enumerate(message.tool_calls or ()):
        check_text(f"{where}.tool_calls[{number}].function.arguments", call.function.arguments)
    if isinstance(message.content, list):
        for number, part in enumerate(message.content):
            if (part.refusal if part.type == "refusal" else part.text) is None:
                refuse(f"{where}.content[{number}]", f"A part of the type {part.type!r} needs its text.")


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
