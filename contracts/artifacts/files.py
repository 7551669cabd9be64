"""Which files of a directory are a model's, what is refused, and what identifies a file.

Refusing is simpler than scanning: pickles run code when they are loaded, Python files and ``auto_map`` when an engine
is told to trust them (CVE-2025-66448, CVE-2026-22807), links may show what was never meant to be published.
"""

import hashlib
import json
import math
import os
from collections.abc import Callable, Iterable
from pathlib import Path, PurePath
from typing import Any

import msgspec

from contracts.messages.records import PART_BYTES, Artifact

WEIGHTS = ".safetensors"
COMPANIONS = frozenset({".json", ".jinja", ".model", ".txt", ".tiktoken"})
"""What an engine reads beside weights. Of other files (licences, pictures) nothing is published."""
_RUNS_CODE = frozenset(
    {".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle", ".joblib", ".npy", ".npz", ".h5", ".keras", ".pyc", ".so"}
)
_CODE_KEYS = frozenset({"auto_map", "custom_pipelines"})
TOKENIZER_FILES = frozenset(
    {
        "tokenizer.json",
        "tokenizer_config.json",
        "special_tokens_map.json",
        "added_tokens.json",
        "chat_template.jinja",
        "chat_template.json",
    }
)
"""What who only counts tokens needs."""
REQUIRED = ("config.json", "tokenizer.json")

HEADER_BYTES_MAX = 100_000_000
"""Of a safetensors file, as its format says."""
COMPANION_BYTES_MAX = 256 << 20
FILES_MAX = 10_000
DIRECTORIES_MAX = 8
_READ_BYTES = 1 << 20

_TYPE_BITS = {
    "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6, "F8_E5M2": 8, "F8_E4M3": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8,
    "BOOL": 8, "U8": 8, "I8": 8, "U16": 16, "I16": 16, "F16": 16, "BF16": 16, "U32": 32, "I32": 32, "F32": 32,
    "U64": 64, "I64": 64, "F64": 64, "C64": 64,
}  # fmt: skip


class BadArtifact(Exception):
    """A file that may not be published or loaded, or that cannot be had; the text says which, and what to do."""


def publishable(directory: Path) -> dict[str, Path]:
    """The model's files by their path below ``directory``. Raises BadArtifact for what is refused or missing."""
    if directory.is_symlink() or not directory.is_dir():
        raise BadArtifact(f"{directory} is not a directory")
    chosen: dict[str, Path] = {}
    for root, folders, names in os.walk(directory, followlinks=False):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in [*folders, *sorted(names)]:
            file = Path(root, name)
            path = file.relative_to(directory).as_posix()
            if file.is_symlink():
                raise BadArtifact(f"{path} is a link: copy what it points to (cp -L)")
            if name in folders or name.startswith("."):
                continue
            if _is_chosen(file, path):
                chosen[path] = file
            if len(chosen) > FILES_MAX:
                raise BadArtifact(f"{directory} has more than {FILES_MAX} files")
    check_set(chosen)
    return chosen


def _is_chosen(file: Path, path: str) -> bool:
    """Whether it is published; raises BadArtifact when it is refused."""
    suffix = file.suffix.lower()
    if suffix in _RUNS_CODE:
        raise BadArtifact(f"{path} may run code when it is loaded: only .safetensors are weights, take it out")
    if suffix == ".py":
        raise BadArtifact(f"{path} is code, which is never published or run: take it out")
    if not file.is_file():
        raise BadArtifact(f"{path} is no plain file")
    if suffix != WEIGHTS and suffix not in COMPANIONS:
        return False
    check_path(path)
    check_contents(file, path)
    return True


def check_path(path: str) -> None:
    """Raises BadArtifact for a path that could lead out of its directory, or that no directory can have."""
    parts = path.split("/")
    if not path or len(path) > 255 or len(parts) > DIRECTORIES_MAX or any(part in ("", ".", "..") for part in parts):
        raise BadArtifact(f"{path[:80]!r} is no path of a model's file")
    if "\\" in path or any(ord(character) < 32 for character in path):
        raise BadArtifact(f"{path[:80]!r} is no path of a model's file")


def check_contents(file: Path, path: str) -> None:
    """Raises BadArtifact for what would run code, or is not what its name says. ``file`` may have another name."""
    suffix = PurePath(path).suffix.lower()
    if suffix == WEIGHTS:
        check_safetensors(file, path)
        return
    if file.stat().st_size > COMPANION_BYTES_MAX:
        raise BadArtifact(f"{path} is larger than {COMPANION_BYTES_MAX >> 20} MiB, and no weights")
    if suffix == ".json":
        try:
            content = json.loads(file.read_bytes())
        except (ValueError, RecursionError) as error:
            raise BadArtifact(f"{path} is no JSON: {error}") from error
        if key := _code_key(content):
            raise BadArtifact(f"{path} names code to run ({key}): models with code of their own are not served")


