"""The example services as a team would run them: processes with a tenant's own credentials, beside a real stack."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.nats_server import free_port
from tests.support.polling import wait_until
from tests.support.stack import ENVIRONMENT, ROOT, Stack, StartStack

SUMMARY = " ".join(f"t{number}" for number in range(200))


@contextmanager
def summarizer(stack: Stack, tenant: str, log: Path, *limits: str) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """The process, once it serves, and the address of its summaries."""
    stack.cli_json("tenant", "create", tenant, *limits)
    given = stack.cli("nats-config", "--tenant", tenant).stdout.splitlines()
    port = free_port()
    command = [sys.executable, str(ROOT / "examples" / "summarizer.py"), "--tenant", tenant, "--model", "simulated"]
    with log.open("wb") as output:
        process = subprocess.Popen(
            [*command, "--port", str(port)],
            env=ENVIRONMENT | dict(line.split("=", 1) for line in given),
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    try:
        wait_until(lambda: "running on" in log.read_text() or process.poll() is not None, "the summarizer serves")
        assert process.poll() is None, log.read_text()
        yield process, f"http://127.0.0.1:{port}/summaries"
    finally:
        process.kill()
        process.wait()


def used(stack: Stack, tenant: str) -> Any:
    """What is booked for ``tenant``, once it is."""

    def rows() -> list[Any]:
        return [row for row in stack.usage("--by", "tenant") if row["tenant"] == tenant]

    return wait_until(rows, "it is booked")[0]


@pytest.fixture
def http() -> Iterator[httpx.Client]:
    with httpx.Client(trust_env=False, timeout=30) as client:
        yield client


def test_the_summarizer_streams_cancels_and_ends_cleanly(stack: Stack, http: httpx.Client, tmp_path: Path) -> None:
    with summarizer(stack, "library", tmp_path / "log") as (process, url):
        with http.stream("POST", url, content="one two three") as response:
            for text in response.iter_text():
                if "t1" in text:
                    break
        left = used(stack, "library")
        assert left["requests"] == 1 and 0 < left["completion_tokens"] < 200
        with http.stream("POST", url, content="one two three") as response:
            assert response.status_code == 200
            pieces: list[str] = []
            for piece in response.iter_text():
                if not pieces:
                    process.send_signal(signal.SIGTERM)
                pieces.append(piece)
        assert "".join(pieces) == SUMMARY and len(pieces) > 20
        assert process.wait(30) == 0
    wait_until(
        lambda: used(stack, "library")["completion_tokens"] == left["completion_tokens"] + 200, "both are booked"
    )


def test_the_summarizer_passes_refusals_on(stack: Stack, http: httpx.Client, tmp_path: Path) -> None:
    """One request a minute: the pause that the second would need is beyond the deadline."""
    with summarizer(stack, "hasty", tmp_path / "log", "--rpm", "1") as (_, url):
        assert http.post(url, content="one").text == SUMMARY
        refused = http.post(url, content="two")
        assert refused.status_code == 429 and 10 <= int(refused.headers["retry-after"]) <= 60
        assert http.post(url, content=b"x" * (9 << 20)).status_code == 413


def test_the_summarizer_never_lets_half_a_summary_look_whole(
    start_stack: StartStack, http: httpx.Client, tmp_path: Path
) -> None:
    stack = start_stack()
    with summarizer(stack, "unlucky", tmp_path / "log") as (_, url):
        seen = ""

        def read() -> None:
            nonlocal seen
            with http.stream("POST", url, content="one two three") as response:
                for text in response.iter_text():
                    if not seen:
                        os.kill(stack.run.pids["worker"][0], signal.SIGKILL)
                    seen += text

        with pytest.raises(httpx.RemoteProtocolError):
            read()
    assert 0 < len(seen) < len(SUMMARY)
