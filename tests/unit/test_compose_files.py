"""The container files name what exists. Containers themselves are not built here."""

import importlib.util
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest

from contracts.permissions import OPERATOR, role_of
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


def test_each_service_has_a_user_of_its_role_on_the_bus() -> None:
    """Its container has its own seed alone; the users are made by a service of their own."""
    made = {word.removeprefix("--user=") for word in services()["users"]["command"]}
    for name in (*CONFIGS, "cli", "model"):
        service = services()[name]
        user = Path(service["environment"]["HEADRACE_NATS_SEED_FILE"]).name.removesuffix(".seed")
        assert role_of(user) == (name if name in CONFIGS else OPERATOR)
        assert user == OPERATOR or user in made
        mounts = [each for each in service["volumes"] if isinstance(each, dict) and each["source"] == "bus"]
        assert [each["volume"]["subpath"] for each in mounts] == [f"bus/seeds/{user}"]
