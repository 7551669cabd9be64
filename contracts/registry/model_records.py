"""Records of models and of their versions. A version never changes; what an operator may change is the model's.

A version is entered once. What identifies it is all that its manifest says but where its files lie, what its engine
answered to the golden prompt, and its tokenizer's fingerprint: those may be entered again (`put_version`), for another
place, other hardware, or another release of a library that makes other tokens of the same files.
"""

import hashlib
from typing import Any, NoReturn

import msgspec

from contracts import shards, subjects, topology
from contracts.bus import Bus, KvEntry, WrongSequence
from contracts.clock import now_ms
from contracts.errors import HeadraceError
from contracts.messages.base import Codec
from contracts.messages.records import Base, Manifest, ModelRecord
from contracts.registry.base import Changed, at_home, change_record, check_counts, check_name, encoded, readable
from contracts.simulated import SimulatedVersion

_MANIFEST = Codec[Manifest](Manifest)
_MODEL = Codec[ModelRecord](ModelRecord)

OVERBOOKING_MAX = 100.0
CONTEXT_MAX = 1 << 30


def read_model(entry: KvEntry) -> ModelRecord:
    """The model of an entry. Raises MsgspecError for what is none, and for a record from another place."""
    record = _MODEL.decode(entry.value)
    return at_home(record, subjects.encode_or_empty(record.name), entry)


def read_version(entry: KvEntry) -> Manifest:
    """The version of an entry, likewise."""
    manifest = _MANIFEST.decode(entry.value)
    home = f"{subjects.encode_or_empty(manifest.name)}.{subjects.encode_or_empty(manifest.version)}"
    return at_home(manifest, home, entry)


def check_version(name: str) -> str:
    """``name`` when a version can have it: `@` is between model and version in a pin."""
    if "@" in name:
        raise HeadraceError("invalid_request", "a version's name has no @", param="version")
    return check_name("version name", name)


def identity(manifest: Manifest) -> str:
    """Sha256 of all that makes it this version and no other."""
    bare = msgspec.structs.replace(
        manifest, path="", store="", golden=None, tokenizer_fingerprint="", created_at_ms=0, version=""
    )
    return hashlib.sha256(msgspec.json.encode(bare, order="sorted")).hexdigest()


ENGINE_ARGUMENTS = frozenset(
    """
    block_size data_parallel_size dtype enable_auto_tool_choice enable_chunked_prefill enable_expert_parallel
    enable_lora enable_prefix_caching enforce_eager gpu_memory_utilization kv_cache_dtype kv_cache_memory_bytes
    limit_mm_per_prompt max_lora_rank max_loras max_num_batched_tokens max_num_seqs pipeline_parallel_size quantization
    reasoning_parser rope_scaling seed swap_space tensor_parallel_size tool_call_parser
    """.split()  # noqa: SIM905 (a list of words reads better)
)
"""Of vLLM's own, those that a manifest may state: none that names files, or lets code of a model run."""


def check_manifest(manifest: Manifest) -> Manifest:
    """``manifest`` when it can be entered; raises HeadraceError."""
    check_name("model name", manifest.name)
    if shards.number_of(manifest.name):
        raise HeadraceError("invalid_request", "a model's name does not end as a shard's does (#1)", param="name")
    check_version(manifest.version)
    beyond = manifest.engine_arguments.keys() - ENGINE_ARGUMENTS
    if manifest.engine == "vllm" and beyond:
        message = f"a version may not state these arguments of its engine: {', '.join(sorted(beyond))[:200]}"
        raise HeadraceError("invalid_request", message, param="engine_arguments")
    if manifest.engine == "simulated":
        try:
            msgspec.convert(manifest.engine_arguments, SimulatedVersion)
        except msgspec.ValidationError as error:
            raise HeadraceError("invalid_request", f"engine_arguments: {error}", param="engine_arguments") from error
    if not 1 <= manifest.context <= CONTEXT_MAX:
        raise HeadraceError("invalid_request", f"context must be from 1 to {CONTEXT_MAX}", param="context")
    if not 1 <= manifest.default_output_tokens <= manifest.context:
        message = "default_output_tokens must be at least 1 and within the context"
        raise HeadraceError("invalid_request", message, param="default_output_tokens")
    return manifest


def refuse_change(manifest: Manifest) -> NoReturn:
    """Raises HeadraceError (conflict): the version is there with other contents."""
    raise HeadraceError(
        "conflict",
        f"{manifest.name} {manifest.version} is there with other contents, and a version never changes: "
        "give it another name",
        param="version",
    )


