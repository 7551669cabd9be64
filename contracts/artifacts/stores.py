"""Where the parts of files lie: in the bus's own store, at a URL, or still in the plain files.

A store gives one part at a time, checked against its name, so that what reads it need not trust it.
"""

import asyncio
import hashlib
import re
from collections.abc import Iterable
from typing import Any, Protocol
from urllib.parse import urlsplit

from contracts import subjects, topology
from contracts.artifacts.files import BadArtifact, part_size
from contracts.bus import Bus, BusError
from contracts.bus.objects import PIECE_BYTES
from contracts.messages.records import Artifact, Manifest

SCHEMES = frozenset({"file", "https", "http", "s3", "gs", "memory"})
"""Of URLs that a manifest may name."""
TRIES, PAUSE_S = 4, 0.5
"""For a part that a store does not give; the pause doubles."""
OVERHEAD = 1.02
"""Of a part in the bus's store: some 100 bytes with each piece of 128 KiB, and room for what is written again."""
SLACK_BYTES = 16 << 20

_PART = re.compile(r"[0-9a-f]{64}\Z")


class PartSource(Protocol):
    """Gives parts."""

    async def part(self, path: str, artifact: Artifact, index: int) -> bytes:
        """A part, as its digest says. Raises BadArtifact."""
        ...


class PartStore(PartSource, Protocol):
    """Takes parts, too."""

    async def present(self, sizes: dict[str, int]) -> set[str]:
        """Those of these parts (digest -> bytes) that are there whole."""
        ...

    async def reserve(self, size: int) -> None:
        """Make sure that there is room for ``size`` more bytes; raises BadArtifact."""
        ...

    async def put(self, digest: str, data: bytes) -> None:
        """Keep a part. Raises BadArtifact."""
        ...


def source_of(manifest: Manifest, bus: Bus) -> PartSource:
    """Where a version's parts are."""
    return PlainFiles(manifest.path) if manifest.path else store_at(manifest.store, bus)


def store_at(url: str, bus: Bus) -> "PartStore":
    """The store at a URL; the bus's own without one."""
    return UrlParts(url) if url else BusParts(bus)


def is_local(path: str) -> bool:
    """Whether a manifest's ``path`` is a directory of hosts that share it."""
    return path.startswith("/")


