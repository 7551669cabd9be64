"""What requests have in common: those of a conversation, which a roll-out keeps on its side; those of a cache. Pure.

Of a conversation: the caller's own key where it gives one (`prompt_cache_key`), else how the conversation opened: all
messages up to the first of its user, which a chat sends again with each turn.
"""

import hashlib
from collections.abc import Mapping
from typing import Any

from contracts.errors import HeadraceError

TEXT_CHARS_MAX = 4_096
"""Of each message: more of it tells no more conversations apart, and costs the event loop."""
MESSAGES_MAX = 16


def conversation_of(fields: Mapping[str, Any]) -> str:
    """A digest of 16 hex digits; empty where a body has neither key nor messages of a user."""
    key = fields.get("prompt_cache_key")
    if isinstance(key, str) and key:
        return _digest(["key", key[:TEXT_CHARS_MAX]])
    messages = fields.get("messages", fields.get("input"))
    if not isinstance(messages, list):
        return ""
    opening: list[str] = []
    for message in messages[:MESSAGES_MAX]:
        if not isinstance(message, dict):
            return ""
        opening += [str(message.get("role")), _text(message.get("content"))]
        if message.get("role") == "user":
            return _digest(opening)
    return ""


def cache_salt_of(fields: Mapping[str, Any]) -> str:
    """A digest of the body's ``cache_salt``, under which alone cached prompts are shared; empty where it has none.

    Raises HeadraceError.
    """
    salt = fields.get("cache_salt")
    if salt is None:
        return ""
    if not isinstance(salt, str) or not 0 < len(salt) <= TEXT_CHARS_MAX:
        message = f"cache_salt: It must be a text of 1 to {TEXT_CHARS_MAX} characters."
        raise HeadraceError("invalid_request", message, param="cache_salt")
    return hashlib.blake2b(salt.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()


def _text(content: Any) -> str:
    if isinstance(content, str):
        return content[:TEXT_CHARS_MAX]
    parts = content[:MESSAGES_MAX] if isinstance(content, list) else []
    texts = (part.get("text") for part in parts if isinstance(part, dict))
    return "\0".join(text[:TEXT_CHARS_MAX] for text in texts if isinstance(text, str))


def _digest(parts: list[str]) -> str:
    return hashlib.blake2b("\1".join(parts).encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()
