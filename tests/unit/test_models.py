"""What `compose.stack.models` promises without converting: names, hashes, versions, the chat template."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jinja2
import pytest
from jinja2.sandbox import ImmutableSandboxedEnvironment

from compose.stack import models
from contracts import fingerprint
from tests.support.models import TOKENIZER

# The template inside the GGUF file of SmolLM2-135M-Instruct.
ORIGINAL_TEMPLATE = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n' }}"
    "{% endif %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]
CALL = {
    "role": "assistant",
    "content": None,
    "tool_calls": [{"id": "1", "type": "function", "function": {"name": "weather", "arguments": {"in": "Zürich"}}}],
}


def no_progress(line: str) -> None:
    """Take a progress line and do nothing with it."""


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def template(text: str) -> jinja2.Template:
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    environment.filters["tojson"] = lambda value: json.dumps(value, ensure_ascii=False)
    return environment.from_string(text)


def write_model(path: Path, weights: bytes = b"weights") -> Path:
    path.mkdir(parents=True)
    (path / "config.json").write_text(json.dumps({"max_position_embeddings": 512}))
    (path / "tokenizer.json").write_text(TOKENIZER)
    (path / "chat_template.jinja").write_text("{{ messages }}")
    (path / "model.safetensors").write_bytes(weights)
    (path / "README.md").write_text("not part of the model")
    return path


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADRACE_CACHE", str(tmp_path / "cache"))


@pytest.mark.parametrize("generate", [True, False])
@pytest.mark.parametrize(
    "messages",
    [
        [],
        [user("What is the capital of France?")],
        [{"role": "system", "content": "Be brief."}, user("héllo 😀\n\n\tx ")],
        [user("a"), {"role": "assistant", "content": "b"}, user(" c ")],
        [user("a"), {"role": "system", "content": "in the middle"}, user("")],
    ],
)
def test_template_without_tools_renders_as_the_original(messages: list[Any], generate: bool) -> None:
    expected = template(ORIGINAL_TEMPLATE).render(messages=messages, add_generation_prompt=generate)
    none: list[Any] = []
    for tools in (None, none):
        assert expected == template(models.CHAT_TEMPLATE).render(
            messages=messages, tools=tools, add_generation_prompt=generate
        )


def test_template_with_tools_speaks_hermes() -> None:
    messages = [user("w?"), CALL, {"role": "tool", "tool_call_id": "1", "content": "sunny"}]
    text = template(models.CHAT_TEMPLATE).render(messages=messages, tools=TOOLS, add_generation_prompt=True)
    assert text.startswith("<|im_start|>system\nYou are a helpful AI assistant named SmolLM")
    assert f"<tools>\n{json.dumps(TOOLS[0])}\n</tools>" in text
    assert text.endswith(
        '<|im_start|>assistant\n<tool_call>\n{"name": "weather", "arguments": {"in": "Zürich"}}\n</tool_call>'
        "<|im_end|>\n<|im_start|>user\n<tool_response>\nsunny\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    )


def test_own_system_message_stays_with_tools() -> None:
    messages = [{"role": "system", "content": "Be brief."}, user("w?")]
    text = template(models.CHAT_TEMPLATE).render(messages=messages, tools=TOOLS)
    assert text.startswith("<|im_start|>system\nBe brief.\n\n# Tools\n")
    assert text.count("<|im_start|>system") == 1


def test_a_directory_is_described_as_it_stands(tmp_path: Path) -> None:
    path = write_model(tmp_path / "mine")
    model = models.prepare(str(path), progress=no_progress)
    assert (model.name, model.path, model.context) == ("mine", str(path.resolve()), 512)
    assert set(model.artifacts) == {"chat_template.jinja", "config.json", "model.safetensors", "tokenizer.json"}
    assert sorted(file.name for file in path.iterdir()) == sorted([*model.artifacts, "README.md"])
    assert models.prepare(str(path), progress=no_progress) == model


def test_changed_weights_give_another_version_and_the_same_fingerprint(tmp_path: Path) -> None:
    path = write_model(tmp_path / "mine")
    before = models.prepare(str(path), progress=no_progress)
    (path / "model.safetensors").write_bytes(b"other weights")
    after = models.prepare(str(path), progress=no_progress)
    assert before.version != after.version
    assert before.tokenizer_fingerprint == after.tokenizer_fingerprint


def test_a_damaged_hash_cache_is_made_anew(tmp_path: Path) -> None:
    path = write_model(tmp_path / "mine")
    before = models.prepare(str(path), progress=no_progress)
    for memo in (tmp_path / "cache" / "hashes").iterdir():
        memo.write_text("{")
    assert models.prepare(str(path), progress=no_progress) == before


def test_a_hub_snapshot_is_named_by_its_model(tmp_path: Path) -> None:
    path = write_model(tmp_path / "models--owner--Some-Model" / "snapshots" / "0123abcd")
    assert models.prepare(str(path), progress=no_progress).name == "Some-Model"


def test_template_inside_the_tokenizer_config_is_found(tmp_path: Path) -> None:
    path = write_model(tmp_path / "mine")
    (path / "chat_template.jinja").unlink()
    assert fingerprint.chat_template(path) is None
    (path / "tokenizer_config.json").write_text(json.dumps({"chat_template": "T"}))
    assert fingerprint.chat_template(path) == "T"


@pytest.mark.parametrize("lost", ["config.json", "tokenizer.json", "model.safetensors"])
def test_an_incomplete_directory_is_refused_with_what_is_missing(tmp_path: Path, lost: str) -> None:
    path = write_model(tmp_path / "mine")
    (path / lost).unlink()
    with pytest.raises(models.ModelError, match=r"safetensors" if lost.startswith("model") else lost):
        models.prepare(str(path), progress=no_progress)


def test_a_tokenizer_that_nobody_can_count_by_is_refused(tmp_path: Path) -> None:
    path = write_model(tmp_path / "mine")
    (path / "tokenizer.json").write_text('{"version": "1.0"}')
    with pytest.raises(models.ModelError, match="cannot count by"):
        models.prepare(str(path), progress=no_progress)


def test_an_unknown_name_is_refused_with_what_is_possible() -> None:
    with pytest.raises(models.ModelError, match=models.DEFAULT_MODEL):
        models.prepare("gpt-9", progress=no_progress)