async def put_version(bus: Bus, manifest: Manifest) -> Changed[Manifest]:
    """Enter a version, and its model when there is none: that serves it.

    One that is there stays as it is, but for where its files lie; raises HeadraceError (conflict) for other contents.
    """
    check_manifest(manifest)
    if manifest.base is not None:
        await version(bus, manifest.base.model, manifest.base.version)
        if (split := await find_model(bus, manifest.name)) is not None and split.shards > 1:
            raise HeadraceError("conflict", f"{manifest.name} has {split.shards} shards, which no adapter can have")
    present = await find_version(bus, manifest.name, manifest.version)
    if present is not None and identity(present) != identity(manifest):
        refuse_change(manifest)
    kept = msgspec.structs.replace(manifest, created_at_ms=present.created_at_ms if present else now_ms())
    if kept != present:
        await _keep_version(bus, kept, present)
    record = ModelRecord(name=manifest.name, stable=manifest.version, created_at_ms=now_ms())
    if await find_model(bus, manifest.name) is None:
        try:
            await bus.kv.create(topology.MODELS, subjects.encode(manifest.name), encoded(_MODEL, record))
        except WrongSequence:
            await _add_again(bus, record)
    return Changed(present, kept)


async def _add_again(bus: Bus, record: ModelRecord) -> None:
    """One that is being removed serves that version now; one that somebody else has just made stays as it is."""

    def change(present: ModelRecord) -> ModelRecord:
        return msgspec.structs.replace(present, removed=False, stable=record.stable) if present.removed else present

    await change_record(bus, topology.MODELS, record.name, read_model, _MODEL, change, _missing(record.name))


async def _keep_version(bus: Bus, manifest: Manifest, present: Manifest | None) -> None:
    key = _key(manifest.name, manifest.version)
    entry = await bus.kv.get(topology.VERSIONS, key) if present else None
    try:
        if entry is None:
            await bus.kv.create(topology.VERSIONS, key, encoded(_MANIFEST, manifest))
        else:
            await bus.kv.update(topology.VERSIONS, key, encoded(_MANIFEST, manifest), revision=entry.revision)
    except WrongSequence as error:
        message = f"{manifest.name} {manifest.version} is being entered by others; try again"
        raise HeadraceError("conflict", message) from error


async def find_version(bus: Bus, name: str, version: str) -> Manifest | None:
    """The manifest; None when there is no such version."""
    entry = await bus.kv.get(topology.VERSIONS, _key(name, version))
    found = readable(read_version, {} if entry is None else {entry.key: entry})
    return found[0] if found else None


async def version(bus: Bus, name: str, version: str) -> Manifest:
    """The manifest; raises HeadraceError (not_found)."""
    found = await find_version(bus, name, version)
    if found is None:
        raise HeadraceError("not_found", f"there is no version {version} of a model {name}", param="version")
    return found


async def versions(bus: Bus, name: str | None = None) -> list[Manifest]:
    """By model and age; of one model, or of all."""
    pattern = f"{subjects.encode(check_name('model name', name))}.*" if name is not None else ">"
    found = readable(read_version, await bus.kv.all(topology.VERSIONS, pattern))
    return sorted(found, key=lambda manifest: (manifest.name, manifest.created_at_ms, manifest.version))


async def remove_version(bus: Bus, name: str, version: str) -> None:
    """Forget a version that its model does not serve; raises HeadraceError, also while there are adapters of it."""
    itself = Base(model=name, version=version)
    if adapters := sorted({each.name for each in await versions(bus) if each.base == itself}):
        message = f"{', '.join(adapters)}: adapters of {name} {version}; remove them first"
        raise HeadraceError("conflict", message, param="version")
    record = await find_model(bus, name)
    if record is not None and record.stable == version:
        raise HeadraceError("conflict", f"{name} serves {version}: promote another version first", param="version")
    await bus.kv.delete(topology.VERSIONS, _key(name, version))


async def find_model(bus: Bus, name: str) -> ModelRecord | None:
    """The model's record; None when there is none, or it is being removed."""
    entry = await bus.kv.get(topology.MODELS, subjects.encode(check_name("model name", name)))
    found = readable(read_model, {} if entry is None else {entry.key: entry})
    return found[0] if found and not found[0].removed else None


async def model(bus: Bus, name: str) -> ModelRecord:
    """The model's record; raises HeadraceError (not_found)."""
    found = await find_model(bus, name)
    if found is None:
        raise HeadraceError("not_found", _missing(name))
    return found


async def models(bus: Bus) -> list[ModelRecord]:
    """Those in service, by name."""
    found = readable(read_model, await bus.kv.all(topology.MODELS))
    return sorted((record for record in found if not record.removed), key=lambda record: record.name)


async def remove_model(bus: Bus, name: str) -> Changed[ModelRecord]:
    """Take a model out of service: nothing new is admitted, and its owner forgets it once its last request has ended.

    Other models' fallbacks may name it: whoever goes through them passes it by. Raises HeadraceError (not_found), and
    (conflict) while there are adapters of it.
    """
    present = await model(bus, name)
    if adapters := [each.name for each in await adapters_of(bus, name)]:
        raise HeadraceError("conflict", f"{', '.join(adapters)}: adapters of {name}; remove them first")

    def change(record: ModelRecord) -> ModelRecord:
        return msgspec.structs.replace(record, removed=True)

    await change_record(bus, topology.MODELS, name, read_model, _MODEL, change, _missing(name))
    return Changed(present, None)


