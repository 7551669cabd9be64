"""Names of tenants, models and aliases: what people and addresses could take for another one is refused."""

import pytest

from contracts import registry
from contracts.errors import HeadraceError


@pytest.mark.parametrize(
    "name", ["acme", "café", "شركة", "می\u200cشود", "\U0001f9d1\u200d\U0001f680", "<img src=x>", "a/b", "...", "a\"b'c"]
)
def test_names_of_any_language_are_kept(name: str) -> None:
    assert registry.check_name("tenant name", name) == name


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("", "empty"),
        ("n" * 65, "at most"),
        (".", "between folders"),
        ("..", "between folders"),
        (" acme", "a space"),
        ("acme\u2003", "a space"),
        (" ", "a space"),
        ("a\x1b[2J", "U+001B at position 1"),
        ("a\u2028b", "U+2028"),
        ("a\u202eb", "invisible character U+202E at position 1"),
        ("acme\u200b", "U+200B"),
        ("\ufeffacme", "U+FEFF"),
        ("so\u00adft", "U+00AD"),
        ("cafe\u0301", "NFC"),
    ],
)
def test_what_looks_like_another_one_is_refused(name: str, why: str) -> None:
    with pytest.raises(HeadraceError, match="cannot be kept") as caught:
        registry.check_name("tenant name", name)
    assert why in str(caught.value) and caught.value.code == "invalid_request"
