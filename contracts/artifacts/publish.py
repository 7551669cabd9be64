"""Brings a version's files into a store: what is there is not sent again, so that what was cut off goes on."""

import asyncio
import hashlib
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from contracts.artifacts.files import BadArtifact, check_path, describe, part_size, publishable
from contracts.artifacts.stores import PartStore, file_system
from contracts.messages.records import PART_BYTES, Artifact

AT_A_TIME = 2
"""Parts that are sent at a time: they are in memory."""
ROUNDS = 3
"""Looks at what is missing: somebody else may publish the same part at the same time, and spoil both."""
DOWNLOAD_BYTES = PART_BYTES

Progress = Callable[[str, int, int], None]
"""What is done, bytes so far, bytes in all."""

_HTTP_NAMES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "modules.json",
    "model.safetensors",
    "model.safetensors.index.json",
    "adapter_config.json",
    "adapter_model.safetensors",
)
"""A web server lists nothing: these are asked for, and the shards that the index names."""


def described(files: dict[str, Path], progress: Progress) -> dict[str, Artifact]:
    """Digests of files by their path."""
    total = sum(file.stat().st_size for file in files.values())
    done = 0

    def read(size: int) -> None:
        nonlocal done
        done += size
        progress("hashing", done, total)

    return {path: describe(file, read) for path, file in files.items()}


async def upload(store: PartStore, files: dict[str, Path], artifacts: dict[str, Artifact], progress: Progress) -> None:
    """Send what the store lacks. Raises BadArtifact."""
    places = {
        digest: (files[path], path, artifact, index)
        for path, artifact in artifacts.items()
        for index, digest in enumerate(artifact.parts)
    }
    sizes = {digest: part_size(artifact, index) for digest, (_, _, artifact, index) in places.items()}
    total = sum(sizes.values())
    turns = asyncio.Semaphore(AT_A_TIME)
    for _ in range(ROUNDS):
        missing = sizes.keys() - await store.present(sizes)
        if not missing:
            return
        done = total - sum(sizes[digest] for digest in missing)
        progress("uploading", done, total)
        await store.reserve(total - done)

        async def send(digest: str) -> None:
            nonlocal done
            file, path, _, index = places[digest]
            async with turns:
                data = await asyncio.to_thread(_read_part, file, index)
                if describe_part(data) != digest:
                    raise BadArtifact(f"{path} was changed while it was published")
                await store.put(digest, data)
                done += len(data)
                progress("uploading", done, total)

        try:
            async with asyncio.TaskGroup() as tasks:
                for digest in sorted(missing, key=lambda each: (places[each][1], places[each][3])):
                    tasks.create_task(send(digest))
        except* BadArtifact as group:
            raise group.exceptions[0] from None
    raise BadArtifact("parts are missing in the store after they were sent: does somebody else publish them? Try again")


def describe_part(data: bytes) -> str:
    """Its name."""
    return hashlib.sha256(data).hexdigest()


def _read_part(file: Path, index: int) -> bytes:
    with file.open("rb") as content:
        content.seek(index * PART_BYTES)
        return content.read(PART_BYTES)


def download(
    url: str, directory: Path, progress: Progress, chosen: Callable[[Path], dict[str, Path]] = publishable
) -> dict[str, Path]:
    """The model's files at a URL, in ``directory``; one that is there with the same size is not fetched again.

    ``chosen`` gives those that count, of a directory.
    Nothing vouches for what a source without a manifest gives but its size, and the headers of weights. Raises
    BadArtifact.
    """
    files, root = file_system(url)
    directory.mkdir(parents=True, exist_ok=True, mode=0o700)
    try:
        sizes = _listed(files, root, directory, url)
    except BadArtifact:
        raise
    except Exception as error:  # each file system raises its own
        raise BadArtifact(f"{url} cannot be read: {type(error).__name__}: {str(error)[:200]}") from error
    total, done = sum(sizes.values()), 0
    for path, size in sizes.items():
        target = directory / path
        if not (target.exists() and target.stat().st_size == size):
            _download_file(files, f"{root}/{path}", target, size, partial(_plus, progress, done, total))
        done += size
    return chosen(directory)


def _listed(files: Any, root: str, directory: Path, url: str) -> dict[str, int]:
    """Path -> bytes."""
    if url.startswith(("http://", "https://")):
        names = [name for name in _HTTP_NAMES if files.exists(f"{root}/{name}")]
        if "model.safetensors.index.json" in names:
            index = json.loads(files.cat_file(f"{root}/model.safetensors.index.json"))
            names += sorted(set(index["weight_map"].values()))
    else:
        names = [str(place).removeprefix(root).lstrip("/") for place in files.find(root)]
    for name in names:
        check_path(name)
    if not names:
        raise BadArtifact(f"there are no files of a model at {url}")
    return {name: int(files.info(f"{root}/{name}")["size"] or 0) for name in names}


def _plus(progress: Progress, done: int, total: int, size: int) -> None:
    progress("downloading", done + size, total)


def _download_file(files: Any, place: str, target: Path, size: int, progress: Callable[[int], None]) -> None:
    """In ranges, from where an earlier try got to."""
    target.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    begun = target.with_name(f"{target.name}.partial")
    with begun.open("ab") as content:
        at = content.tell()
        if at > size:
            at = 0
            content.truncate(0)
        while at < size:
            try:
                data = files.cat_file(place, start=at, end=min(size, at + DOWNLOAD_BYTES))
            except Exception as error:  # each file system raises its own
                raise BadArtifact(
                    f"{place} was cut off at {at} of {size} bytes ({type(error).__name__}): run it again"
                ) from error
            if not data:
                raise BadArtifact(f"{place} ends at {at} of {size} bytes: run it again")
            content.write(data)
            at += len(data)
            progress(at)
    begun.rename(target)
