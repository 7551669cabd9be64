"""The engines by the kind that a model's manifest names: a new one is a folder here and a row below."""

from collections.abc import Callable

from contracts.messages.records import Manifest
from worker.config import WorkerConfig
from worker.engines.base import Engine
from worker.engines.simulated import engine as simulated
from worker.engines.vllm import engine as vllm

ENGINES: dict[str, Callable[[WorkerConfig, Manifest], Engine]] = {
    "simulated": simulated.build,
    "vllm": vllm.build,
}


def build(config: WorkerConfig, manifest: Manifest) -> Engine:
    """A new engine of the manifest's kind, not yet started."""
    return ENGINES[manifest.engine](config, manifest)
