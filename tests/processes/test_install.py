"""Where ``make`` finds PyTorch's CPU build, with local indexes in place of pip's own sources and PyTorch's."""

import hashlib
import os
import re
import shutil
import subprocess
import venv
import zipfile
from pathlib import Path

import pytest

INSTALL = Path(__file__).parents[2] / "compose" / "deploy" / "install.sh"
LOCKS = INSTALL.parent / "locks"
LOCKED = re.findall(r"^torch==(\S+)", (LOCKS / "torch.txt").read_text(), re.MULTILINE)[0]


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("environment")
    venv.create(place, with_pip=True)
    return place


@pytest.fixture
def index(tmp_path: Path) -> str:
    """An index that has nothing but the locked version of PyTorch, as an empty package."""
    folder = tmp_path / "index" / "torch"
    folder.mkdir(parents=True)
    name = f"torch-{LOCKED}-py3-none-any.whl"
    with zipfile.ZipFile(folder / name, "w") as wheel:
        about = f"torch-{LOCKED}.dist-info"
        wheel.writestr("torch.py", "")
        wheel.writestr(f"{about}/METADATA", f"Metadata-Version: 2.1\nName: torch\nVersion: {LOCKED}\n")
        wheel.writestr(f"{about}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{about}/RECORD", "")
    (folder / "index.html").write_text(f'<a href="{name.replace("+", "%2B")}">{name}</a>')
    return folder.parent.as_uri()


@pytest.fixture
def script(tmp_path: Path, index: str) -> Path:
    """install.sh beside a lock that holds the empty package's hash."""
    (wheel,) = (tmp_path / "index" / "torch").glob("*.whl")
    (tmp_path / "locks").mkdir()
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    (tmp_path / "locks" / "torch.txt").write_text(f"torch=={LOCKED} --hash=sha256:{digest}\n")
    return Path(shutil.copy(INSTALL, tmp_path))


def install(script: Path, environment: Path, own: str, torch_index: str) -> subprocess.CompletedProcess[str]:
    """The step with ``own`` as pip's own source."""
    settings = {name: value for name, value in os.environ.items() if not name.startswith("PIP_")}
    settings |= {"PIP_CONFIG_FILE": os.devnull, "PIP_INDEX_URL": own, "TORCH_INDEX": torch_index}
    command = [str(environment / "bin" / "python"), "-m", "pip", "uninstall", "-qy", "torch"]
    subprocess.run(command, env=settings, check=True, capture_output=True)
    command = [str(script), str(environment), "torch"]
    return subprocess.run(command, env=settings, capture_output=True, text=True, check=False)


def test_pips_own_sources_come_first(script: Path, environment: Path, index: str, tmp_path: Path) -> None:
    done = install(script, environment, index, (tmp_path / "nowhere").as_uri())
    assert done.returncode == 0, done.stderr
    assert "from pip's own sources" in done.stdout


def test_the_named_index_is_asked_next(script: Path, environment: Path, index: str, tmp_path: Path) -> None:
    done = install(script, environment, (tmp_path / "empty").as_uri(), index)
    assert done.returncode == 0, done.stderr
    assert f"from {index}" in done.stdout


def test_without_an_index_it_says_what_to_name(script: Path, environment: Path, tmp_path: Path) -> None:
    done = install(script, environment, (tmp_path / "empty").as_uri(), "")
    assert done.returncode == 1
    assert "make TORCH_INDEX=ADDRESS" in done.stderr


def test_an_index_without_it_is_named(script: Path, environment: Path, tmp_path: Path) -> None:
    done = install(script, environment, (tmp_path / "empty").as_uri(), (tmp_path / "nowhere").as_uri())
    assert done.returncode == 1
    assert (tmp_path / "nowhere").as_uri() in done.stderr


def test_what_is_not_the_locked_file_is_refused(environment: Path, index: str) -> None:
    """The real lock, and an index that offers another file by the locked name."""
    done = install(INSTALL, environment, index, index)
    assert done.returncode == 1
    assert "DO NOT MATCH THE HASHES" in done.stderr


@pytest.mark.parametrize("lock", sorted(LOCKS.glob("*.txt")), ids=lambda lock: lock.name)
def test_every_locked_package_has_hashes(lock: Path) -> None:
    packages = re.findall(r"^[A-Za-z0-9][^\n]*(?:\n    [^\n]*)*", lock.read_text(), re.MULTILINE)
    assert packages
    for package in packages:
        assert re.match(r"[A-Za-z0-9._-]+==\S+", package), package
        assert "--hash=sha256:" in package, package


def test_make_names_pytorchs_own_index_by_default() -> None:
    done = subprocess.run(
        ["make", "-pn", "help"],
        cwd=INSTALL.parents[2],
        capture_output=True,
        text=True,
        check=True,
        env={name: value for name, value in os.environ.items() if name != "TORCH_INDEX"},
    )
    assert "\nTORCH_INDEX = https://download.pytorch.org/whl/cpu\n" in done.stdout
