"""The engines by the kind that a model's manifest names: a new one is a folder here and a row below."""

from collections.abc import Callable

from contracts.messages.records import Manifest
from worker.config import WorkerConfig
from worker.engines.base import Engine
from worker.engines.simulated.engine import SimulatedEngine
from worker.engines.vllm.engine import VllmEngine

ENGINES: dict[str, Callable[[WorkerConfig, Manifest], Engine]] = {"simulated": SimulatedEngine, "vllm": VllmEngine}


def build(config: WorkerConfig, manifest: Manifest) -> Engine:
    """A new engine of the manifest's kind, not yet started."""
    return ENGINES[manifest.engine](config, manifest)
