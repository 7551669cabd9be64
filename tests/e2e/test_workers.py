"""Several models on one stack, and what is changed of it while it runs."""

import json
import socket
import threading
from collections.abc import Iterator
from functools import partial
from typing import Any

import httpx
import pytest
from typer.testing import CliRunner

from compose.cli.main import app
from compose.stack import control
from compose.stack.data_dir import ComposeError, DataDir
from contracts.errors import HeadraceError
from tests.support.polling import wait_until
from tests.support.stack import ENVIRONMENT, Stack, StartStack, alive, headrace

HELLO = [{"role": "user", "content": "one two three"}]
A_CHAT = {"messages": HELLO, "max_tokens": 3}


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """In a directory whose path is longer than the kernel lets a socket's be."""
    directory = tmp_path_factory.mktemp("a") / ("deep" * 30) / "data"
    directory.parent.mkdir()
    made = Stack(directory, "--engine", "simulated", "--model", "a", "--model", "b/1", "--workers", "a=2")
    made.wait_ready()
    yield made
    assert made.stop() == 0


def ask(stack: Stack, model: str, **fields: Any) -> httpx.Response:
    with stack.client() as client:
        return client.post("/v1/chat/completions", json=A_CHAT | {"model": model} | fields)


def is_served(stack: Stack, model: str) -> bool:
    return ask(stack, model).status_code == 200


def workers(stack: Stack) -> dict[str, str]:
    """Name -> model, of those that are ready."""
    return {each["name"]: each["model"] for each in stack.cli_json("worker", "list") if each["state"] == "ready"}


def running(stack: Stack, model: str) -> list[str]:
    """Processes whose workers say that they run something."""
    [answer] = stack.cli_json("queue", "--model", model)
    return [each["worker"].rpartition("-")[0] for each in answer["workers"] if each["running"]]


def places(stack: Stack, model: str) -> list[str]:
    """Names of a model's workers as its owner sees them."""
    return sorted(versions(stack, model))


def versions(stack: Stack, model: str) -> dict[str, str]:
    """Version by name of a model's workers that are ready, as its owner sees them."""
    [answer] = stack.cli_json("queue", "--model", model)
    ready = [each for each in answer["workers"] if each["state"] == "ready"]
    return {each["worker"].rpartition("-")[0]: each["version"] for each in ready}


def test_each_model_has_its_own_owner_workers_and_limits(stack: Stack) -> None:
    assert sorted(workers(stack).values()) == ["a", "a", "b/1"]
    assert places(stack, "a") == ["worker-0", "worker-1"] and places(stack, "b/1") == ["worker-2"]
    queues = stack.cli_json("queue")
    assert {each["model"] for each in queues} == {"a", "b/1"} and all(each["owner"] for each in queues)
    stack.cli_json("model", "limits", "b/1", "--queued-requests", "0")
    wait_until(lambda: ask(stack, "b/1").status_code == 529, "nothing may wait for b")
    assert ask(stack, "a").json()["model"] == "a"
    stack.cli_json("model", "limits", "b/1", "--queued-requests", "100")
    wait_until(lambda: ask(stack, "b/1").status_code == 200, "b is served again")


def test_a_worker_comes_and_goes_and_nothing_restarts(stack: Stack) -> None:
    """The one that goes finishes the stream that it runs."""
    before = stack.run
    [added] = stack.cli_json("worker", "add", "b/1")
    assert (added["model"], added["state"]) == ("b/1", "ready") and added["pid"] in stack.run.pids["worker"]
    wait_until(lambda: len(places(stack, "b/1")) == 2, "its owner has two workers")
    old = next(name for name, model in workers(stack).items() if model == "b/1" and name != added["name"])
    with stack.client() as client:
        body = A_CHAT | {"model": "b/1", "stream": True, "max_tokens": 40, "simulate": {"itl_ms": 100}}
        with client.stream("POST", "/v1/chat/completions", json=body) as response:
            lines = response.iter_lines()
            next(lines)
            [busy] = wait_until(lambda: running(stack, "b/1"), "a heartbeat says so")
            left = stack.cli_json("worker", "remove", busy)
            assert [each["name"] for each in left] == [({old, added["name"]} - {busy}).pop()]
            assert [line for line in lines if line][-1] == "data: [DONE]"
    assert ask(stack, "b/1").status_code == 200
    after = stack.run
    assert {role: after.pids[role] for role in ("gateway", "scheduler", "ledger", "nats")} == {
        role: before.pids[role] for role in ("gateway", "scheduler", "ledger", "nats")
    }
    assert len(after.metrics_urls["worker"]) == len(after.pids["worker"]) == 3
    actions = [(each["action"], each["result"]) for each in stack.cli_json("audit")]
    assert ("workers.add", "done") in actions and ("workers.remove", "done") in actions


