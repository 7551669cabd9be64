"""Exact prompt tokens of a request, counted as its engine will count them.

For vLLM: the model's own tokenizer and chat template, without torch. What vLLM does to messages before it renders
them (``vllm.renderers``) is repeated in ``chat_template``; tests compare both. Long texts are counted on threads,
in calls that release the GIL, so that they do not delay streams.
"""

import asyncio
import os
from collections.abc import Awaitable, Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import structlog

from contracts.artifacts.files import BadArtifact
from contracts.control_tokens import MARK, ControlTokens
from contracts.errors import HeadraceError
from contracts.messages.records import Manifest
from contracts.prefix import BLOCK_TOKENS, TOKENS_KEYED, keys_of
from contracts.simulated import Prompt, simulated_prompts
from gateway import metrics
from gateway.apis.api import Api
from gateway.prompt import callers_text, threads

if TYPE_CHECKING:
    from tokenizers import Encoding, Tokenizer

    from gateway.prompt.chat_template import ChatTemplate

_log = structlog.get_logger()

ON_THE_SPOT_BYTES = 2_000
"""Smaller bodies are counted on the spot: some 500 tokens take .5 ms (measured: 1.8 ms per 1,000), and a thread may
wait longer for the GIL."""


class Counted(NamedTuple):
    """What was found of a request's prompts."""

    tokens: list[int]
    """Of each prompt."""
    prefix_keys: bytes


