"""The data directory and how commands find a stack."""

import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from compose.stack.data_dir import ComposeError, DataDir, Run, find_target, read_peppers
from compose.stack.ports import Ports

RUN = Run(
    url="http://127.0.0.1:1",
    admin_url="http://127.0.0.1:6",
    gateway_urls=["http://127.0.0.1:2"],
    metrics_urls={"gateway": ["http://127.0.0.1:3/metrics"]},
    nats_url="nats://127.0.0.1:4",
    nats_seed_file="/nats/seeds/operator.seed",
    key="hr_a",
    admin_key="hr_b",
    pids={"gateway": [1], "scheduler": [2], "worker": [3], "ledger": [4], "nats": [5]},
)


@pytest.fixture(autouse=True)
def umask() -> Iterator[None]:
    """``prepare`` sets it for the whole process."""
    before = os.umask(0o022)
    yield
    os.umask(before)


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


def test_what_others_could_read_is_closed_to_them(tmp_path: Path) -> None:
    """A directory that was made by hand, or by an older version, with logs in it."""
    path = tmp_path / "data"
    prepared(path)
    log = path / "logs" / "worker-0.log"
    log.write_text("one line")
    for wide, bits in ((path, 0o755), (log, 0o644), (path / "pepper", 0o640)):
        wide.chmod(bits)
    said = DataDir(path).prepare()
    assert [mode(closed) for closed in (path, log, path / "pepper")] == [0o700, 0o600, 0o600]
    assert sorted(line.split(" ")[0] for line in said) == sorted(map(str, (path, log, path / "pepper")))
    assert DataDir(path).prepare() == []


def test_a_new_or_empty_directory_is_private_whatever_the_umask(tmp_path: Path) -> None:
    os.umask(0)
    (tmp_path / "empty").mkdir(mode=0o777)
    for path in (tmp_path / "empty", tmp_path / "deep" / "new"):
        DataDir(path).prepare()
        (path / "logs" / "log").write_text("")
        assert {mode(each) for each in (path, *path.iterdir()) if each.is_dir()} == {0o700}
        assert {mode(path / "pepper"), mode(path / "logs" / "log")} == {0o600}


def test_an_open_directory_of_something_else_is_left_alone(tmp_path: Path) -> None:
    """``--data-dir /tmp`` must not close /tmp."""
    (tmp_path / "somebodys").write_text("")
    tmp_path.chmod(0o755)
    with pytest.raises(ComposeError, match="other things"):
        DataDir(tmp_path).prepare()
    assert mode(tmp_path) == 0o755 and [each.name for each in tmp_path.iterdir()] == ["somebodys"]


def test_a_damaged_pepper_is_told(tmp_path: Path) -> None:
    directory = prepared(tmp_path / "data")
    for text, reason in (
        ("", "empty"),
        ("\n \n", "empty"),
        ("short", "at least 32"),
        ("a" * 32 + "\nb", "at least 32"),
    ):
        directory.pepper.write_text(text)
        with pytest.raises(ComposeError, match=reason):
            read_peppers(directory.pepper)


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
    assert here.credentials.seed_file == RUN.nats_seed_file
    there = find_target(None, remote)
    assert (there.nats_url, there.pepper) == ("nats://elsewhere:4222", None)
    assert find_target(None, remote | {"HEADRACE_PEPPER_FILE": "/p"}).pepper == Path("/p")
    assert find_target(None, {"HEADRACE_DATA_DIR": str(tmp_path)}) == here


def test_a_port_or_address_that_is_not_to_be_had_names_the_option_to_change() -> None:
    ours, theirs = Ports(), Ports()
    try:
        port = ours.free(shared=True)
        with pytest.raises(ComposeError, match="in use; choose another one with --admin-port"):
            theirs.take("127.0.0.1", port, shared=True, option="--admin-port")
        for address in ("203.0.113.9", "no.such.host.invalid"):
            with pytest.raises(ComposeError, match="is no address of this machine; choose another one with --host"):
                theirs.take(address, 0)
    finally:
        ours.close()
        theirs.close()
