"""The caller's place in its own trace, as W3C's Trace Context has it: ``traceparent``, version 00."""

import re
from typing import NamedTuple

_FORM = re.compile(r"[0-9a-f]{2}-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
SAMPLED = 0x01


class TraceParent(NamedTuple):
    """Ids of the trace and of the caller's span; whether the caller records its own."""

    trace_id: int
    span_id: int
    sampled: bool


def parse(text: str) -> TraceParent | None:
    """None when it is none: then a trace of our own begins, as the specification has it."""
    found = _FORM.fullmatch(text)
    if found is None or text.startswith("ff") or (text.startswith("00") and found[4]):
        return None
    trace_id, span_id = int(found[1], 16), int(found[2], 16)
    return TraceParent(trace_id, span_id, bool(int(found[3], 16) & SAMPLED)) if trace_id and span_id else None


def checked(given: str) -> str:
    """What is passed on of a caller's header: itself, at most 55 characters of it, or nothing."""
    return given[:55] if parse(given) is not None else ""


def headers(given: str) -> dict[str, str] | None:
    """For a message on the bus, as W3C spells it: ours are read in the message itself, this is for who looks on."""
    return {"traceparent": given} if given else None
