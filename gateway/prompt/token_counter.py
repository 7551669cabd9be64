"""Exact prompt tokens of a request, counted as its engine will count them: by the files of the version (``tokenizer``).

Long texts are counted on threads, in calls that release the GIL, so that they do not delay streams.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import structlog

from contracts import fingerprint
from contracts.artifacts.files import BadArtifact
from contracts.errors import HeadraceError
from contracts.messages.records import Manifest
from contracts.prefix import BLOCK_TOKENS, TOKENS_KEYED, keys_of
from contracts.simulated import Prompt, measured, simulated_prompts
from gateway import metrics
from gateway.apis.api import Api
from gateway.prompt import callers_text, threads

if TYPE_CHECKING:
    from gateway.prompt.tokenizer import Tokenizer

_log = structlog.get_logger()

ON_THE_SPOT_BYTES = 2_000
"""Smaller bodies are counted on the spot: some 500 tokens take .5 ms (measured: 1.8 ms per 1,000), and a thread may
wait longer for the GIL."""


class Counted(NamedTuple):
    """What was found of a request's prompts."""

    tokens: list[int]
    """Of each."""
    digest: str
    """Of their ids (contracts.fingerprint); empty where the template writes the time of day, which is another one at
    the engine: then the number of tokens alone can be compared."""
    prefix_keys: bytes


class OtherTokenizer(ValueError):
    """The files, or this code, count otherwise than the version was published with."""


class TokenCounter:
    """Counts for one manifest. A tokenizer is loaded in the background, on a thread.

    ``locate`` gives a directory with its files, verified; without it they are taken from the manifest's ``path``.
    """

    def __init__(self, manifest: Manifest, locate: Callable[[Manifest], Awaitable[Path]] | None = None) -> None:
        self._manifest = manifest
        self._locate = locate
        self._tokenizer: Tokenizer | None = None
        self._loading: asyncio.Future[None] | None = None
        if manifest.engine != "simulated":
            metrics.tokenizer_mismatches(manifest.name)  # From the beginning, for Prometheus.
            self._load()

    @property
    def vocabulary(self) -> int | None:
        """Number of token ids; None where the engine has no fixed one."""
        return self._tokenizer.vocabulary if self._tokenizer else None

    @property
    def template_variables(self) -> frozenset[str]:
        """What a caller may set of the chat template's."""
        return self._tokenizer.template_variables if self._tokenizer else frozenset()

    @property
    def fingerprint(self) -> str:
        """How it counts (``contracts.fingerprint``); empty where there are no files to count by."""
        return self._tokenizer.fingerprint if self._tokenizer else ""

    async def ready(self) -> None:
        """Wait for the tokenizer; raises HeadraceError (unavailable) when it cannot be loaded, or is another one."""
        if self._loading is None:
            return
        failure = self._loading.exception() if self._loading.done() else None
        if failure is not None and not isinstance(failure, OtherTokenizer):
            self._load()  # The files may have come meanwhile.
        try:
            await asyncio.shield(self._loading)
        except OtherTokenizer as error:
            metrics.tokenizer_mismatches(self._manifest.name).inc()
            message = "The model's tokens are counted otherwise here than it was published with."
            raise HeadraceError("unavailable", message, retry_after_s=5) from error
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
        if self._tokenizer is None or self._tokenizer.control is None or api.chat is None:
            return fields
        control = self._tokenizer.control
        return await threads.run(tenant, size, ON_THE_SPOT_BYTES, callers_text.marked, fields, control)

    def _load(self) -> None:
        self._loading = asyncio.ensure_future(self._locate_and_read())
        self._loading.add_done_callback(_retrieve)

    async def _locate_and_read(self) -> None:
        directory = await self._locate(self._manifest) if self._locate else Path(self._manifest.path)
        await threads.start(partial(self._read, directory))

    def _read(self, directory: Path) -> None:
        """On a thread. Imports cost .1 s, which the start of a gateway with simulated models does not pay.

        Raises OtherTokenizer unless it counts as the version was published.
        """
        from gateway.prompt.tokenizer import Tokenizer

        manifest, tokenizer = self._manifest, Tokenizer(self._manifest, directory)
        found, published = tokenizer.fingerprint[:16], manifest.tokenizer_fingerprint[:16]
        if published and tokenizer.fingerprint != manifest.tokenizer_fingerprint:
            model, version = manifest.name, manifest.version
            _log.error("tokenizer_mismatch", model=model, version=version, found=found, published=published)
            raise OtherTokenizer(f"{model} {version} is counted by {found}, and was published with {published}")
        self._tokenizer = tokenizer

    def _count(self, api: Api, fields: dict[str, Any], salt: str) -> Counted:
        prompts: Sequence[Prompt | list[int]]
        if self._tokenizer is None:
            prompts = simulated = simulated_prompts(api.endpoint, fields)
            lengths, digest = measured(simulated)
        else:
            prompts = ids = self._tokenizer.token_ids(api, fields)
            lengths, digest = [len(each) for each in ids], fingerprint.digest(ids)
            if api.chat is not None and self._tokenizer.tells_time:
                digest = ""
        keyed = salt and len(prompts) == 1 and lengths[0] > BLOCK_TOKENS
        return Counted(lengths, digest, keys_of(salt, _first_ids(prompts[0])) if keyed else b"")


def _first_ids(prompt: Prompt | list[int]) -> list[int]:
    """As many as have keys."""
    return prompt.ids(TOKENS_KEYED) if isinstance(prompt, Prompt) else prompt[:TOKENS_KEYED]


def _retrieve(loading: "asyncio.Future[None]") -> None:
    """Keep asyncio from complaining about an exception that the next request will see."""
    if not loading.cancelled():
        loading.exception()