def _code_key(content: Any) -> str:
    """A key that names code, at any depth; empty when there is none."""
    waiting = [content]
    while waiting:
        value = waiting.pop()
        if isinstance(value, dict):
            for key in _CODE_KEYS & value.keys():
                if value[key]:
                    return str(key)
            waiting += value.values()
        elif isinstance(value, list):
            waiting += value
    return ""


def check_set(files: Iterable[str]) -> None:
    """Raises BadArtifact when a model cannot be loaded from files of these names."""
    names = set(files)
    missing = [name for name in REQUIRED if name not in names]
    if not any(name.endswith(WEIGHTS) for name in names):
        missing.append("*.safetensors")
    if missing:
        raise BadArtifact(f"it is not a usable Hugging Face model: {', '.join(missing)} missing")


def check_shards(files: dict[str, Path]) -> None:
    """Raises BadArtifact when an index names a shard that is not there."""
    for path, file in files.items():
        if path.endswith(".safetensors.index.json"):
            shards = json.loads(file.read_bytes()).get("weight_map", {}).values()
            folder = path.rpartition("/")[0]
            for shard in sorted({f"{folder}/{name}".lstrip("/") for name in shards}):
                if shard not in files:
                    raise BadArtifact(f"the shard {shard}, which {path} names, is missing")


class _Tensor(msgspec.Struct, frozen=True):
    dtype: str
    shape: list[int]
    data_offsets: tuple[int, int]


def check_safetensors(file: Path, path: str) -> None:
    """Raises BadArtifact unless header and size fit: what is cut off is found without loading it.

    Source: the format's own rules (huggingface/safetensors README): 8 bytes of header length, a JSON header, tensors
    contiguous without holes.
    """
    size = file.stat().st_size
    with file.open("rb") as content:
        length = int.from_bytes(content.read(8), "little")
        if size < 8 or not 2 <= length <= min(HEADER_BYTES_MAX, size - 8):
            raise BadArtifact(f"{path} is no safetensors file, or is cut off: its header has {length} bytes of {size}")
        header = content.read(length)
    try:
        entries = msgspec.json.decode(header, type=dict[str, msgspec.Raw])
        entries.pop("__metadata__", None)
        tensors = {name: msgspec.json.decode(raw, type=_Tensor) for name, raw in entries.items()}
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise BadArtifact(f"{path} has no safetensors header: {error}") from error
    at = 0
    for name, tensor in sorted(tensors.items(), key=lambda item: item[1].data_offsets):
        bits = _TYPE_BITS.get(tensor.dtype)
        begin, end = tensor.data_offsets
        wanted = bits and math.prod(tensor.shape) * bits
        if (
            begin != at
            or end < begin
            or any(each < 0 for each in tensor.shape)
            or wanted not in (None, (end - begin) * 8)
        ):
            raise BadArtifact(f"{path} has a damaged header: {name[:80]!r} does not lie where it should")
        at = end
    if 8 + length + at != size:
        raise BadArtifact(f"{path} is cut off or has too much: {size} bytes, its header says {8 + length + at}")


def describe(file: Path, progress: Callable[[int], None] = lambda _: None) -> Artifact:
    """Digest of a file and of its parts; ``progress`` hears of bytes that were read."""
    whole, parts, size = hashlib.sha256(), [], 0
    with file.open("rb") as content:
        while data := content.read(PART_BYTES):
            whole.update(data)
            parts.append(hashlib.sha256(data).hexdigest())
            size += len(data)
            progress(len(data))
    return Artifact(sha256=whole.hexdigest(), size=size, parts=parts)


def check_file(file: Path, path: str, artifact: Artifact) -> None:
    """Raises BadArtifact unless the file is the manifest's, byte for byte, and harmless."""
    try:
        size = file.stat().st_size
        if size != artifact.size:
            raise BadArtifact(f"{path} has {size} bytes, the manifest says {artifact.size}")
        with file.open("rb") as content:
            found = hashlib.file_digest(content, "sha256").hexdigest()
    except OSError as error:
        raise BadArtifact(f"{path} cannot be read: {error.strerror}") from error
    if found != artifact.sha256:
        raise BadArtifact(f"{path} has the sha256 {found[:16]}, the manifest says {artifact.sha256[:16]}")
    check_contents(file, path)


def part_size(artifact: Artifact, index: int) -> int:
    """Bytes of a part."""
    return min(PART_BYTES, artifact.size - index * PART_BYTES)
