"""The AsyncAPI document says what the code does: every subject, every message, and who may send it."""

import importlib
import inspect
import json
import pkgutil
from collections.abc import Iterator
from typing import Any

from contracts import asyncapi, messages, permissions, subjects
from contracts.asyncapi import CHANNELS, Channel
from contracts.messages.base import Message

NO_CHANNEL = {
    *(
        "encode",
        "encode_or_empty",
        "decode",
        "form",
        "is_reply",
        "tenant_and_model_of_submit",
        "tenant_of_last_token",
        "scope_of_usage",
    ),
    *(
        "requests_of",
        "worker_heartbeats_of",
        "attempts_of_request",
        "bodies_of",
        "request_of_body",
        "work_of",
        "attempts_of",
        "cancels_of",
        "statuses_of",
        "frames_of",
        "tenant_reply_prefix",
    ),
    *("is_gateway", "is_gateway_cancel", "gateway_stream_owner", "tenant_stream_owner", "stream_owner_heartbeat"),
    "action_of_admin_call",
}
"""Functions that make no subject of their own: wildcards over one, parts of one."""


def references(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        if isinstance(value.get("$ref"), str):
            yield value["$ref"]
        for item in value.values():
            yield from references(item)
    elif isinstance(value, list):
        for item in value:
            yield from references(item)


def resolved(document: Any, reference: str) -> Any:
    found = document
    for step in reference.removeprefix("#/").split("/"):
        found = found[step]
    return found


def test_it_is_json_and_every_reference_leads_somewhere() -> None:
    document = json.loads(json.dumps(asyncapi.document()))
    assert document["asyncapi"] == "3.0.0"
    for reference in references(document):
        assert resolved(document, reference) is not None
    for operation in document["operations"].values():
        channel = operation["channel"]["$ref"]
        assert all(message["$ref"].startswith(f"{channel}/messages/") for message in operation["messages"])


def test_every_subject_has_its_channel() -> None:
    functions = {name for name, _ in inspect.getmembers(subjects, inspect.isfunction) if not name.startswith("_")}
    described = {channel.subject.__name__ for channel in CHANNELS if not isinstance(channel.subject, str)}
    assert functions - NO_CHANNEL - described == set()


def test_channels_have_a_summary_and_one_name_each() -> None:
    assert len({channel.name for channel in CHANNELS}) == len(CHANNELS)
    for name, channel in asyncapi.document()["channels"].items():
        assert channel["summary"], name


def test_every_message_of_the_bus_is_described() -> None:
    kinds = {
        kind
        for part in pkgutil.iter_modules(messages.__path__)
        for _, kind in inspect.getmembers(importlib.import_module(f"contracts.messages.{part.name}"), inspect.isclass)
        if issubclass(kind, Message) and not kind.__subclasses__()
    }
    missing = {kind.__name__ for kind in kinds} - set(asyncapi.document()["components"]["schemas"])
    assert missing == set()


def test_who_sends_may_publish_and_who_receives_may_subscribe() -> None:
    """The document and the permissions agree."""
    for channel in CHANNELS:
        address = example(channel)
        for party in channel.senders:
            assert allowed(granted(party).publish, address), f"{party} sends {channel.name}"
        for party in channel.receivers:
            if not channel.stream:
                assert allowed(granted(party).subscribe, address), f"{party} receives {channel.name}"


def example(channel: Channel) -> str:
    subject = channel.subject
    text = subject if isinstance(subject, str) else subjects.form(subject, lambda parameter: f"{{{parameter}}}")
    tokens = {"{tenant}": "T1", "{worker}": "worker-0", "{gateway}": "gateway-0", "{observer}": "scheduler-0"}
    return ".".join(tokens.get(token, "x" if token.startswith("{") else token) for token in text.split("."))


def granted(party: str) -> permissions.Permissions:
    if party == "service":
        return permissions.of_tenant("T1")
    assert party in permissions.ROLES
    return permissions.of_user(f"{party}-0")


def allowed(patterns: tuple[str, ...], subject: str) -> bool:
    return any(matches(pattern.split("."), subject.split(".")) for pattern in patterns)


def matches(pattern: list[str], tokens: list[str]) -> bool:
    for position, part in enumerate(pattern):
        if part == ">":
            return len(tokens) > position
        if position >= len(tokens) or part not in ("*", tokens[position]):
            return False
    return len(pattern) == len(tokens)
