"""``headrace trace``: any id that a caller saw leads to the life of its request, and no text of it is shown."""

import json
from typing import Any

from tests.support.polling import wait_until
from tests.support.stack import Stack

WORD = "zanzibar-4711"


def ask(stack: Stack, own_id: str, **fields: Any) -> tuple[str, dict[str, Any]]:
    """Our id, and the answer."""
    body = {"model": stack.model, "max_tokens": 5, "messages": [{"role": "user", "content": WORD}], **fields}
    with stack.client() as client:
        answer = client.post("/v1/chat/completions", json=body, headers={"x-request-id": own_id})
        return answer.headers["x-request-id"], answer.json()


def trace(stack: Stack, *arguments: str) -> list[dict[str, Any]]:
    """The steps; none where nobody knows the request."""
    done = stack.cli("trace", *arguments, "--json")
    assert WORD not in done.stdout + done.stderr
    assert done.returncode == 0 or "knows" in done.stderr, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_by_any_id_that_its_caller_saw_and_after_it_ended(stack: Stack) -> None:
    request_id, answer = ask(stack, "trace-one")
    wait_until(lambda: trace(stack, request_id)[-2]["what"] == "relayed", "the ledger has the gateway's word")
    for named in (request_id, answer["id"], "trace-one"):
        steps = trace(stack, named, *(("--follow",) if named == answer["id"] else ()))
        assert [step["what"] for step in steps] == [
            "admitted", "queued", "dispatched", "prefill", "first_token", "attempt_ended", "relayed", "ended",
        ]  # fmt: skip
        assert {step["request_id"] for step in steps} == {request_id}
        assert steps[5]["facts"]["completion_tokens"] == 5 and steps[-1]["facts"]["outcome"] == "completed"
        after = [step["after_ms"] for step in steps]
        assert after == sorted(after), "in its order"


def test_one_that_was_refused_and_one_that_never_was(stack: Stack) -> None:
    request_id, _ = ask(stack, "trace-two", max_tokens=1 << 40)
    for named in (request_id, "trace-two"):
        [step] = wait_until(lambda named=named: trace(stack, named), "the ledger has the gateway's word")  # type: ignore[misc]
        assert (step["what"], step["request_id"], step["facts"]["outcome"]) == ("ended", request_id, "refused")
    unknown = stack.cli("trace", "trace-three")
    assert (unknown.returncode, unknown.stdout) == (1, "") and "knows nothing of trace-three" in unknown.stderr


def test_people_read_one_line_for_a_step(stack: Stack) -> None:
    request_id, _ = ask(stack, "trace-four")
    done = stack.cli("trace", request_id)
    assert done.returncode == 0
    dispatched = next(line for line in done.stdout.splitlines() if "dispatched" in line)
    assert "attempt 1" in dispatched and "worker=" in dispatched and " s " in dispatched
