"""How pytest reports by our plugin: skips in CI, and failures of shared fixtures, with xdist and without."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]

SHARED = """
import pytest
from tests.support.own_failure import own_failure

@pytest.fixture(scope="session")
def shared(request):
    yield
    with own_failure(request.config, "the shared thing"):
        pytest.fail("it did not end well")
"""
USES = "def test_innocent(shared): pass\n"


def run(directory: Path, *arguments: str, **environment: str) -> tuple[int, str, list[dict[str, Any]]]:
    """Exit code, output and reported outcomes of a pytest in ``directory``."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "xdist", "-p", "tests.support.plugin", "--outcomes=outcomes"]
    variables = {name: value for name, value in os.environ.items() if name != "CI" and not name.startswith("PYTEST")}
    done = subprocess.run(
        [*command, *arguments, "-p", "no:cacheprovider", "--rootdir", str(directory), "-c", os.devnull],
        cwd=directory,
        env=variables | {"PYTHONPATH": str(ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"} | environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    lines = (directory / "outcomes").read_text().splitlines()
    return done.returncode, done.stdout + done.stderr, [json.loads(line) for line in lines]


@pytest.mark.parametrize("workers", ["0", "2"])
def test_a_shared_fixture_that_ends_badly_fails_the_run_under_its_own_name(tmp_path: Path, workers: str) -> None:
    (tmp_path / "conftest.py").write_text(SHARED)
    (tmp_path / "test_it.py").write_text(USES)
    code, output, outcomes = run(tmp_path, "-n", workers)
    assert code == 1, output
    assert "1 failed, 1 passed" in output and "it did not end well" in output
    assert [it["test"] for it in outcomes if it["outcome"] == "failed"] == ["the shared thing"]
    assert [it["outcome"] for it in outcomes if "test_innocent" in it["test"]] == ["passed"] * 3


@pytest.mark.parametrize(
    "source",
    [
        "import pytest\ndef test_it(): pytest.skip('nginx is not installed')\n",
        "import pytest\npytest.importorskip('no_such_module')\n",
        "import pytest\n@pytest.mark.skip(reason='why not')\ndef test_it(): pass\n",
    ],
    ids=["in a test", "of a module", "by a mark"],
)
def test_a_skip_is_a_failure_in_ci(tmp_path: Path, source: str) -> None:
    (tmp_path / "test_it.py").write_text(source)
    code, output, _ = run(tmp_path)
    assert code in (0, 5) and "1 skipped" in output, output
    code, output, outcomes = run(tmp_path, CI="true")
    assert code in (1, 2) and "CI skips nothing" in output, output
    assert [it["outcome"] for it in outcomes].count("failed") == 1


def test_an_expected_failure_is_none_in_ci(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text("import pytest\n@pytest.mark.xfail\ndef test_it(): assert False\n")
    assert run(tmp_path, CI="true")[0] == 0
