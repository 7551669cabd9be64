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


# Bounds -----------------------------------------------------------------------------------------------------


def _unbounded(kind: msgspec.inspect.Type, path: str) -> Iterator[str]:
    """Places of ``kind`` that a sender may make as long as it likes."""
    info = msgspec.inspect
    match kind:
        case info.StrType(max_length=None) | info.BytesType(max_length=None):
            yield path
        case info.ListType(item_type=item) | info.VarTupleType(item_type=item):
            if kind.max_length is None:
                yield path
            yield from _unbounded(item, f"{path}[]")
        case info.DictType(key_type=key, value_type=value):
            if kind.max_length is None:
                yield path
            yield from _unbounded(key, f"{path} key")
            if not isinstance(value, info.AnyType):
                yield from _unbounded(value, f"{path} value")
        case info.UnionType(types=kinds):
            for each in kinds:
                yield from _unbounded(each, path)
        case info.StructType(fields=fields):
            for field in fields:
                yield from _unbounded(field.type, f"{path}.{field.name}")
        case info.AnyType():
            yield path


@pytest.mark.parametrize("name", MESSAGES)
def test_every_field_of_every_message_is_bounded_by_its_type(name: str) -> None:
    """Raw JSON has its message's bound: it is as long as the bus carries at most."""
    assert list(_unbounded(msgspec.inspect.type_info(MESSAGES[name]), name)) == []


HOSTILE = {
    "an id of 4 MB": b'{"request_id": "%s"}' % (b"x" * 4_000_000),
    "white space": b'{"request_id": "a"%s}' % (b" " * 5000),
    "an unknown field": b'{"request_id": "a", "x": "%s"}' % (b"x" * 5000),
    "a deep unknown field": b'{"request_id": "a", "x": %s}' % (b"[" * 1500 + b"]" * 1500),
    "a lone byte": b'{"request_id": "\xff"}',
    "a surrogate": b'{"request_id": "\\ud800"}',
    "nothing": b"",
    "a number": b"1e400",
    "digits": b'{"request_id": %s}' % (b"9" * 4000),
}


@pytest.mark.parametrize("name", ["CancelRequest", "StatusRequest", "FramesRequest", "ExplainQuery"])
@pytest.mark.parametrize("sent", HOSTILE.values(), ids=list(HOSTILE))
def test_what_a_tenant_sends_to_grow_or_to_break_is_no_message(name: str, sent: bytes) -> None:
    with pytest.raises(msgspec.MsgspecError):
        Codec[Message](MESSAGES[name]).decode(sent)


def test_a_reply_that_would_be_echoed_in_each_frame_is_short() -> None:
    sent = {"endpoint": "chat/completions", "reply": {"subject": "reply.v1.t.c", "stream": "s" * 65}, "body": {}}
    with pytest.raises(msgspec.ValidationError, match="length"):
        Codec[Message](MESSAGES["SubmitRequest"]).decode(json.dumps(sent).encode())
