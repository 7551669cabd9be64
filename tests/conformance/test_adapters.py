"""LoRA adapters beside their base in one engine: each answers with its own weights, also in one batch.

They are two versions of one model, as during a roll-out.
"""

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import pytest

from compose.stack.adapters import adapter_files, adapter_of
from contracts.artifacts.files import describe
from contracts.messages.records import Manifest
from tests.support.adapters import make_adapter
from tests.support.asking import VLLM_MARKS, Asker
from worker.adapters import AdapterEngine
from worker.engines.base import EngineFailure
from worker.loading import golden_of, prove

pytestmark = [pytest.mark.asyncio(loop_scope="session"), *VLLM_MARKS]


async def answer(asker: Asker, adapter: str) -> tuple[str, set[str]]:
    job = asker.job(True, "completions", prompt="The capital of France is", max_tokens=6)
    given = await asker.ask(msgspec.structs.replace(job, adapter=adapter))
    chunks: list[Any] = given.chunks
    return "".join(chunk["choices"][0]["text"] for chunk in chunks if chunk["choices"]), {it["model"] for it in chunks}


async def test_each_answers_with_its_own_weights_alone_and_in_one_batch(
    vllm: Asker, model_path: Path, tmp_path: Path
) -> None:
    """vLLM 0.32.0 on a CPU gives a request for the base the last adapter's weights (worker.engines.vllm.cpu)."""
    base = Manifest(name="m", version="v1", engine="vllm", context=100, default_output_tokens=8, path=str(model_path))
    names = ("tuned@1", "tuned@2")
    for seed, name in enumerate(names, 1):
        files = make_adapter(tmp_path / name, model_path, seed=seed, strength=0.3 * seed)
        found = {path: describe(file) for path, file in adapter_files(files).items()}
        assert set(found) == {"adapter_config.json", "adapter_model.safetensors"}
        await vllm.engine.load_adapter(name, str(files))
        published = adapter_of("tuned", base, found)
        adapter = AdapterEngine(vllm.engine, name, lambda: vllm.engine)
        golden = await golden_of(adapter, published)
        assert golden.tokens != (await golden_of(vllm.engine, base)).tokens
        await prove(adapter, msgspec.structs.replace(published, golden=golden))
    alone = [await answer(vllm, name) for name in ("", *names)]
    texts = [text for text, _ in alone]
    assert "Paris" in texts[0] and len(set(texts)) == 3
    assert [models for _, models in alone[1:]] == [{"tuned"}, {"tuned"}], "an answer names the model"
    for _ in range(3):
        together = await asyncio.gather(*(answer(vllm, name) for name in ("", names[0], "", names[1])))
        assert [text for text, _ in together][0:3:2] == [texts[0], texts[0]]
        assert together[1][0][:4] == texts[1][:4] and together[3][0][:4] == texts[2][:4]
    with pytest.raises(EngineFailure, match="does not load"):
        await vllm.engine.load_adapter("nothing", str(tmp_path / "nothing"))
    await vllm.engine.unload_adapter(names[1])
    with pytest.raises(EngineFailure):
        await answer(vllm, names[1])
    assert (await answer(vllm, ""))[0] == texts[0]
    await vllm.engine.unload_adapter(names[0])
