"""What the simulated engine and those who count for it share: its request field, and its way to count tokens.

The engine is `worker.engines.simulated.engine`. The field ``simulate`` is its alone; every other engine refuses it.
"""

import re
import zlib
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from typing import Annotated, Any

import msgspec

from contracts.errors import HeadraceError
from contracts.fingerprint import PromptDigest
from contracts.messages.base import Endpoint

MESSAGE_TOKENS = 4
"""Prompt tokens of a chat message beside its words."""

SLICE_CHARS = 1 << 15
"""Some 5,000 words, which take half a millisecond."""
_SPACE = re.compile(r"\s")

_Span = Annotated[float, msgspec.Meta(ge=0, le=3_600_000)]
_Count = Annotated[int, msgspec.Meta(ge=0, le=10_000_000)]


class Simulate(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The body's field ``simulate``. Spans are milliseconds up to an hour. Unknown names are refused."""

    tokens: list[str] | None = None
    """The answer, one token each, passed on as it stands."""
    token_hex: list[str] | None = None
    """The same as hex digits of bytes, so that a token may hold a part of a character."""
    ttft_ms: _Span | None = None
    """Time to the first token instead of prompt tokens over the prefill speed."""
    itl_ms: _Span | None = None
    """Time between tokens instead of the engine's."""
    fail_after: _Count | None = None
    """The attempt fails after that many tokens, over all choices."""
    crash_after: _Count | None = None
    """The engine dies after that many tokens, with all that it runs; the worker lives."""
    exit_after: _Count | None = None
    """The worker's process exits after that many tokens."""
    hang_after: _Count | None = None
    """The attempt stalls for ever after that many tokens."""
    block_ms: _Span | None = None
    """Before the attempt begins the worker's event loop stands still for so long."""
    submit_delay_ms: _Span | None = None
    """The attempt waits that long before the engine's batch hears of it."""

    def __post_init__(self) -> None:
        if self.tokens is not None and self.token_hex is not None:
            raise ValueError("`tokens` and `token_hex` exclude each other")
        for token in self.token_hex or ():
            try:
                bytes.fromhex(token)
            except ValueError as error:
                raise ValueError(f"`token_hex` holds {token[:32]!r}, which is not hex digits of whole bytes") from error

    def script(self) -> list[bytes] | None:
        """The scripted answer's tokens; None when there is none."""
        if self.token_hex is not None:
            return [bytes.fromhex(token) for token in self.token_hex]
        return None if self.tokens is None else [token.encode() for token in self.tokens]


class SimulatedVersion(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The engine arguments of a simulated version's manifest: what is wrong with it, for tests of roll-outs."""

    fails_to_start: bool = False
    starts_after_ms: _Span = 0.0
    """How long its engine takes to start."""
    fails: Annotated[float, msgspec.Meta(ge=0, le=1)] = 0.0
    """Share of attempts that end with an error."""
    counts_as: str = ""
    """The tokenizer fingerprint that its engine finds, in place of the manifest's."""


def simulate_field(body: Mapping[str, Any]) -> Simulate | None:
    """The field of an OpenAI body; raises HeadraceError ``invalid_request`` when it is malformed."""
    try:
        return msgspec.convert(body.get("simulate"), Simulate | None)
    except msgspec.ValidationError as error:
        raise HeadraceError("invalid_request", f"simulate: {error}", param="simulate") from error


class Prompt:
    """The tokens of one prompt, read in slices, each time again.

    A million words are never all there at once, and no single call takes long: other threads get their turns.
    """

    def __init__(self, *parts: str | list[Any]) -> None:
        self._parts = parts
        """Text, or tokens."""

    def __iter__(self) -> Iterator[str | int]:
        for part in self._parts:
            if isinstance(part, str):
                for words in _words(part):
                    yield from words
            else:
                yield from part

    def ids(self, most: int) -> list[int]:
        """A number below 2^32 for each of the first tokens."""
        first = islice(self, most)
        return [token & 0xFFFFFFFF if isinstance(token, int) else zlib.crc32(token.encode()) for token in first]

    def __len__(self) -> int:
        return sum(sum(map(len, _words(part))) if isinstance(part, str) else len(part) for part in self._parts)

    def pieces(self) -> Iterator[tuple[int, bytes]]:
        """The same in slices: how many tokens, and their text with a mark after each."""
        for part in self._parts:
            for tokens in _words(part) if isinstance(part, str) else [list(map(str, part))]:
                yield len(tokens), "".join(f"{token}\0" for token in tokens).encode(errors="surrogatepass")


def measured(prompts: Iterable[Prompt]) -> tuple[list[int], str]:
    """Tokens of each prompt and the digest of them all (``contracts.fingerprint.PromptDigest``), each read once."""
    digest, lengths = PromptDigest(), []
    for prompt in prompts:
        length = 0
        for tokens, text in prompt.pieces():
            digest.add_piece(text)
            length += tokens
        digest.end_pieces(length)
        lengths.append(length)
    return lengths, digest.hex()


def simulated_prompts(endpoint: Endpoint, body: Mapping[str, Any]) -> list[Prompt]:
    """The prompts of a body as the simulated engine's tokens; chat has one, completions may have several.

    A token is a word between white space, or a token id as given; a chat message has MESSAGE_TOKENS more.
    Raises HeadraceError ``invalid_request`` for a prompt of no known form. Counting a million words takes 0.1 s.
    """
    if endpoint == "chat/completions":
        return [Prompt(*(part for message in _messages(body) for part in _message_parts(message)))]
    prompt = body.get("prompt")
    if isinstance(prompt, str):
        return [Prompt(prompt)]
    if isinstance(prompt, list) and prompt:
        if all(isinstance(item, str) for item in prompt):
            return [Prompt(item) for item in prompt]
        if _are_ids(prompt):
            return [Prompt(prompt)]
        if all(isinstance(item, list) and item and _are_ids(item) for item in prompt):
            return [Prompt(item) for item in prompt]
    raise HeadraceError("invalid_request", "prompt must be text, token ids, or a list of either", param="prompt")


def _messages(body: Mapping[str, Any]) -> list[dict[str, Any]]:
    messages = body.get("messages")
    if isinstance(messages, list) and messages and all(isinstance(message, dict) for message in messages):
        return messages
    raise HeadraceError("invalid_request", "messages must be a list of at least one message", param="messages")


def _message_parts(message: Mapping[str, Any]) -> Iterator[str | list[Any]]:
    """The role, MESSAGE_TOKENS times, then the texts."""
    yield [str(message.get("role"))] * MESSAGE_TOKENS
    content = message.get("content")
    if isinstance(content, str):
        yield content
    elif isinstance(content, list):
        for part in content:
            text = part.get("text") if isinstance(part, dict) else None
            if isinstance(text, str):
                yield text
    elif content is not None:
        raise HeadraceError("invalid_request", "content must be text or a list of parts", param="messages")


def _words(text: str) -> Iterator[list[str]]:
    """The words of ``text`` in slices of some SLICE_CHARS characters, cut at white space."""
    start = 0
    while start < len(text):
        space = _SPACE.search(text, start + SLICE_CHARS)
        end = space.start() if space is not None else len(text)
        yield text[start:end].split()
        start = end


def _are_ids(items: list[Any]) -> bool:
    return all(type(item) is int and item >= 0 for item in items)
