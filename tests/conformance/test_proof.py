"""What a worker proves of a version before it serves it: that vLLM counts and answers as when it was published."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from contracts.fingerprint import digest
from contracts.messages.records import Golden, Manifest
from gateway.apis.table import APIS
from gateway.prompt.tokenizer import Tokenizer
from tests.support.asking import VLLM_MARKS, Asker, configuration
from tests.support.polling import metric
from worker.engines.base import EngineFailure
from worker.loading import golden_of, prove

pytestmark = [pytest.mark.asyncio(loop_scope="session"), *VLLM_MARKS]


@pytest.fixture
def manifest(model_path: Path) -> Manifest:
    _, made = configuration("vllm", str(model_path))
    return made


async def test_vllm_and_the_gateway_make_one_fingerprint_and_one_digest(
    vllm: Asker, manifest: Manifest, model_path: Path
) -> None:
    counter = Tokenizer(manifest, model_path)
    assert await vllm.engine.fingerprint() == counter.fingerprint
    body: dict[str, Any] = {"prompt": ["Zürich \U0001f600", "  two  ", "a"], "max_tokens": 1}
    ids = counter.token_ids(APIS["completions"], body)
    job = vllm.job(False, "completions", prompt_tokens=sum(map(len, ids)), prompt_digest=digest(ids), **body)
    await vllm.ask(job)


def wrong_token(golden: Golden) -> Golden:
    return msgspec.structs.replace(golden, tokens=[*golden.tokens[:-1], golden.tokens[-1] + 1])


def wrong_text(golden: Golden) -> Golden:
    return msgspec.structs.replace(golden, tokens=[], text=golden.text + "!")


async def test_a_version_that_answers_and_counts_as_published_is_proven_and_no_other(
    vllm: Asker, manifest: Manifest, model_path: Path
) -> None:
    golden = await golden_of(vllm.engine, manifest)
    assert golden.text and len(golden.tokens) == 16
    counted = Tokenizer(manifest, model_path).fingerprint
    published = msgspec.structs.replace(manifest, golden=golden, tokenizer_fingerprint=counted)
    await prove(vllm.engine, published)
    spoiled: list[Callable[[Golden], Golden]] = [wrong_token, wrong_text]
    for spoil in spoiled:
        with pytest.raises(EngineFailure, match="golden answer differs"):
            await prove(vllm.engine, msgspec.structs.replace(published, golden=spoil(golden)))
    before = metric("headrace_worker_tokenizer_mismatches_total", model=manifest.name)
    with pytest.raises(EngineFailure, match="counts tokens otherwise"):
        await prove(vllm.engine, msgspec.structs.replace(published, tokenizer_fingerprint="0" * 64))
    assert metric("headrace_worker_tokenizer_mismatches_total", model=manifest.name) == before + 1
