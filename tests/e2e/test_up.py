"""``headrace up`` starts, keeps up and stops a whole stack; run.json and the commands tell the truth."""

import json
import os
import shutil
import signal
import socket
import stat
import time
from pathlib import Path

import httpx
import pytest

from tests.support.polling import wait_until
from tests.support.stack import Stack, StartStack, alive, headrace

HELLO = [{"role": "user", "content": "one two three"}]


def answer(stack: Stack, **fields: object) -> httpx.Response:
    with stack.client() as client:
        body = {"model": stack.model, "messages": HELLO, "max_tokens": 3} | fields
        return client.post("/v1/chat/completions", json=body)


def test_run_json_says_where_things_are(stack: Stack) -> None:
    raw = json.loads((stack.data_dir / "run.json").read_text())
    assert set(raw) == {
        "url",
        "admin_url",
        "gateway_urls",
        "metrics_urls",
        "nats_url",
        "nats_seed_file",
        "key",
        "admin_key",
        "pids",
    }
    assert stat.S_IMODE((stack.data_dir / "run.json").stat().st_mode) == 0o600
    assert set(raw["pids"]) == {"gateway", "scheduler", "worker", "ledger", "nats"}
    assert all(len(pids) == 1 and alive(pids[0]) for pids in raw["pids"].values())
    for role in ("gateway", "scheduler", "worker", "ledger"):
        command = Path(f"/proc/{raw['pids'][role][0]}/cmdline").read_bytes().split(b"\0")
        assert command[-2].decode() == role
    for url in (raw["url"], raw["admin_url"], *raw["gateway_urls"]):
        assert httpx.get(f"{url}/health/ready", trust_env=False).status_code == 200
    assert set(raw["metrics_urls"]) == {"gateway", "scheduler", "worker", "ledger"}
    gathered = httpx.get(f"{raw['metrics_urls']['gateway'][0]}/stack", trust_env=False, timeout=30).text
    for role in raw["metrics_urls"]:
        assert f'headrace_service_up{{service="{role}-0"}} 1' in gathered
    assert 'headrace_ledger_connected{service="ledger-0"} 1.0' in gathered
    for urls in raw["metrics_urls"].values():
        for url in urls:
            assert url.endswith("/metrics")
            assert "python_info" in httpx.get(url, trust_env=False).text


def test_the_last_line_says_the_address(stack: Stack) -> None:
    lines = stack.output.read_text().splitlines()
    assert lines[-1].endswith(stack.run.url)
    assert any("curl -N" in line and str(stack.data_dir / "key") in line for line in lines)


def test_the_first_key_is_in_a_file_and_not_in_a_pipe(stack: Stack) -> None:
    file = stack.data_dir / "key"
    assert file.read_text() == stack.run.key and file.stat().st_mode & 0o777 == 0o600
    assert "hr_" not in stack.output.read_text()


def test_no_secret_is_in_an_environment_a_command_line_or_a_log(stack: Stack) -> None:
    run = stack.run
    kept = json.loads((stack.data_dir / "secrets.json").read_text())
    secrets = [run.key, run.admin_key, kept["sql_password"]]
    secrets += [path.read_text().strip() for path in (stack.data_dir / "nats" / "seeds").glob("*/*.seed")]
    secrets.append((stack.data_dir / "pepper").read_text())
    seen = {f"{pid} {what}": Path(f"/proc/{pid}/{what}") for pid in stack.pids for what in ("environ", "cmdline")}
    seen |= {path.name: path for path in (stack.data_dir / "logs").iterdir()}
    found = [name for name, path in seen.items() if any(secret in path.read_text("latin-1") for secret in secrets)]
    assert found == []


def test_a_chat_is_answered_and_its_usage_is_booked(stack: Stack) -> None:
    response = answer(stack)
    assert response.status_code == 200, response.text
    used = response.json()["usage"]
    tenant_rows = wait_until(
        lambda: [row for row in stack.usage("--by", "tenant") if row["tenant"] == "demo"], "the usage is in the ledger"
    )
    assert tenant_rows[0]["requests"] >= 1
    assert tenant_rows[0]["completion_tokens"] >= used["completion_tokens"] == 3


