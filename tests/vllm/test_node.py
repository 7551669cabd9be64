"""The official Node SDK against the whole stack with the real vLLM."""

import json
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.support.stack import Stack
from tests.support.vllm import MODEL

SCRIPT = Path(__file__).parent / "node" / "chat.mjs"
INSTALL_LIMIT_S = 90


@pytest.fixture(scope="module")
def node_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the SDK and the script; skips where they cannot be had."""
    if not shutil.which("node") or not shutil.which("npm"):
        pytest.skip("Node.js is not installed: the Node SDK is not tested")
    directory = tmp_path_factory.mktemp("node")
    install = ["npm", "install", "--silent", "--no-fund", "--no-audit", "--ignore-scripts", "openai"]
    try:
        done = subprocess.run(
            install, cwd=directory, capture_output=True, text=True, timeout=INSTALL_LIMIT_S, check=False
        )
    except subprocess.TimeoutExpired:
        pytest.skip(f"npm did not install the package openai within {INSTALL_LIMIT_S} s: the Node SDK is not tested")
    if done.returncode:
        pytest.skip(f"npm cannot install the package openai here: {done.stderr.strip()[-200:]}")
    shutil.copy(SCRIPT, directory)
    return directory


def test_the_node_sdk_chats_streams_calls_tools_and_raises_its_errors(vllm_stack: Stack, node_directory: Path) -> None:
    run = vllm_stack.run
    command = ["node", SCRIPT.name, f"{run.url}/v1", run.key, MODEL]
    done = subprocess.run(command, cwd=node_directory, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert "Paris" in told["whole"] and told["streamed"] == told["whole"] == told["response"]
    assert told["usage"]["completion_tokens"] > 1
    assert set(told["arguments"]) == {"city"}
    assert told["denied"] == ["AuthenticationError", 401, "invalid_api_key"]
    assert told["unknown"] == ["NotFoundError", 404, "model_not_found"]
