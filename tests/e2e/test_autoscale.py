"""A stack whose workers come and go by what its requests need, down to none."""

import concurrent.futures
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.support.polling import wait_until
from tests.support.stack import Stack

HOLD = ("model", "limits", "simulated", "--replicas-hold-s", "4", "--replicas-spare", "0")


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    made = Stack(
        tmp_path_factory.mktemp("stack") / "data", "--engine", "simulated", "--autoscale", "0..2", "--sim-slots", "2"
    )
    made.wait_ready()
    assert made.cli(*HOLD).returncode == 0
    yield made
    assert made.stop() == 0


def pool(stack: Stack) -> Any:
    [found] = stack.cli_json("pools")
    return found


def ask(stack: Stack, tokens: int) -> httpx.Response:
    run = stack.run
    body = {"model": "simulated", "max_tokens": tokens, "messages": [{"role": "user", "content": "hi"}]}
    return httpx.post(
        f"{run.url}/v1/chat/completions", json=body, headers={"authorization": f"Bearer {run.key}"}, timeout=60
    )


def test_none_while_nobody_asks_and_the_first_request_waits_for_one(stack: Stack) -> None:
    wait_until(lambda: not stack.cli_json("worker", "list"), limit_s=60)
    wait_until(lambda: pool(stack)["ready"] == 0, "the owner has looked")
    assert (pool(stack)["desired"], pool(stack)["reason"]) == (0, "idle")
    assert httpx.get(f"{stack.run.url}/health/ready").status_code == 200
    assert ask(stack, 5).status_code == 200
    wait_until(lambda: pool(stack)["ready"] == 1, "the owner has looked")


def test_more_come_for_more_work_and_leave_after_it(stack: Stack) -> None:
    with concurrent.futures.ThreadPoolExecutor(16) as pool_of_threads:
        asked = [pool_of_threads.submit(ask, stack, 300) for _ in range(16)]
        wait_until(lambda: pool(stack)["ready"] == 2, limit_s=60)
        assert {each.result().status_code for each in asked} == {200}
    admin = {"authorization": f"Bearer {stack.run.admin_key}"}
    shown = httpx.get(f"{stack.run.admin_url}/admin/v1/pools/simulated", headers=admin).json()
    assert shown["desired"] in (0, 1, 2)
    assert shown.keys() >= {"reason", "needed", "warm_up_ms"}
    assert httpx.get(f"{stack.run.admin_url}/admin/v1/pools/none", headers=admin).status_code == 404
    wait_until(lambda: not stack.cli_json("worker", "list"), limit_s=90)
    changes = [entry["action"] for entry in stack.cli_json("audit")]
    assert {"workers.add", "workers.remove"} <= set(changes)
