"""Which models are served, under which names: the buckets MODELS, VERSIONS and ALIASES, watched; each stable version
with its token counter.
"""

from collections.abc import Hashable
from functools import partial
from weakref import WeakValueDictionary

import msgspec
import structlog

from contracts import registry, subjects, topology
from contracts.artifacts.fetch import TOKENIZER_FILES, Cache, cache_dir, tokenizer_files
from contracts.bus import Bus, KvEntry, Watch
from contracts.errors import HeadraceError
from contracts.messages.records import PRICE_TIERS, Alias, Base, Manifest, ModelRecord, TenantRecord
from gateway.intake import choice
from gateway.intake.choice import Candidate, Need, Offer
from gateway.prompt.token_counter import TokenCounter

_log = structlog.get_logger()


CACHE_BYTES = 16 << 30
"""Of tokenizers' files: hundreds of the largest."""


class Model(msgspec.Struct, frozen=True):
    """A model, the version that it serves, and the counter of that one's prompt tokens."""

    record: ModelRecord
    manifest: Manifest
    tokens: TokenCounter


class Catalog:
    """Models by name. ``cache``: where files of tokenizers are kept (``contracts.artifacts.fetch.cache_dir``)."""

    def __init__(self, cache: str = "") -> None:
        self._models: dict[str, Model] = {}
        """Those whose record and stable version are there."""
        self._records: dict[str, ModelRecord] = {}
        self._versions: dict[str, Manifest] = {}
        """Both by their keys."""
        self._pins: dict[str, Model] = {}
        """Versions that callers have named, by ``model@version``."""
        self._counters: WeakValueDictionary[Hashable, TokenCounter] = WeakValueDictionary()
        """Of what is served, by what they count with: versions and adapters that have one tokenizer share one."""
        self._aliases: dict[str, Alias] = {}
        self._loads: dict[str, float | None] = {}
        self._watches: list[Watch] = []
        self._cache = Cache(cache_dir(cache), CACHE_BYTES)

    async def start(self, bus: Bus) -> None:
        """Returns when the present state is known."""
        self._bus = bus
        self._watches.append(await bus.kv.watch(topology.ALIASES, self._on_alias))
        self._watches.append(await bus.kv.watch(topology.VERSIONS, self._on_version))
        self._watches.append(await bus.kv.watch(topology.MODELS, self._on_model))

    def _counter(self, manifest: Manifest) -> TokenCounter:
        key = _counted_with(manifest)
        if (counter := self._counters.get(key)) is None:
            counter = self._counters[key] = TokenCounter(manifest, partial(tokenizer_files, self._cache, self._bus))
        return counter

    async def close(self) -> None:
        """Stop watching."""
        for watch in self._watches:
            await watch.close()

    def names(self) -> list[str]:
        """Of all models."""
        return sorted(self._models)

    def records(self) -> list[ModelRecord]:
        """Of all models, by name."""
        return [self._models[name].record for name in self.names()]

    def visible(self, tenant: TenantRecord) -> list[Manifest]:
        """Models that the tenant may use, by name."""
        return [self._models[name].manifest for name in self.names() if _may_use(tenant, self._models[name])]

    def resolve(self, name: str, tenant: TenantRecord) -> Model:
        """The model, or that version of it which ``model@version`` names.

        Raises HeadraceError (model_not_found) also for one that the tenant may not use.
        """
        model = self._models.get(name) or self._pinned(name)
        if model is None or not _may_use(tenant, model):
            raise _unknown(name)
        return model

    def aliases(self, tenant: TenantRecord) -> dict[str, list[Manifest]]:
        """What each alias stands for, of what the tenant may use; those that stand for nothing are left out."""
        visible = {manifest.name: manifest for manifest in self.visible(tenant)}
        found = {
            name: [visible[each] for each in alias.models or visible if each in visible]
            for name, alias in sorted((registry.BUILT_IN | self._aliases).items())
            if name not in self._models
        }
        return {name: models for name, models in found.items() if models}

    def check(self, name: str, tenant: TenantRecord) -> None:
        """Raises HeadraceError (model_not_found) for what is neither a model that the tenant may use nor an alias."""
        if self._alias(name) is None:
            self.resolve(name, tenant)

    def candidates(self, name: str, tenant: TenantRecord, need: Need) -> list[Candidate]:
        """Whom to ask for a model or alias, in order (``gateway.intake.choice``); raises HeadraceError."""
        offers = {manifest.name: self._offer(manifest) for manifest in self.visible(tenant)}
        if (alias := self._alias(name)) is not None:
            return choice.of_alias(alias, offers, need)
        model = self.resolve(name, tenant)
        record = model.record
        if name != record.name:  # A version that was asked for has no stand-in.
            return choice.of_model(self._offer(model.manifest, name), [], need)
        fallbacks = [offers[each] for each in record.fallbacks if each in offers] if tenant.fallback else []
        return choice.of_model(offers[name], fallbacks, need)

    def note_load(self, name: str, load: float | None) -> None:
        """How a model was at the last look (``Offer.load``)."""
        self._loads[name] = load

    def _offer(self, manifest: Manifest, name: str = "") -> Offer:
        load = self._loads.get(manifest.name, 0.0)
        return Offer(name or manifest.name, manifest.endpoints, manifest.capabilities, manifest.price_tier, load)

    def _pinned(self, name: str) -> Model | None:
        """Its prompts are counted with the version's own tokenizer, an adapter's with its base's."""
        model, _, version = name.rpartition("@")
        served = self._models.get(model)
        manifest = self._versions.get(f"{subjects.encode_or_empty(model)}.{subjects.encode_or_empty(version)}")
        if served is None or manifest is None:
            self._pins.pop(name, None)
            return None
        counted = manifest.base and self._versions.get(_place(manifest.base.model, manifest.base.version))
        if manifest.base and not counted:
            return None
        self._pins[name] = Model(served.record, manifest, self._counter(counted or manifest))
        return self._pins[name]

    def _alias(self, name: str) -> Alias | None:
        """A model's own name is never an alias."""
        if name in self._models:
            return None
        return self._aliases.get(name) or registry.BUILT_IN.get(name)

    def _on_alias(self, key: str, entry: KvEntry | None) -> None:
        if entry is None:
            self._aliases.pop(subjects.decode(key), None)
            return
        try:
            alias = registry.read_alias(entry)
        except msgspec.MsgspecError as error:
            _log.error("alias_unreadable", key=key, seq=entry.revision, reason=str(error))
            return
        self._aliases[alias.name] = alias

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
            self._loads.pop(gone.name, None)

    def _on_version(self, key: str, entry: KvEntry | None) -> None:
        if entry is None:
            self._versions.pop(key, None)
            return
        try:
            manifest = self._versions[key] = registry.read_version(entry)
        except msgspec.MsgspecError as error:
            _log.error("manifest_unreadable", key=key, seq=entry.revision, reason=str(error))
            return
        itself = Base(model=manifest.name, version=manifest.version)
        for record in list(self._records.values()):
            stable = self._versions.get(_place(record.name, record.stable))
            if stable is not None and (stable == manifest or stable.base == itself):
                self._serve(record)

    def _serve(self, record: ModelRecord) -> None:
        """Until the stable version's manifest is there, the one before goes on being served."""
        before = self._models.get(record.name)
        manifest = self._versions.get(_place(record.name, record.stable))
        counted = manifest and manifest.base and self._versions.get(_place(manifest.base.model, manifest.base.version))
        if manifest is None or (manifest.base and not counted):
            _log.warning("manifest_awaited", model=record.name, version=record.stable)
            if before is None:
                return
            manifest = before.manifest
        # An adapter's prompts are counted with its base's tokenizer.
        self._models[record.name] = Model(record, manifest, self._counter(counted or manifest))


def _counted_with(manifest: Manifest) -> Hashable:
    """Equal for versions whose prompts one counter counts: what it reads, from where, and the context."""
    files = tuple(sorted((name, manifest.artifacts[name].sha256) for name in TOKENIZER_FILES & set(manifest.artifacts)))
    place = "" if files else manifest.path
    return manifest.engine, manifest.context, manifest.tokenizer_fingerprint, files, place


def _place(model: str, version: str) -> str:
    """Key of a version."""
    return f"{subjects.encode(model)}.{subjects.encode(version)}"


def _may_use(tenant: TenantRecord, model: Model) -> bool:
    """By its list and its price ceiling."""
    listed = tenant.models is None or model.record.name in tenant.models
    return listed and PRICE_TIERS.index(model.manifest.price_tier) <= PRICE_TIERS.index(tenant.price_ceiling)


def _unknown(name: str) -> HeadraceError:
    shown = name if len(name) <= 128 else f"{name[:128]}..."
    message = f"The model {shown!r} does not exist or you have no access to it."
    return HeadraceError("model_not_found", message, param="model")
