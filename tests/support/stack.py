"""A real stack: ``headrace up`` with the simulated engine, on free ports and a data directory of its own.

``stack`` is shared by the whole session: tests that kill, limit or reconfigure take ``start_stack``. ``vllm_stack``
runs the real vLLM, and ``direct`` is vLLM's own server beside it.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from compose.stack.data_dir import DataDir, Run
from compose.stack.processes import die_with
from contracts.bus import Credentials

ROOT = Path(__file__).parents[2]
HEADRACE = [sys.executable, "-m", "compose.cli.main"]
ENVIRONMENT = {name: value for name, value in os.environ.items() if not name.startswith("HEADRACE_")} | {
    "PYTHONPATH": str(ROOT)
}
START_LIMIT_S = 60.0
STOP_LIMIT_S = 60.0
COMMAND_LIMIT_S = 240.0
"""The doctor imports vLLM: seconds, on a busy machine a minute."""


def headrace(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """One run of the command, to its end."""
    return subprocess.run(
        [*HEADRACE, *arguments],
        env=ENVIRONMENT | environment,
        capture_output=True,
        text=True,
        timeout=COMMAND_LIMIT_S,
        check=False,
    )


def alive(pid: int) -> bool:
    """Whether the process runs; one that is dead and not yet waited for does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


class Stack:
    """One ``headrace up``. Its output is in ``output``; ``run`` reads run.json anew each time."""

    def __init__(self, data_dir: Path, *options: str, **environment: str) -> None:
        self.data_dir = data_dir
        self.output = data_dir.with_name(f"{data_dir.name}.out")
        (data_dir / "run.json").unlink(missing_ok=True)  # of a stack that was killed
        parent = os.getpid()
        with self.output.open("wb") as output:
            self.process = subprocess.Popen(
                [*HEADRACE, "up", "--port", "0", "--data-dir", str(data_dir), *options],
                env=ENVIRONMENT | environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=lambda: die_with(parent),  # noqa: PLW1509
            )

    def wait_ready(self, limit_s: float = START_LIMIT_S) -> "Stack":
        deadline = time.monotonic() + limit_s
        while not self.started:
            if self.process.poll() is not None or time.monotonic() > deadline:
                self.stop()
                pytest.fail(f"the stack did not start:\n{self.output.read_text()}\n{self.logs()}")
            time.sleep(0.02)
        with self.client(verify=False) as client:
            self.model: str = client.get("/v1/models").json()["data"][0]["id"]
            """The first model that it was started with: tests of one stack may add others."""
        return self

    @property
    def started(self) -> bool:
        return (self.data_dir / "run.json").exists()

    @property
    def run(self) -> Run:
        return DataDir(self.data_dir).read_run()

    @property
    def credentials(self) -> Credentials:
        """The operator's, for the stack's bus."""
        return Credentials(seed_file=self.run.nats_seed_file)

    @property
    def pids(self) -> list[int]:
        """Of all services."""
        return [pid for pids in self.run.pids.values() for pid in pids]

    def client(self, key: str | None = None, **options: Any) -> httpx.Client:
        """HTTP client of the shared port, with the demo key unless another is given."""
        run = self.run
        headers = {"Authorization": f"Bearer {key or run.key}"}
        return httpx.Client(base_url=run.url, headers=headers, timeout=30, trust_env=False, **options)

    def admin(self) -> httpx.Client:
        """HTTP client of the admin address, with the admin key."""
        run = self.run
        headers = {"Authorization": f"Bearer {run.admin_key}"}
        return httpx.Client(base_url=run.admin_url, headers=headers, timeout=30, trust_env=False)

    def async_client(self, key: str | None = None, **options: Any) -> httpx.AsyncClient:
        run = self.run
        headers = {"Authorization": f"Bearer {key or run.key}"}
        return httpx.AsyncClient(base_url=run.url, headers=headers, timeout=30, trust_env=False, **options)

    def sdk(self, key: str | None = None, *, url: str = "", **options: Any) -> openai.OpenAI:
        """OpenAI's own client of the shared port, or of ``url``, without retries unless they are asked for."""
        run = self.run
        http: Any = httpx.Client(trust_env=False, timeout=120)
        options = {"max_retries": 0} | options
        return openai.OpenAI(base_url=f"{url or run.url}/v1", api_key=key or run.key, http_client=http, **options)

    def cli(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """The headrace command on this stack."""
        return headrace(*arguments, "--data-dir", str(self.data_dir))

    def cli_json(self, *arguments: str) -> Any:
        done = self.cli(*arguments, "--json")
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    def usage(self, *arguments: str) -> list[dict[str, Any]]:
        """Rows of ``headrace usage``, of all time: its own default is a month, which may end while a test runs."""
        rows: list[dict[str, Any]] = self.cli_json("usage", "--from", "2026-01-01", "--to", "2100-01-01", *arguments)[
            "data"
        ]
        return rows

    def logs(self, lines: int = 15) -> str:
        """The last lines of every service's log."""
        parts = []
        for log in sorted((self.data_dir / "logs").glob("*.log")):
            tail = log.read_text(errors="replace").splitlines()[-lines:]
            parts.append("\n".join([f"--- {log.name}", *tail]))
        return "\n".join(parts)

    def stop(self, number: int = signal.SIGINT) -> int:
        """Ask it to stop, wait for that; the exit status."""
        if self.process.poll() is None:
            self.process.send_signal(number)
            try:
                self.process.wait(STOP_LIMIT_S)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
                pytest.fail(f"the stack did not stop:\n{self.output.read_text()}\n{self.logs()}")
        self.check_permissions()
        return self.process.returncode

    def check_permissions(self) -> None:
        """No service ever asked the bus for more than its user may do. A server that was told to read its users again
        has forgotten which answers were under way, and refuses them: those who asked do so again.
        """
        logs = self.data_dir / "logs"
        reloaded = "Reloaded server configuration" in (logs / "nats.log").read_text(errors="replace")
        for log in logs.glob("*-*.log"):
            denied = [line for line in log.read_text(errors="replace").splitlines() if "permissions violation" in line]
            if reloaded:
                denied = [line for line in denied if 'publish to \\"_inbox.' not in line]
            assert not denied, f"{log.name}: {denied[:5]}"


StartStack = Callable[..., Stack]
