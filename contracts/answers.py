"""OpenAI chunks and answers as the client gives them out: what services read, and the JSON as it came."""

from typing import Any

import msgspec


class Answer(msgspec.Struct, kw_only=True):
    """Base. ``raw`` is the whole JSON object as it came, fields that have no name here included."""

    id: str = ""
    created: int = 0
    model: str = ""
    usage: dict[str, Any] | None = None
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


class ChatChunk(Answer):
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


class ChatAnswer(Answer):
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


class CompletionChunk(Answer):
    """One chunk of a streamed completion, or a whole completion."""

    choices: list[TextChoice] = []

    @property
    def text(self) -> str:
        """Text of the first choice."""
        return "".join(choice.text for choice in self.choices if choice.index == 0)