def test_a_new_version_is_published_served_and_promoted_by_commands_alone(start_stack: StartStack) -> None:
    """While it is rolled out a pin reaches it; what has no pin goes there once it is the stable one.

    Then the other workers follow, without a restart; and come back from a version whose roll-out was aborted.
    """
    stack = start_stack()
    name = stack.model
    stack.cli_json("model", "publish", name, "--version", "next", "--engine", "simulated")
    refused = stack.cli("worker", "add", name, "--version", "none")
    assert refused.returncode == 1 and "no version none" in refused.stderr
    [added] = stack.cli_json("worker", "add", name, "--version", "next")
    assert (added["model"], added["version"], added["state"]) == (name, "next", "ready")
    assert stack.cli("rollout", "start", name, "--to", "next", "--steps", "1,100", "--hold", "1h").returncode == 0
    with stack.client() as client:
        answer = client.post("/v1/chat/completions", json=A_CHAT | {"model": f"{name}@next"})
    assert answer.headers.get("x-headrace-model") == f"{name}@next", answer.text
    pids = stack.run.pids["worker"]
    assert stack.cli("rollout", "promote", name).returncode == 0
    wait_until(lambda: ask(stack, name).headers.get("x-headrace-model") == f"{name}@next", "it is the stable one")
    both = {"worker-0": "next", added["name"]: "next"}
    wait_until(lambda: versions(stack, name) == both, "the others follow")
    stack.cli_json("model", "publish", name, "--version", "third", "--engine", "simulated")
    [third] = stack.cli_json("worker", "add", name, "--version", "third")
    assert stack.cli("rollout", "start", name, "--to", "third", "--steps", "1", "--hold", "1h").returncode == 0
    wait_until(lambda: "third" in versions(stack, name).values(), "its owner sees it")
    assert stack.cli("rollout", "abort", name).returncode == 0
    wait_until(lambda: versions(stack, name) == both | {third["name"]: "next"}, "it comes back")
    assert ask(stack, name).status_code == 200
    assert set(stack.run.pids["worker"]) == {*pids, third["pid"]}


def test_a_model_comes_and_goes(stack: Stack) -> None:
    """What waits for it or runs when it goes is answered; then its workers are gone, and it may come again."""
    stack.cli_json("model", "add", "guest", "--engine", "simulated")
    stack.cli_json("worker", "add", "guest")
    wait_until(lambda: ask(stack, "guest").status_code == 200, "it is served")
    [pid] = [each["pid"] for each in stack.cli_json("worker", "list") if each["model"] == "guest"]
    removing = threading.Thread(target=lambda: stack.cli_json("model", "remove", "guest"))
    with stack.client() as client:
        body = A_CHAT | {"model": "guest", "stream": True, "max_tokens": 30, "simulate": {"itl_ms": 100}}
        with client.stream("POST", "/v1/chat/completions", json=body) as response:
            lines = response.iter_lines()
            next(lines)
            removing.start()
            wait_until(lambda: ask(stack, "guest").status_code == 404, "nothing new is admitted")
            assert [line for line in lines if line][-1] == "data: [DONE]"
    removing.join(60)
    assert not alive(pid) and "guest" not in workers(stack).values()
    assert {each["name"] for each in stack.cli_json("model", "list")} == {"a", "b/1"}
    assert ask(stack, "a").status_code == 200


