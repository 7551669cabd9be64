"""The container files name what exists. Containers themselves are not built here."""

import importlib.util
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest

from compose.stack import nats_config
from contracts.permissions import ROLES
from contracts.service.config import Secret, ServiceConfig
from gateway.config import GatewayConfig
from ledger.config import LedgerConfig
from scheduler.config import SchedulerConfig
from worker.config import WorkerConfig

COMPOSE = Path(__file__).parents[2] / "compose" / "deploy"
CONFIGS: dict[str, type[ServiceConfig]] = {
    "gateway": GatewayConfig,
    "scheduler": SchedulerConfig,
    "worker": WorkerConfig,
    "ledger": LedgerConfig,
}


def services() -> dict[str, dict[str, Any]]:
    yaml = pytest.importorskip("yaml", reason="PyYAML comes with the CPU engine")
    found: dict[str, dict[str, Any]] = yaml.safe_load((COMPOSE / "docker-compose.yml").read_text())["services"]
    return found


def test_every_service_runs_and_knows_its_settings() -> None:
    for name, config in CONFIGS.items():
        service = services()[name]
        assert service["command"] == ["python", "-m", name]
        assert importlib.util.find_spec(f"{name}.__main__") is not None
        fields = msgspec.structs.fields(config)
        known = {f"HEADRACE_{field.name.upper()}" for field in fields}
        secret = {f"HEADRACE_{field.name.upper()}_FILE" for field in fields if field.type == Secret}
        assert set(service["environment"]) <= known | secret
        given = {name.removesuffix("_FILE") if name in secret else name for name in service["environment"]}
        assert {f"HEADRACE_{field.name.upper()}" for field in fields if field.required} <= given


def test_every_secret_is_in_the_example() -> None:
    named = set(re.findall(r"\$\{(\w+):\?\}", (COMPOSE / "docker-compose.yml").read_text()))
    given = set(re.findall(r"^(\w+)=", (COMPOSE / "example.env").read_text(), re.MULTILINE))
    assert named | {"HEADRACE_PEPPER"} == given


def test_the_image_is_made_of_files_that_exist() -> None:
    for path in re.findall(r"compose/[\w./-]+", (COMPOSE / "Dockerfile").read_text()):
        assert (COMPOSE.parents[1] / path).exists(), path


def test_the_users_of_the_containers_are_those_of_the_contracts() -> None:
    made = nats_config.users({role: nats_config.variable(role) for role in ROLES}, {})
    assert (COMPOSE / nats_config.FILE).read_text() == made, (
        "run: headrace nats-config > compose/deploy/nats-users.conf"
    )
