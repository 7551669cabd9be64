"""The admin surface: limits that are changed by command line or HTTP hold within a second; fallback; live queues."""

import json
import subprocess
import threading
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.polling import wait_until
from tests.support.stack import ENVIRONMENT, HEADRACE, Stack, StartStack

HELLO = [{"role": "user", "content": "one two three"}]


@pytest.fixture(scope="module")
def admin(stack: Stack) -> Any:
    with stack.admin() as client:
        yield client


def ask(client: httpx.Client, model: str, **fields: Any) -> httpx.Response:
    return client.post("/v1/chat/completions", json={"model": model, "messages": HELLO, "max_tokens": 2} | fields)


def new_key(stack: Stack, tenant: str) -> str:
    key: str = stack.cli_json("key", "create", tenant)["key"]
    with stack.client(key) as client:
        wait_until(lambda: client.get("/v1/models").status_code == 200, "the key works")
    return key


def test_only_admin_keys_get_in(stack: Stack) -> None:
    url = f"{stack.run.admin_url}/admin/v1/tenants"
    refused = httpx.get(url, headers={"Authorization": f"Bearer {stack.run.key}"}, trust_env=False)
    assert refused.status_code == 403 and refused.json()["error"]["code"] == "permission_denied"
    assert httpx.get(url, headers={"Authorization": "Bearer x"}, trust_env=False).status_code == 401


def test_the_admin_api_is_at_its_own_address_alone(stack: Stack) -> None:
    origin = {"Origin": "https://elsewhere.example", "Access-Control-Request-Method": "GET"}
    with stack.client(stack.run.admin_key) as public, stack.admin() as private:
        paths = [path for path in private.get("/openapi.json").json()["paths"] if path.startswith("/admin")]
        assert "/admin/v1/tenants" in paths and "/admin/usage" in paths
        for path in paths:
            assert public.get(path).status_code == 404, path
            assert public.post(path, json={}).status_code == 404, path
        assert not [path for path in public.get("/openapi.json").json()["paths"] if path.startswith("/admin")]
        answer = private.get("/admin/v1/tenants", headers=origin)
        assert answer.status_code == 200 and "access-control-allow-origin" not in answer.headers
        assert private.options("/admin/v1/tenants", headers=origin).status_code == 405
        assert private.post("/v1/chat/completions", json={}).status_code == 404


def test_tenants_and_keys_over_http(stack: Stack, admin: httpx.Client) -> None:
    body = {"name": "by-http", "limits": {"rpm": 3}, "weight": 2}
    made = admin.post("/admin/v1/tenants", json=body)
    assert made.status_code == 201, made.text
    assert (made.json()["limits"]["rpm"], made.json()["limits"]["input_tpm"], made.json()["weight"]) == (3, None, 2)
    assert admin.post("/admin/v1/tenants", json=body | {"weight": 3}).status_code == 409
    key = admin.post("/admin/v1/keys", json={"tenant": "by-http"})
    assert key.status_code == 201 and key.json()["key"].startswith("hr_")
    with stack.client(key.json()["key"]) as client:
        wait_until(lambda: client.get("/v1/models").status_code == 200, "the key works", 2)
        assert admin.delete(f"/admin/v1/keys/{key.json()['id']}").json()["revoked_at_ms"] > 0
        wait_until(lambda: client.get("/v1/models").status_code == 401, "the key is revoked", 2)
    assert "by-http" in [t["name"] for t in admin.get("/admin/v1/tenants").json()["data"]]
    assert "hr_" not in admin.get("/admin/v1/keys").text


