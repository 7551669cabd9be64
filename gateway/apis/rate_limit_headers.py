"""How a tenant's rate limits read in the headers of an answer: OpenAI's names, and Anthropic's. Pure."""

import math
from datetime import UTC, datetime

from contracts.messages.admission import RateLimit, RateLimits

Headers = list[tuple[bytes, bytes]]

PARTS = ("limit", "remaining", "reset")
OPENAI = {kind: [f"x-ratelimit-{part}-{kind}" for part in PARTS] for kind in ("requests", "tokens")}
"""Names by kind, in the order of PARTS. Tokens are those of the scarcer bucket."""
ANTHROPIC = {
    kind: [f"anthropic-ratelimit-{kind}-{part}" for part in PARTS]
    for kind in ("requests", "tokens", "input-tokens", "output-tokens")
}


def openai(limits: RateLimits, now_ms: int) -> Headers:
    """For those limits that there are; resets are spans."""
    found = (limits.requests, limits.tokens)
    return [
        header
        for names, limit in zip(OPENAI.values(), found, strict=True)
        if limit is not None
        for header in _named(names, limit, _span(limit.reset_ms))
    ]


def anthropic(limits: RateLimits, now_ms: int) -> Headers:
    """For those limits that there are; resets are instants."""
    found = (limits.requests, limits.tokens, limits.input_tokens, limits.output_tokens)
    return [
        header
        for names, limit in zip(ANTHROPIC.values(), found, strict=True)
        if limit is not None
        for header in _named(names, limit, _instant(now_ms + limit.reset_ms))
    ]


def _named(names: list[str], limit: RateLimit, reset: bytes) -> Headers:
    values = (b"%d" % limit.limit, b"%d" % limit.remaining, reset)
    return [(name.encode(), value) for name, value in zip(names, values, strict=True)]


def _span(milliseconds: int) -> bytes:
    """As OpenAI writes spans: 12ms, 1.5s, 6m0s."""
    if milliseconds < 1000:
        return b"%dms" % milliseconds
    minutes, rest = divmod(milliseconds, 60_000)
    seconds = f"{rest / 1000:g}s"
    return (f"{minutes}m{seconds}" if minutes else seconds).encode()


def _instant(at_ms: int) -> bytes:
    """RFC 3339, in whole seconds, rounded up."""
    return f"{datetime.fromtimestamp(math.ceil(at_ms / 1000), UTC):%Y-%m-%dT%H:%M:%SZ}".encode()
