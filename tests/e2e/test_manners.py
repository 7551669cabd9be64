"""What callers of other servers send and read, on a whole simulated stack: cases D.. and E.. of the table."""

import asyncio
import json
import resource
from pathlib import Path
from typing import Any

import anthropic
import pytest

from tests.support.polling import wait_until
from tests.support.stack import Stack, StartStack

CHAT: dict[str, Any] = {"model": "simulated", "messages": [{"role": "user", "content": "one two three"}]}
TEXT: dict[str, Any] = {"model": "simulated", "prompt": "one two three"}
PATHS = {"/v1/chat/completions": CHAT, "/v1/completions": TEXT}
LINE_ENDS = ["a\u2028", "b\u2029", "c\u0085", "d\u000b", "e\u001c", "\n\r", "é\u2028"]


def chunks_of(text: str) -> list[dict[str, Any]]:
    """The events as a client reads them whose language has its own idea of a line's end."""
    lines = [line for line in text.splitlines() if line]
    assert lines.pop() == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines]


def text_of(answer: dict[str, Any]) -> str:
    choice = answer["choices"][0]
    return str(choice["text"] if "text" in choice else choice.get("delta", choice.get("message"))["content"])


@pytest.mark.parametrize("path", PATHS)
def test_e01_line_separators_travel_escaped(stack: Stack, path: str) -> None:
    body = PATHS[path] | {"simulate": {"tokens": LINE_ENDS, "itl_ms": 0}, "max_tokens": 100}
    with stack.client() as client:
        streamed, whole = client.post(path, json=body | {"stream": True}), client.post(path, json=body)
    for response in (streamed, whole):
        assert not any(end in response.text for end in "\u2028\u2029\u0085\u000b\u001c")
    assert "".join(map(text_of, chunks_of(streamed.text))) == text_of(whole.json()) == "".join(LINE_ENDS)


@pytest.mark.parametrize("path", PATHS)
def test_d23_numbers_as_other_languages_write_them(stack: Stack, path: str) -> None:
    with stack.client() as client:
        for number in ("2", "2.0", "0.2e1"):
            body = (
                json.dumps(PATHS[path])[:-1] + f', "max_tokens": {number}, "n": 1.0, "top_p": 0, "temperature": 1e-9}}'
            )
            answer = client.post(path, content=body)
            assert answer.status_code == 200 and answer.json()["usage"]["completion_tokens"] == 2


async def test_d25_the_ledger_is_not_below_the_usage_that_was_last_seen(stack: Stack) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = CHAT | {"stream": True, "n": 2, "stream_options": options, "max_tokens": 500}
    async with stack.async_client() as client:
        async with client.stream("POST", "/v1/chat/completions", json=body) as response:
            request, seen = response.headers["x-request-id"], []
            async for line in response.aiter_lines():
                if line.startswith("data: "):
                    seen.append(json.loads(line[6:])["usage"]["completion_tokens"])
                if len(seen) == 7:
                    break
    assert seen == list(range(1, 8))

    def booked() -> int:
        done = stack.cli("explain", request, "--json")
        return sum(row["completion_tokens"] for row in json.loads(done.stdout)["attempts"]) if done.stdout else 0

    await asyncio.to_thread(wait_until, lambda: booked() >= seen[-1], "what was seen is booked")


async def test_d33_a_gateway_out_of_file_descriptors_goes_on(start_stack: StartStack) -> None:
    stack = start_stack()
    (gateway,) = stack.run.pids["gateway"]
    limits = resource.prlimit(gateway, resource.RLIMIT_NOFILE)
    body = CHAT | {"stream": True, "max_tokens": 150}
    async with stack.async_client() as client:
        async with client.stream("POST", "/v1/chat/completions", json=body) as response:
            lines = response.aiter_lines()
            await anext(lines)
            open_now = len(list(Path(f"/proc/{gateway}/fd").iterdir()))
            resource.prlimit(gateway, resource.RLIMIT_NOFILE, (open_now + 10, limits[1]))
            host, port = stack.run.url.removeprefix("http://").split(":")
            idle = [await asyncio.open_connection(host, int(port)) for _ in range(100)]
            told = [line async for line in lines if line]
            assert told[-1] == "data: [DONE]" and len(told) >= 150
            for _, writer in idle:
                writer.close()
        answer = await client.post("/v1/chat/completions", json=CHAT)
    assert answer.status_code == 200 and stack.run.pids["gateway"] == [gateway]
    assert 1 <= stack.logs().count("connections_cannot_be_taken") <= 3


ALIASES = ["auto", "best", "fast"]


def test_d09_anthropics_sdk_lists_models(stack: Stack) -> None:
    run = stack.run
    with anthropic.Anthropic(base_url=run.url, api_key=run.key, max_retries=0) as client:
        (model,) = client.models.list(limit=1).data
        assert model == client.models.retrieve(model.id)
        assert (model.type, model.id, model.display_name) == ("model", "simulated", "simulated")
        assert model.created_at.tzinfo is not None
        assert [it.id for it in client.models.list(after_id=model.id, limit=2)] == ALIASES, "page by page"
        assert list(client.models.list(before_id=model.id)) == []
        for wrong in ({"after_id": "no"}, {"limit": 0}, {"limit": 1001}):
            with pytest.raises(anthropic.BadRequestError):
                client.models.list(**wrong)
        with pytest.raises(anthropic.NotFoundError) as unknown:
            client.models.retrieve("no")
    assert isinstance(unknown.value.body, dict) and unknown.value.body["type"] == "error"
    with stack.sdk() as plain:
        assert plain.models.retrieve("simulated").id == "simulated"
        assert [it.id for it in plain.models.list()] == ["simulated", *ALIASES]