def test_keys_by_command_line_and_the_trail_of_all(stack: Stack, admin: httpx.Client, tmp_path: Path) -> None:
    stack.cli_json("tenant", "create", "trailed", "--rpm", "7")
    file = tmp_path / "key"
    options = ("--scopes", "inference", "--addresses", "127.0.0.0/8", "--expires", "2900-01-01", "--note", "for tests")
    made = stack.cli_json("key", "create", "trailed", *options, "--out", str(file))
    assert made == {"id": made["id"], "file": str(file)} and file.stat().st_mode & 0o777 == 0o600
    assert stack.cli("key", "create", "trailed", "--out", str(file)).returncode == 1
    with stack.client(file.read_text()) as client:
        wait_until(lambda: client.get("/v1/models").status_code == 200, "the key works")
        stack.cli_json("key", "set", made["id"], "--addresses", "10.0.0.0/8")
        wait_until(lambda: client.get("/v1/models").status_code == 403, "it is for another network")
    admin.patch("/admin/v1/tenants/trailed", json={"weight": 2}).raise_for_status()
    stack.cli_json("key", "revoke", made["id"])
    assert stack.cli("key", "create", "nobody").returncode == 1

    entries = [entry for entry in stack.cli_json("audit") if entry["target"] in ("trailed", made["id"], "nobody")]
    said = [(entry["action"], entry["via"], entry["result"]) for entry in entries]
    assert said == [
        ("tenants.create", "cli", "done"),
        ("keys.create", "cli", "done"),
        ("keys.change", "cli", "done"),
        ("tenants.change", "api", "done"),
        ("keys.revoke", "cli", "done"),
        ("keys.create", "cli", "refused"),
    ]
    assert entries[2]["after"] == {"addresses": ["10.0.0.0/8"]}
    assert (entries[3]["after"], entries[3]["address"]) == ({"weight": 2.0}, "127.0.0.1")
    assert file.read_text() not in stack.cli("audit").stdout
    shown = stack.cli("audit", "--target", "trailed", "--action", "tenants", "--actor", "operator").stdout
    assert shown.count("trailed") == 2 and "tenants.create" in shown, "the name of the target, and in the new record"


def test_failed_logins_are_in_the_trail_with_their_address(stack: Stack) -> None:
    with stack.client("hr_nobodys") as client:
        assert client.get("/v1/models").status_code == 401

    def found() -> bool:
        return any(entry["address"] == "127.0.0.1" for entry in stack.cli_json("audit", "--action", "logins.failed"))

    wait_until(found, "the trail has it")


def test_the_trail_can_be_followed(stack: Stack) -> None:
    command = [*HEADRACE, "audit", "--follow", "--json", "--target", "followed", "--data-dir", str(stack.data_dir)]
    with subprocess.Popen(command, env=ENVIRONMENT, stdout=subprocess.PIPE, text=True) as following:
        try:
            stack.cli_json("tenant", "create", "followed")
            assert following.stdout is not None
            seen = [json.loads(following.stdout.readline()) for _ in range(2)]
        finally:
            following.kill()
    assert [(entry["action"], entry["result"]) for entry in seen] == [
        ("tenants.create", "intended"),
        ("tenants.create", "done"),
    ]


@pytest.mark.parametrize(
    ("body", "status"),
    [
        ({"limits": {"rmp": 3}}, 400),
        ({"weight": 0}, 400),
        ({"weight": "many"}, 400),
        ({"priorities": []}, 400),
        ({"limits": {"rpm": -1}}, 400),
        ({"models": ["a\nb"]}, 400),
    ],
)
def test_nonsense_changes_nothing(admin: httpx.Client, body: dict[str, Any], status: int) -> None:
    before = admin.get("/admin/v1/tenants/demo").json()
    answer = admin.patch("/admin/v1/tenants/demo", json=body)
    assert answer.status_code == status and answer.json()["error"]["message"], answer.text
    assert admin.get("/admin/v1/tenants/demo").json() == before
    assert admin.patch("/admin/v1/tenants/nobody", json={}).status_code == 404


