"""The HTTP edge against a real NATS server: answers, errors, headers, bodies, keys."""

import asyncio
import gzip
import json
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from contracts import topology
from contracts.messages.admission import AdmissionAnswer, RateLimit, RateLimits
from contracts.messages.records import KeyRecord, TenantLimits, TenantRecord
from tests.support.gateway_world import (
    BASE,
    CHAT,
    CONTEXT,
    K1,
    K2,
    Raw,
    World,
    admitted,
    digest,
    encode,
    error_of,
    events_of,
    serve,
    simulated,
    text_of,
)
from tests.support.polling import until


@pytest.fixture
async def world(nats_url: str, tmp_path: Path) -> AsyncIterator[World]:
    async with serve(nats_url, tmp_path, body_s_max=1.0) as world:
        yield world


async def ready(world: World) -> bool:
    return await world.status_of("/health/ready") == 200


# Answers ---------------------------------------------------------------------------------------------------


async def test_a_chat_streams_its_chunks_and_done(world: World) -> None:
    response = await world.post(BASE | {"stream": True})
    assert response.status_code == 200
    assert response.headers["content-type"].startswith("text/event-stream")
    assert response.headers["x-accel-buffering"] == "no"
    assert response.headers["cache-control"] == "no-cache"
    assert "server" not in response.headers
    events = events_of(response.text)
    assert text_of(events) == "Hello"
    assert events[-1] == "[DONE]"
    [envelope] = world.stored
    assert envelope.request_id == response.headers["x-request-id"]
    assert (envelope.tenant, envelope.key_id, envelope.prompt_tokens) == ("T1", "key-T1", 5)
    assert (await world.body_of(envelope))["max_tokens"] == envelope.max_output_tokens == 16


async def test_without_stream_the_answer_is_one_json_body(world: World) -> None:
    response = await world.post(BASE)
    assert response.status_code == 200
    assert response.headers["content-type"] == "application/json"
    assert response.json() == {"id": "chatcmpl-1"}


async def test_completions_with_several_prompts(world: World) -> None:
    body = {"model": "m", "prompt": ["one two", "three"], "n": 2, "max_tokens": 7}
    assert (await world.post(body, "/v1/completions")).status_code == 200
    [request] = world.admissions
    assert (request.endpoint, request.prompt_tokens, request.choices) == ("completions", 3, 4)
    assert request.max_output_tokens == 7


async def test_c47_the_reservation_and_the_engine_get_the_same_limit(world: World) -> None:
    await world.post(BASE | {"max_tokens": 9, "max_completion_tokens": 5})
    await world.post(BASE)
    assert [request.max_output_tokens for request in world.admissions] == [5, 16]
    bodies = [await world.body_of(envelope) for envelope in world.stored]
    assert [body["max_tokens"] for body in bodies] == [5, 16]
    assert not any("max_completion_tokens" in body for body in bodies)


async def test_a_body_that_is_repeated_has_the_same_hash_and_another_has_not(world: World) -> None:
    for body in (BASE, BASE, BASE | {"max_tokens": 5}):
        await world.post(body)
    first, again, other = [request.body_hash for request in world.admissions]
    assert first == again != other and len(first) == 32
    assert [envelope.body_hash for envelope in world.stored] == [first, again, other]


