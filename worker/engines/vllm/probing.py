"""The fingerprint of a version by what serves it: vLLM's own application renders and tokenizes the probes."""

import contextvars
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime, tzinfo
from pathlib import Path

import msgspec

from contracts import fingerprint
from contracts.messages.records import Manifest
from contracts.probes import Probe
from worker.engines.vllm.asgi import Application, AsgiCall


async def fingerprint_of(application: Application, manifest: Manifest) -> str:
    """As ``contracts.fingerprint.of``. Some 60 calls of its ``/tokenize``, before anything else is rendered."""
    with _at_probing_time():
        counted = [await _token_ids(application, manifest.name, probe) for probe in fingerprint.probes(manifest)]
    return fingerprint.of(Path(manifest.path), counted)


class _Tokens(msgspec.Struct):
    tokens: list[int]


async def _token_ids(application: Application, model: str, probe: Probe) -> list[int] | None:
    """None: the template refuses it."""
    fields = {"prompt": probe.text} if probe.chat is None else probe.chat
    body = msgspec.json.encode({"model": model, **fields})
    call = AsgiCall(application, "/tokenize", body, headers={}, context=contextvars.copy_context())
    try:
        status, answer = await call.status(), await call.body()
    finally:
        await call.close()
    return msgspec.json.decode(answer, type=_Tokens).tokens if status == 200 else None


class _Probed(datetime):
    """A clock that stands."""

    @classmethod
    def now(cls, tz: tzinfo | None = None) -> "_Probed":
        return cls.fromisoformat(fingerprint.PROBED_AT.isoformat())


@contextmanager
def _at_probing_time() -> Iterator[None]:
    """Templates that write the time of day write that one (``strftime_now``, which is transformers')."""
    from transformers.utils import chat_template_utils

    before, chat_template_utils.datetime = chat_template_utils.datetime, _Probed
    try:
        yield
    finally:
        chat_template_utils.datetime = before
