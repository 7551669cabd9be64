"""The local cache of files: what is missing is downloaded, all of it is verified, an engine gets a directory of links.

blobs/<sha256>            a file, whole and synced; common files of versions are here once
blobs/<sha256>.partial    one on its way: verified parts, the next one follows
versions/<identity>/      the directory that is loaded: a link for each of the manifest's files
"""

import asyncio
import errno
import fcntl
import hashlib
import os
import shutil
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path

import structlog

from contracts import registry
from contracts.artifacts.files import TOKENIZER_FILES, BadArtifact, check_file, check_path, check_shards, part_size
from contracts.artifacts.stores import PartSource, is_local, source_of
from contracts.bus import Bus
from contracts.messages.records import PART_BYTES, Artifact, Manifest

FREE_BYTES_MIN = 256 << 20
"""What a download leaves free on the disk for everybody else."""
LOCK_S = 0.2

_log = structlog.get_logger()

Progress = Callable[[int, int], None]
"""Bytes that are there, and bytes in all."""


def cache_dir(own: str = "") -> Path:
    """``own``, else $HEADRACE_CACHE, else $XDG_CACHE_HOME/headrace, else ~/.cache/headrace."""
    if chosen := own or os.environ.get("HEADRACE_CACHE"):
        return Path(chosen).expanduser()
    if shared := os.environ.get("XDG_CACHE_HOME"):
        return Path(shared).expanduser() / "headrace"
    return Path.home() / ".cache" / "headrace"


