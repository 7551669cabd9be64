"""How the suite asks an engine, and what it gathers."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Literal

import msgspec
import pytest

from contracts.messages.base import Endpoint
from contracts.messages.records import Manifest
from tests.support.polling import until
from worker.config import WorkerConfig
from worker.engines.base import Counts, Engine, Job

SLOTS = 4
MODEL = "the-public-name"
CONTEXT = 8192


def configuration(kind: Literal["vllm", "simulated"], path: str = "") -> tuple[WorkerConfig, Manifest]:
    """What an engine of that kind is made with; a real one of the model in the directory ``path``."""
    config = WorkerConfig(
        model=MODEL,
        sim_slots=SLOTS,
        sim_itl_ms=5,
        sim_context=CONTEXT,
        vllm_slots=SLOTS,
        vllm_adapters=2,
        check_timeout_s=5,
    )
    manifest = Manifest(name=MODEL, version="v1", engine=kind, context=CONTEXT, default_output_tokens=16, path=path)
    return config, manifest


VLLM_MARKS = [
    pytest.mark.vllm,
    pytest.mark.slow,
    # vLLM, torch and their imports warn of each other.
    pytest.mark.filterwarnings("ignore"),
]


@asynccontextmanager
async def running(engine: Engine) -> AsyncIterator[Engine]:
    """The engine, started and in the end closed."""
    await engine.start()
    try:
        yield engine
    finally:
        await engine.close()


class Answer:
    """All that came of one attempt."""

    def __init__(self, chunks: list[dict[str, Any]], counts: Counts) -> None:
        self.chunks = chunks
        self.counts = counts

    @property
    def choices(self) -> list[dict[str, Any]]:
        return [choice for chunk in self.chunks for choice in chunk["choices"]]

    def text(self, index: int = 0) -> str:
        return "".join(_text(choice) for choice in self.choices if choice["index"] == index)

    def finish_reasons(self, index: int = 0) -> list[str]:
        """Those that are not null."""
        return [it["finish_reason"] for it in self.choices if it["index"] == index and it["finish_reason"]]

    @property
    def usage(self) -> dict[str, Any]:
        (usage,) = [chunk["usage"] for chunk in self.chunks if chunk.get("usage")]
        return dict(usage)


def _text(choice: dict[str, Any]) -> str:
    if "text" in choice:
        return str(choice["text"])
    return str(choice.get("delta", choice.get("message", {})).get("content") or "")


class Asker:
    """Asks one engine. Bodies are greedy and do not end by themselves unless they say otherwise."""

    def __init__(self, kind: str, engine: Engine) -> None:
        self.kind = kind
        self.engine = engine
        self._asked = 0

    def job(
        self,
        stream: bool,
        endpoint: Endpoint = "chat/completions",
        *,
        salt: str = "",
        prompt_tokens: int | None = None,
        prompt_digest: str = "",
        **body: Any,
    ) -> Job:
        self._asked += 1
        if endpoint == "chat/completions":
            body = {"messages": [{"role": "user", "content": "Count for me, please."}]} | body
        body = {"model": "whatever-the-caller-wrote", "temperature": 0, "ignore_eos": True} | body
        return Job(
            request_id=f"request-{self._asked}",
            attempt=1,
            endpoint=endpoint,
            body=msgspec.json.encode(body),
            stream=stream,
            cache_salt=salt or f"salt-{self._asked}",
            prompt_tokens=prompt_tokens,
            prompt_digest=prompt_digest,
        )

    async def ask(self, job: Job, counts: Counts | None = None) -> Answer:
        counts = counts or Counts()
        chunks: list[bytes] = []
        await self.engine.generate(job, counts, chunks.append)
        return Answer([msgspec.json.decode(chunk) for chunk in chunks], counts)

    async def until_idle(self) -> None:
        def idle() -> bool:
            stats = self.engine.stats()
            return stats.running == stats.waiting == stats.kv_tokens_used == 0

        await until(idle, "the engine is idle")
