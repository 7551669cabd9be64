"""Control tokens that somebody typed: text such as ``<|im_end|>`` in a message, which would close a turn and forge one.

A chat is rendered to one text, in which a tokenizer takes every spelling of a control token for the token. So the
gateway puts MARK into those that callers wrote; the template's own have none. Gateway and worker then make the same
tokens of the rendered text: control tokens where the template wrote them, and plain characters where a caller did,
with the marks taken out. Text without marks is tokenized as ever.
"""

import json
import re
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tokenizers import Tokenizer

MARK = "\ufdd0"
"""A character that Unicode keeps for uses inside a program; from callers it is dropped."""
_SPACE = re.compile(r"\s*")


class ControlTokens:
    """Those of one tokenizer, by the text of its ``tokenizer.json``."""

    def __init__(self, file: str) -> None:
        self._file = file
        found = [token for token in json.loads(file).get("added_tokens", []) if token.get("special")]
        self._tokens: dict[str, dict[str, Any]] = {it["content"]: it for it in found if len(it["content"]) > 1}
        longest_first = sorted(self._tokens, key=len, reverse=True)
        self._spelled = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")
        self._plain: Tokenizer | None = None

    def spelled_in(self, text: str) -> bool:
        """Whether a control token is written in ``text``."""
        return self._spelled.search(text) is not None

    def marked(self, text: str) -> str:
        """A caller's text with a mark in each control token that it spells."""
        if MARK in text:
            text = text.replace(MARK, "")
        return self._spelled.sub(lambda found: found[0][0] + MARK + found[0][1:], text)

    def token_ids(self, text: str) -> list[int]:
        """Of a rendered text: control tokens where they are spelled without a mark, all else plain."""
        ids: list[int] = []
        at = 0
        for found in self._spelled.finditer(text):
            token = self._tokens[found[0]]
            ids += self._plain_ids(text[at : found.start()], strip_end=token.get("lstrip", False))
            ids.append(token["id"])
            space = _SPACE.match(text, found.end()) if token.get("rstrip") else None
            at = space.end() if space is not None else found.end()
        return ids + self._plain_ids(text[at:])

    def _plain_ids(self, text: str, *, strip_end: bool = False) -> list[int]:
        text = text.replace(MARK, "")
        if strip_end:
            text = text.rstrip()
        return self._tokenizer().encode_batch_fast([text], add_special_tokens=False)[0].ids if text else []

    def _tokenizer(self) -> "Tokenizer":
        """Takes control tokens for characters; made when the first marked text comes."""
        if self._plain is None:
            from tokenizers import Tokenizer

            plain = Tokenizer.from_str(self._file)
            plain.no_truncation()
            plain.no_padding()
            plain.encode_special_tokens = True
            self._plain = plain
        return self._plain

    def holds_for(self, tokenizer: "Tokenizer") -> bool:
        """Whether text in pieces has the tokens of the whole: some tokenizers treat the start of a text specially."""
        sample = "".join(f"{token} one  two\n\n{token}\nthree {token}" for token in list(self._tokens)[:8])
        return bool(self._tokens) and self.token_ids(sample) == tokenizer.encode(sample, add_special_tokens=False).ids
