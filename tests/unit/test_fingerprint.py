"""A tokenizer's fingerprint changes with all that changes how prompts are counted, and with nothing else."""

import json
from collections.abc import Callable
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import msgspec
import pytest

from contracts import fingerprint
from contracts.errors import HeadraceError
from contracts.messages.base import Endpoint
from contracts.messages.records import Manifest
from contracts.probes import CHATS, TEXTS
from contracts.service import telemetry
from contracts.simulated import measured, simulated_prompts
from gateway.apis.table import APIS
from gateway.prompt import chat_template, tokenizer
from gateway.prompt.token_counter import TokenCounter
from gateway.prompt.tokenizer import Tokenizer
from tests.support import failure_table
from tests.support.models import TOKENIZER
from tests.support.polling import metric

MANIFEST = Manifest(
    name="skewed",
    version="v1",
    engine="vllm",
    context=10_000,
    default_output_tokens=16,
    endpoints=("chat/completions",),
)
SETTINGS = {"bos_token": "a", "eos_token": {"content": "Hello"}, "add_bos_token": False, "transformers_version": "5.1"}
TEMPLATE = "{% for message in messages %}{{ message.role }} {{ message.content }}{% endfor %}{{ eos_token }}"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "tokenizer.json").write_text(TOKENIZER)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(SETTINGS))
    (tmp_path / "chat_template.jinja").write_text(TEMPLATE)
    return tmp_path


def of(directory: Path) -> str:
    return Tokenizer(MANIFEST, directory).fingerprint


def setting(**changes: object) -> Callable[[Path], object]:
    return lambda it: (it / "tokenizer_config.json").write_text(json.dumps(SETTINGS | changes))


def vocabulary(it: Path) -> None:
    (it / "tokenizer.json").write_text(TOKENIZER.replace('"Hello": 2, "user": 3', '"user": 2, "Hello": 3'))


HELLO = {"messages": [{"role": "user", "content": "Hello"}]}


async def digest_of(directory: Path, endpoint: Endpoint, fields: dict[str, Any]) -> str:
    counter = TokenCounter(msgspec.structs.replace(MANIFEST, path=str(directory)))
    await counter.ready()
    return (await counter.count(APIS[endpoint], fields, 100, "t")).digest


SKEWS: dict[str, Callable[[Path], object]] = {
    "two token ids swapped": vocabulary,
    "another special token": setting(eos_token="user"),
    "a special token more": setting(pad_token="user"),
    "added tokens in the settings": setting(added_tokens_decoder={"4": {"content": "<x>"}}),
    "added tokens in a file": lambda it: (it / "added_tokens.json").write_text('{"<x>": 4}'),
    "the start of a text is marked": setting(add_bos_token=True),
    "white space in the template": lambda it: (it / "chat_template.jinja").write_text(TEMPLATE + " "),
    "no template": lambda it: (it / "chat_template.jinja").unlink(),
    "a template that refuses": lambda it: (it / "chat_template.jinja").write_text("{{ raise_exception('no') }}"),
}


@pytest.mark.parametrize("skew", SKEWS)
def test_every_skew_gives_another_fingerprint(model: Path, skew: str) -> None:
    before = of(model)
    SKEWS[skew](model)
    assert of(model) != before


def test_what_changes_no_count_changes_no_fingerprint(model: Path) -> None:
    before = of(model)
    (model / "tokenizer_config.json").write_text(json.dumps(SETTINGS | {"transformers_version": "6"}, indent=4))
    (model / "README.md").write_text("new")
    assert of(model) == before


def test_equal_files_that_are_counted_otherwise_have_another_fingerprint(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As another release of a library did, by one token of white space for each message."""
    before, render = of(model), chat_template.ChatTemplate.render
    monkeypatch.setattr(
        chat_template.ChatTemplate, "render", lambda self, fields, **more: render(self, fields, **more) + " a"
    )
    assert of(model) != before


def test_every_probe_counts(model: Path) -> None:
    ids = [[number] for number, _ in enumerate([*TEXTS, *CHATS])]
    whole = fingerprint.of(model, ids)
    for number, _ in enumerate(ids):
        assert whole != fingerprint.of(model, [*ids[:number], None, *ids[number + 1 :]])


async def test_a_template_that_tells_the_time_has_one_fingerprint_and_no_digest(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (model / "chat_template.jinja").write_text("{{ strftime_now('%H:%M:%S %d') }}" + TEMPLATE)
    before = of(model)

    class Later(datetime):
        @classmethod
        def now(cls, tz: object = None) -> "Later":
            return cls.fromisoformat(datetime.now().isoformat()) + timedelta(hours=30)  # noqa: DTZ005

    monkeypatch.setattr(chat_template, "datetime", Later)
    assert of(model) == before
    assert await digest_of(model, "chat/completions", HELLO) == ""
    assert await digest_of(model, "completions", {"prompt": "Hello"})


def digest(*prompts: list[int]) -> str:
    return fingerprint.digest(prompts)


async def test_a_digest_tells_ids_order_and_bounds_apart(model: Path) -> None:
    made = [digest([1, 2, 3]), digest([1, 3, 2]), digest([1], [2, 3]), digest([1, 2], [3]), digest([2, 3], [1])]
    assert len(set(made)) == 5
    cases: list[tuple[Endpoint, dict[str, Any], str]] = [
        ("completions", {"prompt": ["Hello a", "user"]}, digest([2, 1], [3])),
        ("completions", {"prompt": [[2, 1], [3]]}, digest([2, 1], [3])),
        ("completions", {"prompt": [2, 1]}, digest([2, 1])),
        ("embeddings", {"input": "Hello a"}, digest([2, 1])),
        ("chat/completions", HELLO, digest([3, 0])),
    ]
    for endpoint, fields, wanted in cases:
        assert await digest_of(model, endpoint, fields) == wanted, fields


def test_simulated_prompts_have_digests_of_their_words() -> None:
    def of_prompt(prompt: object) -> str:
        return measured(simulated_prompts("completions", {"prompt": prompt}))[1]

    long = "word " * 20_000
    assert of_prompt("a b") == of_prompt(" a\n b ") != of_prompt("b a")
    assert of_prompt(["a", "b"]) != of_prompt(["a b"]) != of_prompt("a b c")
    assert of_prompt([1, 2]) == of_prompt([1, 2]) != of_prompt([2, 1])
    assert of_prompt(long) == of_prompt(long.replace(" ", "  ")) != of_prompt(long + "word")
    assert measured(simulated_prompts("completions", {"prompt": long}))[0] == [20_000]


async def test_a_counter_that_counts_otherwise_refuses_and_is_loud(
    model: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    published = msgspec.structs.replace(MANIFEST, path=str(model), tokenizer_fingerprint=of(model))
    counter = TokenCounter(published)
    await counter.ready()
    assert counter.fingerprint == published.tokenizer_fingerprint
    (model / "chat_template.jinja").write_text(TEMPLATE + "\n")
    counter = TokenCounter(published)
    row = failure_table.table()["gateway counts tokens otherwise than was published"]
    before = row.figure(telemetry.page().decode())
    for _ in range(2):
        with pytest.raises(HeadraceError) as refused:
            await counter.ready()
        assert (refused.value.code, refused.value.status) == ("unavailable", 503)
        monkeypatch.setattr(tokenizer, "Tokenizer", None)  # It is not read again for each request.
    assert row.figure(telemetry.page().decode()) == before + 2
    assert metric("headrace_gateway_tokenizer_mismatches_total", model=published.name) >= 2
    assert capsys.readouterr().out.count(row.log) == 1
