"""The container and Kubernetes files: they name what exists, give each service its own secrets, and no privileges.

Containers themselves are not built here.
"""

import importlib.util
import re
import stat
import subprocess
from collections.abc import Iterator
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

DEPLOY = Path(__file__).parents[2] / "compose" / "deploy"
CONFIGS: dict[str, type[ServiceConfig]] = {
    "gateway": GatewayConfig,
    "scheduler": SchedulerConfig,
    "worker": WorkerConfig,
    "ledger": LedgerConfig,
}
PEPPERED = {"gateway", "scheduler"}
"""Services that judge API keys."""
DIGEST = re.compile(r"[\w./-]+:[\w.-]+@sha256:[0-9a-f]{64}")


def documents(name: str) -> Iterator[dict[str, Any]]:
    """Those of a YAML file, the items of a list one by one."""
    yaml = pytest.importorskip("yaml", reason="PyYAML comes with the CPU engine")
    for document in yaml.safe_load_all((DEPLOY / name).read_text()):
        yield from document["items"] if document.get("kind") == "List" else [document]


def settings(config: type[ServiceConfig]) -> dict[str, bool]:
    """Variable -> whether the service needs it. A secret has two forms, of which containers use the file's."""
    found = {}
    for field in msgspec.structs.fields(config):
        suffix = "_FILE" if field.type == Secret else ""
        found[f"HEADRACE_{field.name.upper()}{suffix}"] = field.required
    return found | {"HEADRACE_NATS_URL": False}


def check_environment(name: str, environment: dict[str, str]) -> None:
    known = settings(CONFIGS[name])
    assert set(environment) <= set(known)
    assert {variable for variable, required in known.items() if required} <= set(environment)
    check_nothing_secret(environment)


def check_nothing_secret(environment: dict[str, str]) -> None:
    for variable, value in environment.items():
        assert "$" not in value and "@" not in value, variable
        if re.search(r"PASSWORD|SECRET|PEPPER|SEED|TOKEN|KEY", variable):
            assert variable.endswith("_FILE") and value.startswith("/run/"), variable


# Docker compose --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def services() -> dict[str, dict[str, Any]]:
    (document,) = documents("docker-compose.yml")
    found: dict[str, dict[str, Any]] = document["services"]
    return found


def secrets_of(service: dict[str, Any]) -> set[str]:
    """Volumes of secrets that a container mounts, with the folder; without one, all of it."""
    mounts = [each for each in service.get("volumes", []) if isinstance(each, dict)]
    found = {f"{each['source']}/{each['volume']['subpath']}" for each in mounts}
    whole = [each.split(":")[0] for each in service.get("volumes", []) if isinstance(each, str)]
    return found | {each for each in whole if each in ("bus", "secrets")}


@pytest.mark.parametrize("name", CONFIGS)
def test_every_service_runs_and_knows_its_settings(services: dict[str, dict[str, Any]], name: str) -> None:
    assert services[name]["command"] == ["python", "-m", name]
    assert importlib.util.find_spec(f"{name}.__main__") is not None
    check_environment(name, services[name]["environment"])


def test_each_container_holds_its_own_secrets_alone(services: dict[str, dict[str, Any]]) -> None:
    held = {name: secrets_of(service) for name, service in services.items()}
    pepper, operator = "secrets/pepper", "bus/bus/seeds/operator"
    expected = {name: {f"bus/bus/seeds/{name}"} for name in CONFIGS} | {
        "nats": {"bus/bus/server", "bus/store"},
        "clickhouse": {"secrets/clickhouse-users"},
        "model": {operator},
        "cli": {operator, pepper},
        "users": {"bus"},
        "bus": {"bus"},
        "secrets": {"bus", "secrets"},
    }
    for name in PEPPERED:
        expected[name].add(pepper)
    expected["ledger"].add("secrets/clickhouse")
    assert held == expected
    for service in services.values():
        check_nothing_secret(service.get("environment", {}))
        assert "secrets" not in service and "env_file" not in service


def test_each_service_has_a_user_of_its_role_on_the_bus(services: dict[str, dict[str, Any]]) -> None:
    made = {word.removeprefix("--user=") for word in services["users"]["command"]}
    for name in (*CONFIGS, "cli", "model"):
        user = Path(services[name]["environment"]["HEADRACE_NATS_SEED_FILE"]).name.removesuffix(".seed")
        assert role_of(user) == (name if name in CONFIGS else OPERATOR)
        assert user == OPERATOR or user in made


def test_no_container_has_more_than_it_needs(services: dict[str, dict[str, Any]]) -> None:
    for name, service in services.items():
        assert service["read_only"] is True, name
        assert service["cap_drop"] == ["ALL"] and "cap_add" not in service, name
        assert service["security_opt"] == ["no-new-privileges:true"], name
        assert service["mem_limit"] and service["pids_limit"], name
        assert int(service["user"].split(":")[0]) > 0, name
        assert not {"privileged", "network_mode", "pid", "ipc", "devices"} & set(service), name
        assert service["image"] == "headrace" or DIGEST.fullmatch(service["image"]), name
        once = service["restart"] != "unless-stopped"
        assert ("test" in service["healthcheck"]) is not once, name


