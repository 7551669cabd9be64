"""Commands that people type: what they print, what they change, what they refuse."""

import json
import socket
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from tests.support.polling import wait_until
from tests.support.stack import Stack, StartStack, headrace

IMPORTS_S = 240
"""The doctor imports vLLM: seconds, on a busy machine a minute."""
TOMORROW = (datetime.now(UTC) + timedelta(days=1)).date().isoformat()


def findings(data_dir: Path, *arguments: str) -> tuple[int, dict[str, Any]]:
    """Exit status and findings of ``headrace doctor``, by name."""
    done = headrace("doctor", "--data-dir", str(data_dir), "--json", *arguments, timeout_s=IMPORTS_S)
    return done.returncode, {found["name"]: found for found in json.loads(done.stdout)}


def test_doctor_finds_a_running_stack_healthy(stack: Stack) -> None:
    status, found = findings(stack.data_dir)
    assert [name for name, each in found.items() if each["needed"] and not each["ok"]] == []
    assert status == 0
    assert f"running and healthy at {stack.run.url}" in found["stack"]["text"]
    assert "vllm" in found["vLLM"]["text"] and "torch" in found["vLLM"]["text"]


def test_doctor_says_what_is_wrong(tmp_path: Path) -> None:
    """A port that is taken, and the run.json of a stack that was killed; what is well is said beside it."""
    gone = {
        "url": "http://127.0.0.1:9",
        "gateway_urls": ["http://127.0.0.1:9"],
        "metrics_urls": {},
        "nats_url": "nats://127.0.0.1:9",
        "key": "k",
        "admin_key": "a",
        "pids": {"gateway": [2**22 + 1]},
    }
    (tmp_path / "run.json").write_text(json.dumps(gone))
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        status, found = findings(tmp_path, "--port", str(port))
    assert status == 1
    assert not found[f"port {port}"]["ok"]
    assert "--port" in found[f"port {port}"]["text"]
    assert found["Python"]["ok"] and found["nats-server"]["ok"]
    assert "it was killed" in found["stack"]["text"]


def test_models_and_prices_are_entered_and_listed(start_stack: StartStack) -> None:
    stack = start_stack()
    made = stack.cli_json("model", "add", "added", "--engine", "simulated", "--sim-context", "4096")
    assert (made["name"], made["engine"], made["context"]) == ("added", "simulated", 4096)
    assert "added" in [each["name"] for each in stack.cli_json("model", "list")]
    with stack.client() as client:
        wait_until(lambda: "added" in [each["id"] for each in client.get("/v1/models").json()["data"]], "it is listed")
    _prices_are_listed_as_they_were_set(stack)


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["model", "add", "/no/such/directory"], "unknown model"),
        (["price", "set", "m", "--input", "-1", "--output", "1"], "from 0 to 1000000"),
        (["price", "set", "m", "--input", "1.0000001", "--output", "1"], "at most 6 digits"),
        (["price", "set", "m", "--input", "1", "--output", "1", "--from", "2020-01-01"], "--backdate"),
        (["usage", "--from", "2026-02-30"], "day is out of range for month"),
        (["usage", "--by", "colour"], "is not one of"),
        (["latency", "--by", "key"], "is not one of"),
        (["invoice", "demo", "2026-13"], "month must be in 1..12"),
    ],
)
def test_what_makes_no_sense_is_refused(stack: Stack, arguments: list[str], reason: str) -> None:
    done = headrace(*arguments, "--data-dir", str(stack.data_dir))
    assert done.returncode in (1, 2)
    assert reason in " ".join(done.stderr.replace("│", " ").split())
    assert done.stdout == ""


def _prices_are_listed_as_they_were_set(stack: Stack) -> None:
    stack.cli_json("price", "set", "cli", "--input", "0.15", "--output", "0.6", "--cached", "0.075")
    stack.cli_json(
        "price", "set", "cli", "--input", "0.05", "--output", "0.2", "--tier", "batch", "--from", "2099-01-01"
    )
    listed = [price for price in stack.cli_json("price", "list") if price["model"] == "cli"]
    fields = ("tier", "valid_from", "currency", "input", "cached_input", "output", "reasoning")
    assert [tuple(price[field] for field in fields) for price in listed] == [
        ("batch", TOMORROW, "USD", 150_000, 75_000, 600_000, 600_000),
        ("batch", "2099-01-01", "USD", 50_000, 50_000, 200_000, 200_000),
        ("interactive", TOMORROW, "USD", 150_000, 75_000, 600_000, 600_000),
    ]
    shown = headrace("price", "list", "--data-dir", str(stack.data_dir)).stdout.splitlines()
    assert shown[0].split() == ["MODEL", "TIER", "FROM", "CURRENCY", "INPUT", "CACHED", "OUTPUT", "REASONING"]
    assert ["cli", "batch", TOMORROW, "USD", "0.15", "0.075", "0.6", "0.6"] in [line.split() for line in shown]
