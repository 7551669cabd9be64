"""How tests are marked, ordered and reported: a plugin of pytest that tests/conftest.py loads.

A folder gives its tests their marks. In CI nothing is skipped: what a test needs must be there. What goes wrong when a
shared fixture ends is a failure of its own, not one of the test that happened to be last.
"""

import json
import os
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

from tests.support.own_failure import OWN, report

TESTS = Path(__file__).parents[1]

FOLDERS: dict[str, tuple[str, ...]] = {
    "unit": (),
    "explore": (),
    "processes": (),
    "ledger": (),
    "bus": (),
    "conformance": (),
    "e2e": (),
    "long": ("slow",),
    "smoke": ("vllm",),
    "vllm": ("vllm", "slow"),
    "chaos": ("chaos",),
}
"""The marks of each folder's tests; folders run in this order."""
VLLM_LIMIT_S = 900
"""For a test and the engines that start for it."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--outcomes", metavar="FILE", help="write every report into FILE, one line of JSON each")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Before ``-m`` looks at marks."""
    order = list(FOLDERS)
    places = {item: _folder(item) for item in items}
    for item, folder in places.items():
        for mark in FOLDERS.get(folder, ()):
            item.add_marker(mark)
        if item.get_closest_marker("vllm"):
            item.add_marker(pytest.mark.timeout(VLLM_LIMIT_S))
    if unknown := {folder for folder in places.values() if folder and folder not in FOLDERS}:
        raise pytest.UsageError(f"tests/support/plugin.py does not know the folders {sorted(unknown)}")
    items.sort(key=lambda item: order.index(places[item]) if places[item] else -1)


def _folder(item: pytest.Item) -> str:
    """Name of the folder under tests; empty for what lies elsewhere."""
    return item.path.relative_to(TESTS).parts[0] if item.path.is_relative_to(TESTS) else ""


# Skips -----------------------------------------------------------------------------------------------------


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, Any, Any]:
    return _unskipped((yield))


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report() -> Generator[None, Any, Any]:
    return _unskipped((yield))


def _unskipped(report: Any) -> Any:
    if os.environ.get("CI") and report.skipped and not hasattr(report, "wasxfail"):
        report.outcome = "failed"
        report.longrepr = f"CI skips nothing. {report.longrepr[2] if report.longrepr else ''}"
    return report


# Failures of their own -------------------------------------------------------------------------------------


def pytest_sessionfinish(session: pytest.Session) -> None:
    """In xdist's worker: what it has to tell."""
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["own_failures"] = session.config.stash.get(OWN, [])


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """In xdist's controller."""
    for name, text in getattr(node, "workeroutput", {}).get("own_failures", []):
        report(node.config, name, text)


# Outcomes for tests/support/suite.py -----------------------------------------------------------------------


class Outcomes:
    """Writes one line for every report of a test."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("w")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        line = {
            "test": report.nodeid,
            "when": report.when,
            "outcome": report.outcome,
            "seconds": report.duration,
            "text": report.longreprtext if report.failed else "",
        }
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            line = {"test": report.nodeid, "when": "collect", "outcome": "failed", "text": report.longreprtext}
            self._file.write(json.dumps(line | {"seconds": 0.0}) + "\n")

    def pytest_unconfigure(self) -> None:
        self._file.close()


def pytest_configure(config: pytest.Config) -> None:
    path = config.getoption("--outcomes")
    if path and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Outcomes(Path(path)))
