"""A whole answer that was cut inside a tool call reads as its stream does.

vLLM reads a whole answer with one parser and a stream with another. Of a call that is not complete the first makes
text, markup and all; the second gives the call as far as it came, as OpenAI and Anthropic do. So a whole answer that
was cut (by the limit, by a stop text) is read here from the pieces in which it came, by the parser's own way of reading
streams. What was cut says so: ``length`` in place of ``tool_calls``, ``incomplete`` in place of ``completed``.

Imports vLLM; see ``parts``.
"""

import json
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from typing import Any

import msgspec
from openai.types.responses import ResponseFunctionToolCall, ResponseOutputItemDoneEvent
from pydantic_core import from_json
from vllm.entrypoints.generate.base.protocol import DeltaMessage, FunctionCall
from vllm.parser.abstract_parser import DelegatingParser


class Choice(msgspec.Struct):
    """One choice of a whole answer, in the pieces in which it came."""

    prompt_token_ids: list[int]
    token_ids: list[int] = []
    pieces: list[tuple[str, list[int]]] = []
    """Text and token ids."""
    finish_reason: str | None = None
    stop_reason: int | str | None = None

    def add(self, completion: Any) -> None:
        """A ``CompletionOutput`` of what is new."""
        self.token_ids += completion.token_ids
        self.pieces.append((completion.text, list(completion.token_ids)))
        self.finish_reason, self.stop_reason = completion.finish_reason, completion.stop_reason

    @property
    def cut(self) -> bool:
        return self.finish_reason == "length" or isinstance(self.stop_reason, str)


Choices = Callable[[], Mapping[int, Choice]]
"""Of the answer that is being made in this context, by index."""


def read_as_streams(state: Any, choices: Choices) -> None:
    """Have the application's chat, messages and responses read what was cut as their streams do."""
    chat, messages, responses = (
        state.openai_serving_chat,
        state.anthropic_serving_messages,
        state.openai_serving_responses,
    )
    for serving in (chat, messages):
        serving.parser_cls = reading_pieces(serving.parser_cls, choices)
        serving.chat_completion_full_generator = _keeping_length(serving.chat_completion_full_generator, choices)
    messages.messages_full_converter = _taking_cut_arguments(messages.messages_full_converter)
    responses.parser = reading_pieces(responses.parser, choices)
    responses.responses_full_generator = _marking_response(responses.responses_full_generator)
    responses._process_simple_streaming_events = _marking_events(responses._process_simple_streaming_events)


def reading_pieces(parser: type[Any] | None, choices: Choices) -> type[Any] | None:
    """Of two parsers in one; those that are one machine for both read both alike."""
    if parser is None or not issubclass(parser, DelegatingParser):
        return parser

    class ReadingPieces(parser):  # type: ignore[misc, valid-type]
        def parse(
            self,
            model_output: str,
            request: Any,
            enable_auto_tools: bool = False,
            model_output_token_ids: Sequence[int] = (),
        ) -> tuple[str | None, str | None, list[FunctionCall] | None]:
            ids = list(model_output_token_ids)
            choice = next((it for it in choices().values() if it.cut and it.token_ids == ids), None)
            if choice is None or not request.tools or request.tool_choice == "none":
                whole: tuple[str | None, str | None, list[FunctionCall] | None] = super().parse(
                    model_output, request, enable_auto_tools, model_output_token_ids
                )
                return whole
            deltas = [
                self.parse_delta(text, tokens, request, choice.prompt_token_ids, finished=number == len(choice.pieces))
                for number, (text, tokens) in enumerate(choice.pieces, 1)
            ]
            return _joined([delta for delta in deltas if delta is not None])

    return ReadingPieces


def _joined(deltas: list[DeltaMessage]) -> tuple[str | None, str | None, list[FunctionCall]]:
    calls: dict[int, FunctionCall] = {}
    for piece in (it for delta in deltas for it in delta.tool_calls):
        call = calls.setdefault(piece.index, FunctionCall(name="", arguments=""))
        call.id = call.id or piece.id
        if piece.function is not None:
            call.name = call.name or piece.function.name or ""
            call.arguments += piece.function.arguments or ""
    reasoning = "".join(delta.reasoning or "" for delta in deltas)
    content = "".join(delta.content or "" for delta in deltas)
    return reasoning or None, content or None, list(calls.values())


def _keeping_length(generate: Callable[..., Awaitable[Any]], choices: Choices) -> Callable[..., Awaitable[Any]]:
    async def generated(*given: Any, **named: Any) -> Any:
        response = await generate(*given, **named)
        for choice in getattr(response, "choices", ()):
            known = choices().get(choice.index)
            if known is not None and known.finish_reason == "length":
                choice.finish_reason = "length"
        return response

    return generated


def _taking_cut_arguments(convert: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Anthropic's form has arguments as an object: as far as they came, as its SDK reads a stream."""

    def converted(answer: Any) -> Any:
        choice = answer.choices[0]
        cut = [call for call in choice.message.tool_calls if not _is_json(call.function.arguments)]
        for call in cut:
            call.function.arguments = json.dumps(_as_far_as_it_came(call.function.arguments))
        message = convert(answer)
        if cut and choice.finish_reason != "length" and isinstance(choice.stop_reason, str):
            message.stop_reason, message.stop_sequence = "stop_sequence", choice.stop_reason
        return message

    return converted


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


def _as_far_as_it_came(text: str) -> dict[str, Any]:
    try:
        found = from_json(text or "{}", allow_partial=True)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _mark(item: Any) -> None:
    """The item that an answer was cut in."""
    if hasattr(item, "status") and not (isinstance(item, ResponseFunctionToolCall) and _is_json(item.arguments)):
        item.status = "incomplete"


def _marking_response(generate: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
    async def generated(*given: Any, **named: Any) -> Any:
        response = await generate(*given, **named)
        if getattr(response, "status", None) == "incomplete" and response.output:
            _mark(response.output[-1])
        return response

    return generated


def _marking_events(process: Callable[..., AsyncIterator[Any]]) -> Callable[..., AsyncIterator[Any]]:
    """The last item's end is the last event of all: it waits until that is known."""

    async def marked(request: Any, params: Any, results: Any, context: Any, *more: Any) -> AsyncIterator[Any]:
        held: Any = None
        async for event in process(request, params, results, context, *more):
            if held is not None:
                yield held
            held = event if isinstance(event, ResponseOutputItemDoneEvent) else None
            if held is None:
                yield event
        if held is not None:
            if context.last_output.outputs[0].finish_reason == "length":
                _mark(held.item)
            yield held

    return marked