def test_internal_submit_prints_the_text(stack: Stack) -> None:
    done = stack.cli("submit", "one two", "--max-tokens", "3", "--model", stack.model)
    assert (done.returncode, done.stdout.split()) == (0, ["t0", "t1", "t2"]), done.stderr


def test_tenants_and_keys(stack: Stack) -> None:
    made = stack.cli_json("tenant", "create", "Café 1", "--rpm", "5", "--models", "simulated")
    assert (made["name"], made["limits"]["rpm"], made["models"]) == ("Café 1", 5, ["simulated"])
    again = stack.cli("tenant", "create", "Café 1", "--rpm", "5", "--models", "simulated")
    assert again.returncode == 0
    other = stack.cli("tenant", "create", "Café 1", "--rpm", "6")
    assert other.returncode == 1 and "exists" in other.stderr and other.stdout == ""

    key = stack.cli_json("key", "create", "Café 1")
    assert set(key) == {"id", "key"}
    with stack.client(key["key"]) as client:
        wait_until(lambda: client.get("/v1/models").status_code == 200, "the new key works")
        assert key["id"] in [record["id"] for record in stack.cli_json("key", "list")]
        assert stack.cli("key", "revoke", key["id"]).returncode == 0
        wait_until(lambda: client.get("/v1/models").status_code == 401, "the revoked key is refused", 5)
    assert stack.cli("key", "revoke", key["id"]).returncode == 0


def test_lists_show_no_secret(stack: Stack) -> None:
    for command in (("tenant", "list"), ("key", "list"), ("model", "list"), ("queue",)):
        for options in ((), ("--json",)):
            done = stack.cli(*command, *options)
            assert done.returncode == 0, done.stderr
            assert "hr_" not in done.stdout and done.stdout.strip()


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (("tenant", "create", ""), "empty"),
        (("tenant", "create", "x" * 129), "129 characters"),
        (("tenant", "create", "a\nb"), "control character"),
        (("key", "create", "nobody"), "no tenant"),
        (("key", "revoke", "key_none"), "no key"),
        (("queue", "--model", "none"), "answer"),
        (("submit", "hello", "--model", "none"), "model_not_found"),
    ],
)
def test_what_cannot_be_done_is_told_on_stderr(stack: Stack, arguments: tuple[str, ...], reason: str) -> None:
    done = stack.cli(*arguments)
    assert done.returncode == 1
    assert reason in done.stderr and "Traceback" not in done.stderr and done.stdout.strip() == ""


def test_a_wrong_command_line_is_2(stack: Stack) -> None:
    for arguments in (("tenant", "create"), ("tenant", "create", "x", "--rpm", "-1"), ("usage", "--by", "moon")):
        assert stack.cli(*arguments).returncode == 2


def test_the_bus_alone_can_be_named_by_the_environment(stack: Stack) -> None:
    away = {"HEADRACE_NATS_URL": stack.run.nats_url, "HEADRACE_NATS_SEED_FILE": stack.run.nats_seed_file}
    assert headrace("tenant", "list", "--json", **away).returncode == 0
    refused = headrace("key", "create", "demo", **away)
    assert refused.returncode == 1 and "HEADRACE_PEPPER_FILE" in refused.stderr
    pepper = str(stack.data_dir / "pepper")
    made = headrace("key", "create", "demo", "--json", **away, HEADRACE_PEPPER_FILE=pepper)
    with stack.client(json.loads(made.stdout)["key"]) as client:
        wait_until(lambda: client.get("/v1/models").status_code == 200, "the key made so works")


def test_an_unreachable_bus_is_told_on_stderr_alone() -> None:
    done = headrace("tenant", "list", "--json", HEADRACE_NATS_URL="nats://127.0.0.1:1")
    assert (done.returncode, done.stdout) == (1, "") and "no connection" in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_no_stack_is_told(tmp_path: Path) -> None:
    done = headrace("tenant", "list", "--data-dir", str(tmp_path))
    assert done.returncode == 1 and "no stack is running" in done.stderr


