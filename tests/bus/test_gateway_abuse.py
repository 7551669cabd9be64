"""What a tenant can have a gateway do for nothing, by each API and from the bus: bounded, and others do not notice."""

import gzip
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from contracts import subjects
from contracts.messages.admission import AdmissionAnswer
from contracts.messages.request import Reply, SubmitAnswer, SubmitRequest
from gateway.intake import reading_budget
from tests.support.gateway_world import CHAT, K1, K2, MODEL, World, decode, encode, serve, simulated
from tests.support.polling import until

BODY_BYTES_MAX = 128 << 10
COUNT = "/v1/messages/count_tokens"
TEXT = "word " * 3000
"""15 KB: sixteen times fill the bucket."""
USER = [{"role": "user", "content": TEXT}]
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"model": MODEL, "messages": USER},
    "/v1/completions": {"model": MODEL, "prompt": TEXT},
    "/v1/responses": {"model": MODEL, "input": TEXT},
    "/v1/messages": {"model": MODEL, "max_tokens": 5, "messages": USER},
    COUNT: {"model": MODEL, "messages": USER},
    "/v1/embeddings": {"model": "e", "input": TEXT},
}
each_path = pytest.mark.parametrize("path", list(BODIES))


@pytest.fixture
async def world(nats_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[World]:
    """Two models whose tokens are single bytes; what was charged does not come back by waiting."""
    monkeypatch.setattr(reading_budget, "BYTES_PER_S", 0.001)
    tokenizer = Tokenizer(
        models.BPE({token: number for number, token in enumerate(pre_tokenizers.ByteLevel.alphabet())}, [])
    )
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    text = ("chat/completions", "completions", "responses", "messages")
    real: dict[str, Any] = {"engine": "vllm", "path": str(tmp_path), "context": 20_000}
    async with serve(nats_url, tmp_path, body_bytes_max=BODY_BYTES_MAX) as world:
        await world.put_model(simulated(endpoints=text, **real))
        await world.put_model(simulated("e", endpoints=("embeddings",), **real))

        async def known() -> bool:
            listed = (await world.client.get("/v1/models")).json()["data"]
            return [len(model["endpoints"]) for model in listed if not model["alias_of"]] == [1, 4]

        await until(known)
        yield world


async def status(world: World, path: str, body: dict[str, Any], secret: str = K1) -> int:
    response = await world.post(body, path, headers={"authorization": f"Bearer {secret}"})
    if response.status_code == 429:
        assert int(response.headers["retry-after"]) > 0
        assert "rate_limit" in response.text
    return response.status_code


async def flooded(world: World, path: str, body: dict[str, Any]) -> list[int]:
    return [await status(world, path, body) for _ in range(20)]


async def test_a_flood_of_counts_is_refused_for_its_tenant_alone(world: World) -> None:
    answers = await flooded(world, COUNT, BODIES[COUNT])
    assert answers == sorted(answers) and set(answers) == {200, 429} and answers.count(200) > 10
    assert await status(world, COUNT, BODIES[COUNT], K2) == 200
    assert await status(world, CHAT, BODIES[CHAT]) == 429  # It waits as long for anything else that must be read.
    assert world.admissions == []


@each_path
async def test_a_flood_of_what_never_fits_is_refused_before_it_is_counted(world: World, path: str) -> None:
    field, value = next((name, value) for name, value in BODIES[path].items() if name not in ("model", "max_tokens"))
    longer = "x" * 25_000 if isinstance(value, str) else [{"role": "user", "content": "x" * 25_000}]
    answers = await flooded(world, path, BODIES[path] | {field: longer})
    assert answers == sorted(answers) and set(answers) == {400, 429}
    assert await status(world, path, BODIES[path], K2) == 200
    assert [request.tenant for request in world.admissions] == ["T2"] * (path != COUNT)


@pytest.mark.parametrize("path", [path for path in BODIES if path != COUNT])
async def test_what_is_run_is_not_held_against_a_tenant_and_what_its_limits_refuse_is(world: World, path: str) -> None:
    assert set(await flooded(world, path, BODIES[path])) == {200}
    world.decide = lambda request: AdmissionAnswer(admitted=False, code="overloaded", message="Full.", retry_after_s=1)
    assert set(await flooded(world, path, BODIES[path])) == {529}
    world.decide = lambda request: AdmissionAnswer(
        admitted=False, code="rate_limit_exceeded", message="Too many.", retry_after_s=1
    )
    asked = len(world.admissions)
    assert set(await flooded(world, path, BODIES[path])) == {429}
    assert len(world.admissions) - asked < 20


async def test_a_flood_from_the_bus_is_refused_too(world: World) -> None:
    request = SubmitRequest(
        endpoint="messages",
        reply=Reply(subject="reply.v1.T1.inbox", stream="7"),
        body=msgspec.Raw(encode(BODIES["/v1/messages"] | {"max_tokens": 500_000})),
    )
    codes = []
    for _ in range(20):
        data = await world.bus.request(subjects.submit("T1", MODEL), encode(request), timeout_s=10)
        answer = decode(data, type=SubmitAnswer)
        assert answer.error is not None
        codes.append(answer.error.code)
    assert codes == sorted(codes) and set(codes) == {"context_length_exceeded", "rate_limit_exceeded"}
    assert world.admissions == []


@each_path
async def test_a_small_gzip_that_becomes_a_large_body_is_not_inflated(nats_url: str, tmp_path: Path, path: str) -> None:
    """Four of 16 KB, each 16 MiB of one character, cost 44 s of CPU and 9 GB when they were counted."""
    async with serve(nats_url, tmp_path) as world:
        bomb = gzip.compress(b'{"model":"m","prompt":"' + b"a" * ((16 << 20) - 100) + b'"}')
        assert len(bomb) < 20_000
        for _ in range(4):
            response = await world.client.post(path, content=bomb, headers={"content-encoding": "gzip"})
            assert response.status_code == 413
            assert "inflates more than" in response.json()["error"]["message"]
        honest = gzip.compress(encode({"model": "m", "messages": USER * 20}))
        response = await world.client.post(CHAT, content=honest, headers={"content-encoding": "gzip"})
        assert response.status_code == 400 and "maximum context length" in response.text


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        (CHAT, {"prompt_logprobs": 20}, "prompt_logprobs"),
        ("/v1/completions", {"prompt_logprobs": 20}, "prompt_logprobs"),
        ("/v1/completions", {"echo": True, "logprobs": 20, "max_tokens": 1}, "logprobs"),
    ],
)
async def test_d26_log_probabilities_of_a_long_prompt_are_bounded_before_any_work(
    world: World, path: str, fields: dict[str, Any], param: str
) -> None:
    response = await world.post(BODIES[path] | fields, path)
    assert response.status_code == 400
    assert (response.json()["error"]["param"], world.admissions) == (param, [])
    assert "65536" in response.json()["error"]["message"]
    fewer = fields | {name: 2 for name in fields if name in ("prompt_logprobs", "logprobs")}
    assert (await world.post(BODIES[path] | fewer, path)).status_code == 200
    evaluation = {"model": MODEL, "prompt": [[5] * 9000, [6] * 9000], "logprobs": 1, "echo": True, "max_tokens": 1}
    assert (await world.post(evaluation | {"seed": 1234}, "/v1/completions")).status_code == 200
    without_echo = {"model": MODEL, "prompt": TEXT, "logprobs": 20}
    assert (await world.post(without_echo, "/v1/completions")).status_code == 200