def test_only_the_gateway_is_reached_from_outside(services: dict[str, dict[str, Any]]) -> None:
    (document,) = documents("docker-compose.yml")
    outer = {name for name, network in document["networks"].items() if not (network or {}).get("internal")}
    assert outer == {"edge"}
    assert [name for name, service in services.items() if "edge" in service["networks"]] == ["gateway"]
    assert [name for name, service in services.items() if "ports" in service] == ["gateway"]
    assert [name for name, service in services.items() if "ledger" in service["networks"]] == ["clickhouse", "ledger"]


def test_secrets_are_made_once_and_apart(tmp_path: Path) -> None:
    def make() -> dict[str, bytes]:
        subprocess.run(["sh", str(DEPLOY / "make-secrets.sh"), str(tmp_path)], check=True)
        return {str(path.relative_to(tmp_path)): path.read_bytes() for path in tmp_path.glob("*/*")}

    made = make()
    assert set(made) == {"pepper/pepper", "clickhouse/url", "clickhouse-users/headrace.xml"}
    assert re.fullmatch(rb"[0-9a-f]{64}", made["pepper/pepper"])
    (password,) = re.findall(rb"http://headrace:([0-9a-f]{64})@clickhouse:8123", made["clickhouse/url"])
    assert password not in made["clickhouse-users/headrace.xml"]
    for name in ("pepper/pepper", "clickhouse/url"):
        assert stat.S_IMODE((tmp_path / name).stat().st_mode) == 0o600
    assert make() == made


# Kubernetes ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def objects() -> list[dict[str, Any]]:
    (kustomization,) = documents("kustomization.yaml")
    return [each for name in kustomization["resources"] for each in documents(name)]


def test_pods_are_restricted(objects: list[dict[str, Any]]) -> None:
    workloads = [each for each in objects if "template" in each.get("spec", {})]
    assert len(workloads) == 6
    for workload in workloads:
        name, pod = workload["metadata"]["name"], workload["spec"]["template"]["spec"]
        assert pod["automountServiceAccountToken"] is False and pod["enableServiceLinks"] is False, name
        assert pod["securityContext"]["runAsNonRoot"] is True and pod["securityContext"]["runAsUser"] > 0, name
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}, name
        assert not {"hostNetwork", "hostPID", "hostIPC"} & set(pod), name
        (container,) = pod["containers"]
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }, name
        assert container["resources"]["limits"]["memory"], name
        assert container["image"] == "headrace" or DIGEST.fullmatch(container["image"]), name
        if workload["kind"] != "Job":
            assert {"startupProbe", "readinessProbe", "livenessProbe"} <= set(container), name
        assert "envFrom" not in container and all(set(each) == {"name", "value"} for each in container["env"]), name
    (namespace,) = [each for each in objects if each["kind"] == "Namespace"]
    assert namespace["metadata"]["labels"]["pod-security.kubernetes.io/enforce"] == "restricted"


@pytest.mark.parametrize("name", CONFIGS)
def test_deployments_run_as_the_containers_do(objects: list[dict[str, Any]], name: str) -> None:
    (workload,) = [each for each in objects if each["kind"] == "Deployment" and each["metadata"]["name"] == name]
    pod = workload["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert container["command"] == ["python", "-m", name]
    check_environment(name, {each["name"]: each["value"] for each in container["env"]})
    mounted = {each["secret"]["secretName"] for each in pod["volumes"] if "secret" in each}
    expected = {f"bus-{name}"} | ({"pepper"} if name in PEPPERED else set())
    assert mounted == expected | ({"clickhouse"} if name == "ledger" else set())
    budgets = [each for each in objects if each["kind"] == "PodDisruptionBudget" and each["metadata"]["name"] == name]
    assert [each["spec"]["selector"] for each in budgets] == [workload["spec"]["selector"]]


def test_nobody_is_reached_but_where_a_policy_says_so(objects: list[dict[str, Any]]) -> None:
    policies = {each["metadata"]["name"]: each["spec"] for each in objects if each["kind"] == "NetworkPolicy"}
    assert policies["nothing"] == {"podSelector": {}, "policyTypes": ["Ingress", "Egress"]}
    open_to_all = [name for name, spec in policies.items() for rule in spec.get("ingress", []) if not rule.get("from")]
    assert open_to_all == ["callers-to-gateway"]
    assert policies["callers-to-gateway"]["podSelector"] == {"matchLabels": {"app": "gateway"}}
    assert all(rule.get("to") for spec in policies.values() for rule in spec.get("egress", []))


def test_the_kustomization_is_complete() -> None:
    (kustomization,) = documents("kustomization.yaml")
    assert {f"kubernetes/{path.name}" for path in (DEPLOY / "kubernetes").iterdir()} == set(kustomization["resources"])
    assert all((DEPLOY / name).exists() for each in kustomization["configMapGenerator"] for name in each["files"])
    assert [each["name"] for each in kustomization["images"]] == ["headrace"]


def test_keda_scales_the_workers_by_what_the_scheduler_plans(objects: list[dict[str, Any]]) -> None:
    (scaled,) = documents("keda.yaml")
    (worker,) = [each for each in objects if each["kind"] == "Deployment" and each["metadata"]["name"] == "worker"]
    assert scaled["spec"]["scaleTargetRef"]["name"] == worker["metadata"]["name"]
    (trigger,) = scaled["spec"]["triggers"]
    assert "headrace_desired_replicas" in trigger["metadata"]["query"]
    assert trigger["metadata"]["ignoreNullValues"] == "false", "what is not known is not none"