async def test_models_are_those_that_the_tenant_may_see(world: World) -> None:
    await world.put_model(simulated("org/name", created_at_ms=5_000))
    await world.put_tenant(TenantRecord(name="T2", models=["org/name"]))
    key2 = {"authorization": f"Bearer {K2}"}

    async def listed(**options: Any) -> list[dict[str, Any]]:
        return (await world.client.get("/v1/models", **options)).json()["data"]

    async def seen() -> bool:
        return len(await listed()) == 5 and len(await listed(headers=key2)) == 4

    await until(seen)
    entry = {
        "object": "model",
        "created": 5,
        "owned_by": "headrace",
        "max_model_len": CONTEXT,
        "endpoints": ["chat/completions", "completions"],
        "capabilities": [],
        "price_tier": "standard",
        "parent": None,
    }
    aliases = [{"id": name, **entry, "alias_of": ["org/name"]} for name in ("auto", "best", "fast")]
    assert await listed(headers=key2) == [{"id": "org/name", **entry, "alias_of": []}, *aliases]
    for form in ("org/name", "org%2Fname", "org/name/"):
        response = await world.client.get(f"/v1/models/{form}")
        assert (response.status_code, response.json()["id"]) == (200, "org/name")
    # C40: a model that the tenant may not see is not told from one that does not exist.
    hidden = await world.client.get("/v1/models/m", headers=key2)
    called = await world.post(BASE, headers=key2)
    nowhere = await world.post(BASE | {"model": "nowhere"}, headers=key2)
    assert {response.status_code for response in (hidden, called, nowhere)} == {404}
    assert error_of(called)["code"] == error_of(nowhere)["code"] == "model_not_found"
    assert error_of(called)["message"].replace("'m'", "") == error_of(nowhere)["message"].replace("'nowhere'", "")
    assert world.admissions == []


async def test_health_and_the_page_need_no_key(world: World) -> None:
    await until(lambda: ready(world))
    for path in ("/health/live", "/health/ready", "/"):
        for method in ("GET", "HEAD"):
            response = await world.client.request(method, path, headers={"authorization": ""})
            assert response.status_code == 200, path
            assert bool(response.content) is (method == "GET")
    assert "text/html" in (await world.client.get("/")).headers["content-type"]


async def test_ready_says_what_is_missing(world: World) -> None:
    world.worker_state = "starting"

    async def told() -> bool:
        return "no worker" in (await world.client.get("/health/ready")).text

    await until(told)
    response = await world.client.get("/health/ready")
    assert response.status_code == 503
    assert error_of(response)["code"] == "unavailable"


async def test_usage_is_the_callers_own(world: World) -> None:
    response = await world.client.get("/v1/usage", params={"tenant_id": "T2"}, headers={"X-Tenant-Id": "T2"})
    found = response.json()
    assert (found["object"], found["data"], found["has_more"]) == ("list", [], False)
    [query] = world.usage_queries
    assert query.tenant == "T1"
    assert world.usage_subjects == ["usage.v1.of.T1.usage"]
    assert query.by == ["day", "model", "version"]
    assert query.from_at_ms <= time.time() * 1000 < query.to_at_ms


# Refusals --------------------------------------------------------------------------------------------------


async def test_a_refusal_carries_its_code_and_the_limits(world: World) -> None:
    limits = RateLimits(requests=RateLimit(limit=10, remaining=0, reset_ms=6_500))
    world.decide = lambda request: AdmissionAnswer(
        admitted=False, code="rate_limit_exceeded", message="Too many.", retry_after_s=7, limits=limits
    )
    response = await world.post(BASE | {"stream": True})
    assert response.status_code == 429
    assert error_of(response) == {
        "message": "Too many.",
        "type": "rate_limit_error",
        "param": None,
        "code": "rate_limit_exceeded",
    }
    assert response.headers["retry-after"] == "7"
    assert "x-should-retry" not in response.headers
    assert response.headers["x-ratelimit-limit-requests"] == "10"
    assert response.headers["x-ratelimit-remaining-requests"] == "0"
    assert response.headers["x-ratelimit-reset-requests"] == "6.5s"
    assert "x-ratelimit-limit-tokens" not in response.headers
    assert world.stored == []


@pytest.mark.parametrize("code", ["request_quarantined", "insufficient_quota", "request_exceeds_limit"])
async def test_what_a_repeat_cannot_mend_says_so(world: World, code: str) -> None:
    world.decide = lambda request: AdmissionAnswer(admitted=False, code=code, message="No.")
    response = await world.post(BASE)
    assert error_of(response)["code"] == code and response.headers["x-should-retry"] == "false"


async def test_c36_no_room_is_529_with_an_integer_retry_after(world: World) -> None:
    world.decide = lambda request: AdmissionAnswer(admitted=False, code="overloaded", message="Full.", retry_after_s=9)
    response = await world.post(BASE)
    assert (response.status_code, response.headers["retry-after"]) == (529, "9")
    assert error_of(response)["type"] == "overloaded_error"


