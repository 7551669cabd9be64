"""A text that must be in no file: said in every place of a request where callers put what is theirs, and looked for."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx

from tests.support.stack import Stack

BODIES_LIE_IN = ("REQUESTS", "WORK", "BODIES")
"""Streams of the bus that hold the bodies of open requests; what ended is freed when the server compacts a block."""


def say(stack: Stack, text: str, *, engine: str, name: str) -> int:
    """Ask the model ``name`` by every API, well and badly, with ``text`` in what its caller wrote; how often."""
    model = {"model": name}
    asked = 0
    with stack.client() as client:
        for path, body in (*_good(text, engine), *_bad(text)):
            for stream in (False, True):
                given = json.dumps(model | body | ({"stream": True} if stream else {}))
                client.post(path, content=given, headers={"content-type": "application/json"})
                asked += 1
        for content in (f'{{"messages": "{text}', f'{{"model": "{name}", "prompt": ["{text}"}}', text):
            client.post("/v1/chat/completions", content=content)
            asked += 1
    for key in (f"hr_{text}{'x' * 20}", text):
        httpx.post(
            f"{stack.run.url}/v1/chat/completions",
            json=model | {"messages": [{"role": "user", "content": text}]},
            headers={"authorization": f"Bearer {key}"},
            trust_env=False,
        )
    stack.cli("submit", name, text, "--max-tokens", "2")
    return asked + 3


def _good(text: str, engine: str) -> Iterator[tuple[str, dict[str, Any]]]:
    said = [{"role": "system", "content": f"You are {text}."}, {"role": "user", "content": f"Say {text}!"}]
    tool = {"type": "function", "function": {"name": "f", "description": text, "parameters": {"type": "object"}}}
    chat: dict[str, Any] = {"messages": said, "max_tokens": 4}
    yield "/v1/chat/completions", chat
    yield "/v1/chat/completions", chat | {"tools": [tool], "stop": [text], "user": text, "metadata": {"a": text}}
    yield "/v1/chat/completions", {"messages": [{"role": "user", "content": f"{text} " * 8_000}], "max_tokens": 2}
    yield "/v1/completions", {"prompt": [f"{text} one", f"{text} two"], "max_tokens": 4, "echo": True}
    yield "/v1/responses", {"input": text, "instructions": text, "max_output_tokens": 4}
    yield "/v1/messages", {"messages": said[1:], "system": text, "max_tokens": 4}
    yield "/v1/messages/count_tokens", {"messages": said[1:], "system": text}
    yield "/v1/responses/input_tokens", {"input": text, "instructions": text}
    if engine == "simulated":
        yield "/v1/chat/completions", chat | {"simulate": {"tokens": [f"{text} ", "is", f" {text}"]}}
        yield "/v1/chat/completions", chat | {"simulate": {"fail_after": 0}}
        yield "/v1/chat/completions", chat | {"simulate": {"tokens": [text] * 4, "fail_after": 2}}


def _bad(text: str) -> Iterator[tuple[str, dict[str, Any]]]:
    said = [{"role": "user", "content": text}]
    schema = {"type": "object", "properties": {text: {"type": "string", "pattern": f"({text}"}}}
    named = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}
    for change in (
        {"max_tokens": 10**9},
        {"temperature": text},
        {"stop": [text] * 40},
        {"logit_bias": {text: 1}},
        {"response_format": named},
        {"response_format": {"type": text}},
        {"structured_outputs": {"regex": f"({text}"}},
        {"structured_outputs": {"grammar": f"root ::= {text} ("}},
        {"tools": [{"type": "function", "function": {"name": f"{text} {text}"}}]},
        {"tool_choice": {"type": "function", "function": {"name": text}}},
        {"chat_template_kwargs": {"x": [text]}},
        {"messages": [{"role": text, "content": text}]},
        {"messages": [{"role": "user", "content": [{"type": text, "text": text}]}]},
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": text}}]}]},
    ):
        yield "/v1/chat/completions", {"messages": said, "max_tokens": 2} | change
    yield "/v1/completions", {"prompt": {"a": text}}
    yield "/v1/embeddings", {"input": text}
    yield "/v1/responses", {"input": [{"type": text, "content": text}], "previous_response_id": text}
    yield "/v1/messages", {"messages": said, "max_tokens": text}


def files_with(folder: Path, text: str) -> list[str]:
    """Files below ``folder`` that hold ``text``, but for where bodies must lie."""
    wanted = text.encode()
    return [
        str(path.relative_to(folder))
        for path in sorted(folder.rglob("*"))
        if path.is_file() and not set(path.parts) & set(BODIES_LIE_IN) and wanted in path.read_bytes()
    ]
