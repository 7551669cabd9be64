"""Every metric of every service: named by Prometheus' rules, with one set of labels, and counted in some test."""

import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import msgspec
import pytest

TESTS = Path(__file__).parents[1]

COLLECT = """
import contracts.bus, contracts.streaming.subscriber, gateway.metrics, worker.metrics, ledger.metrics
import json
from prometheus_client.parser import text_string_to_metric_families
from contracts.service import telemetry
from contracts.messages.base import Epoch
from contracts.messages.records import ModelRecord
from scheduler.core.core import Core
from scheduler.core.settings import Settings
from scheduler.metrics import Collector

record = ModelRecord(name="m", stable="v1")
core = Core(model="m", owner="s", epoch=Epoch(1, 1), record=record, settings=Settings(), now_ms=0)
Collector(lambda: [core], 0.5).register()
print(json.dumps([
    [family.name, family.type, family.documentation]
    for family in text_string_to_metric_families(telemetry.page().decode())
    if family.name.startswith("headrace_")
]))
"""

UNITS = re.compile(r"_(milliseconds|ms|minutes|hours|kb|mb|percent)(_|$)")


@cache
def exported() -> frozenset[str]:
    """Names of all services' metrics, as their pages have them before the suffix."""
    return frozenset(name for name, _, _ in collected())


@cache
def collected() -> list[tuple[str, str, str]]:
    """(name, type, help) of all services' metrics, as one registry takes them: no name stands twice."""
    printed = subprocess.run([sys.executable, "-c", COLLECT], capture_output=True, check=True, timeout=60)
    return msgspec.json.decode(printed.stdout, type=list[tuple[str, str, str]])


@pytest.fixture(scope="module")
def families() -> list[tuple[str, str, str]]:
    return collected()


def test_names_follow_the_rules_of_prometheus(families: list[tuple[str, str, str]]) -> None:
    assert len(families) > 40
    names = [name for name, _, _ in families]
    assert sorted(set(names)) == sorted(names)
    for name, kind, text in families:
        assert re.fullmatch(r"headrace_[a-z][a-z0-9_]*", name), name
        assert text.strip(), f"{name} has no help text"
        assert not UNITS.search(name), f"{name}: base units only"
        assert kind != "histogram" or name.endswith("_seconds"), name
        assert not name.endswith("_total"), f"{name}: the suffix is the client library's"
        assert kind in ("counter", "gauge", "histogram"), f"{name} is a {kind}"


def test_every_metric_stands_in_a_test(families: list[tuple[str, str, str]]) -> None:
    """By its name; a worker's by what follows ``headrace_worker_`` in the table of bus/test_worker_service."""
    files = {path: path.read_text() for path in TESTS.rglob("test_*.py") if path != Path(__file__)}
    workers = files[TESTS / "bus" / "test_worker_service.py"]
    missing = []
    for name, _, _ in families:
        short = name.removeprefix("headrace_worker_")
        if not any(name in text for text in files.values()) and (short == name or f'"{short}' not in workers):
            missing.append(name)
    assert not missing, f"counted in no test: {missing}"
