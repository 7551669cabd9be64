"""How a version counts tokens, in one line: its files, and the token ids that the code which serves makes of probes.

Equal files have counted differently: another release of a library, white space of a template. So publisher, gateway
and worker each count the probes by what they count requests with, and compare. And each request's own ids are compared
once more before its first token (``PromptDigest``).
"""

import hashlib
import json
from array import array
from collections.abc import Iterable, Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec

from contracts.messages.records import Manifest
from contracts.probes import CHATS, TEXTS, Probe

PROBED_AT = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC).replace(tzinfo=None)
"""The time that a template is told while it is probed: some write the date."""


def probes(manifest: Manifest) -> Iterator[Probe]:
    """Those that a version is tried with: chats where it serves any."""
    yield from map(Probe, TEXTS)
    if "chat/completions" in manifest.endpoints:
        yield from CHATS


def of(directory: Path, counted: Iterable[Sequence[int] | None]) -> str:
    """The fingerprint, 64 hexadecimal digits, of the files in ``directory`` and the ids of ``probes`` in their order.

    None stands for a probe that the template refuses.
    """
    ids = hashlib.sha256()
    for each in counted:
        ids.update(b"refused" if each is None else msgspec.json.encode(list(each)))
        ids.update(b"\n")
    parts = {
        "tokenizer": hashlib.sha256((directory / "tokenizer.json").read_bytes()).hexdigest(),
        "settings": {name: value for name, value in settings(directory).items() if _counts(name)},
        "added_tokens": _json(directory / "added_tokens.json"),
        "chat_template": chat_template(directory),
        "probes": ids.hexdigest(),
    }
    return hashlib.sha256(msgspec.json.encode(parts, order="deterministic")).hexdigest()


def settings(directory: Path) -> dict[str, Any]:
    """What ``tokenizer_config.json`` says; nothing where there is none."""
    return _json(directory / "tokenizer_config.json")


def chat_template(directory: Path) -> str | None:
    """The source of the model's chat template; None where it has none (a completion model)."""
    if (separate := directory / "chat_template.jinja").is_file():
        return separate.read_text(encoding="utf-8")
    found = settings(directory).get("chat_template")
    if isinstance(found, list):  # several by name, as older models have them
        found = next((entry["template"] for entry in found if entry.get("name") == "default"), None)
    return found if isinstance(found, str) else None


def special_tokens(settings: dict[str, Any]) -> dict[str, str]:
    """Text of each special token by its name, such as ``eos_token``: what a template may write."""
    found = {}
    for name, value in settings.items():
        if name.endswith("_token"):
            text = value.get("content") if isinstance(value, dict) else value
            if isinstance(text, str):
                found[name] = text
    return found


class PromptDigest:
    """Of a request's prompts as token ids, each with its length, in their order; the same where they are the same."""

    def __init__(self) -> None:
        self._hash = hashlib.blake2b(digest_size=16)

    def add(self, ids: Sequence[int]) -> None:
        """One more prompt; ids below 2^32. 80 us for 10,000 ids."""
        self._hash.update(len(ids).to_bytes(8, "little"))
        self._hash.update(array("I", ids).tobytes())

    def add_piece(self, text: bytes) -> None:
        """Of a prompt whose tokens are no numbers."""
        self._hash.update(text)

    def end_pieces(self, length: int) -> None:
        """Such a prompt is whole, and has so many tokens."""
        self._hash.update(length.to_bytes(8, "little"))

    def hex(self) -> str:
        """32 digits."""
        return self._hash.hexdigest()


def digest(prompts: Iterable[Sequence[int]]) -> str:
    """Of all prompts of a request."""
    made = PromptDigest()
    for ids in prompts:
        made.add(ids)
    return made.hex()


def _counts(name: str) -> bool:
    """Whether a setting says how tokens are made: special and added ones, and where they are put."""
    return name.endswith(("_token", "_tokens", "_tokens_decoder")) or name.startswith("add_")


def _json(file: Path) -> dict[str, Any]:
    found = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    return found if isinstance(found, dict) else {}
