"""Streams that pause and connections that rest, for as long as proxies and clients let them."""

import http.client
import json
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import httpx
import pytest

from tests.support.stack import Stack

HELLO: list[Any] = [{"role": "user", "content": "one two three"}]


def test_c21_a_stream_that_pauses_outlives_the_patience_of_nginx(nginx: str, stack: Stack) -> None:
    """40 s without a token, nginx cuts after 30 s of silence: comments bridge it, and the SDK reads over them."""
    script = {"tokens": ["a ", "b"], "ttft_ms": 1, "itl_ms": 40_000}
    with stack.sdk(url=nginx) as client:
        stream = client.chat.completions.create(
            model=stack.model, messages=HELLO, stream=True, extra_body={"simulate": script}
        )
        chunks = list(stream)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == "a b"


@pytest.mark.parametrize("idle_s", [8, 60])
def test_c38_a_rested_connection_is_used_again(stack: Stack, idle_s: int) -> None:
    """200 times: the server must not close first, a client that posts at that moment would see a reset."""
    address = httpx.URL(stack.run.url)
    connections = [http.client.HTTPConnection(address.host, address.port, timeout=30) for _ in range(200)]
    body = json.dumps({"model": stack.model, "messages": HELLO, "max_tokens": 1})
    headers = {"Authorization": f"Bearer {stack.run.key}", "Content-Type": "application/json"}

    def post(connection: http.client.HTTPConnection) -> int:
        connection.request("POST", "/v1/chat/completions", body, headers)
        response = connection.getresponse()
        response.read()
        connection.auto_open = 0  # From now on a lost connection is an error.
        return response.status

    with ExitStack() as closing, ThreadPoolExecutor(16) as pool:
        for connection in connections:
            closing.callback(connection.close)
        assert set(pool.map(post, connections)) == {200}
        time.sleep(idle_s)
        assert set(pool.map(post, connections)) == {200}
