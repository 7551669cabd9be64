"""A nats-server reads our configuration."""

import os
import subprocess
from functools import partial
from pathlib import Path

import pytest

from compose.stack import nats_config
from compose.stack.seeds import SYSTEM, Seeds
from tests.support.polling import wait_until


def is_ready(log: Path) -> bool:
    return log.exists() and "Server is ready" in log.read_text()


COMPOSE = Path(__file__).parents[2] / "compose" / "deploy"


def test_nats_takes_its_configuration_both_ways(tmp_path: Path) -> None:
    """Variables from the file (headrace up) and from the environment (containers)."""
    seeds = Seeds(tmp_path / "seeds")
    seeds.ensure([SYSTEM, "operator", "worker-0", "t.acme"])
    nats_config.write_server(tmp_path / "nats.conf", "127.0.0.1:-1", tmp_path / "a", seeds)
    ours = tmp_path / "containers"
    ours.mkdir()
    nats_config.write(ours, seeds)
    (ours / "nats.conf").write_bytes((COMPOSE / "nats.conf").read_bytes())
    variables = {"HEADRACE_NATS_LISTEN": "127.0.0.1:-1", "HEADRACE_NATS_STORE": str(tmp_path / "b")}
    for number, (path, environment) in enumerate(((tmp_path / "nats.conf", {}), (ours / "nats.conf", variables))):
        log = tmp_path / f"{number}.log"
        process = subprocess.Popen(
            [nats_config.nats_server(), "-c", str(path), "-l", str(log)], env=dict(os.environ) | environment
        )
        try:
            wait_until(partial(is_ready, log), "the server is ready")
        finally:
            process.terminate()
            process.wait()


def test_no_secret_stands_in_the_configuration(tmp_path: Path) -> None:
    seeds = Seeds(tmp_path / "seeds")
    seeds.ensure([SYSTEM, "operator", "worker-0", "t.acme"])
    nats_config.write_server(tmp_path / "nats.conf", "127.0.0.1:-1", tmp_path / "a", seeds)
    written = (tmp_path / "nats.conf").read_text() + (tmp_path / nats_config.FILE).read_text()
    for user in seeds.users():
        assert seeds.path(user).read_text().strip() not in written
        assert seeds.path(user).stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize(("given", "cores", "used"), [("", 1, 1), ("", 2, 1), ("", 16, 8), ("3", 16, 3), ("0", 16, 8)])
def test_the_server_leaves_half_of_the_cores_to_the_stack(
    given: str, cores: int, used: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GOMAXPROCS", given)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cores)))
    assert nats_config.processors() == used