class Cache:
    """``bytes_max``: of all blobs together, beside those of the version that was fetched last."""

    def __init__(self, directory: Path, bytes_max: int) -> None:
        self._blobs = directory / "artifacts" / "blobs"
        self._versions = directory / "artifacts" / "versions"
        self._bytes_max = bytes_max

    async def fetch(
        self,
        manifest: Manifest,
        source: PartSource,
        *,
        only: Callable[[str], bool] = lambda path: True,
        progress: Progress = lambda done, total: None,
    ) -> Path:
        """A directory with the version's files (``only`` those), each as the manifest says. Raises BadArtifact."""
        wanted = {path: artifact for path, artifact in manifest.artifacts.items() if only(path)}
        for path in wanted:
            check_path(path)
        in_place = is_local(manifest.path)
        try:
            await asyncio.to_thread(self._make, in_place)
            if in_place:
                files = {path: Path(manifest.path, path) for path in wanted}
            else:
                files = await self._download(wanted, source, progress)
            await self._verify(files, wanted)
            return await asyncio.to_thread(self._link, manifest, files)
        except OSError as error:
            raise BadArtifact(f"the cache {self._blobs.parent} fails: {error.strerror or error}") from error

    def _make(self, in_place: bool) -> None:
        """Make the folders. Where files stay in place a cache that is read-only will do: links alone lie elsewhere."""
        try:
            for folder in (self._blobs, self._versions):
                folder.mkdir(parents=True, exist_ok=True, mode=0o700)
                folder.parent.chmod(0o700)
            writable = os.access(self._versions, os.W_OK)
        except OSError:
            if not in_place:
                raise
            writable = False
        if in_place and not writable:
            self._versions = Path(tempfile.mkdtemp(prefix="headrace-"))

    async def _verify(self, files: dict[str, Path], wanted: dict[str, Artifact]) -> None:
        """Hash everything once more: disks and people change files. A blob that differs is taken out of the cache."""

        def check(path: str) -> None:
            try:
                check_file(files[path], path, wanted[path])
            except BadArtifact:
                if files[path].parent == self._blobs:
                    files[path].unlink(missing_ok=True)
                raise

        for path in wanted:  # one after the other: what is slow is the disk
            await asyncio.to_thread(check, path)
        await asyncio.to_thread(check_shards, files)

    async def _download(self, wanted: dict[str, Artifact], source: PartSource, progress: Progress) -> dict[str, Path]:
        files = {path: self._blobs / artifact.sha256 for path, artifact in wanted.items()}
        total = sum(artifact.size for artifact in wanted.values())
        missing = {artifact.sha256: artifact for path, artifact in wanted.items() if not files[path].exists()}
        self._make_room({file.name for file in files.values()}, sum(artifact.size for artifact in missing.values()))
        done = total - sum(artifact.size for artifact in wanted.values() if artifact.sha256 in missing)
        progress(done, total)
        for path, artifact in wanted.items():
            if artifact.sha256 not in missing:
                os.utime(files[path])
                continue
            async with _locked(files[path].with_suffix(".lock")):
                if not files[path].exists():
                    await self._complete(path, artifact, source, partial(_plus, progress, done, total))
            done += artifact.size
            progress(done, total)
        return files

    async def _complete(
        self, path: str, artifact: Artifact, source: PartSource, progress: Callable[[int], None]
    ) -> None:
        """Download one file, from where an earlier try got to."""
        if len(artifact.parts) != -(-artifact.size // PART_BYTES):
            raise BadArtifact(
                f"the manifest names {len(artifact.parts)} parts of {path}, which has {artifact.size} bytes"
            )
        final = self._blobs / artifact.sha256
        begun_file = final.with_suffix(".partial")
        try:
            with begun_file.open("r+b" if begun_file.exists() else "w+b") as file:
                begun = await asyncio.to_thread(_whole_parts, file.fileno(), artifact)
                file.truncate(begun * PART_BYTES if begun < len(artifact.parts) else artifact.size)
                for index in range(begun, len(artifact.parts)):
                    progress(index * PART_BYTES)
                    data = await source.part(path, artifact, index)
                    file.seek(index * PART_BYTES)
                    await asyncio.to_thread(file.write, data)
                file.flush()
                await asyncio.to_thread(os.fsync, file.fileno())
            await asyncio.to_thread(check_file, begun_file, path, artifact)
        except BadArtifact as error:
            if begun_file.exists() and begun_file.stat().st_size == artifact.size:
                begun_file.unlink()  # whole, and wrong: nothing to go on with
            raise error
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                begun_file.unlink(missing_ok=True)
                raise BadArtifact(f"the disk of {self._blobs} is full: {path} was not kept") from error
            raise
        begun_file.rename(final)
        _sync_directory(self._blobs)

    def _make_room(self, needed: set[str], missing_bytes: int) -> None:
        """Within the bound and the disk; raises BadArtifact when there is no room."""
        blobs = [(file.stat(), file) for file in self._blobs.iterdir() if file.suffix == "" or _is_old_partial(file)]
        used = sum(stat.st_size for stat, _ in blobs)
        free = shutil.disk_usage(self._blobs).free - FREE_BYTES_MIN
        for stat, file in sorted(blobs, key=lambda each: each[0].st_mtime):
            if used + missing_bytes <= self._bytes_max and missing_bytes <= free:
                break
            if file.name not in needed:
                file.unlink(missing_ok=True)
                used -= stat.st_size
                free += stat.st_size
        if missing_bytes > free:
            raise BadArtifact(
                f"no room for {missing_bytes >> 20} MiB in {self._blobs}: {max(0, free) >> 20} MiB may be used; "
                "free some, or name another place by HEADRACE_CACHE"
            )
        for folder in self._versions.iterdir():
            if any(not link.exists() for link in folder.rglob("*") if link.is_symlink()):
                shutil.rmtree(folder, ignore_errors=True)

    def _link(self, manifest: Manifest, files: dict[str, Path]) -> Path:
        """Put together the directory that is loaded: these files, and nothing that lies beside them."""
        listing = "".join(f"{path}\0{file}\n" for path, file in sorted(files.items()))
        name = hashlib.sha256(f"{registry.identity(manifest)}\n{listing}".encode()).hexdigest()[:32]
        target = self._versions / name
        if not target.exists():
            work = self._versions / f".{name}.{os.getpid()}.{time.monotonic_ns()}"
            for path, file in files.items():
                link = work / path
                link.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
                link.symlink_to(file)
            with suppress(OSError):  # somebody else was first
                work.rename(target)
            shutil.rmtree(work, ignore_errors=True)
        return target


async def tokenizer_files(cache: Cache, bus: Bus, manifest: Manifest) -> Path:
    """A directory with what who only counts tokens needs. Raises BadArtifact.

    Files in place stay there: what lies beside them and was not published must be none that a tokenizer reads.
    """
    if not manifest.artifacts:
        return Path(manifest.path)
    if is_local(manifest.path):
        await asyncio.to_thread(_check_in_place, manifest)
        return Path(manifest.path)
    return await cache.fetch(manifest, source_of(manifest, bus), only=TOKENIZER_FILES.__contains__)


def _check_in_place(manifest: Manifest) -> None:
    for name in TOKENIZER_FILES:
        file = Path(manifest.path, name)
        if name in manifest.artifacts:
            check_file(file, name, manifest.artifacts[name])
        elif file.exists():
            raise BadArtifact(f"{file} is there, but was not published: take it out, or publish another version")


def _plus(progress: Progress, done: int, total: int, size: int) -> None:
    progress(done + size, total)


def _whole_parts(descriptor: int, artifact: Artifact) -> int:
    """How many parts at the start of a file are as they should be."""
    for index, digest in enumerate(artifact.parts):
        data = os.pread(descriptor, part_size(artifact, index), index * PART_BYTES)
        if hashlib.sha256(data).hexdigest() != digest:
            return index
    return len(artifact.parts)


def _is_old_partial(file: Path) -> bool:
    """Nobody writes it any more: it had no part for an hour."""
    return file.suffix == ".partial" and time.time() - file.stat().st_mtime > 3600


@asynccontextmanager
async def _locked(path: Path) -> AsyncIterator[None]:
    """Hold a lock file; the system releases it when the process ends, however it ends."""
    with path.open("a") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                await asyncio.sleep(LOCK_S)
        yield


def _sync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
