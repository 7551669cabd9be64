"""Steps in words."""

import re
from typing import Any

from tests.explore.records import Action

_DULL = re.compile(
    r'"(?:tenant|key_id|model|endpoint|priority|admitted_at_ms|publish_within_ms|deadline_ms|reply|stream_owner|version'
    r"|prompt_tokens|max_output_tokens|choices|dispatched_at_ms|ended_at_ms|reserved_tokens|error_message|limits"
    r'|message|slots|kv_tokens|stream)":(?:"[^"]*"|\{[^{}]*\}|[^,{}\[\]]*),?'
)


def describe(action: Action) -> str:
    """One line for a reader: who does what, and with which message."""
    return f"  {action[0]}: " + " ".join(_words(part) for part in action[1:])


def _words(part: Any) -> str:
    if isinstance(part, bytes):
        return _DULL.sub("", part.decode()).replace(",}", "}")
    if isinstance(part, tuple):
        return "(" + " ".join(_words(inner) for inner in part if inner != "") + ")"
    return str(part)
