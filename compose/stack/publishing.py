"""Publishes a version: checks and hashes its files, asks the engine its golden answer, uploads, enters the manifest.

The manifest comes last, so that no worker hears of a version whose parts are not there.
"""

import asyncio
import contextlib
import hashlib
import os
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

from compose.stack import models
from compose.stack.adapters import adapter_files, adapter_of
from compose.stack.data_dir import ComposeError, Engine
from compose.stack.manifest import SIMULATED_OUTPUT_TOKENS
from compose.stack.processes import die_with
from contracts import registry, topology
from contracts.administration import Administration
from contracts.artifacts import publish as artifacts
from contracts.artifacts.fetch import Cache, cache_dir
from contracts.artifacts.files import check_shards, publishable
from contracts.artifacts.stores import BusParts, is_local, source_of, store_at
from contracts.bus import Bus
from contracts.messages.records import Capability, Golden, Manifest, PriceTier
from contracts.registry import Changed

GOLDEN_TIMEOUT_S = 600.0
BASE_CACHE_BYTES = 1 << 40
"""Of the cache in which an adapter's base is kept for its golden answer: the disk is the bound."""


class Publication(msgspec.Struct, frozen=True, kw_only=True):
    """What is to be published, and how."""

    name: str
    version: str
    source: str = ""
    """Directory, or URL of one; empty for a simulated version without files."""
    base: str = ""
    """Model, or ``model@version`` of it, that this is a LoRA adapter of: then the engine is that one's."""
    engine: Engine = "vllm"
    store: str = ""
    """URL of the store of parts; empty: the bus's own."""
    in_place: bool = False
    """Copy nothing: workers read the files where they are."""
    golden: bool = True
    context: int | None = None
    default_output_tokens: int | None = None
    capabilities: tuple[Capability, ...] | None = None
    price_tier: PriceTier = "standard"
    engine_arguments: dict[str, Any] = {}


async def publish(bus: Bus, do: Administration, wanted: Publication) -> Changed[Manifest]:
    """The version as it was entered. Raises HeadraceError, BadArtifact, ComposeError, and then nothing was entered."""
    registry.check_name("model name", wanted.name)
    registry.check_version(wanted.version)
    await topology.ensure(bus)
    base = await _base(bus, wanted.base) if wanted.base else None
    with bar() as progress:
        chosen = publishable if base is None else adapter_files
        files = await asyncio.to_thread(_files, wanted.source, chosen, progress) if wanted.source else {}
        described = await asyncio.to_thread(artifacts.described, files, progress)
        directory = _root(files)
        manifest = await asyncio.to_thread(_manifest, wanted, base, directory, described)
        registry.check_manifest(manifest)
        present = await registry.find_version(bus, wanted.name, wanted.version)
        if present is not None and registry.identity(present) != registry.identity(manifest):
            registry.refuse_change(manifest)
        if wanted.golden:
            loaded = [msgspec.structs.replace(manifest, path=str(directory) if files else "")]
            if base is not None:
                loaded.insert(0, await _fetched(bus, base, progress))
            progress("asking the engine for its golden answer", 0, 0)
            manifest = msgspec.structs.replace(manifest, golden=await _golden(loaded))
        if not wanted.in_place:
            await artifacts.upload(store_at(wanted.store, bus), files, described, progress)
        changed = await do.publish(manifest)
        if not wanted.in_place:  # Somebody may have collected garbage before the manifest named its parts.
            await artifacts.upload(store_at(wanted.store, bus), files, described, progress)
    return changed


async def unpublish(bus: Bus, do: Administration, name: str, version: str) -> int:
    """Remove a version, and the parts in the bus that no version refers to any more; how many they were.

    Parts at a URL stay: others may use that store.
    """
    await do.unpublish(name, version)
    left = [manifest for manifest in await registry.versions(bus) if not manifest.path and not manifest.store]
    used = {part for manifest in left for artifact in manifest.artifacts.values() for part in artifact.parts}
    return await BusParts(bus).keep_only(used)


async def _base(bus: Bus, named: str) -> Manifest:
    """The version that ``model`` serves, or ``model@version``; raises HeadraceError (not_found)."""
    name, at, version = named.partition("@")
    return await registry.version(bus, name, version if at else (await registry.model(bus, name)).stable)


