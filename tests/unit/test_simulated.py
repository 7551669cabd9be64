"""The simulated engine's request field, its token count, and its way from tokens to text."""

import codecs
import random
from typing import Any

import pytest

from contracts import simulated
from contracts.errors import HeadraceError
from contracts.messages.base import Endpoint
from contracts.simulated import Prompt, simulate_field, simulated_prompts
from worker.engines.simulated.answer import ChoiceText

HELLO = [{"role": "user", "content": "hello big world"}]


@pytest.mark.parametrize(
    ("endpoint", "body", "tokens"),
    [
        ("chat/completions", {"messages": HELLO}, 7),
        ("chat/completions", {"messages": [{"role": "system", "content": ""}, *HELLO]}, 11),
        ("chat/completions", {"messages": [{"role": "assistant", "content": None}]}, 4),
        (
            "chat/completions",
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "a b"}, {"type": "x"}]}]},
            6,
        ),
        ("completions", {"prompt": "  one\n two\tthree "}, 3),
        ("completions", {"prompt": ["one two", "three"]}, 3),
        ("completions", {"prompt": [1, 2, 3, 4]}, 4),
        ("completions", {"prompt": [[1, 2], [3]]}, 3),
    ],
)
def test_prompt_tokens_are_words_and_four_for_each_message(
    endpoint: Endpoint, body: dict[str, Any], tokens: int
) -> None:
    assert sum(map(len, simulated_prompts(endpoint, body))) == tokens


@pytest.mark.parametrize(
    ("endpoint", "body", "param"),
    [
        ("chat/completions", {}, "messages"),
        ("chat/completions", {"messages": []}, "messages"),
        ("chat/completions", {"messages": "hello"}, "messages"),
        ("chat/completions", {"messages": [{"role": "user", "content": 7}]}, "messages"),
        ("completions", {}, "prompt"),
        ("completions", {"prompt": []}, "prompt"),
        ("completions", {"prompt": [1, "a"]}, "prompt"),
        ("completions", {"prompt": [True]}, "prompt"),
        ("completions", {"prompt": [[]]}, "prompt"),
    ],
)
def test_a_prompt_of_no_known_form_is_refused(endpoint: Endpoint, body: dict[str, Any], param: str) -> None:
    with pytest.raises(HeadraceError) as refusal:
        simulated_prompts(endpoint, body)
    assert (refusal.value.code, refusal.value.param) == ("invalid_request", param)


def test_the_script_is_text_or_hex() -> None:
    text = simulate_field({"simulate": {"tokens": ["He", "llo", ""]}})
    raw = simulate_field({"simulate": {"token_hex": ["f09f", "9880"]}})
    assert text is not None
    assert text.script() == [b"He", b"llo", b""]
    assert raw is not None
    assert raw.script() == [b"\xf0\x9f", b"\x98\x80"]


def test_the_field_may_be_absent_or_null_and_so_may_its_parts() -> None:
    assert simulate_field({}) is None
    assert simulate_field({"simulate": None}) is None
    empty = simulate_field({"simulate": {"tokens": None, "ttft_ms": None}})
    assert empty is not None
    assert empty.script() is None


@pytest.mark.parametrize(
    "field",
    [
        {"tokens": ["a"], "token_hex": ["61"]},
        {"token_hex": ["6"]},
        {"token_hex": ["zz"]},
        {"tokens": "text"},
        {"ttft_ms": -1},
        {"itl_ms": 3_600_001},
        {"fail_after": 1.5},
        {"exit_after": -1},
        {"submit_delay": 5},
        [],
        "x",
    ],
)
def test_a_malformed_field_is_refused(field: object) -> None:
    with pytest.raises(HeadraceError) as refusal:
        simulate_field({"simulate": field})
    assert (refusal.value.code, refusal.value.param) == ("invalid_request", "simulate")


def pieces(tokens: list[bytes], *stops: str) -> list[str]:
    """What goes out after each token until a stop string, and what was held back at the end."""
    text, out = ChoiceText(list(stops)), []
    for token in tokens:
        out.append(text.add(token))
        if text.stopped:
            return out
    return [*out, text.close()]


def test_a_character_split_over_tokens_comes_whole() -> None:
    tokens = [b"hi ", b"\xf0\x9f", b"\xa7\x91", b"\xe2\x80\x8d", b"\xf0\x9f\x9a", b"\x80"]
    out = pieces(tokens)
    assert "".join(out) == b"".join(tokens).decode() == "hi \U0001f9d1\u200d\U0001f680"
    assert out[1] == out[4] == ""


def test_a_character_cut_by_the_end_is_one_replacement() -> None:
    assert "".join(pieces([b"hi ", b"\xf0\x9f"])) == "hi \ufffd"


def test_bytes_that_are_no_text_are_replaced_as_a_decoder_does() -> None:
    tokens = [b"a\xff", b"\xc3", b"(b"]
    assert "".join(pieces(tokens)) == codecs.decode(b"".join(tokens), errors="replace")


def test_a_stop_string_split_over_tokens_never_leaks() -> None:
    assert pieces([b"AB", b"C\nUs", b"er:", b" x"], "\nUser:") == ["AB", "C", ""]


def test_what_looked_like_a_stop_string_comes_at_the_end() -> None:
    assert pieces([b"ok\nUs"], "\nUser:") == ["ok", "\nUs"]


def test_what_looked_like_a_stop_string_comes_once_it_cannot_be_one() -> None:
    assert pieces([b"aab", b"aac", b"d"], "aabaab") == ["", "aabaac", "d", ""]


def test_the_earliest_of_several_stop_strings_cuts() -> None:
    assert pieces([b"one two three"], "three", "two") == ["one "]


def test_a_stop_string_may_be_split_in_a_character() -> None:
    heart = "\u2764".encode()
    assert "".join(pieces([b"x" + heart[:1], heart[1:2], heart[2:] + b"y"], "\u2764")) == "x"


@pytest.mark.parametrize("seed", range(20))
def test_words_are_those_of_split_wherever_the_slices_fall(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(simulated, "SLICE_CHARS", 7)
    chance = random.Random(seed)
    text = "".join(chance.choice(["a", "bc", "é", " ", "\n", "\t", "\u3000", "\x1f", "\xa0"]) for _ in range(400))
    prompt = Prompt(text)
    assert list(prompt) == text.split() == list(prompt)
    assert len(prompt) == len(text.split())


def test_a_long_prompt_comes_in_small_slices() -> None:
    """Each slice is one call during which no other thread runs."""
    slices = list(simulated._words("word " * 200_000))
    assert sum(map(len, slices)) == 200_000
    assert max(map(len, slices)) < 10_000
