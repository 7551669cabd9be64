"""A version's tokenizer and chat template, read from its files: token ids of prompts, as its engine will make them.

For vLLM, without torch. What vLLM does to messages before it renders them (``vllm.renderers``) is repeated in
``chat_template``; tests compare both.
"""

import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec
from tokenizers import Tokenizer as Library

from contracts import fingerprint
from contracts.control_tokens import MARK, ControlTokens
from contracts.errors import HeadraceError
from contracts.messages.records import Manifest
from contracts.probes import Probe
from gateway.apis.api import Api
from gateway.prompt.chat_template import ChatTemplate


class Tokenizer:
    """Of the files in ``directory``. Raises OSError and ValueError for files that are missing or cannot be read."""

    def __init__(self, manifest: Manifest, directory: Path) -> None:
        # In parallel, texts would wait for each other in one pool of threads of the library's own, the event loop too.
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        text = (directory / "tokenizer.json").read_text(encoding="utf-8")
        try:
            library = Library.from_str(text)
        except Exception as error:  # The library raises plain Exception.
            raise ValueError(f"tokenizer.json: {error}") from error
        library.no_truncation()
        library.no_padding()
        self._context = manifest.context
        self._library = library
        self._template = ChatTemplate.from_directory(directory)
        self.template_variables = self._template.variables if self._template is not None else frozenset[str]()
        """What a caller may set of the chat template's."""
        longest = _token_bytes_max(msgspec.json.decode(text), library.get_vocab(with_added_tokens=True))
        self._text_bytes_max = longest and longest * manifest.context
        """Text of more bytes has more tokens than the context; None where a token may stand for text of any length."""
        control = ControlTokens(text)
        self.control = control if control.holds_for(library) else None
        """None where marks are of no use: without control tokens, and with tokenizers that need the whole text."""
        self.vocabulary = library.get_vocab_size(with_added_tokens=True)
        """Number of token ids."""
        self.fingerprint = fingerprint.of(directory, map(self._probed, fingerprint.probes(manifest)))

    @property
    def tells_time(self) -> bool:
        """Whether the template may write a chat otherwise a moment later."""
        return self._template is not None and self._template.tells_time

    def token_ids(self, api: Api, fields: dict[str, Any]) -> list[list[int]]:
        """Of each prompt of a validated body.

        Raises HeadraceError: invalid_request when the chat template refuses the messages, context_length_exceeded for
        a text of more bytes than tokens of the whole context can have.
        """
        if api.chat is not None:
            if self._template is None:
                raise HeadraceError("invalid_request", "This model has no chat template.", param="model")
            text = self._template.render(api.chat(fields, self._template.system_first))
            return self._bounded(api, [text], special_tokens=False)
        prompt = fields[api.prompt_field]
        if isinstance(prompt, str):
            return self._bounded(api, [prompt], special_tokens=True)
        if isinstance(prompt[0], str):
            return self._bounded(api, prompt, special_tokens=True)
        return [prompt] if isinstance(prompt[0], int) else prompt

    def _bounded(self, api: Api, texts: list[str], *, special_tokens: bool) -> list[list[int]]:
        most = self._text_bytes_max
        if most is not None and any(len(text) > most or len(text.encode()) > most for text in texts):
            part = api.prompt_field
            raise HeadraceError(
                "context_length_exceeded",
                f"This model's maximum context length is {self._context} tokens. However, the {part} has more than "
                f"{most} bytes, which are more tokens, however they are counted. Please reduce the length of the "
                f"{part}.",
                param=part,
            )
        return self._token_ids(texts, special_tokens=special_tokens)

    def _token_ids(self, texts: list[str], *, special_tokens: bool) -> list[list[int]]:
        if self.control is not None and any(MARK in text for text in texts):
            return [self.control.token_ids(text) for text in texts]
        # encode_batch_fast releases the GIL, encode does not (measured: gaps of .5 s on a 0.9 MB text).
        encodings = self._library.encode_batch_fast(texts, add_special_tokens=special_tokens)
        return [encoding.ids for encoding in encodings]

    def _probed(self, probe: Probe) -> Sequence[int] | None:
        try:
            if probe.chat is None:
                return self._token_ids([probe.text], special_tokens=True)[0]
            if self._template is None:
                return None
            text = self._template.render(probe.chat, now=fingerprint.PROBED_AT)
        except HeadraceError:
            return None
        return self._token_ids([text], special_tokens=False)[0]


_SHRINKS = {None: 1, "NFC": 3, "Prepend": 1, "Replace": 1}
"""By how much a normalizer may shorten a text: NFC makes one syllable of 3 Korean letters. Others may drop anything."""


def _token_bytes_max(form: dict[str, Any], vocabulary: Iterable[str]) -> int | None:
    """Bytes of text that one token stands for at most, by the tokenizer's file; None when that has no bound.

    Known of tokenizers alone that have a token for each byte: with others, a word of any length may be unknown.
    """
    normalizer = form.get("normalizer") or {}
    steps = normalizer.get("normalizers", [normalizer])
    if any(step.get("type") not in _SHRINKS for step in steps):
        return None
    shrinks = max((_SHRINKS[step.get("type")] for step in steps), default=1)
    if b'"ByteLevel"' in msgspec.json.encode(form.get("pre_tokenizer")):
        return shrinks * max(map(len, vocabulary))  # Each byte is written as one character.
    if form["model"].get("byte_fallback"):
        return shrinks * max(len(token.encode()) for token in vocabulary)
    return None
