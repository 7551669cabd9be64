"""What is kept of settled requests and of early cancels, so that repeats and late messages find them; bounded."""

from collections import OrderedDict

import msgspec

from contracts.messages.attempts import AttemptEvent
from contracts.messages.frames import ErrorData

KEPT_MS = 600_000
"""Longer than any client repeats itself and any publish is stored late."""
KEPT_MAX = 50_000


class Tombstone(msgspec.Struct, frozen=True):
    """A request's last stored end and, where the scheduler told its caller one, the error."""

    event: AttemptEvent
    error: ErrorData | None
    until_ms: int


class Tombstones:
    """Requests that have ended, and cancels of ids that nobody knows (yet). The oldest go first."""

    def __init__(self) -> None:
        self._ended: OrderedDict[str, Tombstone] = OrderedDict()
        self._cancelled: OrderedDict[str, int] = OrderedDict()

    def ended(self, request_id: str) -> Tombstone | None:
        """Of a request whose last stored end was read and that is not open."""
        return self._ended.get(request_id)

    def add_ended(self, event: AttemptEvent, error: ErrorData | None, now_ms: int) -> None:
        """``error``: what its caller was told, if anything."""
        self._ended.pop(event.request_id, None)
        self._ended[event.request_id] = Tombstone(event, error, now_ms + KEPT_MS)
        if len(self._ended) > KEPT_MAX:
            self._ended.popitem(last=False)

    def forget(self, request_id: str) -> None:
        """The request is open again: an earlier owner's end of it was not the last."""
        self._ended.pop(request_id, None)

    def cancelled(self, request_id: str) -> bool:
        """Whether a cancel of this id came before its request."""
        return request_id in self._cancelled

    def add_cancelled(self, request_id: str, now_ms: int) -> None:
        """Should a request of this id come yet, it is refused."""
        self._cancelled.pop(request_id, None)
        self._cancelled[request_id] = now_ms + KEPT_MS
        if len(self._cancelled) > KEPT_MAX:
            self._cancelled.popitem(last=False)

    def pass_time(self, now_ms: int) -> None:
        """Drop what is older than KEPT_MS."""
        while self._ended and next(iter(self._ended.values())).until_ms <= now_ms:
            self._ended.popitem(last=False)
        while self._cancelled and next(iter(self._cancelled.values())) <= now_ms:
            self._cancelled.popitem(last=False)
