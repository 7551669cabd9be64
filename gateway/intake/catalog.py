"""Which models are served: the manifests of the MODELS bucket, watched, each with its token counter."""

import msgspec
import structlog

from contracts import registry, topology
from contracts.bus import Bus, KvEntry, Watch
from contracts.errors import HeadraceError
from contracts.messages.records import Manifest, TenantRecord
from gateway.prompt.token_counter import TokenCounter

_log = structlog.get_logger()


class Model(msgspec.Struct, frozen=True):
    """A manifest, and its counter of prompt tokens."""

    manifest: Manifest
    tokens: TokenCounter


class Catalog:
    """Models by name."""

    def __init__(self) -> None:
        self._models: dict[str, Model] = {}
        self._names: dict[str, str] = {}
        self._watch: Watch | None = None

    async def start(self, bus: Bus) -> None:
        """Returns when the present state is known."""
        self._watch = await bus.kv.watch(topology.MODELS, self._on_manifest)

    async def close(self) -> None:
        """Stop watching."""
        if self._watch is not None:
            await self._watch.close()

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

    def _on_manifest(self, key: str, entry: KvEntry | None) -> None:
        if entry is None:
            self._models.pop(self._names.pop(key, ""), None)
            return
        try:
            manifest = registry.read_model(entry)
        except msgspec.MsgspecError as error:
            _log.error("manifest_unreadable", key=key, seq=entry.revision, reason=str(error))
            return
        before = self._models.get(manifest.name)
        if before is not None and before.manifest == manifest:
            return
        self._names[key] = manifest.name
        self._models[manifest.name] = Model(manifest, TokenCounter(manifest))
