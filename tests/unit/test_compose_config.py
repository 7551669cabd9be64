"""The data directory and how commands find a stack."""

import stat
from pathlib import Path

import pytest

from compose.stack.data_dir import ComposeError, DataDir, Run, find_target

RUN = Run(
    url="http://127.0.0.1:1",
    admin_url="http://127.0.0.1:6",
    gateway_urls=["http://127.0.0.1:2"],
    metrics_urls={"gateway": ["http://127.0.0.1:3/metrics"]},
    nats_url="nats://operator:secret@127.0.0.1:4",
    key="hr_a",
    admin_key="hr_b",
    pids={"gateway": [1], "scheduler": [2], "worker": [3], "ledger": [4], "nats": [5]},
)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def prepared(path: Path) -> DataDir:
    directory = DataDir(path)
    directory.prepare()
    return directory


def test_secrets_outlive_a_restart_and_are_private(tmp_path: Path) -> None:
    directory = prepared(tmp_path / "data")
    first = directory.secrets()
    pepper = directory.pepper.read_bytes()

    again = prepared(tmp_path / "data")

    assert again.secrets() == first
    assert again.pepper.read_bytes() == pepper
    assert len(first.key) == len("hr_") + 43 and first.key.startswith("hr_") and first.key != first.admin_key
    assert mode(directory.pepper) == mode(directory.path / "secrets.json") == 0o600
    assert mode(directory.path) == 0o700


def test_damaged_secrets_are_told_not_replaced(tmp_path: Path) -> None:
    directory = prepared(tmp_path)
    (tmp_path / "secrets.json").write_text("{")
    with pytest.raises(ComposeError, match="damaged"):
        directory.secrets()
    assert (tmp_path / "secrets.json").read_text() == "{"


def test_run_json_is_private_and_round_trips(tmp_path: Path) -> None:
    directory = prepared(tmp_path)
    directory.write_run(RUN)
    assert directory.read_run() == RUN
    assert mode(directory.run) == 0o600
    directory.remove_run()
    directory.remove_run()
    with pytest.raises(ComposeError, match="no stack is running"):
        directory.read_run()


def test_a_second_stack_in_the_same_directory_is_refused(tmp_path: Path) -> None:
    directory = prepared(tmp_path)
    directory.lock()
    with pytest.raises(ComposeError, match="another stack is running"):
        DataDir(tmp_path).lock()


def test_a_file_in_the_place_of_the_directory_is_refused(tmp_path: Path) -> None:
    (tmp_path / "data").write_text("")
    with pytest.raises(ComposeError, match="cannot be used"):
        DataDir(tmp_path / "data").prepare()


def test_the_option_comes_before_the_environment(tmp_path: Path) -> None:
    """The pepper always belongs to the same stack as the URL; else new keys would never work."""
    directory = prepared(tmp_path)
    directory.write_run(RUN)
    remote = {"HEADRACE_NATS_URL": "nats://elsewhere:4222", "HEADRACE_DATA_DIR": str(tmp_path)}

    here = find_target(tmp_path, remote)
    assert (here.nats_url, here.pepper) == (RUN.nats_url, directory.pepper)
    there = find_target(None, remote)
    assert (there.nats_url, there.pepper) == ("nats://elsewhere:4222", None)
    assert find_target(None, remote | {"HEADRACE_PEPPER_FILE": "/p"}).pepper == Path("/p")
    assert find_target(None, {"HEADRACE_DATA_DIR": str(tmp_path)}) == here