async def test_limits_are_told_on_success_too(world: World) -> None:
    world.decide = lambda request: admitted(
        limits=RateLimits(output_tokens=RateLimit(limit=1000, remaining=900, reset_ms=90_000))
    )
    for stream in (True, False):
        headers = (await world.post(BASE | {"stream": stream})).headers
        assert headers["x-ratelimit-remaining-tokens"] == "900"
        assert headers["x-ratelimit-reset-tokens"] == "1m30s"


@pytest.mark.parametrize("stream", [True, False])
async def test_c35_a_prompt_over_the_context_is_refused_before_anything(world: World, stream: bool) -> None:
    words = "x " * (CONTEXT - 4)
    for body, path in (
        ({"messages": [{"role": "user", "content": words}]}, CHAT),
        ({"prompt": "x " * 5000}, "/v1/completions"),
        ({"prompt": "x " * 4000, "max_tokens": 500}, "/v1/completions"),
    ):
        response = await world.post({"model": "m", "stream": stream, **body}, path)
        assert response.status_code == 400
        assert error_of(response)["code"] == "context_length_exceeded"
        assert str(CONTEXT) in error_of(response)["message"]
    assert world.admissions == []
    assert world.stored == []


async def test_no_scheduler_is_503_within_the_bound(nats_url: str, tmp_path: Path) -> None:
    async with serve(nats_url, tmp_path, admit_s_max=0.5) as world:
        world.decide = lambda request: None
        started = time.monotonic()
        response = await world.post(BASE)
        assert time.monotonic() - started < 5
        assert (response.status_code, error_of(response)["code"]) == (503, "unavailable")
        assert int(response.headers["retry-after"]) >= 1


async def test_admission_is_asked_again_with_the_same_id(world: World) -> None:
    answers = iter([None, admitted()])
    world.decide = lambda request: next(answers)
    assert (await world.post(BASE)).status_code == 200
    first, second = world.admissions
    assert first == second


async def test_a_reservation_that_lapsed_is_cancelled_and_503(world: World) -> None:
    world.decide = lambda request: admitted(publish_within_ms=0)
    response = await world.post(BASE)
    assert response.status_code == 503
    await until(lambda: world.cancelled)
    assert world.cancelled[0].request_id == response.headers["x-request-id"]
    assert world.cancelled[0].reason == "publish_unconfirmed"
    assert world.stored == []


async def test_a_full_stream_is_529(world: World) -> None:
    await world.bus.jetstream.api(
        "STREAM.UPDATE.REQUESTS", _shrunk(await world.bus.jetstream.api("STREAM.INFO.REQUESTS"))
    )
    assert (await world.post(BASE)).status_code == 200
    response = await world.post(BASE)
    assert (response.status_code, error_of(response)["code"]) == (529, "overloaded")
    await until(lambda: world.cancelled)


async def test_a_full_store_for_large_bodies_is_529_and_leaves_nothing_in_it(world: World) -> None:
    """Its model's owner would have refused in time: who finds the store full cannot say until when."""
    config = (await world.bus.jetstream.api(f"STREAM.INFO.{topology.BODIES}"))["config"]
    await world.bus.jetstream.api(f"STREAM.UPDATE.{topology.BODIES}", {**config, "max_bytes": 100_000})
    body = {**BASE, "messages": [{"role": "user", "content": "x" * 150_000}]}
    response = await world.post(body)
    assert (response.status_code, error_of(response)["code"]) == (529, "overloaded")
    assert "large bodies" in error_of(response)["message"] and "retry-after" not in response.headers
    await until(lambda: world.cancelled)
    assert (await world.bus.jetstream.api(f"STREAM.INFO.{topology.BODIES}"))["state"]["messages"] == 0
    assert world.admissions[0].body_bytes > 150_000
    assert (await world.post(BASE)).status_code == 200


