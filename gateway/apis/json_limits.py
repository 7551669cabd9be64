"""JSON from outside: bounded in depth and in the number of its parts before any decoder sees it."""

import re
from typing import Any

import msgspec

from contracts.errors import HeadraceError

NESTING_MAX = 64
"""Levels of a body; the same on every Python, and far below what any decoder trips over."""
CONTAINERS_MAX = 200_000
"""Objects and lists of a body: millions of them would cost seconds of garbage collection (measured)."""


def decode(data: bytes | msgspec.Raw) -> dict[str, Any]:
    """The JSON object in ``data``; raises HeadraceError (invalid_json, invalid_request)."""
    check_shape(data)
    try:
        body = msgspec.json.decode(data)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise HeadraceError("invalid_json", f"The body is not valid JSON: {_fault(bytes(data)) or error}.") from error
    if not isinstance(body, dict):
        raise HeadraceError("invalid_request", "The body must be a JSON object.")
    return body


_ESCAPE = re.compile(
    rb"\\(?:u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|(u[dD][89a-fA-F][0-9a-fA-F]{2})|.)", re.DOTALL
)
"""What a backslash begins: a surrogate pair, half of one (kept), or anything else."""


def _fault(data: bytes) -> str:
    """What the decoder has no words for, and where; empty for what it names itself."""
    if not data.strip():
        return "it is empty"
    try:
        data.decode()
    except UnicodeDecodeError as error:
        return f"it is not UTF-8 (byte {error.start})"
    for escape in _ESCAPE.finditer(data):
        if half := escape[1]:
            return f"\\{half.decode()} is half of a surrogate pair (byte {escape.start()})"
    return ""


_QUOTED = re.compile(rb'"[^"]*"')
_NO_BRACKET = bytes(set(range(256)) - set(b'[]{}"'))
_ONE_KIND = bytes.maketrans(b"{}", b"[]")


def check_shape(data: bytes | msgspec.Raw) -> None:
    """Raises HeadraceError when ``data`` is nested deeper than NESTING_MAX or has more than CONTAINERS_MAX parts.

    Without recursion: strings are cut out, and what remains of brackets loses its innermost level in each round.
    """
    data = bytes(data)
    if data.count(b"[") + data.count(b"{") <= NESTING_MAX:
        return
    plain = data.replace(rb"\\", b"").replace(rb"\"", b"").translate(_ONE_KIND, _NO_BRACKET)
    plain = plain.replace(b'""', b"")  # Whether it is a string without brackets, or one's end and another's start.
    if plain.count(b'"') > 2 * CONTAINERS_MAX:
        raise HeadraceError("invalid_request", "The body holds too many values.")
    brackets = _QUOTED.sub(b"", plain)
    if len(brackets) > 2 * CONTAINERS_MAX:
        raise HeadraceError("invalid_request", f"The body holds more than {CONTAINERS_MAX} objects and lists.")
    for _ in range(NESTING_MAX):
        inner = brackets.replace(b"[]", b"")
        if len(inner) == len(brackets):
            break  # Nothing pairs: not JSON, which the decoder says better, unless there is much of it.
        brackets = inner
    if len(brackets) > NESTING_MAX or b"[]" in brackets:
        raise HeadraceError("invalid_request", f"The body is nested deeper than {NESTING_MAX} levels.")


def check_text(where: str, text: str) -> None:
    """The same for JSON inside a text, which engines decode; raises HeadraceError that names the field ``where``."""
    try:
        check_shape(text.encode())
    except HeadraceError as error:
        raise HeadraceError(error.code, f"{where}: {error.message}", param=where) from error
