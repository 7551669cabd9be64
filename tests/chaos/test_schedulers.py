"""Schedulers that die or freeze: what was admitted goes on, a standby takes over, a deposed owner can do nothing."""

import json
import os
import signal
import threading
import time
from typing import Any

import httpx

from tests.support.polling import wait_until
from tests.support.stack import Stack, StartStack

HELLO = [{"role": "user", "content": "one two three"}]


def owner_pid(stack: Stack) -> int:
    """The scheduler process whose log last said that it owns the model and not that it released it."""
    owners: dict[int, str] = {}
    run = stack.run
    for pid, url in zip(run.pids["scheduler"], run.metrics_urls["scheduler"], strict=True):
        text = httpx.get(url, trust_env=False, timeout=5).text
        if "headrace_requests_waiting{" in text:
            owners[pid] = url
    (pid,) = owners
    return pid


def owner(stack: Stack) -> str:
    """Name of the model's owner; empty while nobody answers."""
    done = stack.cli("queue", "--json")
    name: str = json.loads(done.stdout)[0]["owner"] if done.returncode == 0 else ""
    return name


def ask(stack: Stack, **fields: Any) -> httpx.Response:
    with stack.client() as client:
        body = {"model": stack.model, "messages": HELLO} | fields
        return client.post("/v1/chat/completions", json=body, timeout=60)


def in_background(stack: Stack, count: int, **fields: Any) -> tuple[list[threading.Thread], list[httpx.Response]]:
    answers: list[httpx.Response] = []
    threads = [threading.Thread(target=lambda: answers.append(ask(stack, **fields))) for _ in range(count)]
    for thread in threads:
        thread.start()
    return threads, answers


def running(stack: Stack) -> tuple[int, int]:
    (queue,) = stack.cli_json("queue")
    return queue["running"], queue["waiting"]


def test_queued_and_running_requests_survive_the_death_of_their_scheduler(start_stack: StartStack) -> None:
    stack = start_stack("--schedulers", "2", "--sim-slots", "2")
    threads, answers = in_background(stack, 6, max_tokens=150)
    wait_until(lambda: running(stack) == (2, 4), "two run and four wait")
    before = owner(stack)
    killed_at = time.monotonic()
    os.kill(owner_pid(stack), signal.SIGKILL)

    wait_until(lambda: owner(stack) not in ("", before), "the standby owns the model", 30)
    print(f"takeover: the standby answered {time.monotonic() - killed_at:.1f} s after the kill")
    for thread in threads:
        thread.join(60)
    expected = " ".join(f"t{number}" for number in range(150))
    assert [answer.status_code for answer in answers] == [200] * 6
    assert {answer.json()["choices"][0]["message"]["content"] for answer in answers} == {expected}
    wait_until(lambda: running(stack) == (0, 0), "nothing is left")


def test_a_frozen_owner_that_wakes_up_has_no_say(start_stack: StartStack) -> None:
    stack = start_stack("--schedulers", "2", "--sim-slots", "2")
    threads, answers = in_background(stack, 4, max_tokens=300)
    wait_until(lambda: running(stack) == (2, 2), "two run and two wait")
    frozen = owner_pid(stack)
    os.kill(frozen, signal.SIGSTOP)
    time.sleep(6)
    os.kill(frozen, signal.SIGCONT)
    for thread in threads:
        thread.join(60)
    assert [answer.status_code for answer in answers] == [200] * 4, [answer.text for answer in answers]
    assert ask(stack, max_tokens=1).status_code == 200
    wait_until(lambda: running(stack) == (0, 0), "nothing is left")


def test_one_scheduler_frozen_for_ten_seconds_loses_no_worker(start_stack: StartStack) -> None:
    stack = start_stack("--sim-slots", "2")
    threads, answers = in_background(stack, 2, max_tokens=800)
    wait_until(lambda: running(stack) == (2, 0), "both run")
    (pid,) = stack.run.pids["scheduler"]
    os.kill(pid, signal.SIGSTOP)
    time.sleep(10)
    os.kill(pid, signal.SIGCONT)
    for thread in threads:
        thread.join(60)
    assert [answer.status_code for answer in answers] == [200] * 2, [answer.text for answer in answers]
    log = (stack.data_dir / "logs" / "scheduler-0.log").read_text()
    assert '"outcome": "lost"' not in log
    assert json.loads(answers[0].text)["usage"]["completion_tokens"] == 800