def _shrunk(info: Any) -> dict[str, Any]:
    return {**info["config"], "max_msgs": 1}


async def test_the_deadline_header_is_passed_on(world: World) -> None:
    await world.post(BASE, headers={"X-Headrace-Deadline-Ms": "1500"})
    assert world.admissions[0].deadline_ms == 1500
    for wrong in ("", "x", "-1", "0", "1.5", "99999999999999"):
        response = await world.post(BASE, headers={"X-Headrace-Deadline-Ms": wrong})
        assert response.status_code == 400
        assert error_of(response)["param"] == "X-Headrace-Deadline-Ms"


# C44: every error has OpenAI's shape -----------------------------------------------------------------------


async def test_c44_errors_have_one_shape(world: World) -> None:
    client = world.client
    json_type = {"content-type": "application/json"}
    for response, status in (
        (await client.get("/v1/nope"), 404),
        (await client.get("/nope"), 404),
        (await client.get("//v1/models", headers={"authorization": ""}), 404),
        (await client.get(CHAT), 405),
        (await client.delete("/v1/models"), 405),
        (await client.post(CHAT, content=b"{bad", headers=json_type), 400),
        (await client.post(CHAT, content=b"[]", headers=json_type), 400),
        (await client.post(CHAT, content=b"", headers=json_type), 400),
        (await client.post(CHAT, content=encode(BASE), headers={"content-type": "text/csv"}), 415),
        (await client.post(CHAT, content=b"a=b", headers={"content-type": "application/x-www-form-urlencoded"}), 400),
        (await client.post(CHAT, json={"model": "m"}), 400),
        (await client.post(CHAT, json={"model": "m", "messages": []}), 400),
        (await client.post(CHAT, json={"model": "m", "messages": "x"}), 400),
        (await client.post(CHAT, json={"messages": []}), 400),
        (await client.post(CHAT, json=BASE | {"model": 5}), 400),
    ):
        assert response.status_code == status
        error_of(response)
    assert (await client.get(CHAT)).headers["allow"] == "POST"
    assert error_of(await client.post(CHAT, json={"model": "m"}))["param"] == "messages"
    await client.post(CHAT, content=encode(BASE))
    for kind in (
        "application/json; charset=utf-8",
        "application/vnd.api+json",
        "text/plain;charset=UTF-8",
        "application/x-www-form-urlencoded",
    ):
        assert (await client.post(CHAT, content=encode(BASE), headers={"content-type": kind})).status_code == 200
    assert len(world.stored) == 5


async def test_c44_a_bug_is_500_without_a_traceback(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    def boom(*_: object) -> None:
        raise RuntimeError("secret detail")

    monkeypatch.setattr("gateway.apis.api.Api.validate", boom)
    monkeypatch.setattr("gateway.http.model_list.Model.of", boom)
    for response in (await world.post(BASE), await world.client.get("/v1/models")):
        assert response.status_code == 500
        assert error_of(response)["code"] == "internal_error"
        assert "secret" not in response.text


async def test_c06_and_c13_are_refused_before_anything_is_published(world: World) -> None:
    for body in (
        b'{"model":"m","stream":true,"messages":[{"role":"user","content":"\\ud83d"}]}',
        b"[" * 100_000,
        b'{"model":"m","messages":[{"role":"user","content":"x"}],"x":' + b'{"a":' * 50_000 + b"1" + b"}" * 50_001,
    ):
        response = await world.client.post(CHAT, content=body)
        assert response.status_code == 400
        assert error_of(response)["type"] == "invalid_request_error"
    assert world.admissions == []


# Keys ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "header",
    [b"Bearer caf\xe9", "Bearer “x”".encode(), b"Bearer", b"Bearer  ", b"Basic eA==", b"", b"Bearer " + b"x" * 9000],
)
async def test_c15_odd_credentials_are_401(world: World, header: bytes) -> None:
    raw = await Raw.open(world)
    raw.writer.write(b"GET /v1/models HTTP/1.1\r\nhost: x\r\nauthorization: " + header + b"\r\n\r\n")
    status, headers = await raw.head()
    error = json.loads(await raw.reader.readexactly(int(headers["content-length"])))["error"]
    assert (status, error["code"]) == (401, "invalid_api_key")
    await raw.close()


