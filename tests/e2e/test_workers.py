"""Several models on one stack, and what is changed of it while it runs."""

import json
import socket
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from compose.stack import control
from compose.stack.data_dir import ComposeError, DataDir
from tests.support.polling import wait_until
from tests.support.stack import ENVIRONMENT, Stack, alive, headrace

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


def workers(stack: Stack) -> dict[str, str]:
    """Name -> model, of those that are ready."""
    return {each["name"]: each["model"] for each in stack.cli_json("worker", "list") if each["state"] == "ready"}


def places(stack: Stack, model: str) -> list[str]:
    """Names of a model's workers as its owner sees them."""
    [answer] = stack.cli_json("queue", "--model", model)
    return sorted(each["worker"].rpartition("-")[0] for each in answer["workers"] if each["state"] == "ready")


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
            [answer] = stack.cli_json("queue", "--model", "b/1")
            busy = next(each["worker"].rpartition("-")[0] for each in answer["workers"] if each["running"])
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


@pytest.mark.parametrize(
    ("command", "reason"),
    [
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
