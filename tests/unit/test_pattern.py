"""Chunks that differ in their text alone: what is put together is what was taken apart."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from contracts.streaming.pattern import CHUNK_BYTES_MAX, Pattern, text_at

_TEXTS = st.text(st.sampled_from('ab"\\/{}:,é\u2028\n\x00')) | st.sampled_from(
    ['","content":"', '"}', "\\", '"text":"x"']
)
_NAMES = st.sampled_from(["content", "text", "delta", "id", "arguments"])
_CHUNKS = st.fixed_dictionaries({}, optional={"id": _TEXTS, "n": st.integers()}).flatmap(
    lambda more: st.dictionaries(_NAMES, _TEXTS, max_size=3).map(lambda texts: more | texts)
)


@given(chunks=st.lists(_CHUNKS, min_size=2, max_size=4), again=_TEXTS)
def test_a_text_and_its_pattern_are_the_chunk_to_the_byte(chunks: list[dict[str, object]], again: str) -> None:
    encoded = [msgspec.json.encode(chunk) for chunk in chunks]
    encoded += [msgspec.json.encode(chunk | {"content": again}) for chunk in chunks]
    for chunk in encoded:
        if (at := text_at(chunk)) is None:
            continue
        pattern = Pattern.of(chunk, at)
        msgspec.json.decode(pattern.filled(b'"other"'))
        for other in encoded:
            text = pattern.text_of(other)
            if text is not None:
                assert pattern.filled(text) == other
                msgspec.json.decode(text, type=str)
        assert pattern.text_of(chunk) is not None


def test_chunks_that_differ_in_more_are_another_pattern() -> None:
    chunk = b'{"index":0,"text":"a","n":1}'
    pattern = Pattern.of(chunk, text_at(chunk) or (0, 0))
    assert pattern.text_of(b'{"index":0,"text":"b","n":1}') == b'"b"'
    for other in (
        b'{"index":1,"text":"a","n":1}',
        b'{"index":0,"text":"a","n":2}',
        b'{"index":0,"text":null,"n":1}',
        b'{"index":0,"text":"a","m":"b","n":1}',
        b'{"index":0,"text":"a","n":"","n":1}',
        b'{"index":0,"text":,"n":1}',
        b'{"index":0,"text":"a\\","n":1}',
    ):
        assert pattern.text_of(other) is None, other


@pytest.mark.parametrize("chunk", [b"{}", b'{"content":null}', b'{"type":"text"}', b'{"a":"\\"text\\":\\"b\\""}'])
def test_a_chunk_without_text_has_no_pattern(chunk: bytes) -> None:
    assert text_at(chunk) is None


def test_no_text_is_looked_for_in_what_is_long() -> None:
    assert text_at(b'{"text":"%b"}' % (b"a" * CHUNK_BYTES_MAX)) is None
