"""Messages stay readable: what was encoded once is decoded by every later version.

``messages.v1.jsonl`` holds what each message looked like: with its required fields alone, and with all. Lines are added
there, for a new message or field, and never changed.
"""

import importlib
import json
import pkgutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from contracts import messages
from contracts.messages.base import Codec, Message

SAMPLES = [json.loads(line) for line in (Path(__file__).parent / "messages.v1.jsonl").read_text().splitlines()]


def _heirs(kind: type[Message]) -> list[type[Message]]:
    """Direct ones among the messages: other packages may inherit for their own ends."""
    return [heir for heir in kind.__subclasses__() if heir.__module__.startswith(messages.__name__)]


def _below(kind: type[Message]) -> Iterator[type[Message]]:
    for below in _heirs(kind):
        yield below
        yield from _below(below)


for _module in pkgutil.iter_modules(messages.__path__):
    importlib.import_module(f"{messages.__name__}.{_module.name}")
MESSAGES = {kind.__name__: kind for kind in _below(Message) if not _heirs(kind)}
"""But for the bases of several, which travel nowhere."""


def test_every_message_has_a_sample() -> None:
    assert MESSAGES.keys() == {sample["message"] for sample in SAMPLES}


@pytest.mark.parametrize("sample", SAMPLES, ids=lambda sample: sample["message"])
def test_a_sample_is_decoded_and_says_the_same_when_encoded(sample: dict[str, Any]) -> None:
    codec = Codec[Message](MESSAGES[sample["message"]])
    unknown = sample["json"] | {"of_tomorrow": 1}
    assert _within(sample["json"], json.loads(codec.encode(codec.decode(json.dumps(unknown).encode()))))


def _within(old: Any, new: Any) -> bool:
    """Whether ``new`` says what ``old`` says; it may say more."""
    if isinstance(old, dict):
        return isinstance(new, dict) and all(name in new and _within(old[name], new[name]) for name in old)
    if isinstance(old, list):
        return isinstance(new, list) and len(old) == len(new) and all(map(_within, old, new))
    return bool(old == new)


def test_a_message_without_a_required_field_is_none() -> None:
    with pytest.raises(msgspec.ValidationError, match="stream_owner"):
        Codec[Message](MESSAGES["StreamOwnerHeartbeat"]).decode(b"{}")
