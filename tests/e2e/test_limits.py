"""Tenants' limits and budgets on a whole stack: what a request costs, when it is refused, and what headers say."""

from typing import Any

import httpx
import pytest

from tests.e2e.test_admin import new_key
from tests.support.polling import wait_until
from tests.support.stack import Stack

CHAT = "/v1/chat/completions"


def chat(stack: Stack, **fields: Any) -> dict[str, Any]:
    return {"model": stack.model, "messages": [{"role": "user", "content": "hi"}], **fields}


def tenant(stack: Stack, name: str, *limits: str) -> str:
    """The key of a new tenant with these limits, once it works."""
    stack.cli_json("tenant", "create", name, *limits)
    return new_key(stack, name)


def test_d01_who_hangs_up_before_the_first_token_has_spent_the_prompt(stack: Stack) -> None:
    key = tenant(stack, "hasty", "--input-tpm", "5000")
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
    usage = stack.cli_json("usage", "--tenant", "hasty", "--by", "outcome")["data"]
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
