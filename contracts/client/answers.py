"""What the client gives out, by API: the fields that services read, and the JSON as it came.

A *chunk* or *event* is a part of a stream, an *answer* is whole. Each has ``text``: what it says, of its first choice.
"""

from typing import Any

import msgspec


class ApiObject(msgspec.Struct, kw_only=True):
    """Base. ``raw`` is the whole JSON object as it came, fields that have no name here included."""

    id: str = ""
    created: int = 0
    model: str = ""
    usage: dict[str, Any] | None = None
    """Token counts, under the API's own names; a streamed chat has them only where ``stream_options`` ask for it."""
    raw: msgspec.Raw = msgspec.Raw()


class Delta(msgspec.Struct, frozen=True, kw_only=True):
    """What a chunk adds to one choice, or a whole choice's message."""

    role: str | None = None
    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    refusal: str | None = None
    tool_calls: list[dict[str, Any]] | None = None


class ChunkChoice(msgspec.Struct, frozen=True, kw_only=True):
    index: int = 0
    delta: Delta = Delta()
    finish_reason: str | None = None
    logprobs: Any = None


class ChatChunk(ApiObject):
    """One chunk of a streamed chat."""

    choices: list[ChunkChoice] = []

    @property
    def text(self) -> str:
        """What the chunk adds to the first choice's content."""
        return "".join(choice.delta.content or "" for choice in self.choices if choice.index == 0)


class ChatChoice(msgspec.Struct, frozen=True, kw_only=True):
    index: int = 0
    message: Delta = Delta()
    finish_reason: str | None = None
    logprobs: Any = None


class ChatAnswer(ApiObject):
    """A whole chat answer."""

    choices: list[ChatChoice] = []

    @property
    def text(self) -> str:
        """Content of the first choice."""
        return "".join(choice.message.content or "" for choice in self.choices if choice.index == 0)


class TextChoice(msgspec.Struct, frozen=True, kw_only=True):
    index: int = 0
    text: str = ""
    finish_reason: str | None = None
    logprobs: Any = None


class CompletionChunk(ApiObject):
    """One chunk of a streamed completion, or a whole completion."""

    choices: list[TextChoice] = []

    @property
    def text(self) -> str:
        """Text of the first choice."""
        return "".join(choice.text for choice in self.choices if choice.index == 0)


class ResponseEvent(ApiObject):
    """One event of a streamed response, such as ``response.output_text.delta``."""

    type: str
    delta: Any = None
    response: dict[str, Any] | None = None
    """The whole response so far, in the events that begin and end it."""

    @property
    def text(self) -> str:
        """What the event adds to the output text."""
        return str(self.delta) if self.type == "response.output_text.delta" else ""


class ResponseAnswer(ApiObject):
    """A whole response."""

    status: str = ""
    output: list[dict[str, Any]] = []
    """Items by ``type``: message, function_call, reasoning."""

    @property
    def text(self) -> str:
        """Text of all messages in the output."""
        parts = [part for item in self.output if item["type"] == "message" for part in item["content"]]
        return "".join(part["text"] for part in parts if part["type"] == "output_text")


class MessageEvent(ApiObject):
    """One event of a streamed message, such as ``content_block_delta``."""

    type: str
    index: int | None = None
    """Number of the content block."""
    delta: dict[str, Any] | None = None
    content_block: dict[str, Any] | None = None
    message: dict[str, Any] | None = None

    @property
    def text(self) -> str:
        """What the event adds to a text block."""
        delta = self.delta or {}
        return str(delta["text"]) if delta.get("type") == "text_delta" else ""


class MessageAnswer(ApiObject):
    """A whole message."""

    content: list[dict[str, Any]] = []
    """Blocks by ``type``: text, tool_use, thinking."""
    stop_reason: str | None = None

    @property
    def text(self) -> str:
        """Text of all text blocks."""
        return "".join(block["text"] for block in self.content if block["type"] == "text")


class Embedding(msgspec.Struct, frozen=True, kw_only=True):
    embedding: list[float]
    index: int = 0


class EmbeddingsAnswer(ApiObject):
    """One vector for each input, in its order."""

    data: list[Embedding] = []
