"""From a manifest to an engine that serves: fetch and verify the files, start, prove that it is what was published.

What fails here is told in words and never serves. Which version is loaded, and when, is decided in the core.
"""

import asyncio
from collections.abc import Callable

import msgspec
import structlog

from contracts.artifacts.fetch import Cache, cache_dir
from contracts.artifacts.files import BadArtifact
from contracts.artifacts.stores import source_of
from contracts.bus import Bus
from contracts.messages.base import Endpoint
from contracts.messages.control import Loading
from contracts.messages.records import Golden, Manifest
from worker import metrics
from worker.config import WorkerConfig
from worker.engines.base import Counts, Engine, EngineFailure, Job
from worker.engines.supervisor import close

GOLDEN_TOKENS = 16
GOLDEN_S = 120.0
"""Time limit of the golden answer; some 16 tokens."""
GOLDEN_PROMPT = "The quick brown fox jumps over the lazy dog. Counting: one, two, three,"

_log = structlog.get_logger()


class Loader:
    """``build`` makes an engine, not yet started, of a manifest whose ``path`` is a directory here."""

    def __init__(self, bus: Bus, config: WorkerConfig, build: Callable[[Manifest], Engine]) -> None:
        self._bus = bus
        self._build = build
        self._cache = Cache(cache_dir(config.cache), config.cache_bytes)
        self.stage = ""
        """What is being done, for the heartbeat; empty while nothing is."""
        self.loading: Loading | None = None
        """How many bytes of it are here."""

    async def fetch(self, manifest: Manifest) -> Manifest:
        """Have all its files here, verified. Raises EngineFailure."""
        if not manifest.artifacts:
            if manifest.engine == "vllm" and not manifest.base:
                raise EngineFailure("unavailable", "the manifest names no files: publish the version again")
            return manifest
        self.stage = f"verifying {manifest.version}"

        def progress(done: int, total: int) -> None:
            self.stage = f"fetching {manifest.version}: {done >> 20} of {total >> 20} MiB"
            self.loading = Loading(version=manifest.version, done_bytes=done, total_bytes=total)

        try:
            source = source_of(manifest, self._bus)
            directory = await self._cache.fetch(manifest, source, progress=progress)
        except BadArtifact as error:
            raise EngineFailure("unavailable", str(error)) from error
        finally:
            self.stage, self.loading = "", None
        return msgspec.structs.replace(manifest, path=str(directory))

    async def load(self, manifest: Manifest) -> Engine:
        """An engine that has answered as it should. Raises EngineFailure."""
        here = await self.fetch(manifest)
        try:
            engine = self._build(here)
        except msgspec.ValidationError as error:
            raise EngineFailure("unavailable", f"its engine arguments are not valid: {error}") from error
        try:
            self.stage = f"starting the engine with {manifest.version}"
            await engine.start()
            self.stage = f"warming up {manifest.version}"
            await prove(engine, manifest)
        except BaseException:
            await close(engine)
            raise
        finally:
            self.stage = ""
        return engine


async def prove(engine: Engine, manifest: Manifest) -> None:
    """Raises EngineFailure unless the engine counts and answers as it did when the version was published."""
    found, wanted = await engine.fingerprint(), manifest.tokenizer_fingerprint
    if found and wanted and found != wanted:
        metrics.count_other_tokenizer(manifest.name)
        version, model = manifest.version, manifest.name
        _log.error("tokenizer_mismatch", model=model, version=version, found=found[:16], published=wanted[:16])
        raise EngineFailure(
            "unavailable",
            f"the engine counts tokens otherwise than was published (fingerprint {found[:16]}, published "
            f"{wanted[:16]}): another tokenizer, chat template or library; publish a version made with this one",
        )
    if manifest.golden is not None and (reason := disagreement(manifest.golden, await golden_of(engine, manifest))):
        raise EngineFailure("unavailable", f"the golden answer differs from the published one: {reason}")


def disagreement(published: Golden, found: Golden) -> str:
    """How two answers to one prompt differ; empty when they agree as far as was published."""
    if published.tokens:
        compared = published.agreeing or len(published.tokens)
        for number, wanted in enumerate(published.tokens[:compared]):
            if number >= len(found.tokens) or found.tokens[number] != wanted:
                return f"token {number + 1} of {compared} is another"
    elif published.text != found.text:
        return "it is another text"
    return ""


async def golden_of(engine: Engine, manifest: Manifest) -> Golden:
    """The engine's greedy answer to the manifest's golden prompt, else to the usual one. Raises EngineFailure."""
    prompt = manifest.golden.prompt if manifest.golden else GOLDEN_PROMPT
    endpoint: Endpoint = "embeddings" if "embeddings" in manifest.endpoints else "completions"
    asked: dict[str, object] = {"input": prompt}
    if endpoint == "completions":
        asked = {"prompt": prompt, "max_tokens": GOLDEN_TOKENS, "temperature": 0, "return_token_ids": True}
    job = Job(
        request_id="golden",
        attempt=0,
        endpoint=endpoint,
        body=msgspec.json.encode(asked),
        stream=False,
        cache_salt="golden",
    )
    try:
        chunks: list[bytes] = []
        async with asyncio.timeout(GOLDEN_S):
            await engine.generate(job, Counts(), chunks.append)
        answer = b"".join(chunks)
    except TimeoutError as error:
        raise EngineFailure("unavailable", f"no golden answer within {GOLDEN_S:g} s", engine_death=True) from error
    if endpoint == "embeddings":
        return Golden(prompt=prompt)
    try:
        choice = msgspec.json.decode(answer, type=_Answer).choices[0]
    except (msgspec.MsgspecError, IndexError) as error:
        raise EngineFailure("unavailable", f"the golden answer is none: {error}") from error
    if not choice.text and not choice.token_ids:
        raise EngineFailure("unavailable", "the golden answer is empty")
    return Golden(prompt=prompt, text=choice.text, tokens=choice.token_ids or [])


class _Choice(msgspec.Struct, frozen=True):
    text: str = ""
    token_ids: list[int] | None = None


class _Answer(msgspec.Struct, frozen=True):
    choices: list[_Choice]