async def test_c15_the_scheme_has_no_case(world: World) -> None:
    for scheme in ("bearer", "BEARER", "Bearer "):
        response = await world.client.get("/v1/models", headers={"authorization": f"{scheme} {K1}"})
        assert response.status_code == 200
    async with httpx.AsyncClient(base_url=world.url) as client:
        assert (await client.get("/v1/models")).status_code == 401


async def test_c32_revocation_holds_within_a_second_by_every_path(world: World) -> None:
    async def becomes(status: int, key: str) -> None:
        async with asyncio.timeout(1.0):
            while True:
                response = await world.client.get("/v1/models", headers={"authorization": f"Bearer {key}"})
                if response.status_code == status:
                    return
                await asyncio.sleep(0.01)

    await becomes(200, K1)
    await world.put_key(K1, KeyRecord(id="key-T1", tenant="T1", revoked_at_ms=1))
    await becomes(401, K1)
    await becomes(200, K2)
    await world.put_tenant(TenantRecord(name="T2", disabled=True))
    await becomes(401, K2)
    await world.put_tenant(TenantRecord(name="T2", limits=TenantLimits(rpm=1)))
    await becomes(200, K2)
    await world.bus.kv.delete(topology.KEYS, f"key-T2.{digest(K2)}")
    await becomes(401, K2)
    # No negative cache: a key that was tried before it existed.
    await becomes(401, "hr_new")
    await world.put_key("hr_new", KeyRecord(id="new", tenant="T1"))
    await becomes(200, "hr_new")


# Ids and CORS ----------------------------------------------------------------------------------------------


async def test_c28_a_clients_id_is_echoed_and_recorded_but_never_ours(world: World) -> None:
    ids = set()
    for key in (K1, K2):
        response = await world.post(
            BASE | {"request_id": "same"}, headers={"X-Request-Id": "same", "authorization": f"Bearer {key}"}
        )
        assert response.headers["x-client-request-id"] == "same"
        ids.add(response.headers["x-request-id"])
    assert ids == {envelope.request_id for envelope in world.stored}
    assert len(ids) == 2
    assert {envelope.client_request_id for envelope in world.stored} == {"same"}
    for envelope in world.stored:
        assert "request_id" not in await world.body_of(envelope)
    for odd in ("x" * 129, "é", "a b"):
        response = await world.post(BASE, headers={"X-Request-Id": odd.encode()})
        assert response.status_code == 200
        assert "x-client-request-id" not in response.headers
    raw = await Raw.open(world)
    await raw.send("GET /v1/models HTTP/1.1\r\nx-request-id: " + "x" * (1 << 20))
    status, _ = await raw.head()
    assert status == 431
    await raw.close()


async def test_c39_browsers_may_call_and_see_errors(world: World) -> None:
    preflight = await world.client.options(
        CHAT,
        headers={
            "authorization": "",
            "origin": "https://a.example",
            "access-control-request-method": "POST",
            "access-control-request-headers": "authorization,content-type,x-stainless-os",
        },
    )
    assert preflight.status_code == 204
    assert preflight.headers["access-control-allow-origin"] == "*"
    assert preflight.headers["access-control-allow-headers"] == "authorization,content-type,x-stainless-os"
    assert "POST" in preflight.headers["access-control-allow-methods"]
    for response in (
        await world.client.get("/v1/models", headers={"origin": "https://a.example", "authorization": "Bearer no"}),
        await world.client.get("/nope", headers={"origin": "https://a.example"}),
        await world.post(BASE, headers={"origin": "https://a.example"}),
    ):
        assert response.headers["access-control-allow-origin"] == "*"
        for name in ("x-request-id", "retry-after", "x-should-retry", "x-ratelimit-limit-requests"):
            assert name in response.headers["access-control-expose-headers"]


