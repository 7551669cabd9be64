"""``python -m worker.golden``: the golden answer of a version, by the engine that will serve it.

Standard input is a list of manifests whose ``path`` is a directory here: the version, before it its base where it is an
adapter. The last line of standard output is a Golden. An engine that counts tokens otherwise than the publisher fails.
"""

import asyncio
import json
import sys
from pathlib import Path

import msgspec

from contracts.messages.records import Golden, Manifest
from worker.adapters import AdapterEngine
from worker.config import WorkerConfig
from worker.engines import table
from worker.engines.base import Engine, EngineFailure
from worker.engines.supervisor import close
from worker.loading import golden_of, prove

AGREEING = 8
"""Of the first token ids: arithmetic differs between kinds of processors, and greedy answers part some tokens later."""
RANKS = (16, 32, 64, 128, 256, 512)
"""That vLLM takes memory for."""


async def _ask(manifests: list[Manifest]) -> Golden:
    base, version = manifests[0], manifests[-1]
    adapter = version if version.base is not None else None
    engine: Engine = table.build(_config(base, adapter), base)
    try:
        await engine.start()
        asked = engine
        if adapter is not None:
            await engine.load_adapter(adapter.name, adapter.path)
            asked = AdapterEngine(engine, adapter.name, lambda: engine)
        await prove(asked, msgspec.structs.replace(version, golden=None))
        golden = await golden_of(asked, version)
    finally:
        await close(engine)
    return msgspec.structs.replace(golden, agreeing=min(AGREEING, len(golden.tokens)))


def _config(base: Manifest, adapter: Manifest | None) -> WorkerConfig:
    if adapter is None or base.engine != "vllm":
        return WorkerConfig(model=base.name)
    rank = json.loads(Path(adapter.path, "adapter_config.json").read_bytes())["r"]
    return WorkerConfig(model=base.name, vllm_adapters=1, vllm_adapter_rank=min(it for it in RANKS if it >= rank))


def main() -> int:
    """0, or 1 with the reason as the last line of standard error."""
    manifests = msgspec.json.decode(sys.stdin.buffer.read(), type=list[Manifest])
    try:
        golden = asyncio.run(_ask(manifests))
    except (EngineFailure, msgspec.ValidationError) as error:
        print(f"\n{error}", file=sys.stderr)
        return 1
    sys.stdout.buffer.write(b"\n" + msgspec.json.encode(golden) + b"\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