def test_an_alias_stands_for_the_first_that_takes_it(stack: Stack) -> None:
    """The answer, a header, ``explain`` and SQL say which model that was, and why; over the bus likewise."""
    stack.cli_json("alias", "set", "ours", "--model", "b/1", "--model", "a")
    wait_until(lambda: ask(stack, "ours").status_code == 200, "the gateways know it")
    first = ask(stack, "ours")
    assert first.json()["model"] == "b/1" and first.headers["x-headrace-model"] == "b/1@sim-1"
    assert first.headers["x-headrace-choice"] == "alias ours, listed"
    assert "x-headrace-choice" not in ask(stack, "a").headers
    stack.cli_json("model", "limits", "b/1", "--queued-requests", "0")
    wait_until(lambda: ask(stack, "b/1").status_code == 529, "b takes nothing")
    answer = ask(stack, "ours", stream=True)
    assert answer.headers["x-headrace-model"] == "a@sim-1" and '"model":"a"' in answer.text
    assert answer.headers["x-headrace-choice"] == "alias ours, listed; b/1: overloaded"
    submitted = stack.cli("submit", "hello", "--model", "ours", "--max-tokens", "2")
    assert submitted.returncode == 0 and submitted.stdout.strip()
    stack.cli_json("model", "limits", "b/1", "--queued-requests", "100")
    request_id = answer.headers["x-request-id"]
    wait_until(lambda: stack.cli("explain", request_id).returncode == 0, "the ledger has it")
    told = stack.cli("explain", request_id).stdout
    assert "The caller asked for ours. Model a answers: alias ours, listed; b/1: overloaded." in told
    [event] = stack.cli_json("explain", request_id)["attempts"]
    assert (event["model"], event["requested_model"]) == ("a", "ours")
    with stack.client() as client:
        listed = {each["id"]: each for each in client.get("/v1/models").json()["data"]}
    assert set(listed) == {"a", "b/1", "auto", "best", "fast", "ours"}
    assert listed["ours"]["alias_of"] == ["b/1", "a"] and listed["a"]["capabilities"]
    with stack.admin() as admin:
        changed = admin.put("/admin/v1/aliases/ours", json={"models": ["a"], "order": "listed"})
        assert changed.json()["models"] == ["a"]
        assert admin.put("/admin/v1/aliases/ours", json={"models": ["nobody"]}).status_code == 400
        assert admin.put("/admin/v1/aliases/a", json={"models": ["b/1"]}).status_code == 409
        assert [each["name"] for each in admin.get("/admin/v1/aliases").json()["data"]] == [
            "auto",
            "best",
            "fast",
            "ours",
        ]
        assert admin.delete("/admin/v1/aliases/ours").json()["models"] == ["a"]
        assert admin.delete("/admin/v1/aliases/ours").status_code == 404
    wait_until(lambda: ask(stack, "ours").status_code == 404, "it is gone")


def test_a_tenant_has_a_price_ceiling_and_so_may_a_request(stack: Stack) -> None:
    stack.cli_json("model", "add", "dear", "--engine", "simulated", "--price-tier", "premium")
    stack.cli_json("worker", "add", "dear")
    key = stack.cli_json("key", "create", "demo")["key"]

    def asked(model: str, **headers: str) -> httpx.Response:
        with stack.client(key=key) as client:
            return client.post("/v1/chat/completions", json=A_CHAT | {"model": model}, headers=headers)

    wait_until(lambda: asked("best").json().get("model") == "dear", "the dearest is the best")
    assert asked("auto").json()["model"] in ("a", "b/1")
    ceiling = {"x-headrace-price-ceiling": "standard"}
    assert asked("best", **ceiling).json()["model"] in ("a", "b/1")
    refused = asked("dear", **ceiling)
    assert refused.status_code == 400 and "premium, above standard" in refused.text
    assert asked("best", **{"x-headrace-price-ceiling": "cheap"}).status_code == 400
    stack.cli_json("tenant", "set", "demo", "--price-ceiling", "standard")
    wait_until(lambda: asked("dear").status_code == 404, "it is not there for this tenant")
    assert asked("best").json()["model"] in ("a", "b/1")
    stack.cli_json("tenant", "set", "demo", "--price-ceiling", "premium")
    stack.cli_json("model", "remove", "dear")


