"""What a gateway counts with when a model's stable version changes."""

from typing import Any

import msgspec
import pytest

from contracts import subjects
from contracts.bus import KvEntry
from contracts.messages.records import Artifact, Manifest, ModelRecord, TenantRecord
from gateway.intake import catalog
from gateway.intake.catalog import Catalog
from gateway.prompt.token_counter import TokenCounter

TENANT = TenantRecord(name="t")
TOKENIZER = Artifact(sha256="a" * 64, size=1)


class Counter(TokenCounter):
    """It reads no files."""

    def _load(self) -> None:
        pass


def entry(key: str, value: msgspec.Struct) -> KvEntry:
    return KvEntry(key=key, value=msgspec.json.encode(value), revision=1, created_at_ms=0)


def version(name: str, weights: str, tokenizer: Artifact = TOKENIZER, **fields: Any) -> Manifest:
    files = {"tokenizer.json": tokenizer, "model.safetensors": Artifact(sha256=weights * 64, size=1)}
    given: dict[str, Any] = {"context": 100, "tokenizer_fingerprint": "f"} | fields
    return Manifest(name="m", version=name, engine="vllm", default_output_tokens=1, artifacts=files, **given)


def serve(served: Catalog, manifest: Manifest) -> TokenCounter:
    """It is published and made the stable one; what counts its prompts."""
    key = f"{subjects.encode('m')}.{subjects.encode(manifest.version)}"
    served._on_version(key, entry(key, manifest))
    served._on_model("m", entry("m", ModelRecord(name="m", stable=manifest.version)))
    return served.resolve("m", TENANT).tokens


def test_a_stable_version_with_the_same_tokenizer_loads_none(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    """Else every request of the model would wait for it."""
    monkeypatch.setattr(catalog, "TokenCounter", Counter)
    served = Catalog(str(tmp_path))
    served._bus = None  # type: ignore[assignment]
    first = serve(served, version("v1", "1"))
    assert serve(served, version("v2", "2")) is first
    assert served.resolve("m@v1", TENANT).tokens is first, "a pin shares it"
    assert serve(served, version("v3", "2", Artifact(sha256="b" * 64, size=1))) is not first
    assert serve(served, version("v4", "2", context=200)) is not first
    assert serve(served, version("v5", "2", tokenizer_fingerprint="g")) is not first
