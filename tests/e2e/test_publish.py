"""``headrace model publish`` and ``unpublish`` as people type them."""

import os
from pathlib import Path
from typing import Any

import pytest

from tests.support.models import TOKENIZER, safetensors
from tests.support.stack import Stack, headrace


@pytest.fixture
def files(tmp_path: Path) -> Path:
    directory = tmp_path / "model"
    directory.mkdir()
    (directory / "config.json").write_text('{"max_position_embeddings": 64}')
    (directory / "tokenizer.json").write_text(TOKENIZER)
    (directory / "model.safetensors").write_bytes(safetensors({"a": os.urandom(100_000)}))
    return directory


def publish(stack: Stack, *arguments: str) -> dict[str, Any]:
    made: dict[str, Any] = stack.cli_json("model", "publish", "pub", "--engine", "simulated", *arguments)
    return made


def versions(stack: Stack) -> dict[str, list[str]]:
    models = stack.cli_json("model", "list")
    return {each["stable"]: [it["version"] for it in each["versions"]] for each in models if each["name"] == "pub"}


def refusal(stack: Stack, *arguments: str) -> str:
    done = headrace("model", *arguments, "--data-dir", str(stack.data_dir))
    assert done.returncode in (1, 2) and done.stdout == "" and "Traceback" not in done.stderr
    return " ".join(done.stderr.replace("│", " ").split())


def test_versions_are_published_once_and_their_parts_go_with_the_last_that_has_them(stack: Stack, files: Path) -> None:
    made = publish(stack, "--version", "v1", "--from", str(files))
    assert set(made["artifacts"]) == {"config.json", "tokenizer.json", "model.safetensors"}
    assert made["golden"]["text"], "the engine was asked"
    again = publish(stack, "--version", "v1", "--from", str(files))
    assert again["created_at_ms"] == made["created_at_ms"]
    (files / "model.safetensors").write_bytes(safetensors({"a": os.urandom(100_000)}))
    assert "never changes" in refusal(
        stack, "publish", "pub", "--engine", "simulated", "--version", "v1", "--from", str(files)
    )
    publish(stack, "--version", "v2", "--from", str(files), "--no-golden")
    assert versions(stack) == {"v1": ["v1", "v2"]}
    assert "serves v1" in refusal(stack, "unpublish", "pub", "--version", "v1")
    gone = stack.cli_json("model", "unpublish", "pub", "--version", "v2")
    assert gone["parts_deleted"] == 1, "what v1 has, too, stays"
    assert versions(stack) == {"v1": ["v1"]}
    assert publish(stack, "--version", "v3", "--from", str(files), "--no-golden", "--in-place")["path"] == str(files)


BAD: list[tuple[tuple[str, ...], str]] = [
    (("publish", "x"), "--version"),
    (("publish", "x", "--version", "v1"), "--from"),
    (("publish", "", "--version", "v1", "--engine", "simulated"), "empty"),
    (("publish", "x", "--version", "", "--engine", "simulated"), "empty"),
    (("publish", "x", "--version", "a@b", "--engine", "simulated"), "no @"),
    (("publish", "x", "--version", "v" * 65, "--engine", "simulated"), "at most 64"),
    (("publish", "x", "--version", "v1", "--from", "/no/such/directory"), "is not a directory"),
    (("publish", "x", "--version", "v1", "--from", "/etc/hostname"), "is not a directory"),
    (("publish", "x", "--version", "v1", "--from", "ftp://host/x"), "files are taken from"),
    (("publish", "x", "--version", "v1", "--from", "https://me:secret@host/x"), "no password"),
    (("publish", "x", "--version", "v1", "--in-place", "--store", "s3://b"), "nothing for --store"),
    (("publish", "x", "--version", "v1", "--engine", "simulated", "--context", "0"), "--context"),
    (("publish", "x", "--version", "v1", "--engine", "simulated", "--capabilities", "flying"), "--capabilities"),
    (("publish", "x", "--version", "v1", "--engine", "simulated", "--engine-argument", "x"), "NAME=VALUE"),
    (("publish", "x", "--version", "v1", "--engine", "simulated", "--engine-argument", "x=1"), "engine_arguments"),
    (
        ("publish", "x", "--version", "v1", "--engine", "simulated", "--engine-argument", "fails_to_start=true"),
        "no golden answer",
    ),
    (("unpublish", "x", "--version", "v1"), "no version v1"),
    (("unpublish", "x"), "--version"),
]


@pytest.mark.parametrize(("arguments", "reason"), BAD, ids=lambda value: str(value)[:60])
def test_bad_input_is_refused_in_words_and_changes_nothing(
    stack: Stack, arguments: tuple[str, ...], reason: str
) -> None:
    assert reason in refusal(stack, *arguments)
    assert "x" not in [each["name"] for each in stack.cli_json("model", "list")]


def test_arguments_that_run_code_are_refused(stack: Stack, files: Path) -> None:
    told = refusal(
        stack, "publish", "x", "--version", "v1", "--from", str(files), "--engine-argument", "trust-remote-code=true"
    )
    assert "trust_remote_code" in told


def test_a_directory_with_a_pickle_is_refused(stack: Stack, files: Path) -> None:
    (files / "pytorch_model.bin").write_bytes(b"")
    assert "may run code" in refusal(stack, "publish", "x", "--version", "v1", "--from", str(files))
