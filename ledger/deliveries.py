"""What gateways saw of requests: taken from the bus into the table ``deliveries``, about once a second.

Nothing is billed by it, so nothing is kept for it: what cannot be stored soon is dropped, the oldest first.
"""

from collections import deque
from collections.abc import Callable, Sequence

import msgspec
import structlog

from contracts.bus import Incoming, unreadable
from contracts.messages.base import Codec
from contracts.messages.deliveries import Deliveries, Delivery
from contracts.ticks import tick
from ledger import metrics
from ledger.core import deliveries
from ledger.store import Away, BadValues, Store

EVERY_S = 1.0
KEPT_MAX = 20_000
"""While ClickHouse is away: some 20 MB, and minutes of most gateways."""

_log = structlog.get_logger(__name__)
_codec: Codec[Deliveries] = Codec(Deliveries)


class DeliveryIngest:
    """``take`` may be subscribed while ``run`` is running. ``told`` is called with what has come."""

    def __init__(self, store: Store, told: Callable[[Sequence[Delivery]], None]) -> None:
        self._store = store
        self._told = told
        self._waiting: deque[Delivery] = deque()

    def take(self, message: Incoming) -> None:
        """A message on subjects.DELIVERIES."""
        try:
            found = _codec.decode(message.data).deliveries
        except msgspec.MsgspecError as error:
            unreadable("deliveries_undecodable", message, error)
            return
        self._told(found)
        self._waiting.extend(found)
        while len(self._waiting) > KEPT_MAX:
            self._waiting.popleft()
            metrics.DELIVERIES_DROPPED.inc()

    async def run(self) -> None:
        """Insert what has come, until cancelled."""
        while True:
            await tick(EVERY_S)
            await self._insert()

    async def _insert(self) -> None:
        batch = list(self._waiting)
        if not batch:
            return
        rows = [row for each in batch if (row := deliveries.row_of(each)) is not None]
        try:
            await self._store.insert_deliveries(rows)
        except Away:
            return  # They wait, within the bound.
        except BadValues as error:
            _log.warning("deliveries_not_stored", count=len(rows), error=str(error))
        else:
            metrics.DELIVERIES.inc(len(rows))
        for _ in batch:
            if self._waiting:
                self._waiting.popleft()