async def test_cors_can_be_narrowed(nats_url: str, tmp_path: Path) -> None:
    async with serve(nats_url, tmp_path, cors_origins=("https://a.example",)) as world:
        ours = await world.client.get("/health/live", headers={"origin": "https://a.example"})
        theirs = await world.client.get("/health/live", headers={"origin": "https://b.example"})
    assert ours.headers["access-control-allow-origin"] == "https://a.example"
    assert ours.headers["vary"] == "Origin"
    assert "access-control-allow-origin" not in theirs.headers


async def test_c39_a_trailing_slash_is_served(world: World) -> None:
    assert (await world.post(BASE, CHAT + "/")).status_code == 200
    assert (await world.client.get("/v1/models/")).status_code == 200


# C24, C11: sizes -------------------------------------------------------------------------------------------


async def test_c24_a_body_over_the_limit_is_413_soon(nats_url: str, tmp_path: Path) -> None:
    async with serve(nats_url, tmp_path, body_bytes_max=1 << 20) as world:
        response = await world.client.post(CHAT, content=b"x" * (2 << 20))
        assert response.status_code == 413
        assert error_of(response)["code"] == "request_too_large"
        for key, status in ((K1, 413), ("bad", 401)):
            raw = await Raw.open(world)
            await raw.send(f"POST {CHAT} HTTP/1.1\r\ntransfer-encoding: chunked", key=key)
            answer = asyncio.create_task(raw.head())
            piece = b"10000\r\n" + b"x" * 0x10000 + b"\r\n"
            pieces = 0
            while not answer.done() and pieces < 1000:
                raw.writer.write(piece)
                await raw.writer.drain()
                await asyncio.sleep(0)
                pieces += 1
            got, headers = await answer
            assert got == status
            assert headers["connection"] == "close"
            assert pieces < 1000
            raw.writer.transport.abort()
        assert world.admissions == []


async def test_c24_gzip_is_inflated_within_the_limit(nats_url: str, tmp_path: Path) -> None:
    async with serve(nats_url, tmp_path, body_bytes_max=1 << 20) as world:

        async def post(data: bytes, coding: str) -> Any:
            return await world.client.post(CHAT, content=data, headers={"content-encoding": coding})

        assert (await post(gzip.compress(encode(BASE)), "gzip")).status_code == 200
        assert (await post(encode(BASE), "identity")).status_code == 200
        bomb = gzip.compress(b"x" * (64 << 20))
        for data, coding, status in (
            (bomb, "gzip", 413),
            (encode(BASE), "zstd", 415),
            (encode(BASE), "gzip, br", 415),
            (encode(BASE), "gzip", 400),
            (gzip.compress(encode(BASE))[:-4], "gzip", 400),
        ):
            response = await post(data, coding)
            assert response.status_code == status
            assert "JSON" not in error_of(response)["message"]
        assert len(world.stored) == 2


async def test_c24_a_body_that_trickles_in_is_408(world: World) -> None:
    raw = await Raw.open(world)
    await raw.send(f"POST {CHAT} HTTP/1.1\r\ncontent-length: 100", b"{")
    status, _ = await asyncio.wait_for(raw.head(), 5)
    assert status == 408
    await raw.close()


async def test_c11_bodies_beyond_the_buss_limit_go_by_reference(nats_url: str, tmp_path: Path) -> None:
    async with serve(nats_url, tmp_path) as world:
        await world.put_model(simulated("big", context=10_000_000))

        async def known() -> bool:
            return await world.status_of("/v1/models/big") == 200

        await until(known)
        emoji = "🦀" * 112_500  # 450 KB of UTF-8, 1.3 MB as escaped JSON.
        for text in ("word " * 300_000, emoji, "🦀 " * 20_000):
            body = {"model": "big", "messages": [{"role": "user", "content": text}]}
            for data in (encode(body), json.dumps(body).encode()):
                response = await world.client.post(CHAT, content=data)
                assert response.status_code == 200
                envelope = world.stored[-1]
                assert envelope.body_bytes and not envelope.body
                assert (await world.body_of(envelope))["messages"][0]["content"] == text
        assert world.bus.session.reconnects == 0
