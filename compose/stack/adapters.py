"""The manifest of a LoRA adapter: what it is called, which version of which model it is of, and its files.

Its engine, context, APIs and tokenizer are its base's. Everything that is wrong with its files is told here, before
anybody loads them.
"""

import json
from pathlib import Path
from typing import Any

import msgspec

from compose.stack.data_dir import ComposeError
from contracts.artifacts.files import BadArtifact, check_contents
from contracts.messages.records import Artifact, Base, Manifest

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
"""As PEFT writes them; of other files nothing is loaded."""
RANK_MAX = 512


def adapter_of(name: str, base: Manifest, artifacts: dict[str, Artifact]) -> Manifest:
    """Without a version. Raises ComposeError. A simulated base's adapter has no files that anybody reads."""
    if name == base.name:
        raise ComposeError("an adapter has a name of its own, not its base's")
    if base.base is not None:
        raise ComposeError(f"{base.name} is an adapter itself; name the model that it is of")
    if "embeddings" in base.endpoints:
        raise ComposeError(f"{base.name} gives embeddings: the engine loads adapters beside models of text alone")
    if base.engine != "simulated" and not artifacts:
        raise ComposeError("say where the adapter's files are: --from DIRECTORY or --from URL")
    return msgspec.structs.replace(
        base,
        name=name,
        version="",
        artifacts=artifacts,
        path="",
        store="",
        engine_arguments={},
        golden=None,
        base=Base(model=base.name, version=base.version),
        created_at_ms=0,
    )


def adapter_files(directory: Path) -> dict[str, Path]:
    """Its two files. Raises ComposeError for what vLLM does not load."""
    found = {name: directory / name for name in (CONFIG, WEIGHTS)}
    for name, path in found.items():
        if path.is_symlink() or not path.is_file():
            only = " (adapter_model.bin is a pickle, which runs code: save it as safetensors)"
            pickled = name == WEIGHTS and (directory / "adapter_model.bin").exists()
            raise ComposeError(f"{directory} is no LoRA adapter: {name} is missing or a link{only if pickled else ''}")
    try:
        for name, path in found.items():
            check_contents(path, name)
    except BadArtifact as error:
        raise ComposeError(f"{directory}: {error}") from error
    _check_config(json.loads(found[CONFIG].read_bytes()))
    return found


def _check_config(config: Any) -> None:
    """Raises ComposeError for what vLLM does not load."""
    kind = config.get("peft_type") if isinstance(config, dict) else None
    if kind != "LORA":
        raise ComposeError(f"{CONFIG}: peft_type is {kind!r}; only LORA is served")
    rank = config.get("r")
    if not isinstance(rank, int) or not 0 < rank <= RANK_MAX:
        raise ComposeError(f"{CONFIG}: r (the rank) must be a whole number from 1 to {RANK_MAX}, not {rank!r}")
    for field in ("modules_to_save", "use_dora"):
        if config.get(field):
            raise ComposeError(f"{CONFIG}: {field} is set, which the engine does not load")