async def adapters_of(bus: Bus, name: str) -> list[ModelRecord]:
    """Models in service of which a version, whether it is served or not, is an adapter of one of that model's."""
    of_it = {each.name for each in await versions(bus) if each.base and each.base.model == name}
    return [record for record in await models(bus) if record.name in of_it]


async def is_known(bus: Bus, name: str) -> bool:
    """Whether the model is in service, or was removed and has requests that have not ended."""
    return await bus.kv.get(topology.MODELS, subjects.encode(name)) is not None


async def forget_removed(bus: Bus, name: str) -> bool:
    """Delete a removed model and its versions; False when it was added again meanwhile.

    ``name`` may be a shard's: each goes after those behind it, and the model with the last of them.
    """
    number, name = shards.number_of(name), shards.model_of(name)
    entry = await bus.kv.get(topology.MODELS, subjects.encode(name))
    if entry is None or not (record := read_model(entry)).removed or record.shards != number + 1:
        return False
    try:
        if number:
            fewer = msgspec.structs.replace(record, shards=number)
            await bus.kv.update(topology.MODELS, entry.key, encoded(_MODEL, fewer), revision=entry.revision)
            return False
        await bus.kv.delete(topology.MODELS, entry.key, revision=entry.revision)
    except WrongSequence:
        return False
    for manifest in await versions(bus, name):
        await bus.kv.delete(topology.VERSIONS, _key(name, manifest.version))
    return True


async def change_model(
    bus: Bus, name: str, *, limits: dict[str, Any] | None = None, fallbacks: list[str] | None = None
) -> Changed[ModelRecord]:
    """Change bounds of the model's queue (fields of PoolLimits) or its fallbacks, which must be other models."""
    if fallbacks is not None:
        known = {record.name for record in await models(bus)}
        for fallback in fallbacks:
            if fallback == name or fallback not in known:
                raise HeadraceError("invalid_request", f"{fallback} is no other model", param="fallbacks")

    def change(record: ModelRecord) -> ModelRecord:
        changed = msgspec.structs.replace(record.limits, **(limits or {}))
        check_counts(changed)
        if not 0 < changed.kv_overbooking <= OVERBOOKING_MAX:
            message = f"kv_overbooking must be above 0 and at most {OVERBOOKING_MAX:g}"
            raise HeadraceError("invalid_request", message, param="kv_overbooking")
        if not 0 <= changed.cached_input_share <= 1:
            message = "cached_input_share must be from 0 to 1"
            raise HeadraceError("invalid_request", message, param="cached_input_share")
        if changed.replicas_max is not None and changed.replicas_max < max(1, changed.replicas_min):
            message = "replicas_max must be at least 1 and not below replicas_min"
            raise HeadraceError("invalid_request", message, param="replicas_max")
        return msgspec.structs.replace(
            record, limits=changed, fallbacks=record.fallbacks if fallbacks is None else fallbacks
        )

    return await change_record(bus, topology.MODELS, name, read_model, _MODEL, change, _missing(name))


async def set_shards(bus: Bus, name: str, count: int) -> Changed[ModelRecord]:
    """Split a model over more owners; raises HeadraceError for fewer, for one that cannot be split, or not now."""
    record = await model(bus, name)
    if not record.shards <= count <= shards.SHARDS_MAX:
        message = f"{name} has {record.shards} shards, and may have {shards.SHARDS_MAX} at most; it never gets fewer"
        raise HeadraceError("invalid_request", message, param="shards")
    for shard in shards.names(name, count):
        check_name("shard's name", shard)
    if any(each.base for each in await versions(bus, name)):
        raise HeadraceError("conflict", f"{name} is an adapter, which is not split: its base may be")

    def change(present: ModelRecord) -> ModelRecord:
        return msgspec.structs.replace(present, shards=max(present.shards, count))

    return await change_record(bus, topology.MODELS, name, read_model, _MODEL, change, _missing(name))


async def set_stable(bus: Bus, name: str, stable: str) -> Changed[ModelRecord]:
    """Make a version, which must be there, the one that the model serves."""
    await version(bus, name, stable)
    return await change_record(
        bus,
        topology.MODELS,
        name,
        read_model,
        _MODEL,
        lambda record: msgspec.structs.replace(record, stable=stable, removed=False),
        _missing(name),
    )


def _missing(name: str) -> str:
    return f"there is no model {name}"


def _key(name: str, version: str) -> str:
    return f"{subjects.encode(check_name('model name', name))}.{subjects.encode(check_version(version))}"