async def _fetched(bus: Bus, base: Manifest, progress: artifacts.Progress) -> Manifest:
    """The base with its files in this machine's cache."""
    if not base.artifacts:
        return base
    cache = Cache(cache_dir(), BASE_CACHE_BYTES)
    tell = partial(progress, f"fetching {base.name}")
    return msgspec.structs.replace(base, path=str(await cache.fetch(base, source_of(base, bus), progress=tell)))


def _files(source: str, chosen: Callable[[Path], dict[str, Path]], progress: artifacts.Progress) -> dict[str, Path]:
    """The files of the source by their path below it, downloaded first where it is a URL."""
    if "://" in source and not source.startswith("file://"):
        incoming = cache_dir() / "incoming" / hashlib.sha256(source.encode()).hexdigest()[:24]
        files = artifacts.download(source, incoming, progress, chosen)
    else:
        directory = Path(source.removeprefix("file://")).expanduser()
        files = chosen(directory.parent.resolve() / directory.name if directory.name else directory.resolve())
    check_shards(files)
    return files


def _root(files: dict[str, Path]) -> Path:
    for path, file in files.items():
        return file.parents[path.count("/")]
    return Path()


def _manifest(wanted: Publication, base: Manifest | None, directory: Path, described: dict[str, Any]) -> Manifest:
    if base is not None:
        if wanted.engine_arguments:
            raise ComposeError("an adapter runs in its base's engine, and has no arguments of its own")
        made = msgspec.structs.replace(adapter_of(wanted.name, base, described), version=wanted.version)
    elif wanted.engine == "simulated":
        made = Manifest(
            name=wanted.name,
            version=wanted.version,
            engine="simulated",
            context=wanted.context or 1_048_576,
            default_output_tokens=SIMULATED_OUTPUT_TOKENS,
            capabilities=("tools", "json", "reasoning"),
            artifacts=described,
        )
    elif not described:
        raise ComposeError("say where the files are: --from DIRECTORY or --from URL")
    else:
        made = msgspec.structs.replace(
            models.manifest_of(wanted.name, directory, described), version=wanted.version, path=""
        )
    stated = {
        "context": wanted.context,
        "default_output_tokens": wanted.default_output_tokens,
        "capabilities": wanted.capabilities,
        "price_tier": wanted.price_tier,
        "engine_arguments": wanted.engine_arguments,
        "store": wanted.store,
    }
    if wanted.in_place:
        stated["path"] = str(directory) if is_local(str(directory)) and "://" not in wanted.source else wanted.source
    return msgspec.structs.replace(made, **{name: value for name, value in stated.items() if value is not None})


async def _golden(loaded: list[Manifest]) -> Golden:
    """Of the last of them, from a process of its own: the engine is large, and may die. It ends with this one."""
    parent = os.getpid()
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "worker.golden"),
        stdin=-1,
        stdout=-1,
        stderr=-1,
        env=os.environ | {"TQDM_DISABLE": "1"},
        preexec_fn=lambda: die_with(parent),
    )
    try:
        async with asyncio.timeout(GOLDEN_TIMEOUT_S):
            out, err = await process.communicate(msgspec.json.encode(loaded))
    except TimeoutError as error:
        raise ComposeError(f"the engine gave no golden answer within {GOLDEN_TIMEOUT_S:g} s") from error
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
    if process.returncode != 0:
        last = (err.decode(errors="replace").strip().splitlines() or ["no reason given"])[-1]
        raise ComposeError(f"the engine gave no golden answer: {last} (--no-golden publishes without)")
    return msgspec.json.decode(out.strip().splitlines()[-1], type=Golden)


@contextlib.contextmanager
def bar() -> Iterator[artifacts.Progress]:
    """A bar on a terminal, nothing elsewhere."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as shown:
        tasks: dict[str, Any] = {}

        def tell(what: str, done: int, total: int) -> None:
            if what not in tasks:
                tasks[what] = shown.add_task(what, total=total or None)
            shown.update(tasks[what], completed=done, total=total or None)

        yield tell
