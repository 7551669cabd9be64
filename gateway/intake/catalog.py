"""Which models are served: the buckets MODELS and VERSIONS, watched; each stable version with its token counter."""

import msgspec
import structlog

from contracts import registry, subjects, topology
from contracts.bus import Bus, KvEntry, Watch
from contracts.errors import HeadraceError
from contracts.messages.records import Manifest, ModelRecord, TenantRecord
from gateway.prompt.token_counter import TokenCounter

_log = structlog.get_logger()


class Model(msgspec.Struct, frozen=True):
    """A model, the version that it serves, and the counter of that one's prompt tokens."""

    record: ModelRecord
    manifest: Manifest
    tokens: TokenCounter


class Catalog:
    """Models by name."""

    def __init__(self) -> None:
        self._models: dict[str, Model] = {}
        """Those whose record and stable version are there."""
        self._records: dict[str, ModelRecord] = {}
        self._versions: dict[str, Manifest] = {}
        """Both by their keys."""
        self._watches: list[Watch] = []

    async def start(self, bus: Bus) -> None:
        """Returns when the present state is known."""
        self._watches.append(await bus.kv.watch(topology.VERSIONS, self._on_version))
        self._watches.append(await bus.kv.watch(topology.MODELS, self._on_model))

    async def close(self) -> None:
        """Stop watching."""
        for watch in self._watches:
            await watch.close()

    def names(self) -> list[str]:
        """Of all models."""
        return sorted(self._models)

    def visible(self, tenant: TenantRecord) -> list[Manifest]:
        """Models that the tenant may see, by name."""
        return [self._models[name].manifest for name in self.names() if tenant.models is None or name in tenant.models]

    def resolve(self, name: str, tenant: TenantRecord) -> Model:
        """The model; raises HeadraceError (model_not_found) also for one that the tenant may not see."""
        model = self._models.get(name)
        if model is None or (tenant.models is not None and name not in tenant.models):
            shown = name if len(name) <= 128 else f"{name[:128]}..."
            raise HeadraceError(
                "model_not_found", f"The model {shown!r} does not exist or you have no access to it.", param="model"
            )
        return model

    def _on_model(self, key: str, entry: KvEntry | None) -> None:
        if entry is None:
            self._forget(key)
            return
        try:
            record = registry.read_model(entry)
        except msgspec.MsgspecError as error:
            _log.error("model_unreadable", key=key, seq=entry.revision, reason=str(error))
            return
        if record.removed:
            self._forget(key)
            return
        self._records[key] = record
        self._serve(record)

    def _forget(self, key: str) -> None:
        if (gone := self._records.pop(key, None)) is not None:
            self._models.pop(gone.name, None)

    def _on_version(self, key: str, entry: KvEntry | None) -> None:
        if entry is None:
            self._versions.pop(key, None)
            return
        try:
            manifest = self._versions[key] = registry.read_version(entry)
        except msgspec.MsgspecError as error:
            _log.error("manifest_unreadable", key=key, seq=entry.revision, reason=str(error))
            return
        if (record := self._records.get(key.partition(".")[0])) is not None and record.stable == manifest.version:
            self._serve(record)

    def _serve(self, record: ModelRecord) -> None:
        """Until the stable version's manifest is there, the one before goes on being served."""
        before = self._models.get(record.name)
        manifest = self._versions.get(f"{subjects.encode(record.name)}.{subjects.encode(record.stable)}")
        if manifest is None:
            _log.warning("manifest_awaited", model=record.name, version=record.stable)
            if before is None:
                return
            manifest = before.manifest
        tokens = before.tokens if before is not None and before.manifest == manifest else TokenCounter(manifest)
        self._models[record.name] = Model(record, manifest, tokens)
