"""Chunks of an answer that differ from the one before in their text alone: of those only the text travels.

Bytes are compared, and no JSON is read or made: what is put together is what the engine gave, to the byte. Pure.
"""

import re
from typing import Self

import msgspec

CHUNK_BYTES_MAX = 4096
"""No text is looked for in longer chunks: what comes with a token is shorter, a whole answer may have megabytes."""

_TEXT = re.compile(rb'"(?:content|text|delta|reasoning|reasoning_content|arguments)":("(?:[^"\\]|\\.)*")')
"""Fields that hold a piece of text, in all APIs. In a string of the answer its quotes would be escaped."""
_STRING = re.compile(rb'"(?:[^"\\]|\\.)*"')


def text_at(chunk: bytes) -> tuple[int, int] | None:
    """Where the text of a chunk begins and ends, its quotes included; None where it has none."""
    found = _TEXT.search(chunk) if len(chunk) <= CHUNK_BYTES_MAX else None
    return None if found is None else found.span(1)


class Pattern(msgspec.Struct, frozen=True, eq=False, gc=False):
    """All of a chunk but its text."""

    head: bytes
    tail: bytes

    @classmethod
    def of(cls, chunk: bytes, at: tuple[int, int]) -> Self:
        """Raises msgspec.ValidationError when no text can be there."""
        start, end = at
        if not 0 < start < end < len(chunk):
            raise msgspec.ValidationError("the text is not within its chunk")
        return cls(chunk[:start], chunk[end:])

    def text_of(self, chunk: bytes) -> bytes | None:
        """The text with its quotes, of a chunk that has all else from here; None for another one."""
        head, tail = self.head, self.tail
        if not (chunk.startswith(head) and chunk.endswith(tail)):
            return None
        text = chunk[len(head) : len(chunk) - len(tail)]
        return text if _STRING.fullmatch(text) else None

    def filled(self, text: bytes) -> bytes:
        """The chunk with this text, which has quotes."""
        return b"%b%b%b" % (self.head, text, self.tail)