def test_adapters_are_models_that_the_bases_workers_serve(stack: Stack) -> None:
    """Under their own names, limits and prices, on workers that nobody started for them; usage is told by name."""
    made = stack.cli_json("model", "publish", "tuned", "--version", "v1-t", "--base", "b/1")
    assert made["golden"]["text"], "the engine answered as the adapter"
    stack.cli_json("model", "publish", "other", "--version", "v1-o", "--base", "b/1@sim-1", "--no-golden")
    assert made["base"] == {"model": "b/1", "version": "sim-1"}
    for name in ("tuned", "other"):
        wait_until(partial(is_served, stack, name), f"{name} is served")
        answer = ask(stack, name)
        assert answer.json()["model"] == name
        assert answer.headers["x-headrace-model"].startswith(f"{name}@v1-")
        assert len(places(stack, name)) == len(places(stack, "b/1"))
    assert ask(stack, "b/1").json()["model"] == "b/1"
    stack.cli_json("model", "limits", "tuned", "--queued-requests", "0")
    wait_until(lambda: ask(stack, "tuned").status_code == 529, "its limits are its own")
    assert ask(stack, "other").status_code == 200
    stack.cli_json("model", "limits", "tuned", "--queued-requests", "100")
    with stack.client() as client:
        listed = {each["id"]: each for each in client.get("/v1/models").json()["data"]}
    assert listed["tuned"]["parent"] == "b/1" and listed["b/1"]["parent"] is None

    def used() -> set[tuple[str, str]]:
        rows = stack.usage("--by", "model", "--by", "version")
        return {(row["model"], row["version"]) for row in rows if row["completion_tokens"]}

    wait_until(lambda: {name for name, _ in used()} >= {"b/1", "tuned", "other"}, "usage is by adapter")
    refused = stack.cli("worker", "add", "tuned")
    assert refused.returncode == 1 and "is an adapter: the workers of b/1 serve it" in refused.stderr
    roll_out_an_adapter(stack)
    refused = stack.cli("model", "remove", "b/1")
    assert refused.returncode == 1 and "adapters of b/1; remove them first" in refused.stderr
    refused = stack.cli("model", "unpublish", "b/1", "--version", "sim-1")
    assert refused.returncode == 1 and "adapters of b/1 sim-1; remove them first" in refused.stderr
    for name in ("tuned", "other"):
        stack.cli_json("model", "remove", name)
    wait_until(lambda: ask(stack, "tuned").status_code == 404, "it is gone")
    with stack.admin() as admin:
        wait_until(lambda: admin.get("/admin/v1/rollouts").json()["data"] == [], "so is its roll-out")
    assert ask(stack, "b/1").status_code == 200


def roll_out_an_adapter(stack: Stack) -> None:
    """Each worker of the base serves both versions meanwhile, and one before and after."""
    stack.cli_json("model", "publish", "tuned", "--version", "v2-t", "--base", "b/1", "--no-golden")

    def answered() -> str:
        answer = ask(stack, "tuned")
        assert answer.json()["model"] == "tuned"
        return answer.headers["x-headrace-model"]

    with stack.admin() as admin:

        def served() -> set[str]:
            queues = {each["model"]: each for each in admin.get("/admin/v1/queues").json()["data"]}
            return {each["version"] for each in queues["tuned"]["workers"] if each["state"] == "ready"}

        for wanted, left in (("abort", "v1-t"), ("promote", "v2-t")):
            plan = {"to": "v2-t", "steps": [50], "hold_ms": 3_600_000, "shadow": 0}
            assert admin.post("/admin/v1/models/tuned/rollout", json=plan).status_code == 201
            wait_until(lambda: served() == {"v1-t", "v2-t"}, "both are served")
            wait_until(lambda: answered() == "tuned@v2-t", "the new one has its share")
            wait_until(lambda: answered() == "tuned@v1-t", "and the old one its own")
            assert admin.patch("/admin/v1/models/tuned/rollout", json={"wanted": wanted}).status_code == 200
            wait_until(lambda left=left: served() == {left}, f"{left} alone is served")  # type: ignore[misc]
            assert answered() == f"tuned@{left}"


@pytest.mark.parametrize(
    ("command", "reason"),
    [
        (["model", "publish", "x", "--version", "1", "--base", "nobody"], "there is no model nobody"),
        (["model", "publish", "x", "--version", "1", "--base", "a@9"], "there is no version 9"),
        (["model", "publish", "a", "--version", "1", "--base", "a"], "a name of its own"),
        (["model", "publish", "", "--version", "1", "--base", "a"], "the name is empty"),
        (
            ["model", "publish", "x", "--version", "1", "--base", "a", "--engine-argument", "x=1"],
            "no arguments of its own",
        ),
        (["model", "publish", "x", "--version", "1", "--base", "a", "--from", "/etc"], "no LoRA adapter"),
        (["price", "set", "a@9", "--input", "1", "--output", "1"], "there is no version 9"),
        (["alias", "set", "a", "--model", "b/1"], "a is a model"),
        (["alias", "set", "x", "--model", "nobody"], "there is no model nobody"),
        (["alias", "set", "x", "--model", "a", "--model", "a"], "listed twice"),
        (["alias", "set", "x"], "list models"),
        (["alias", "set", "x@1", "--model", "a"], "no @"),
        (["alias", "set", "", "--model", "a"], "empty"),
        (["alias", "remove", "auto"], "built in"),
        (["alias", "remove", "x"], "there is no alias x"),
        (["worker", "add", "nobody"], "there is no model nobody"),
        (["worker", "add", ""], "the name is empty"),
        (["worker", "remove", "worker-99"], "there is no worker 'worker-99' here"),
        (["worker", "remove", ""], "there is no worker '' here"),
        (["model", "remove", "nobody"], "there is no model nobody"),
    ],
)
def test_what_makes_no_sense_changes_nothing(stack: Stack, command: list[str], reason: str) -> None:
    before = stack.cli_json("worker", "list")
    refused = stack.cli(*command)
    assert refused.returncode == 1 and reason in refused.stderr and "Traceback" not in refused.stderr
    assert stack.cli_json("worker", "list") == before