def test_a_used_port_or_directory_is_refused(stack: Stack, start_stack: StartStack, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        refused = headrace("up", "--engine", "simulated", "--port", port, "--data-dir", str(tmp_path))
    assert refused.returncode == 1 and f"port {port}" in refused.stderr and "in use" in refused.stderr
    port = stack.run.url.rsplit(":", 1)[1]
    refused = headrace("up", "--engine", "simulated", "--port", port, "--data-dir", str(tmp_path))
    assert refused.returncode == 1 and "in use" in refused.stderr
    refused = headrace("up", "--engine", "simulated", "--port", "0", "--data-dir", str(stack.data_dir))
    assert refused.returncode == 1 and "another stack" in refused.stderr
    assert answer(stack).status_code == 200


def test_wrong_settings_end_the_start_with_the_reason(start_stack: StartStack) -> None:
    stack = start_stack(ready=False, HEADRACE_GRACE_S="soon")
    assert stack.process.wait(60) == 1
    assert "HEADRACE_GRACE_S" in stack.output.read_text()


def test_ctrl_c_leaves_nothing_and_keys_outlive_it(start_stack: StartStack) -> None:
    stack = start_stack("--gateways", "2", "--workers", "2")
    before, pids = stack.run, stack.pids
    assert len(before.pids["gateway"]) == len(before.pids["worker"]) == len(before.gateway_urls) == 2
    assert answer(stack).status_code == 200
    assert stack.stop(signal.SIGINT) == 0
    assert not any(alive(pid) for pid in pids)
    assert not (stack.data_dir / "run.json").exists()

    again = start_stack(data_dir=stack.data_dir)
    assert (again.run.key, again.run.admin_key) == (before.key, before.admin_key)
    assert answer(again).status_code == 200


def test_a_second_ctrl_c_does_not_wait(start_stack: StartStack) -> None:
    """A stream that runs for a long time would hold the stop up for the whole grace time."""
    stack = start_stack("--sim-itl-ms", "1000")
    pids = stack.pids
    with stack.client() as client:
        body = {"model": stack.model, "messages": HELLO, "max_tokens": 1000, "stream": True}
        with client.stream("POST", "/v1/chat/completions", json=body) as response:
            next(response.iter_lines())
            started = time.monotonic()
            stack.process.send_signal(signal.SIGINT)
            wait_until(lambda: "stopping" in stack.output.read_text(), "it has heard the first one")
            stack.stop(signal.SIGINT)
            assert time.monotonic() - started < 15
    assert not any(alive(pid) for pid in pids)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGHUP])
def test_nothing_outlives_the_parent(start_stack: StartStack, number: int) -> None:
    stack = start_stack()
    pids = stack.pids
    os.kill(stack.process.pid, number)
    stack.process.wait(60)
    wait_until(lambda: not any(alive(pid) for pid in pids), "every child is dead", 5)
    again = start_stack(data_dir=stack.data_dir)
    assert answer(again).status_code == 200


@pytest.mark.parametrize("role", ["worker", "scheduler", "gateway", "ledger", "nats"])
def test_what_dies_comes_back(start_stack: StartStack, role: str) -> None:
    stack = start_stack()
    before = stack.run.pids[role][0]
    os.kill(before, signal.SIGKILL)
    after = wait_until(lambda: [pid for pid in stack.run.pids[role] if pid != before], f"{role} is started again")
    assert alive(after[0])

    def served() -> bool:
        try:
            return answer(stack).status_code == 200
        except (httpx.HTTPError, LookupError):
            return False

    wait_until(served, f"a chat is answered after the death of {role}", 60)
    assert stack.run.pids[role] == after


def test_a_wiped_store_is_filled_again(start_stack: StartStack) -> None:
    """The streams, the model, and both keys that ``headrace up`` gave away."""
    stack = start_stack()
    before = stack.run
    assert answer(stack).status_code == 200
    os.kill(before.pids["nats"][0], signal.SIGKILL)
    shutil.rmtree(stack.data_dir / "nats" / "store")

    def served() -> bool:
        try:
            with stack.admin() as client:
                tenants = client.get("/admin/v1/tenants")
            return tenants.is_success and answer(stack).status_code == 200
        except (httpx.HTTPError, LookupError):
            return False

    wait_until(served, "both keys work again", 60)
    run = stack.run
    assert (run.key, run.admin_key) == (before.key, before.admin_key)
    assert stack.cli_json("tenant", "list") and stack.cli_json("queue")[0]["model"] == stack.model
