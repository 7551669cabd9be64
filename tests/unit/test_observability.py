"""Alerts, dashboard and the page about them: they name what there is, and each alert fires on what it is for."""

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]

from tests.support import failure_table
from tests.unit.test_metrics import exported

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "compose" / "deploy" / "observability"
RULES = [rule for group in yaml.safe_load((FOLDER / "alerts.yml").read_text())["groups"] for rule in group["rules"]]
ALERTS = {rule["alert"]: rule for rule in RULES if "alert" in rule}
RECORDED = {rule["record"] for rule in RULES if "record" in rule}
_NAME = re.compile(r"\bheadrace[:_][a-z0-9_:]+")
_SUFFIX = re.compile(r"_(total|bucket|count|sum)$")
GATHERED = "headrace_service_up"
"""Made by the page that gathers a stack's metrics."""


def unknown(text: str) -> set[str]:
    """Names in ``text`` that no process exports and no rule records."""
    families = exported() | {GATHERED}
    return {
        name
        for name in _NAME.findall(text)
        if name not in RECORDED and name not in families and _SUFFIX.sub("", name) not in families
    }


def expressions(value: Any) -> list[str]:
    if isinstance(value, dict):
        own = [value[key] for key in ("expr", "query") if isinstance(value.get(key), str)]
        return own + [found for each in value.values() for found in expressions(each)]
    return [found for each in value for found in expressions(each)] if isinstance(value, list) else []


def test_rules_name_what_the_code_exports() -> None:
    assert len(ALERTS) > 20
    for rule in RULES:
        assert not unknown(rule["expr"]), rule


def test_panels_name_what_the_code_exports() -> None:
    found = expressions(json.loads((FOLDER / "dashboard.json").read_text()))
    assert len(found) > 30
    for expression in found:
        assert not unknown(expression), expression


def test_labels_of_rules_are_those_of_the_metrics() -> None:
    """What a rule selects by or sums by is a label of one of its metrics."""
    ours = {"model", "version", "priority", "workload", "outcome", "code", "kind", "process", "le", "service", "job"}
    ours |= {"news"}
    for rule in RULES:
        selected = set(re.findall(r"([a-z_]+)(?:=~|!~|!=|=)\"", rule["expr"]))
        summed = {name for part in re.findall(r"\bby \(([^)]*)\)", rule["expr"]) for name in part.split(", ")}
        assert selected | summed <= ours, rule


def test_the_page_names_what_there_is() -> None:
    text = failure_table.PAGE.read_text()
    assert not unknown(text)
    sources = "\n".join(path.read_text() for folder in ("contracts", "gateway", "scheduler", "worker", "ledger")
                        for path in (ROOT / folder).rglob("*.py"))  # fmt: skip
    for what, row in failure_table.table().items():
        assert row.alert == "-" or row.alert in ALERTS, what
        assert f'"{row.log}"' in sources, what


def test_the_page_says_what_each_alert_is_for() -> None:
    text = re.sub(
        r"(Headrace\w+Burn)Fast, Medium, Slow, Trickle",
        r"\1Fast \1Medium \1Slow \1Trickle",
        failure_table.PAGE.read_text(),
    )
    assert [alert for alert in ALERTS if not re.search(rf"\b{alert}\b", text)] == []


def test_each_failure_is_made_to_happen_in_a_test() -> None:
    made = (
        "chaos/test_clocks.py",
        "chaos/test_explain.py",
        "chaos/test_rollouts.py",
        "bus/test_ledger_service.py",
        "bus/test_worker_service.py",
        "bus/test_worker_versions.py",
        "unit/test_fingerprint.py",
    )
    tests = "\n".join((ROOT / "tests" / name).read_text() for name in made)
    rows = failure_table.table()
    assert len(rows) >= 16
    assert [what for what in rows if f'"{what}"' not in tests] == []


def test_each_alert_fires_in_a_test() -> None:
    cases = yaml.safe_load((FOLDER / "alerts_test.yml").read_text())["tests"]
    fired = {case["alertname"] for test in cases for case in test["alert_rule_test"] if case["exp_alerts"]}
    assert fired == set(ALERTS)


def test_prometheus_itself_runs_the_rules() -> None:
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("promtool is not installed (Debian: prometheus)")
    for arguments in (["check", "rules", "alerts.yml"], ["test", "rules", "alerts_test.yml"]):
        ran = subprocess.run(
            [promtool, *arguments], cwd=FOLDER, capture_output=True, text=True, check=False, timeout=280
        )
        assert ran.returncode == 0, ran.stdout + ran.stderr
