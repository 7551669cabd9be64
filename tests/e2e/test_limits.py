"""Tenants' limits and budgets on a whole stack: what a request costs, when it is refused, and what headers say."""

import os
import signal
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import httpx
import pytest

from tests.e2e.test_admin import new_key
from tests.support.polling import wait_until
from tests.support.stack import Stack, StartStack

CHAT = "/v1/chat/completions"


def chat(stack: Stack, **fields: Any) -> dict[str, Any]:
    return {"model": stack.model, "messages": [{"role": "user", "content": "hi"}], **fields}


def tenant(stack: Stack, name: str, *limits: str) -> str:
    """The key of a new tenant with these limits, once it works."""
    stack.cli_json("tenant", "create", name, *limits)
    return new_key(stack, name)


def test_d01_who_hangs_up_before_the_first_token_has_spent_the_prompt(stack: Stack) -> None:
    key = tenant(stack, "hangs-up", "--input-tpm", "5000")
    words = {"messages": [{"role": "user", "content": "word " * 2000}]}
    script = {"simulate": {"tokens": ["a"], "ttft_ms": 20_000}}
    body = chat(stack, stream=True, max_tokens=5) | words | script
    hung_up = 0
    with stack.client(key) as client:
        while True:
            try:
                refused = client.post(CHAT, json=body, timeout=httpx.Timeout(10, read=0.7))
                break
            except httpx.ReadTimeout:
                hung_up += 1
    assert refused.status_code == 429 and "input tokens per minute" in refused.text
    assert 2 <= hung_up <= 3, "5,000, and what a few seconds refill, over 2,000"
    usage = stack.usage("--tenant", "hangs-up", "--by", "outcome")
    assert all(row["amount"] == "0" and row["completion_tokens"] == 0 for row in usage), "the bill is another question"


@pytest.mark.parametrize("limit", ["rpm", "concurrency", "input_tpm", "output_tpm"])
def test_d02_a_limit_of_0_refuses_from_the_first_request_on_and_none_frees_at_once(stack: Stack, limit: str) -> None:
    option = f"--{limit.replace('_', '-')}"
    key = tenant(stack, f"zero-{limit}", option, "0")
    with stack.client(key) as client:
        for path, body in ((CHAT, chat(stack)), ("/v1/completions", {"model": stack.model, "prompt": "hi"})):
            answer = client.post(path, json=body)
            assert answer.status_code == 403, answer.text
            assert "is 0" in answer.text and "rompt" not in answer.text
        stack.cli_json("tenant", "set", f"zero-{limit}", option, "none")
        wait_until(lambda: client.post(CHAT, json=chat(stack)).status_code == 200, "it is lifted", 1)


def test_e04_headers_say_what_the_scheduler_holds(stack: Stack) -> None:
    key = tenant(stack, "told", "--rpm", "3", "--output-tpm", "1000")
    with stack.client(key) as client:
        answers = [client.post(CHAT, json=chat(stack, max_tokens=10, stream=number == 1)) for number in range(4)]
        bad = client.post(CHAT, json=chat(stack, max_tokens=-1))
    assert [answer.status_code for answer in (*answers, bad)] == [200, 200, 200, 429, 400]
    assert {answer.headers["x-ratelimit-limit-requests"] for answer in (*answers, bad)} == {"3"}
    left = [int(answer.headers["x-ratelimit-remaining-requests"]) for answer in (*answers, bad)]
    assert left[0] == 2 and sorted(left, reverse=True) == left and left[3:] == [0, 0], (
        "3 a minute: none comes back so soon"
    )
    assert all(answer.headers["x-ratelimit-reset-requests"].endswith("s") for answer in answers)
    assert all(int(answer.headers["x-ratelimit-remaining-tokens"]) > 900 for answer in answers)
    assert 1 <= int(answers[3].headers["retry-after"]) <= 20


