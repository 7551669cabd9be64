"""``headrace doctor``, which imports every engine: what it says of a stack that runs, and of what is wrong."""

import json
import socket
from pathlib import Path
from typing import Any

from tests.support.stack import Stack, headrace


def findings(data_dir: Path, *arguments: str) -> tuple[int, dict[str, Any]]:
    """Exit status and findings of ``headrace doctor``, by name."""
    done = headrace("doctor", "--data-dir", str(data_dir), "--json", *arguments)
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
        "admin_url": "http://127.0.0.1:9",
        "gateway_urls": ["http://127.0.0.1:9"],
        "metrics_urls": {},
        "nats_url": "nats://127.0.0.1:9",
        "nats_seed_file": "",
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
