"""The real vLLM in a stack, its own server beside it, and what tests ask of both."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from compose.stack import models
from compose.stack.processes import die_with
from contracts.messages.records import Manifest
from tests.support.nats_server import free_port
from tests.support.stack import ENVIRONMENT, Stack
from worker.config import WorkerConfig
from worker.engines.vllm import arguments

MODEL = "smollm2-135m-instruct"
FRANCE: list[Any] = [{"role": "user", "content": "What is the capital of France?"}]
GREEDY: dict[str, Any] = {"model": MODEL, "messages": FRANCE, "temperature": 0, "max_tokens": 40}
CITY: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 20},
        # A small model at temperature 1 would go on with digits until it is cut.
        "people": {"type": "integer", "minimum": 0, "maximum": 99_999_999},
    },
    "required": ["city", "people"],
    "additionalProperties": False,
}

VLLM_START_LIMIT_S = 400.0
"""Half a minute for one engine on two idle cores; here three start at once."""
_POOLING = {"pooling_mode_cls_token": False, "pooling_mode_mean_tokens": False, "pooling_mode_lasttoken": True}
_MODULES = [
    {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"},
    {"idx": 1, "name": "1", "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"},
]


class Direct:
    """vLLM's own server of the same model with the worker's arguments, without Headrace."""

    def __init__(self, model_path: Path, log: Path) -> None:
        port = free_port()
        # Its calls obey their schemas at this level alone; a worker holds those that are forced to them at any.
        config = WorkerConfig(model=models.DEFAULT_MODEL, vllm_engine_args={"tool_strict_level": "parameter"})
        manifest = Manifest(
            name=models.DEFAULT_MODEL,
            version="v1",
            engine="vllm",
            context=8192,
            default_output_tokens=16,
            path=str(model_path),
        )
        command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--host=127.0.0.1", f"--port={port}"]
        parent = os.getpid()
        self.url = f"http://127.0.0.1:{port}"
        self.log = log
        with log.open("wb") as output:
            self.process = subprocess.Popen(
                [*command, *arguments.engine_arguments(config, manifest)],
                env=ENVIRONMENT | arguments.ENVIRONMENT | {"VLLM_CPU_OMP_THREADS_BIND": "0"},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=lambda: die_with(parent),  # noqa: PLW1509
            )

    def client(self) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=120, trust_env=False)

    def wait_ready(self) -> None:
        deadline = time.monotonic() + VLLM_START_LIMIT_S
        while True:
            try:
                if httpx.get(f"{self.url}/health", trust_env=False).status_code == 200:
                    return
            except httpx.TransportError:
                pass
            if self.process.poll() is not None or time.monotonic() > deadline:
                self.stop()
                pytest.fail(f"vLLM's own server did not start:\n{self.log.read_text()[-3000:]}")
            time.sleep(0.2)

    def stop(self) -> None:
        self.process.terminate()
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()


def embedder(path: Path, directory: Path) -> Path:
    """The same weights as a model of sentence-transformers that takes the last token's state."""
    (directory / "1_Pooling").mkdir(parents=True)
    for file in path.iterdir():
        (directory / file.name).symlink_to(file)
    (directory / "modules.json").write_text(json.dumps(_MODULES))
    (directory / "1_Pooling" / "config.json").write_text(json.dumps(_POOLING | {"word_embedding_dimension": 576}))
    return directory


def post(stack: Stack, path: str = "/v1/chat/completions", **body: Any) -> dict[str, Any]:
    with stack.client() as client:
        response = client.post(path, json=body, timeout=120)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def counted(stack: Stack, body: dict[str, Any], path: str = "/v1/chat/completions", room: str = "max_tokens") -> int:
    """Prompt tokens by the gateway's count, which it names when the answer would not fit."""
    with stack.client() as client:
        response = client.post(path, json=body | {room: 1_000_000})
    message = response.json()["error"]["message"]
    assert response.status_code == 400 and "maximum context length" in message, message
    return int(message.split("you asked for ")[1].split(" tokens")[0]) - 1_000_000
