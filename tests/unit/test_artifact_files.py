"""What may be published: a model's own files, and nothing that runs code or leads elsewhere."""

import json
import random
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from contracts.artifacts.files import BadArtifact, check_path, check_safetensors, check_shards, publishable
from contracts.artifacts.stores import file_system
from tests.support.models import safetensors


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text('{"auto_map": null}')
    (tmp_path / "tokenizer.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(safetensors({"a": b"12", "b": b"3"}))
    (tmp_path / "README.md").write_text("of no use to an engine")
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git" / "hook.pkl").write_text("hidden")
    return tmp_path


def test_a_models_files_and_no_others(model: Path) -> None:
    (model / "1_Pooling").mkdir()
    (model / "1_Pooling" / "config.json").write_text("{}")
    assert set(publishable(model)) == {"config.json", "tokenizer.json", "model.safetensors", "1_Pooling/config.json"}


SPOILED: dict[str, tuple[Callable[[Path], object], str]] = {
    "a pickle": (lambda it: (it / "pytorch_model.bin").write_bytes(b""), "may run code"),
    "a pickle in capitals": (lambda it: (it / "X.PT").write_bytes(b""), "may run code"),
    "a pickle in a folder": (lambda it: (it / ".git").rename(it / "a"), "may run code"),
    "python": (lambda it: (it / "modeling.py").write_text(""), "is code"),
    "a link": (lambda it: (it / "passwd.json").symlink_to("/etc/passwd"), "is a link"),
    "a link to a folder": (lambda it: (it / "etc").symlink_to("/etc"), "is a link"),
    "code named in the config": (
        lambda it: (it / "config.json").write_text('{"auto_map": {"AutoModel": "x.Y"}}'),
        "names code",
    ),
    "code named deep": (lambda it: (it / "x.json").write_text('{"a": [{"custom_pipelines": {"b": 1}}]}'), "names code"),
    "no config": (lambda it: (it / "config.json").unlink(), r"config\.json missing"),
    "no weights": (lambda it: (it / "model.safetensors").unlink(), "safetensors missing"),
    "no JSON": (lambda it: (it / "config.json").write_text("{"), "is no JSON"),
    "JSON without an end": (lambda it: (it / "config.json").write_text("[" * 100_000), "is no JSON"),
    "weights that are cut off": (
        lambda it: (it / "model.safetensors").write_bytes(safetensors({"a": b"12"})[:-1]),
        "cut off",
    ),
    "weights that are empty": (lambda it: (it / "model.safetensors").write_bytes(b""), "no safetensors file"),
    "weights that are text": (
        lambda it: (it / "model.safetensors").write_text("version https://git-lfs"),
        "no safetensors",
    ),
}


@pytest.mark.parametrize("what", SPOILED)
def test_what_is_refused(model: Path, what: str) -> None:
    spoil, says = SPOILED[what]
    spoil(model)
    with pytest.raises(BadArtifact, match=says):
        publishable(model)


def test_a_shard_that_an_index_names_must_be_there(model: Path) -> None:
    (model / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "model-2.safetensors"}}))
    with pytest.raises(BadArtifact, match=r"model-2\.safetensors, which model\.safetensors\.index\.json names"):
        check_shards(publishable(model))


@pytest.mark.parametrize("path", ["", "/etc/passwd", "../x", "a/../../x", "a//b", "./a", "a\\b", "a\nb", "x" * 256])
def test_paths_that_no_manifest_may_have(path: str) -> None:
    with pytest.raises(BadArtifact):
        check_path(path)


HEADERS = {
    "a hole": {"a": {"dtype": "U8", "shape": [1], "data_offsets": [1, 2]}},
    "an overlap": {
        "a": {"dtype": "U8", "shape": [2], "data_offsets": [0, 2]},
        "b": {"dtype": "U8", "shape": [1], "data_offsets": [1, 2]},
    },
    "another size than its shape": {"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 2]}},
    "a negative shape": {"a": {"dtype": "U8", "shape": [-1, -2], "data_offsets": [0, 2]}},
    "no offsets": {"a": {"dtype": "U8", "shape": [2]}},
    "a list": [],
}


@pytest.mark.parametrize("what", HEADERS)
def test_a_header_that_lies(tmp_path: Path, what: str) -> None:
    encoded = json.dumps(HEADERS[what]).encode()
    file = tmp_path / "model.safetensors"
    file.write_bytes(len(encoded).to_bytes(8, "little") + encoded + b"12")
    with pytest.raises(BadArtifact):
        check_safetensors(file, file.name)


def test_any_cut_and_any_flip_of_a_header_is_refused_or_harmless(tmp_path: Path) -> None:
    """A refusal, never another error; no file that is shorter passes."""
    file, whole, drawn = tmp_path / "m.safetensors", safetensors({"a": bytes(9), "b": bytes(30)}), random.Random(7)
    for size in range(len(whole)):
        file.write_bytes(whole[:size])
        with pytest.raises(BadArtifact):
            check_safetensors(file, file.name)
    for _ in range(2000):
        spoiled = bytearray(whole)
        spoiled[drawn.randrange(len(whole) - 39)] ^= 1 << drawn.randrange(8)
        file.write_bytes(spoiled)
        try:
            check_safetensors(file, file.name)
        except BadArtifact:
            continue


@pytest.mark.parametrize(
    ("url", "package"), [("s3://bucket/x", "s3fs"), ("S3://bucket/x", "s3fs"), ("gs://bucket/x", "gcsfs")]
)
def test_a_store_whose_package_is_missing_says_which(url: str, package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(BadArtifact, match=f"needs the package {package}: pip install {package}"):
        file_system(url)
