"""Bad input at the admin and usage APIs: refused by name, before a record that would stop a scheduler is kept."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from contracts.keys import ADMIN_SCOPES
from contracts.messages.records import KeyRecord
from tests.support.gateway_world import ADMIN, World, serve
from tests.support.polling import until


@pytest.fixture
async def world(nats_url: str, tmp_path: Path) -> AsyncIterator[World]:
    async with serve(nats_url, tmp_path) as world:
        await world.put_key(ADMIN, KeyRecord(id="operator", tenant="T1", scopes=("usage", *ADMIN_SCOPES)))
        await until(lambda: knows_key(world), "the gateway knows the key")
        yield world


async def knows_key(world: World) -> bool:
    return (await world.admin.get("/admin/v1/keys")).status_code == 200


@pytest.mark.parametrize(
    ("path", "change", "param"),
    [
        ("tenants/T2", {"weight": 1e308}, "weight"),
        ("tenants/T2", {"weight": 1e-300}, "weight"),
        ("tenants/T2", {"weight": 0}, "weight"),
        ("tenants/T2", {"weight": "1"}, "weight"),
        ("tenants/T2", {"limits": {"rpm": 2**64}}, "rpm"),
        ("tenants/T2", {"limits": {"rpm": 1.5}}, "limits.rpm"),
        ("tenants/T2", {"limits": {"output_tpm": -1}}, "output_tpm"),
        ("tenants/T2", {"model_limits": {"m": {"foo": 1}}}, "model_limits.foo"),
        ("tenants/T2", {"monthly_budget_tokens": 2**64}, "monthly_budget_tokens"),
        ("tenants/T2", {"monthly_budget_tokens": -1}, "monthly_budget_tokens"),
        ("tenants/T2", {"priorities": ["x"]}, "priorities[0]"),
        ("tenants/T2", {"foo": 1}, "foo"),
        ("models/m/limits", {"kv_overbooking": 1e308}, "kv_overbooking"),
        ("models/m/limits", {"kv_overbooking": 0}, "kv_overbooking"),
        ("models/m/limits", {"queued_requests": 2**64}, "queued_requests"),
    ],
)
async def test_a_value_that_no_scheduler_can_count_with_is_refused_by_name(
    world: World, path: str, change: dict[str, Any], param: str
) -> None:
    response = await world.admin.patch(f"/admin/v1/{path}", json=change)
    assert response.status_code == 400
    error = response.json()["error"]
    assert (error["code"], error["param"]) == ("invalid_request", param)


async def test_a_tenant_is_found_by_any_name_that_it_may_have(world: World) -> None:
    for name, path in (("a/b", "a%2Fb"), ("é", "%C3%A9"), ("a b", "a%20b")):
        assert (await world.admin.post("/admin/v1/tenants", json={"name": name})).status_code == 201
        assert (await world.admin.get(f"/admin/v1/tenants/{path}")).json()["name"] == name
        assert (await world.admin.patch(f"/admin/v1/tenants/{path}", json={"weight": 2})).json()["weight"] == 2


@pytest.mark.parametrize("query", ["from=9999-12-31", "to=9999-12-31", "from=3000-01-01T00:00:00Z", "from=0001-01-01"])
async def test_c42_days_beyond_the_calendar_are_400(world: World, query: str) -> None:
    response = await world.client.get(f"/v1/usage?{query}")
    assert response.status_code == 400
    assert response.json()["error"]["param"] == query.partition("=")[0]


@pytest.mark.parametrize(
    "query",
    ["limit=0", "limit=10001", "limit=1_0", "limit=%2B5", "limit=5.0", "after=-1", "after=x", "by=day,moon", "by="],
)
async def test_a_parameter_out_of_range_is_refused_by_name(world: World, query: str) -> None:
    for client, path in ((world.client, "/v1/usage"), (world.admin, "/admin/v1/usage/latency")):
        response = await client.get(f"{path}?{query}")
        assert response.status_code == 400
        assert response.json()["error"]["param"] == query.partition("=")[0]
    assert (await world.client.get("/v1/usage?limit=10000&after=0&by=day,model&unknown=1")).status_code == 200
    unknown = await world.admin.get("/admin/v1/usage?unknown=1")
    assert (unknown.status_code, unknown.json()["error"]["param"]) == (400, "unknown")


async def test_the_live_view_is_followed_until_its_key_is_revoked(world: World) -> None:
    key = KeyRecord(id="watcher", tenant="T1", scopes=("admin:models",))
    await world.put_key("hr_watcher", key)
    headers = {"authorization": "Bearer hr_watcher"}

    async def shows_the_pool() -> bool:
        answer = await world.admin.get("/admin/v1/live", headers=headers)
        return answer.status_code == 200 and bool(answer.json()["models"][0]["pools"])

    await until(shows_the_pool, "the key works, and the owner has been asked")
    assert (await world.admin.get("/admin/v1/key", headers=headers)).json()["scopes"] == ["admin:models"]
    events = []
    async with world.admin.stream("GET", "/admin/v1/live", headers=headers | {"accept": "text/event-stream"}) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        async for line in answer.aiter_lines():
            if line.startswith("event: "):
                events.append(line)
            if len(events) == 2:
                await world.put_key("hr_watcher", msgspec.structs.replace(key, revoked_at_ms=1))
    assert events[:2] == ["event: live"] * 2 and events[-1] == "event: error"


async def lets_in(world: World, headers: dict[str, str]) -> bool:
    return (await world.admin.get("/admin/v1/key", headers=headers)).status_code == 200


async def test_a_key_of_one_area_sees_that_area_alone(world: World) -> None:
    paths = {
        "admin:keys": ["keys"],
        "admin:tenants": ["tenants"],
        "admin:models": ["models", "live", "queues", "models/m/requests"],
    }
    for number, scope in enumerate(paths):
        await world.put_key(f"hr_{number}", KeyRecord(id=f"k{number}", tenant="T1", scopes=(scope,)))  # type: ignore[arg-type]
    for number, scope in enumerate(paths):
        headers = {"authorization": f"Bearer hr_{number}"}
        await until(lambda headers=headers: lets_in(world, headers), "the key works")  # type: ignore[misc]
        for owner, of_area in paths.items():
            for path in of_area:
                status = (await world.admin.get(f"/admin/v1/{path}", headers=headers)).status_code
                assert status == (200 if owner == scope else 403), (scope, path)
