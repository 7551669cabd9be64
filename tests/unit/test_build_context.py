"""What of this repository gets into the image."""

import re
import subprocess
from pathlib import Path

import pytest

from tests.support.build_context import sent

ROOT = Path(__file__).parents[2]
IGNORE = (ROOT / ".dockerignore").read_text()
DOCKERFILE = (ROOT / "compose" / "deploy" / "Dockerfile").read_text()
PRODUCT = ("contracts", "gateway", "scheduler", "worker", "ledger", "compose")


@pytest.mark.parametrize(
    ("rules", "expected"),
    [
        ("a", ["b/a", "b/c.py"]),
        ("**/a", ["b/c.py"]),
        ("b/*", ["a"]),
        ("*\n!b", ["b/a", "b/c.py"]),
        ("*\n!b/*.py", ["b/c.py"]),
        ("*\n!**/*.py\nb", []),
        ("# a\n\n/b/", ["a"]),
        ("**/c.*", ["a", "b/a"]),
        ("[a-b]/?", ["a", "b/c.py"]),
    ],
)
def test_rules_are_read_as_docker_reads_them(rules: str, expected: list[str]) -> None:
    assert sent(["a", "b/a", "b/c.py"], rules) == expected


def test_no_secret_gets_in_whatever_it_is_called() -> None:
    names: tuple[str, ...] = (
        ".env",
        "secrets.json",
        "pepper",
        "run.json",
        "sql.json",
        "sql-password",
        "gateway.seed",
        "tls.key",
    )
    names += ("tls.pem", "id_rsa", "nats-users.conf", "gateway.log", "core.1", "x.pyc", ".git/config", "seeds/a")
    names += (".headrace/pepper", ".headrace/logs/gateway.log", ".headrace/a.py", "stack.data/secrets.json", ".x.py")
    places = ["", *(f"{folder}/" for folder in (*PRODUCT, "compose/deploy", "compose/deploy/locks", "compose/cli"))]
    places += [
        "gateway/http/static/",
        "gateway/http/templates/",
        "ledger/migrations/",
        ".venv/lib/",
        "build/",
        "tests/",
        "examples/",
        ".git/",
    ]
    assert sent([place + name for place in places for name in names], IGNORE) == []


def test_all_that_runs_gets_in_and_no_test() -> None:
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    got = set(sent(tracked, IGNORE))
    assert {path for path in tracked if path.startswith(PRODUCT) and path.endswith(".py")} <= got
    for kind in (
        "gateway/http/static/*",
        "gateway/http/templates/*",
        "ledger/migrations/*.sql",
        "compose/stack/*.jinja",
        "contracts/py.typed",
    ):
        assert {str(path.relative_to(ROOT)) for path in ROOT.glob(kind)} <= got
    assert not [path for path in got if path.startswith(("tests/", "examples/", "."))]


def test_the_image_is_made_of_named_folders_that_exist() -> None:
    copied = re.findall(r"^COPY (?!--from)(.*) \S+$", DOCKERFILE, re.MULTILINE)
    sources = [source for line in copied for source in line.split()]
    assert set(PRODUCT) <= set(sources)
    for source in sources:
        assert source not in (".", "./", "*"), "what is copied is named"
        assert (ROOT / source).exists(), source


def test_bases_are_pinned_and_the_user_is_nobody_special() -> None:
    assert re.search(r"^ARG PYTHON_IMAGE=python:3\.\d+-slim@sha256:[0-9a-f]{64}$", DOCKERFILE, re.MULTILINE)
    assert set(re.findall(r"^FROM (\S+)", DOCKERFILE, re.MULTILINE)) == {"${PYTHON_IMAGE}"}
    assert re.findall(r"^USER (.*)$", DOCKERFILE, re.MULTILINE) == ["10001:10001"]
    for line in re.findall(r"pip install.*", DOCKERFILE.replace("\\\n", "")):
        assert "--require-hashes" in line or "--no-build-isolation" in line, line
