"""Bad input at the admin and usage APIs: refused by name, before a record that would stop a scheduler is kept."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

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