def test_changed_limits_hold_within_a_second(stack: Stack, admin: httpx.Client) -> None:
    stack.cli_json("tenant", "create", "limited")
    with stack.client(new_key(stack, "limited")) as client:
        assert ask(client, stack.model).status_code == 200
        admin.patch("/admin/v1/tenants/limited", json={"limits": {"output_tpm": 10}}).raise_for_status()

        def refused() -> bool:
            answer = ask(client, stack.model, max_tokens=50)
            return answer.status_code == 400 and answer.json()["error"]["code"] == "request_exceeds_limit"

        wait_until(refused, "the lowered limit holds", 1)
        assert stack.cli_json("tenant", "set", "limited", "--output-tpm", "none")["limits"]["output_tpm"] is None
        wait_until(lambda: ask(client, stack.model, max_tokens=50).status_code == 200, "it is lifted", 1)
        stack.cli_json("tenant", "set", "limited", "--disable")
        wait_until(lambda: ask(client, stack.model).status_code == 401, "a disabled tenant is out", 1)


def test_two_gateways_admit_exactly_one_of_ten(start_stack: StartStack) -> None:
    stack = start_stack("--gateways", "2")
    stack.cli_json("tenant", "create", "tight", "--output-tpm", "200")
    key = new_key(stack, "tight")
    urls = [*stack.run.gateway_urls] * 5
    answers: list[httpx.Response] = []

    def one(url: str) -> None:
        with httpx.Client(base_url=url, headers={"Authorization": f"Bearer {key}"}, trust_env=False) as client:
            script = {"tokens": ["x"] * 40, "itl_ms": 1, "ttft_ms": 3000}
            answers.append(ask(client, stack.model, max_tokens=120, simulate=script))

    threads = [threading.Thread(target=one, args=(url,)) for url in urls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    codes = sorted(answer.status_code for answer in answers)
    assert codes == [200] + [429] * 9
    for answer in answers:
        assert answer.headers["x-ratelimit-limit-tokens"] == "200"
        if answer.status_code == 429:
            assert answer.json()["error"]["code"] == "rate_limit_exceeded"
            assert 1 <= int(answer.headers["retry-after"]) <= 60
    with stack.client(key) as client:
        after = ask(client, stack.model, max_tokens=150)
        assert after.status_code == 200, "used 40 of 120: about 160 are free again at once"
        assert ask(client, stack.model, max_tokens=150).status_code == 429


def test_an_overloaded_model_falls_back_where_the_tenant_permits_it(start_stack: StartStack) -> None:
    stack = start_stack("--model", "main", "--model", "spare", "--sim-slots", "1")
    limits = stack.cli_json("model", "limits", "main", "--queued-requests", "0", "--fallbacks", "spare")
    assert (limits["limits"]["queued_requests"], limits["fallbacks"]) == (0, ["spare"])
    with stack.client() as client:
        wait_until(lambda: ask(client, "main").status_code == 529, "the queue is closed", 2)
        stack.cli_json("tenant", "set", "demo", "--fallback")
        answer = wait_until(lambda: (a := ask(client, "main")).status_code == 200 and a, "the fallback answers", 2)
        assert answer.json()["model"] == "spare"
        stream = ask(client, "main", stream=True)
        assert '"model":"spare"' in stream.text and stream.text.rstrip().endswith("[DONE]")
        assert ask(client, "main", max_tokens=2_000_000).status_code == 400

    def booked() -> list[dict[str, Any]]:
        return [row for row in stack.usage("--by", "model") if row["model"] == "spare"]

    assert wait_until(booked, "the ledger says which model answered")[0]["requests"] == 2


def test_live_queues_show_who_waits(start_stack: StartStack) -> None:
    stack = start_stack("--sim-slots", "1")
    with stack.admin() as admin:
        threads = [threading.Thread(target=lambda: _slow(stack)) for _ in range(3)]
        for thread in threads:
            thread.start()

        def line() -> dict[str, Any] | None:
            (queue,) = admin.get("/admin/v1/queues").json()["data"]
            if (queue["running"], queue["waiting"]) != (1, 2):
                return None
            tenant: dict[str, Any] = queue["tenants"][0]
            return tenant

        tenant = wait_until(line, "one runs, two wait")
        assert (tenant["tenant"], tenant["running"], tenant["waiting"]) == ("demo", 1, 2)
        assert tenant["reserved_tokens"] == 3 * (7 + 100)
        shown = stack.cli("queue")
        assert "demo" in shown.stdout
        for thread in threads:
            thread.join()


def _slow(stack: Stack) -> None:
    with stack.client() as client:
        assert ask(client, stack.model, max_tokens=100).status_code == 200


def test_a_worker_is_drained_and_takes_work_again(start_stack: StartStack) -> None:
    stack = start_stack("--workers", "2")

    def states() -> dict[str, str]:
        with stack.admin() as admin:
            [model] = admin.get("/admin/v1/live").json()["models"]
            return {each["worker"]: each["state"] for pool in model["pools"] for each in pool["workers"]}

    first, second = sorted(wait_until(lambda: len(found := states()) == 2 and found, "both are seen"))
    path = f"/admin/v1/models/{stack.model}/workers/{first}"
    with stack.client() as client, stack.admin() as admin:
        assert admin.patch(path, json={"held": True}).json()["held"] is True
        wait_until(lambda: states() == {first: "held", second: "ready"}, "one is held")
        for _ in range(4):
            asked = ask(client, stack.model)
            assert asked.status_code == 200
            text = stack.cli("explain", asked.headers["x-request-id"]).stdout
            assert first not in text
        assert admin.patch(path + "x", json={"held": True}).status_code == 404
        assert admin.patch(path, json={"hold": True}).status_code == 400
    assert stack.cli_json("worker", "resume", "worker-0")["held"] is False
    wait_until(lambda: set(states().values()) == {"ready"}, "it takes work again")
    changes = [entry for entry in stack.cli_json("audit", "--action", "workers.change") if entry["result"] == "done"]
    assert [(entry["via"], entry["after"]) for entry in changes] == [("api", {"held": True}), ("cli", {"held": False})]


def test_an_operator_ends_a_request_and_nobody_pays_for_it(stack: Stack, admin: httpx.Client) -> None:
    slow = {"tokens": ["x "] * 500, "itl_ms": 20}
    answers: list[str] = []

    def caller() -> None:
        with stack.client(key) as client:
            answers.append(ask(client, stack.model, stream=True, max_tokens=500, simulate=slow).text)

    stack.cli_json("tenant", "create", "ended")
    key = new_key(stack, "ended")
    requests = f"/admin/v1/models/{stack.model}/requests"

    def open_ones() -> list[dict[str, Any]]:
        return [row for row in admin.get(requests, params={"limit": 200}).json()["data"] if row["tenant"] == "ended"]

    for end in ("api", "cli"):
        thread = threading.Thread(target=caller)
        thread.start()
        found = wait_until(lambda: [row for row in open_ones() if row["completion_tokens"]], "it has tokens")[0]
        if end == "api":
            done = admin.delete(f"{requests}/{found['request_id']}").json()
        else:
            done = stack.cli_json("cancel", found["request_id"])
        assert (done["tenant"], done["outcome"]) == ("ended", "cancelled")
        thread.join()
        assert '"error"' in answers[-1] and "[DONE]" not in answers[-1]
        assert admin.delete(f"{requests}/{found['request_id']}").status_code == 404
        text = wait_until(lambda id=found["request_id"]: explained(stack, id), "the ledger has it")  # type: ignore[misc]
        assert "an operator cancelled it" in text
    rows = stack.usage("--by", "tenant")
    assert [row["completion_tokens"] for row in rows if row["tenant"] == "ended"] == [0]


def explained(stack: Stack, request_id: str) -> str:
    done = stack.cli("explain", request_id)
    return done.stdout if done.returncode == 0 else ""