class TokenCounter:
    """Counts for one manifest. A tokenizer is loaded in the background, on a thread.

    ``locate`` gives a directory with its files, verified; without it they are taken from the manifest's ``path``.
    """

    def __init__(self, manifest: Manifest, locate: Callable[[Manifest], Awaitable[Path]] | None = None) -> None:
        self._manifest = manifest
        self._locate = locate
        self._tokenizer: Tokenizer | None = None
        self._template: ChatTemplate | None = None
        self._loading: asyncio.Future[None] | None = None
        self.vocabulary: int | None = None
        """Number of token ids; None where the engine has no fixed one."""
        self.template_variables: frozenset[str] = frozenset()
        """What a caller may set of the chat template's."""
        self._control: ControlTokens | None = None
        """None where marks are of no use: without control tokens, and with tokenizers that need the whole text."""
        self._text_bytes_max: int | None = None
        """Text of more bytes has more tokens than the context; None where a token may stand for text of any length."""
        if manifest.engine != "simulated":
            self._load()

    async def ready(self) -> None:
        """Wait for the tokenizer; raises HeadraceError (unavailable) when it cannot be loaded."""
        if self._loading is None:
            return
        if self._loading.done() and self._loading.exception() is not None:
            self._load()  # The files may have come meanwhile.
        try:
            await asyncio.shield(self._loading)
        except (OSError, ValueError, ImportError, BadArtifact) as error:
            _log.error("tokenizer_undecodable", model=self._manifest.name, reason=str(error))
            raise HeadraceError("unavailable", "The model's tokenizer cannot be loaded.", retry_after_s=5) from error

    async def count(self, api: Api, fields: dict[str, Any], size: int, tenant: str, *, salt: str = "") -> Counted:
        """The prompts of ``fields``, a validated body of ``size`` bytes; call ``ready`` before.

        ``salt``: for the keys of an only prompt (contracts.prefix); without it there are none.
        Raises HeadraceError: invalid_request when the chat template refuses the messages, context_length_exceeded for
        a text of more bytes than tokens of the whole context can have.
        """
        with metrics.COUNTING.time():
            return await threads.run(tenant, size, ON_THE_SPOT_BYTES, self._count, api, fields, salt)

    async def marked(self, api: Api, fields: dict[str, Any], size: int, tenant: str) -> dict[str, Any]:
        """A valid body, in which control tokens that callers spelled will not be taken for such.

        Raises HeadraceError (invalid_request) for one in a name.
        """
        if self._control is None or api.chat is None:
            return fields
        return await threads.run(tenant, size, ON_THE_SPOT_BYTES, callers_text.marked, fields, self._control)

    def _load(self) -> None:
        self._loading = asyncio.ensure_future(self._locate_and_read())
        self._loading.add_done_callback(_retrieve)

    async def _locate_and_read(self) -> None:
        directory = await self._locate(self._manifest) if self._locate else Path(self._manifest.path)
        await threads.start(partial(self._read, directory))

    def _read(self, directory: Path) -> None:
        """On a thread. Imports cost .1 s, which the start of a gateway with simulated models does not pay."""
        # In parallel, texts would wait for each other in one pool of threads of the library's own, the event loop too.
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        from tokenizers import Tokenizer

        from gateway.prompt.chat_template import ChatTemplate

        text = (directory / "tokenizer.json").read_text(encoding="utf-8")
        try:
            tokenizer = Tokenizer.from_str(text)
        except Exception as error:  # The library raises plain Exception.
            raise ValueError(f"tokenizer.json: {error}") from error
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._template = ChatTemplate.from_directory(directory)
        self.template_variables = self._template.variables if self._template is not None else frozenset()
        longest = _token_bytes_max(msgspec.json.decode(text), tokenizer.get_vocab(with_added_tokens=True))
        self._text_bytes_max = longest and longest * self._manifest.context
        control = ControlTokens(text)
        self._control = control if control.holds_for(tokenizer) else None
        self._tokenizer = tokenizer
        self.vocabulary = tokenizer.get_vocab_size(with_added_tokens=True)

    def _count(self, api: Api, fields: dict[str, Any], salt: str) -> Counted:
        prompts = self._prompts(api, fields)
        lengths = [len(prompt) for prompt in prompts]
        keyed = salt and len(prompts) == 1 and lengths[0] > BLOCK_TOKENS
        return Counted(lengths, keys_of(salt, _first_ids(prompts[0])) if keyed else b"")

    def _prompts(self, api: Api, fields: dict[str, Any]) -> "Sequence[Prompt | Encoding | list[int]]":
        if self._tokenizer is None:
            return simulated_prompts(api.endpoint, fields)
        if api.chat is not None:
            if self._template is None:
                raise HeadraceError("invalid_request", "This model has no chat template.", param="model")
            text = self._template.render(api.chat(fields, self._template.system_first))
            return self._encoded(api, [text], special_tokens=False)
        prompt = fields[api.prompt_field]
        if isinstance(prompt, str):
            return self._encoded(api, [prompt], special_tokens=True)
        if isinstance(prompt[0], str):
            return self._encoded(api, prompt, special_tokens=True)
        return [prompt] if isinstance(prompt[0], int) else prompt

    def _encoded(self, api: Api, texts: list[str], *, special_tokens: bool) -> "Sequence[Encoding | list[int]]":
        if self._tokenizer is None:
            raise RuntimeError("this model has no tokenizer")
        most = self._text_bytes_max
        if most is not None and any(len(text) > most or len(text.encode()) > most for text in texts):
            part, context = api.prompt_field, self._manifest.context
            raise HeadraceError(
                "context_length_exceeded",
                f"This model's maximum context length is {context} tokens. However, the {part} has more than {most} "
                f"bytes, which are more tokens, however they are counted. Please reduce the length of the {part}.",
                param=part,
            )
        if self._control is not None and any(MARK in text for text in texts):
            return [self._control.token_ids(text) for text in texts]
        # encode_batch_fast releases the GIL, encode does not (measured: gaps of .5 s on a 0.9 MB text).
        return self._tokenizer.encode_batch_fast(texts, add_special_tokens=special_tokens)


def _first_ids(prompt: "Prompt | Encoding | list[int]") -> list[int]:
    """As many as have keys. A million ids would be 36 MB."""
    if isinstance(prompt, list):
        return prompt[:TOKENS_KEYED]
    if isinstance(prompt, Prompt):
        return prompt.ids(TOKENS_KEYED)
    prompt.truncate(TOKENS_KEYED)
    return prompt.ids


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


def _retrieve(loading: "asyncio.Future[None]") -> None:
    """Keep asyncio from complaining about an exception that the next request will see."""
    if not loading.cancelled():
        loading.exception()
