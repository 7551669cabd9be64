"""What is wrong with what others send, told once in a while: nobody fills our logs by sending nonsense.

One line for each kind and ``EVERY_S``, with how often it happened since the line before; without what was sent.
"""

import re
import time
from collections import OrderedDict
from typing import Any

import prometheus_client
import structlog

from contracts.bus.types import Incoming

EVERY_S = 10.0
KINDS_MAX = 256
"""Kinds that are remembered; the one longest without a line goes first."""
SUBJECT_SHOWN, REASON_SHOWN = 160, 160
"""Characters."""

UNREADABLE = prometheus_client.Counter(
    "headrace_bus_unreadable_messages", "Received messages that are none of their kind", ["kind"]
)

log = structlog.get_logger(__name__)

_QUOTED = re.compile(r"'[^']*('|\Z)|\"[^\"]*(\"|\Z)")


class Seldom:
    """Decides when a kind of event is told again; pure."""

    def __init__(self, every_s: float = EVERY_S) -> None:
        self._every_s = every_s
        self._kinds: OrderedDict[str, tuple[float, int]] = OrderedDict()
        """Kind -> when it was told last, and how often it happened since."""

    def count(self, kind: str, now_s: float) -> int:
        """How often it happened since it was told last, when it is to be told now; else 0."""
        told_s, times = self._kinds.get(kind, (now_s - self._every_s, 0))
        if now_s - told_s < self._every_s:
            self._kinds[kind] = told_s, times + 1
            return 0
        self._kinds[kind] = now_s, 0
        self._kinds.move_to_end(kind)
        if len(self._kinds) > KINDS_MAX:
            self._kinds.popitem(last=False)
        return times + 1


_seldom = Seldom()


def seldom(kind: str) -> int:
    """``Seldom.count`` of this process, now."""
    return _seldom.count(kind, time.monotonic())


def unreadable(kind: str, message: Incoming, error: Exception, **about: Any) -> None:
    """Count a message that is none of its kind, and tell it. ``kind`` is an event of the log, one of few."""
    UNREADABLE.labels(kind).inc()
    if times := seldom(kind):
        shown = _QUOTED.sub("'...'", str(error))[:REASON_SHOWN]
        log.warning(
            kind, subject=message.subject[:SUBJECT_SHOWN], bytes=len(message.data), reason=shown, times=times, **about
        )