@pytest.mark.parametrize("given", ["0", "-1", "a", "a=", "a=0", "c=1", "a=1,a=2", "=1", "a=1,,", "1e3", "a=99999"])
def test_workers_that_make_no_sense_are_refused(given: str) -> None:
    refused = headrace("up", "--engine", "simulated", "--model", "a", "--model", "b", "--workers", given)
    assert refused.returncode == 2 and "--workers" in refused.stderr


def test_the_socket_is_its_users_alone_and_takes_calls_only(stack: Stack) -> None:
    path = DataDir(stack.data_dir).control
    assert path.stat().st_mode & 0o777 == 0o600
    for text in (
        b"",
        b"{}\n",
        b'{"type":"Nothing"}\n',
        b"x" * 100_000,
        b'{"type":"AddWorkers","model":"a","count":65}\n',
    ):
        answer = _raw(path, text)
        assert "cannot be read" in answer["error"] and answer.get("workers", []) == []
    assert control.call(path, control.ListWorkers()).workers


def _raw(path: Any, data: bytes) -> Any:
    with socket.socket(socket.AF_UNIX) as connection, control._short(path) as name:
        connection.settimeout(20)
        connection.connect(name)
        connection.sendall(data)
        connection.shutdown(socket.SHUT_WR)
        return json.loads(b"".join(iter(lambda: connection.recv(65536), b"")))


def test_without_a_stack_the_commands_say_so(tmp_path: Any) -> None:
    refused = headrace("worker", "list", "--data-dir", str(tmp_path), **ENVIRONMENT)
    assert refused.returncode == 1 and "no stack is running" in refused.stderr
    with pytest.raises(ComposeError):
        control.call(tmp_path / "control.sock", control.ListWorkers())


@pytest.fixture(scope="module")
def published(stack: Stack) -> Stack:
    """It has a version ``other`` of model a, which nobody serves."""
    stack.cli_json("model", "publish", "a", "--version", "other", "--engine", "simulated", "--no-golden")
    return stack


def attempt(stack: Stack, *command: str) -> str:
    """What a command that must fail says."""
    done = CliRunner().invoke(app, [*command, "--data-dir", str(stack.data_dir)])
    assert done.exit_code in (1, 2), done.output
    if done.exit_code == 2:
        return done.output
    assert isinstance(done.exception, ComposeError | HeadraceError), repr(done.exception)
    return str(done.exception)


START = ("start", "a", "--to", "sim-1")
OTHER = ("start", "a", "--to", "other")


