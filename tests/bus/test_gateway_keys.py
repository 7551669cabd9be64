"""Keys as callers meet them: scopes, networks, expiry, last use, failed logins, two peppers."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import REGISTRY

from contracts import audit, clock, registry, topology
from contracts.keys import ADMIN_SCOPES, Peppers
from contracts.messages.records import KeyRecord
from gateway.intake import activity
from gateway.intake.activity import FAILURES_MAX
from tests.support.gateway_world import ADMIN, BASE, CHAT, PEPPER, World, error_of, serve
from tests.support.polling import until

KEY = "hr_key-under-test"
PREVIOUS = "the pepper that was used before, long enough"


@pytest.fixture
async def world(nats_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[World]:
    monkeypatch.setattr(activity, "REPORT_S", 0.05)
    async with serve(nats_url, tmp_path, pepper=f"{PEPPER}\n{PREVIOUS}") as world:
        await world.put_key(ADMIN, KeyRecord(id="operator", tenant="T1", scopes=("usage", *ADMIN_SCOPES)))
        await until(lambda: admitted(world, ADMIN), "the gateway knows the admin key")
        yield world


def bearer(secret: str) -> dict[str, str]:
    return {"authorization": f"Bearer {secret}"}


async def admitted(world: World, secret: str) -> bool:
    return await world.status_of("/v1/models", headers=bearer(secret)) == 200


async def put(world: World, **fields: Any) -> None:
    await world.put_key(KEY, KeyRecord(**({"id": "tested", "tenant": "T1"} | fields)))


async def becomes(world: World, status: int) -> None:
    async def is_so() -> bool:
        return await world.status_of("/v1/models", headers=bearer(KEY)) == status

    await until(is_so, f"the key gives {status}")


async def test_an_admin_key_does_no_inference_and_an_inference_key_no_admin(world: World) -> None:
    refused = await world.client.post(CHAT, json=BASE, headers=bearer(ADMIN))
    assert (refused.status_code, error_of(refused)["code"]) == (403, "permission_denied")
    count = {"model": "m", "messages": BASE["messages"]}
    assert (await world.client.post("/v1/messages/count_tokens", json=count, headers=bearer(ADMIN))).status_code == 403
    await put(world, scopes=("inference",))
    await becomes(world, 200)
    assert (await world.client.post(CHAT, json=BASE, headers=bearer(KEY))).status_code == 200
    assert await world.status_of("/v1/usage", headers=bearer(KEY)) == 403
    for path in ("tenants", "keys", "models", "queues", "usage"):
        assert (await world.admin.get(f"/admin/v1/{path}", headers=bearer(KEY))).status_code == 403
    assert world.stored and {envelope.key_id for envelope in world.stored} == {"tested"}


@pytest.mark.parametrize("area", ADMIN_SCOPES)
async def test_an_area_of_the_administration_is_that_area_alone(world: World, area: Any) -> None:
    await put(world, scopes=(area,))
    await becomes(world, 200)
    paths = {"tenants": "tenants", "keys": "keys", "models": "models", "queues": "models", "usage": "usage"}
    for path, needed in paths.items():
        status = (await world.admin.get(f"/admin/v1/{path}", headers=bearer(KEY))).status_code
        assert status == (200 if area == f"admin:{needed}" else 403), path


async def test_a_key_holds_until_it_expires_and_where_it_may(world: World) -> None:
    await put(world, expires_at_ms=clock.now_ms() + 3_600_000, addresses=("127.0.0.0/8",))
    await becomes(world, 200)
    await put(world, expires_at_ms=clock.now_ms() - 1)
    await becomes(world, 401)
    answer = await world.client.get("/v1/models", headers=bearer(KEY))
    assert "expired" in error_of(answer)["message"]
    await put(world, addresses=("10.0.0.0/8",))
    await becomes(world, 403)

    async def recorded() -> bool:
        found = {entry.reason: entry for entry in await audit.entries(world.bus) if entry.actor == "tested"}
        return {"expired", "address"} <= found.keys() and found["address"].address == "127.0.0.1"

    await until(recorded, "the trail has both")


async def test_failures_from_one_address_are_bounded_and_valid_keys_let_in(world: World) -> None:
    """A script guesses keys behind the NAT of an honest caller."""
    unknown = {"reason": "unknown"}
    before = REGISTRY.get_sample_value("headrace_failed_logins_total", unknown) or 0
    statuses = [await world.status_of("/v1/models", headers=bearer(f"hr_guess-{n}")) for n in range(FAILURES_MAX + 20)]
    first = statuses.index(429)
    assert statuses[:first] == [401] * first and first >= FAILURES_MAX
    refused = await world.client.post(CHAT, json=BASE, headers=bearer("hr_guess"))
    assert (refused.status_code, error_of(refused)["code"]) == (429, "rate_limit_exceeded")
    assert int(refused.headers["retry-after"]) >= 1
    assert REGISTRY.get_sample_value("headrace_failed_logins_total", unknown) == before + FAILURES_MAX + 21
    assert await admitted(world, ADMIN) and (await world.post(BASE)).status_code == 200
    assert await world.status_of("/v1/models", headers={"authorization": ""}) == 401

    async def counted() -> bool:
        failed = [entry for entry in await audit.entries(world.bus) if entry.action == "logins.failed"]
        return sum(entry.count for entry in failed if entry.reason == "unknown") >= FAILURES_MAX + 20

    await until(counted, "all are in the trail")
    assert b"hr_guess" not in b"".join([e.data async for e in world.bus.jetstream.read(topology.AUDIT, "audit.v1.>")])


async def test_the_last_use_is_shown_to_the_minute(world: World) -> None:
    await put(world, note="batch")
    await becomes(world, 200)

    async def shown() -> dict[str, Any]:
        listed = (await world.admin.get("/admin/v1/keys")).json()["data"]
        return next(key for key in listed if key["id"] == "tested")

    async def used() -> bool:
        return bool((await shown())["last_used_at_ms"])

    await until(used, "the use is shown")
    key = await shown()
    assert key["last_used_at_ms"] % 60_000 == 0 and clock.now_ms() - key["last_used_at_ms"] < 120_000
    assert (key["note"], key["scopes"]) == ("batch", ["inference", "usage"])


async def test_a_key_under_the_previous_pepper_moves_at_its_next_use(world: World) -> None:
    secret = "hr_made-before-the-pepper-changed"
    kept = await registry.keep_key(world.bus, Peppers.parse(PREVIOUS), secret, KeyRecord(id="", tenant="T1"))
    assert kept.after is not None
    await until(lambda: admitted(world, secret), "it works under the previous pepper")

    async def moved() -> bool:
        return bool(await registry.keys_of_secret(world.bus, Peppers.parse(PEPPER), secret.encode()))

    await until(moved, "it is under the current one")
    assert await registry.keys_of_secret(world.bus, Peppers.parse(PREVIOUS), secret.encode()) == []
    for _ in range(20):
        assert await admitted(world, secret), "at every moment"
        await asyncio.sleep(0.01)


async def test_keys_are_made_changed_and_revoked_over_http(world: World) -> None:
    asked = {"tenant": "T2", "scopes": ["inference"], "addresses": ["127.0.0.0/8"], "note": "n"}
    made = (await world.admin.post("/admin/v1/keys", json=asked)).json()
    await until(lambda: admitted(world, made["key"]), "it works")
    changed = await world.admin.patch(f"/admin/v1/keys/{made['id']}", json={"addresses": ["10.0.0.0/8"]})
    assert (changed.status_code, changed.json()["addresses"], changed.json()["note"]) == (200, ["10.0.0.0/8"], "n")

    async def shut_out() -> bool:
        return await world.status_of("/v1/models", headers=bearer(made["key"])) == 403

    await until(shut_out, "it is not for this network")
    assert (await world.admin.delete(f"/admin/v1/keys/{made['id']}")).json()["revoked_at_ms"] > 0
    trail = [entry for entry in await audit.entries(world.bus) if entry.target == made["id"] and entry.result == "done"]
    assert [entry.action for entry in trail] == ["keys.create", "keys.change", "keys.revoke"]
    assert {(entry.actor, entry.address, entry.via) for entry in trail} == {("operator", "127.0.0.1", "api")}
    assert trail[1].before == {"addresses": ["127.0.0.0/8"]} and trail[1].after == {"addresses": ["10.0.0.0/8"]}
    await world.admin.patch("/admin/v1/tenants/T2", json={"weight": 3}, headers={"sec-fetch-site": "same-origin"})
    assert (await audit.entries(world.bus))[-1].via == "console"


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"scopes": ["inference", "admin:keys"]}, "scopes"),
        ({"scopes": []}, "scopes"),
        ({"scopes": ["root"]}, "scopes[0]"),
        ({"addresses": ["10.0.0.1/8"]}, "addresses"),
        ({"expires_at_ms": 1}, "expires_at_ms"),
        ({"expires_at_ms": 2**63 - 1}, "expires_at_ms"),  # No calendar shows it: a list of keys that holds it breaks.
        ({"expires": 1}, "expires"),
    ],
)
async def test_a_key_that_cannot_be_is_refused_by_name(world: World, body: dict[str, Any], param: str) -> None:
    answer = await world.admin.post("/admin/v1/keys", json={"tenant": "T1"} | body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
