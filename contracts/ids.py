"""Identifiers: request ids (UUIDv7, so that the id tells its own time) and incarnation names."""

import os
import secrets

from contracts import clock


def request_id(now_ms: int | None = None) -> str:
    """A new UUIDv7 (RFC 9562 section 5.7): 48 bits of Unix milliseconds, then random bits. 36 characters."""
    milliseconds = clock.now_ms() if now_ms is None else now_ms
    value = (milliseconds & (1 << 48) - 1) << 80 | int.from_bytes(os.urandom(10))
    value = value & ~(0xF << 76) | 0x7 << 76
    value = value & ~(0x3 << 62) | 0x2 << 62
    text = f"{value:032x}"
    return f"{text[:8]}-{text[8:12]}-{text[12:16]}-{text[16:20]}-{text[20:]}"


def incarnation(kind: str) -> str:
    """A new name for one life of a process, such as ``w-3f9a1c20d4e5``; a restarted process takes a new one."""
    return f"{kind}-{secrets.token_hex(6)}"


def api_key() -> str:
    """A new API key: ``hr_`` and 43 url-safe characters, 256 random bits."""
    return f"hr_{secrets.token_urlsafe(32)}"