class BusParts:
    """Parts in the stream PARTS, each in pieces on a subject of its own.

    The stream is as large as what is published: room for more is reserved before, and the server refuses it where its
    disk has none, instead of taking it from the requests.
    """

    def __init__(self, bus: Bus) -> None:
        self._bus = bus

    async def part(self, path: str, artifact: Artifact, index: int) -> bytes:
        digest = _named(artifact, index)
        try:
            data = await self._bus.objects.get(
                topology.PARTS, subjects.part(digest), size=part_size(artifact, index), digest=digest
            )
        except BusError as error:
            raise BadArtifact(f"part {index} of {path} is damaged or cannot be read: {error}") from error
        if data is None:
            raise BadArtifact(f"part {index} of {path} is missing in the store: publish the version again")
        return data

    async def present(self, sizes: dict[str, int]) -> set[str]:
        pieces = await self._bus.objects.subjects(topology.PARTS, subjects.part("*"))
        return {
            digest for digest, size in sizes.items() if pieces.get(subjects.part(digest)) == -(-size // PIECE_BYTES)
        }

    async def reserve(self, size: int) -> None:
        info = await self._bus.jetstream.api(f"STREAM.INFO.{topology.PARTS}")
        wanted = int(info["state"]["bytes"] + size * OVERHEAD) + SLACK_BYTES
        await self._resize(info["config"], max(wanted, info["config"]["max_bytes"]))

    async def _resize(self, config: dict[str, Any], wanted: int) -> None:
        if wanted == config["max_bytes"]:
            return
        try:
            await self._bus.jetstream.api(f"STREAM.UPDATE.{topology.PARTS}", config | {"max_bytes": wanted})
        except BusError as error:
            raise BadArtifact(
                f"the bus has no room for {wanted >> 20} MiB of parts ({error}): give its store more disk, "
                "or publish with --store URL or --in-place"
            ) from error

    async def put(self, digest: str, data: bytes) -> None:
        subject = subjects.part(digest)
        try:
            await self._bus.objects.delete(topology.PARTS, subject)  # what an upload left that was cut off
            await self._bus.objects.put(topology.PARTS, subject, data)
        except BusError as error:
            raise BadArtifact(f"the bus does not take a part: {error}") from error

    async def keep_only(self, used: Iterable[str]) -> int:
        """Delete parts that no version refers to, and give back their room; how many they were."""
        kept = {subjects.part(digest) for digest in used}
        garbage = set(await self._bus.objects.subjects(topology.PARTS, subjects.part("*"))) - kept
        for subject in garbage:
            await self._bus.objects.delete(topology.PARTS, subject)
        info = await self._bus.jetstream.api(f"STREAM.INFO.{topology.PARTS}")
        await self._resize(info["config"], int(info["state"]["bytes"] * OVERHEAD) + SLACK_BYTES)
        return len(garbage)


class UrlParts:
    """Parts at ``<url>/<first two digits>/<digest>``, through fsspec."""

    def __init__(self, url: str) -> None:
        self._files, self._root = file_system(url)

    async def part(self, path: str, artifact: Artifact, index: int) -> bytes:
        digest = _named(artifact, index)
        return await _read(self._files, self._place(digest), path, artifact, index, start=0)

    async def present(self, sizes: dict[str, int]) -> set[str]:
        return await asyncio.to_thread(lambda: {each for each, size in sizes.items() if self._size(each) == size})

    async def reserve(self, size: int) -> None:
        """An object store has no bound that it tells of."""

    async def put(self, digest: str, data: bytes) -> None:
        place = self._place(digest)
        try:
            await asyncio.to_thread(self._put, place, data)
        except Exception as error:  # each file system raises its own
            raise BadArtifact(f"the store does not take a part at {place}: {_said(error)}") from error

    def _put(self, place: str, data: bytes) -> None:
        self._files.makedirs(place.rpartition("/")[0], exist_ok=True)
        self._files.pipe_file(place, data)

    def _place(self, digest: str) -> str:
        return f"{self._root}/{digest[:2]}/{digest}"

    def _size(self, digest: str) -> int:
        try:
            return int(self._files.info(self._place(digest))["size"])
        except FileNotFoundError:
            return -1


class PlainFiles:
    """The files as they lie in a directory, here or at a URL, read in ranges."""

    def __init__(self, url: str) -> None:
        self._files, self._root = file_system(url)

    async def part(self, path: str, artifact: Artifact, index: int) -> bytes:
        return await _read(self._files, f"{self._root}/{path}", path, artifact, index)


def file_system(url: str) -> tuple[Any, str]:
    """fsspec's file system and the place in it. Raises BadArtifact for a URL that is none of ours."""
    parts = urlsplit(url)
    scheme = "file"
    if "://" in url:
        scheme, url = parts.scheme, parts.scheme + url[len(parts.scheme) :]  # In any case of letters.
    if scheme not in SCHEMES:
        raise BadArtifact(f"{url[:80]!r}: files are taken from {', '.join(sorted(SCHEMES - {'memory'}))}")
    if parts.password or (parts.username and scheme != "file"):
        raise BadArtifact("a URL of files has no password: a manifest is read by every service")
    import fsspec  # type: ignore[import-untyped]

    try:
        files, root = fsspec.core.url_to_fs(url, **({"skip_instance_cache": True} if scheme != "memory" else {}))
    except ImportError as error:
        package = {"s3": "s3fs", "gs": "gcsfs"}.get(scheme, "aiohttp")
        raise BadArtifact(
            f"{scheme}:// needs the package {package}: pip install {package}, where this runs and where workers do"
        ) from error
    except ValueError as error:
        raise BadArtifact(f"{scheme}:// cannot be read here: {_said(error)}") from error
    return files, str(root).rstrip("/")


async def _read(
    files: Any, place: str, path: str, artifact: Artifact, index: int, *, start: int | None = None
) -> bytes:
    """A part that begins at ``start``, else where it is in its file; tried a few times."""
    size = part_size(artifact, index)
    begin = index * part_size(artifact, 0) if start is None else start
    for tried in range(1, TRIES + 1):
        try:
            data = await asyncio.to_thread(files.cat_file, place, start=begin, end=begin + size)
            if await asyncio.to_thread(_digest, data) == _named(artifact, index):
                return bytes(data)
            reason = f"{len(data)} bytes with another digest"
        except Exception as error:  # each file system raises its own
            reason = _said(error)
        if tried < TRIES:
            await asyncio.sleep(PAUSE_S * 2 ** (tried - 1))
    raise BadArtifact(f"part {index} of {path} cannot be had from {place}: {reason}")


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _named(artifact: Artifact, index: int) -> str:
    digest = artifact.parts[index]
    if not _PART.match(digest):
        raise BadArtifact("the manifest names a part that has no digest")
    return digest


def _said(error: Exception) -> str:
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0][:200]}" if text else type(error).__name__
