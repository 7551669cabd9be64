"""Which requests are traced, and when all is there that their spans are made of; pure.

The ends of attempts come from ATTEMPTS, the gateway's word by a message of its own, in any order, and with several
ledgers perhaps to another one. So what is not whole after a while is taken as it is.
"""

from collections import OrderedDict

import msgspec

from contracts.messages.attempts import AttemptEvent
from contracts.messages.deliveries import Delivery
from ledger.core.spans import Span, kept, spans

WAIT_MS = 10_000
"""For the other part: a gateway tells within a second, an insert may be tried again."""
RETRY_MS = 600_000
"""For the next attempt after one that gave nothing."""
PENDING_MAX = 20_000
"""Requests whose parts are awaited: some 40 MB."""


class _Pending(msgspec.Struct, kw_only=True):
    attempts: dict[int, AttemptEvent] = {}
    delivery: Delivery | None = None
    stored: tuple[int, int] | None = None
    since_ms: int = 0


class Traces:
    """``sample``: share of the requests without a caller's trace; ``slow_ms``: slower ones are all traced."""

    def __init__(self, *, sample: float, slow_ms: float) -> None:
        self._sample = sample
        self._slow_ms = slow_ms
        self._pending: OrderedDict[str, _Pending] = OrderedDict()

    def attempt(self, event: AttemptEvent, stored_at_ms: int, now_ms: int) -> None:
        """An end that the ledger has stored."""
        pending = self._of(event.request_id, now_ms)
        pending.attempts[event.attempt] = event
        pending.stored = (stored_at_ms, now_ms)

    def delivery(self, delivery: Delivery, now_ms: int) -> None:
        """A gateway's word."""
        self._of(delivery.request_id, now_ms).delivery = delivery

    def take(self, now_ms: int) -> list[Span]:
        """The spans of all requests that are whole, or are waited for no longer; they are forgotten."""
        found: list[Span] = []
        for request_id, pending in list(self._pending.items()):
            late = len(self._pending) > PENDING_MAX or now_ms - pending.since_ms >= _patience_ms(pending)
            if late or _whole(pending):
                del self._pending[request_id]
                found += self._spans(pending)
        return found

    def _of(self, request_id: str, now_ms: int) -> _Pending:
        pending = self._pending.setdefault(request_id, _Pending())
        pending.since_ms = now_ms
        return pending

    def _spans(self, pending: _Pending) -> list[Span]:
        attempts = [pending.attempts[number] for number in sorted(pending.attempts)]
        if not attempts and (pending.delivery is None or not pending.delivery.saw_the_end):
            return []
        if not kept(attempts, pending.delivery, sample=self._sample, slow_ms=self._slow_ms):
            return []
        return spans(attempts, pending.delivery, pending.stored)


def _whole(pending: _Pending) -> bool:
    """The gateway has told, and of each attempt up to the last one the end is there."""
    delivery = pending.delivery
    if delivery is None:
        return False
    if not delivery.saw_the_end:
        last = _last(pending)
        return last is not None and not last.retryable
    if delivery.outcome == "refused" and not delivery.attempt:
        return True  # Nothing was admitted.
    return bool(delivery.attempt) and all(number in pending.attempts for number in range(1, delivery.attempt + 1))


def _patience_ms(pending: _Pending) -> int:
    last, delivery = _last(pending), pending.delivery
    if delivery is not None and not delivery.saw_the_end:
        return RETRY_MS  # It was told of at its beginning.
    return RETRY_MS if last is not None and delivery is None and last.retryable else WAIT_MS


def _last(pending: _Pending) -> AttemptEvent | None:
    return pending.attempts[max(pending.attempts)] if pending.attempts else None
