"""A nats-server reads our configuration."""

import os
import subprocess
from functools import partial
from pathlib import Path

from compose.stack import nats_config
from compose.stack.data_dir import Secrets
from contracts.permissions import ROLES
from tests.support.polling import wait_until


def is_ready(log: Path) -> bool:
    return log.exists() and "Server is ready" in log.read_text()


COMPOSE = Path(__file__).parents[2] / "compose" / "deploy"


def test_nats_takes_its_configuration_both_ways(tmp_path: Path) -> None:
    """Variables from the file (headrace up) and from the environment (containers), awkward passwords included."""
    password = "1e5"
    secrets = Secrets(key="k", admin_key="a", nats_passwords=dict.fromkeys(ROLES, password))
    nats_config.write_server(tmp_path / "nats.conf", "127.0.0.1:-1", tmp_path / "a", secrets)
    variables = {"HEADRACE_NATS_LISTEN": "127.0.0.1:-1", "HEADRACE_NATS_STORE": str(tmp_path / "b")}
    variables |= {f"HEADRACE_NATS_PASSWORD_{role.upper()}": f'"{password}"' for role in ROLES}
    for number, (path, environment) in enumerate(((tmp_path / "nats.conf", {}), (COMPOSE / "nats.conf", variables))):
        log = tmp_path / f"{number}.log"
        process = subprocess.Popen(
            [nats_config.nats_server(), "-c", str(path), "-l", str(log)], env=dict(os.environ) | environment
        )
        try:
            wait_until(partial(is_ready, log), "the server is ready")
        finally:
            process.terminate()
            process.wait()