def test_d10_a_default_that_we_choose_shrinks_to_the_limit_and_what_is_stated_is_refused(stack: Stack) -> None:
    key = tenant(stack, "narrow-output", "--output-tpm", "10")
    with stack.client(key) as client:
        answer = client.post(CHAT, json=chat(stack))
        assert answer.status_code == 200, answer.text
        assert answer.json()["usage"]["completion_tokens"] <= 10
        refused = client.post(CHAT, json=chat(stack, max_tokens=500))
        assert refused.status_code == 400 and "10 output tokens per minute" in refused.text

    key = tenant(stack, "narrow-stated", "--output-tpm", "10")
    with stack.client(key) as client:
        assert client.post(CHAT, json=chat(stack, max_tokens=5)).status_code == 200


def test_d02_a_budget_of_0_refuses_from_the_first_request_on_and_none_frees_at_once(stack: Stack) -> None:
    key = tenant(stack, "penniless")
    stack.cli_json("tenant", "set", "penniless", "--monthly-budget", "0")
    with stack.client(key) as client, ThreadPoolExecutor(20) as threads:
        wait_until(lambda: client.post(CHAT, json=chat(stack)).status_code == 429, "the budget is seen", 2)
        body = chat(stack)
        for answer in threads.map(lambda _: client.post(CHAT, json=body), range(20)):
            assert (answer.status_code, answer.json()["error"]["code"]) == (429, "insufficient_quota")
            assert "budget is 0" in answer.text and int(answer.headers["retry-after"]) > 0
        stack.cli_json("tenant", "set", "penniless", "--monthly-budget", "none")
        wait_until(lambda: client.post(CHAT, json=body).status_code == 200, "it is lifted", 1)


BUDGET = 1000
SCRIPT = {"max_tokens": 200, "simulate": {"tokens": ["a"] * 200, "itl_ms": 0}}


def test_d03_a_budget_holds_in_a_burst_and_whatever_stops_or_dies(start_stack: StartStack) -> None:
    """The ledger stands still all the time; the scheduler is killed twice."""
    stack = start_stack()
    keys = {name: tenant(stack, name) for name in ("burst", "steady")}
    for name in keys:
        stack.cli_json("tenant", "set", name, "--monthly-budget", str(BUDGET))
    for ledger in stack.run.pids["ledger"]:
        os.kill(ledger, signal.SIGSTOP)
    body = chat(stack) | SCRIPT

    def used(client: httpx.Client) -> int:
        """Tokens of one request; 0 when the budget refuses it."""
        while True:
            with suppress(httpx.TransportError):
                answer = client.post(CHAT, json=body)
                if answer.status_code in (200, 429):
                    return int(answer.json()["usage"]["total_tokens"]) if answer.status_code == 200 else 0
                assert answer.status_code == 503, answer.text

    with stack.client(keys["burst"]) as client, ThreadPoolExecutor(50) as threads:
        spent = list(threads.map(lambda _: used(client), range(50)))
        assert BUDGET - 200 <= sum(spent) <= BUDGET + 210
    with stack.client(keys["steady"]) as client:
        spent = []
        for number in range(9):
            if number in (2, 4):
                os.kill(stack.run.pids["scheduler"][0], signal.SIGKILL)
            spent.append(used(client))
        assert BUDGET <= sum(spent) <= BUDGET + 210 and not spent[-1]
    for ledger in stack.run.pids["ledger"]:
        os.kill(ledger, signal.SIGCONT)
    for name, key in keys.items():
        wait_until(
            lambda: [row for row in stack.usage("--by", "tenant") if row["tenant"] == name],  # noqa: B023
            "the ledger has caught up",
        )
        with stack.client(key) as client:
            assert client.post(CHAT, json=body).status_code == 429
            stack.cli_json("tenant", "set", name, "--monthly-budget", str(3 * BUDGET))
            wait_until(lambda: client.post(CHAT, json=body).status_code == 200, "a raised budget holds", 5)
