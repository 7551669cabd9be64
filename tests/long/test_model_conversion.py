"""The default model is converted from its source once, and always to the same bytes."""

from pathlib import Path

import pytest

from compose.stack import models
from contracts import fingerprint


def test_two_conversions_are_equal_byte_for_byte(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The default model is a function of its source: any machine's copy has the same version."""
    pytest.importorskip("torch", reason="the CPU engine is not installed")
    pytest.importorskip("gguf", reason="the CPU engine is not installed")
    monkeypatch.setenv("HEADRACE_CACHE", str(tmp_path / "cache"))
    steps: list[str] = []
    first = models.prepare("SmolLM2-135M-Instruct", progress=steps.append)
    again = models.prepare(models.DEFAULT_MODEL, progress=print)
    monkeypatch.setenv("HEADRACE_CACHE", str(tmp_path / "other"))
    second = models.prepare(models.DEFAULT_MODEL, progress=print)
    assert len(steps) >= 3
    assert first == again
    assert (first.artifacts, first.version, first.context) == (second.artifacts, second.version, 8192)
    assert fingerprint.chat_template(Path(first.path)) == models.CHAT_TEMPLATE
