"""What became of a model's roll-outs, as its schedulers told it: for the explanation of a request."""

import msgspec
import structlog

from contracts import subjects, topology
from contracts.bus import Bus, BusError
from contracts.messages.base import Codec
from contracts.messages.rollouts import RolloutEvent

log = structlog.get_logger()

_EVENT: Codec[RolloutEvent] = Codec(RolloutEvent)


class Rollouts:
    """Reads the stream ROLLOUT_EVENTS."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus

    async def of(self, model: str) -> list[RolloutEvent]:
        """Oldest first; without the bus nothing is known of them."""
        found: list[RolloutEvent] = []
        try:
            stored = self._bus.jetstream.read(topology.ROLLOUT_EVENTS, subjects.rollout(model), to_the_end=True)
            async for message in stored:
                found.append(_EVENT.decode(message.data))
        except (BusError, msgspec.MsgspecError, subjects.InvalidName) as error:
            log.warning("rollouts_not_read", model=model, reason=str(error))
        return found
