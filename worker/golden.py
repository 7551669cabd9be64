"""``python -m worker.golden``: the golden answer of a version, by the engine that will serve it.

Standard input is a manifest whose ``path`` is a directory here; the last line of standard output is a Golden.
"""

import asyncio
import sys

import msgspec

from contracts.messages.records import Golden, Manifest
from worker.config import WorkerConfig
from worker.engines import table
from worker.engines.base import EngineFailure
from worker.engines.supervisor import close
from worker.loading import golden_of

AGREEING = 8
"""Of the first token ids: arithmetic differs between kinds of processors, and greedy answers part some tokens later."""


async def _ask(manifest: Manifest) -> Golden:
    engine = table.build(WorkerConfig(model=manifest.name), manifest)
    try:
        await engine.start()
        golden = await golden_of(engine, manifest)
    finally:
        await close(engine)
    return msgspec.structs.replace(golden, agreeing=min(AGREEING, len(golden.tokens)))


def main() -> int:
    """0, or 1 with the reason as the last line of standard error."""
    manifest = msgspec.json.decode(sys.stdin.buffer.read(), type=Manifest)
    try:
        golden = asyncio.run(_ask(manifest))
    except (EngineFailure, msgspec.ValidationError) as error:
        print(f"\n{error}", file=sys.stderr)
        return 1
    sys.stdout.buffer.write(b"\n" + msgspec.json.encode(golden) + b"\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