@pytest.mark.parametrize(
    ("command", "reason"),
    [
        (("start", "a"), "Missing option"),
        (("start", "--to", "other"), "Missing argument"),
        ((*OTHER, "more"), "unexpected extra argument"),
        (("start", "nobody", "--to", "other"), "there is no model nobody"),
        (("start", "", "--to", "other"), "the name is empty"),
        (("start", "a" * 65, "--to", "other"), "at most 64"),
        (("start", "a", "--to", "nobody"), "there is no version nobody"),
        (("start", "a", "--to", ""), "empty"),
        (("start", "a", "--to", "a@b"), "no @"),
        (START, "a serves sim-1 already"),
        ((*OTHER, "--steps", ""), "steps must be 1 to 64 shares"),
        ((*OTHER, "--steps", "x"), "'x' is no number"),
        ((*OTHER, "--steps", "nan"), "is no number"),
        ((*OTHER, "--steps", "1e999"), "is no number"),
        ((*OTHER, "--steps", "0,50"), "above 0 and at most 100"),
        ((*OTHER, "--steps", "5,101"), "above 0 and at most 100"),
        ((*OTHER, "--steps", "50,5"), "larger than the one before"),
        ((*OTHER, "--steps", "5,5"), "larger than the one before"),
        ((*OTHER, "--steps", "100"), "must be below 100"),
        ((*OTHER, "--steps", ",".join(map(str, range(1, 90)))), "steps must be 1 to 64 shares"),
        ((*OTHER, "--hold", ""), "--hold is a time such as 10m"),
        ((*OTHER, "--hold", "-1s"), "--hold is a time such as 10m"),
        ((*OTHER, "--hold", "31d"), "hold must be from 0 to 30 days"),
        ((*OTHER, "--by", "user"), "--by is request, tenant or conversation"),
        ((*OTHER, "--tenants", "nobody"), "there is no tenant nobody"),
        ((*OTHER, "--tenants", "demo,demo"), "names one twice"),
        ((*OTHER, "--shadow", "-1"), "shadow must be from 0 to 100"),
        ((*OTHER, "--shadow", "nan"), "shadow must be from 0 to 100"),
        ((*OTHER, "--shadow", "much"), "unable to parse string as a number"),
        (("status", "nobody"), "there is no model nobody"),
        (("status", "a"), "there was no roll-out of a yet"),
        *(((change, "a"), "there was no roll-out of a yet") for change in ("pause", "resume", "promote", "abort")),
        *(((change, "nobody"), "there is no model nobody") for change in ("pause", "resume", "promote", "abort")),
        *(((change,), "Missing argument") for change in ("pause", "resume", "promote", "abort")),
    ],
)
def test_a_roll_out_that_makes_no_sense_is_refused(published: Stack, command: tuple[str, ...], reason: str) -> None:
    assert reason in " ".join(attempt(published, "rollout", *command).replace("│", " ").split())
    assert nothing_changed(published)


def nothing_changed(stack: Stack) -> bool:
    with stack.admin() as admin:
        return bool(admin.get("/admin/v1/rollouts").json()["data"] == [])


@pytest.mark.parametrize(
    ("method", "model", "body", "status"),
    [
        ("POST", "a", b"", 400),
        ("POST", "a", b"nothing", 400),
        ("POST", "a", b"[]", 400),
        ("POST", "a", b"{}", 400),
        ("POST", "a", b'{"to":5}', 400),
        ("POST", "a", b'{"to":"other","more":1}', 400),
        ("POST", "a", b'{"to":"other","steps":"all"}', 400),
        ("POST", "a", b'{"to":"other","steps":[1e400]}', 400),
        ("POST", "a", b'{"to":"other","steps":[null]}', 400),
        ("POST", "a", b'{"to":"other","steps":[100]}', 400),
        ("POST", "a", b'{"to":"other","hold_ms":-1}', 400),
        ("POST", "a", b'{"to":"other","hold_ms":1.5}', 400),
        ("POST", "a", b'{"to":"other","by":"user"}', 400),
        ("POST", "a", b'{"to":"other","tenants":"demo"}', 400),
        ("POST", "a", b'{"to":"other","tenants":["nobody"]}', 404),
        ("POST", "a", b'{"to":"other","shadow":"x"}', 400),
        ("POST", "a", b'{"to":"other","shadow":101}', 400),
        ("POST", "a", b'{"to":"none"}', 404),
        ("POST", "a", b'{"to":"sim-1"}', 409),
        ("POST", "nobody", b'{"to":"other"}', 404),
        ("PATCH", "a", b"{}", 400),
        ("PATCH", "a", b'{"wanted":"explode"}', 400),
        ("PATCH", "a", b'{"wanted":"abort"}', 404),
        ("PATCH", "nobody", b'{"wanted":"abort"}', 404),
        ("GET", "a", b"", 404),
        ("GET", "nobody", b"", 404),
    ],
)
def test_so_it_is_over_http(published: Stack, method: str, model: str, body: bytes, status: int) -> None:
    with published.admin() as admin:
        headers = {"content-type": "application/json"} if body else {}
        answer = admin.request(method, f"/admin/v1/models/{model}/rollout", content=body, headers=headers)
    assert answer.status_code == status, answer.text
    assert answer.json()["error"]["message"]
    assert nothing_changed(published)
