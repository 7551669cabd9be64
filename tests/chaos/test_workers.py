"""Workers that die: silently repeated before the first token, a clear error after it; the ledger says what was."""

import asyncio
import json
import os
import signal
import threading
from typing import Any

import httpx
import pytest

from contracts import topology
from contracts.bus import Bus
from tests.support.polling import wait_until
from tests.support.stack import Stack, StartStack

HELLO = [{"role": "user", "content": "one two three"}]


def attempts(stack: Stack) -> list[dict[str, Any]]:
    """Every terminal event that the bus holds, as the ledger reads them."""

    async def read() -> list[dict[str, Any]]:
        bus = await Bus.connect(stack.run.nats_url, name="test")
        try:
            return [json.loads(message.data) async for message in bus.jetstream.read(topology.ATTEMPTS, "attempt.v1.>")]
        finally:
            await bus.close()

    return asyncio.run(read())


def of_request(stack: Stack, request_id: str, count: int) -> list[dict[str, Any]]:
    def found() -> list[dict[str, Any]]:
        own = [event for event in attempts(stack) if event["request_id"] == request_id]
        return own if len(own) >= count else []

    return sorted(wait_until(found, f"{count} attempts of {request_id}"), key=lambda event: event["attempt"])


def busy_pid(stack: Stack) -> int | None:
    """Process id of the worker that has something to do, by its own gauge."""
    run = stack.run
    for pid, url in zip(run.pids["worker"], run.metrics_urls["worker"], strict=True):
        try:
            text = httpx.get(url, trust_env=False, timeout=5).text
        except httpx.HTTPError:
            continue
        for line in text.splitlines():
            if line.startswith("headrace_worker_attempts_in_flight{") and float(line.rsplit(" ", 1)[1]) > 0:
                return pid
    return None


@pytest.fixture
def two_workers(start_stack: StartStack) -> Stack:
    return start_stack("--workers", "2", "--sim-slots", "4")


def post(stack: Stack, body: dict[str, Any], into: dict[str, Any]) -> threading.Thread:
    def run() -> None:
        with stack.client() as client:
            into["response"] = client.post("/v1/chat/completions", json=body, timeout=60)

    thread = threading.Thread(target=run)
    thread.start()
    return thread


@pytest.mark.parametrize("stream", [True, False])
def test_before_the_first_token_another_worker_answers(two_workers: Stack, stream: bool) -> None:
    stack = two_workers
    body = {
        "model": stack.model,
        "messages": HELLO,
        "stream": stream,
        "simulate": {"tokens": ["He", "llo"], "ttft_ms": 2500},
    }
    got: dict[str, Any] = {}
    thread = post(stack, body, got)
    pid = wait_until(lambda: busy_pid(stack), "a worker holds the request")
    os.kill(pid, signal.SIGKILL)
    thread.join(60)
    response: httpx.Response = got["response"]
    assert response.status_code == 200, response.text
    if stream:
        lines = [line[6:] for line in response.text.splitlines() if line.startswith("data: ")]
        assert lines[-1] == "[DONE]"
        text = "".join(json.loads(line)["choices"][0]["delta"].get("content") or "" for line in lines[:-1])
    else:
        text = response.json()["choices"][0]["message"]["content"]
    assert text == "Hello"
    events = of_request(stack, response.headers["x-request-id"], 2)
    assert [event["outcome"] for event in events] == ["lost", "completed"]
    assert [event.get("billable", False) for event in events] == [False, True]


def test_after_tokens_the_stream_ends_with_an_error_event(two_workers: Stack) -> None:
    stack = two_workers
    body = {"model": stack.model, "messages": HELLO, "stream": True, "max_tokens": 500}
    with stack.client() as client, client.stream("POST", "/v1/chat/completions", json=body) as response:
        blocks = []
        killed = False
        for line in response.iter_lines():
            if line.startswith("data: "):
                blocks.append(line[6:])
            if len(blocks) > 60 and not killed:
                os.kill(wait_until(lambda: busy_pid(stack), "a worker holds the request"), signal.SIGKILL)
                killed = True
        request_id = response.headers["x-request-id"]
    last = json.loads(blocks[-1])
    assert last["error"]["code"] == "worker_lost" and request_id in last["error"]["message"]
    text = "".join(json.loads(block)["choices"][0]["delta"].get("content") or "" for block in blocks[:-1])
    words = text.split()
    assert words == [f"t{number}" for number in range(len(words))] and len(words) > 50
    assert all(json.loads(block)["choices"][0]["finish_reason"] is None for block in blocks[:-1])
    (event,) = of_request(stack, request_id, 1)
    assert event["outcome"] == "lost" and event["completion_tokens"] > 0 and not event.get("billable", False)


def test_a_request_that_kills_workers_is_tried_twice_and_its_neighbours_answer(two_workers: Stack) -> None:
    stack = two_workers
    body = {"model": stack.model, "messages": HELLO, "simulate": {"exit_after": 0, "ttft_ms": 1500, "tokens": ["x"]}}
    got: dict[str, Any] = {}
    thread = post(stack, body, got)
    thread.join(90)
    response: httpx.Response = got["response"]
    assert response.status_code == 500, response.text
    assert response.json()["error"]["code"] == "request_quarantined"
    assert [e["outcome"] for e in of_request(stack, response.headers["x-request-id"], 2)] == ["lost", "lost"]

    def served() -> bool:
        with stack.client() as client:
            return client.post(
                "/v1/chat/completions", json={"model": stack.model, "messages": HELLO, "max_tokens": 2}
            ).is_success

    wait_until(served, "the stack still serves", 20)
