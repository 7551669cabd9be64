"""xgrammar itself says which keywords of a schema it passes over: those that the gateway refuses by name."""

import json
from functools import cache
from typing import Any

import pytest

from tests.support.asking import VLLM_MARKS
from tests.support.schemas import BROKEN, KEPT

pytestmark = VLLM_MARKS


@cache
def compiler() -> Any:
    """Of a vocabulary of single bytes."""
    import xgrammar

    tokens = [bytes([byte]) for byte in range(256)] + [b"</s>"]
    info = xgrammar.TokenizerInfo(tokens, vocab_type=xgrammar.VocabType.RAW, stop_token_ids=[256])
    return xgrammar.GrammarCompiler(info, max_threads=1)


def gives(schema: dict[str, Any], document: Any) -> bool:
    """Whether an answer that is held to ``schema`` may be ``document``."""
    import xgrammar

    grammar = compiler().compile_json_schema(json.dumps(schema), any_whitespace=False, separators=(",", ":"))
    matcher = xgrammar.GrammarMatcher(grammar)
    return bool(matcher.accept_string(json.dumps(document, separators=(",", ":"))) and matcher.accept_token(256))


@pytest.mark.parametrize(("schema", "keyword", "document"), [case for case in BROKEN if case[2] is not None])
def test_d12_what_is_refused_would_have_been_broken(schema: dict[str, Any], keyword: str, document: Any) -> None:
    """When one of these fails, xgrammar has learned it, and the gateway may take it."""
    assert gives(schema, document)


@pytest.mark.parametrize("schema", KEPT)
def test_d12_what_is_taken_compiles(schema: dict[str, Any]) -> None:
    assert compiler().compile_json_schema(json.dumps(schema))


@pytest.mark.parametrize(
    ("schema", "document"),
    [
        ({"type": "integer", "minimum": 5}, 3),
        ({"type": "number", "exclusiveMaximum": 5}, 5.0),
        ({"type": "string", "minLength": 3}, "ab"),
        ({"type": "string", "pattern": "^[a-z]+$"}, "A"),
        ({"type": "string", "format": "date"}, "xx"),
        ({"type": "array", "items": {"type": "integer"}, "maxItems": 1}, [1, 2]),
        ({"type": "array", "prefixItems": [{"type": "integer"}], "items": False}, [1, 2]),
        ({"type": "object", "properties": {"a": {}}, "required": ["a"]}, {}),
        ({"type": "object", "properties": {"a": {}, "b": {}}, "maxProperties": 1}, {"a": 1, "b": 2}),
        ({"type": "object", "propertyNames": {"pattern": "^x"}}, {"ya": 1}),
        ({"type": "object", "patternProperties": {"^x": {"type": "integer"}}}, {"xa": "s"}),
        ({"type": "object", "additionalProperties": {"type": "integer"}}, {"c": "x"}),
        ({"anyOf": [{"type": "integer"}, {"type": "null"}]}, "a"),
        ({"type": ["object", "null"], "properties": {"a": {}}, "required": ["a"]}, {}),
    ],
)
def test_d12_what_is_taken_is_kept(schema: dict[str, Any], document: Any) -> None:
    assert not gives(schema, document)
