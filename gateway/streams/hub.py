"""All streams of one gateway process: a Subscriber under the gateway's names, with the gateway's bounds.

Its heartbeats are sent by the thread of the signs of life, so that a gateway that is late keeps its streams.
"""

from contracts import subjects
from contracts.bus import Bus
from contracts.messages.control import CancelReason, CancelRequest
from contracts.messages.request import RequestEnvelope
from contracts.service.vitals import Vitals
from contracts.streaming.subscriber import HEARTBEAT_S, Subscriber, every
from gateway import metrics
from gateway.streams.stream import GatewayStream, Outbox


class Hub(Subscriber):
    """``hold_s`` and ``bytes_max`` are those of each GatewayStream."""

    def __init__(self, bus: Bus, vitals: Vitals, incarnation: str, *, hold_s: float, bytes_max: int) -> None:
        super().__init__(
            bus,
            reply_inbox=subjects.gateway_reply_inbox(incarnation),
            stream_owner=subjects.gateway_stream_owner(incarnation),
            cancel_subject=subjects.gateway_cancel,
        )
        self.incarnation = incarnation
        self._vitals = vitals
        self._hold_s = hold_s
        self._bytes_max = bytes_max
        self._outbox = Outbox(lambda: vitals.lag_ms)
        metrics.STREAMS.set_function(self.__len__)

    async def _live(self) -> None:
        await self._vitals.run(self._live_by)

    async def _live_by(self, bus: Bus) -> None:
        await every(HEARTBEAT_S, lambda: self._beat(bus, lag_ms=self._vitals.lag_ms))

    def cancel_request(self, envelope: RequestEnvelope, reason: CancelReason) -> None:
        """Cancel a request for the stream that its envelope names, here or a service's."""
        reader = envelope.reply.stream if envelope.idempotency is not None else ""
        question = CancelRequest(request_id=envelope.request_id, reason=reason, reader=reader)
        self.send_cancel(question, envelope.model, envelope.tenant)

    def listen(self, envelope: RequestEnvelope) -> GatewayStream:
        """The stream of a request that is yet to be admitted, open; the caller leaves it."""
        stream = GatewayStream(envelope, self._outbox, hold_s=self._hold_s, bytes_max=self._bytes_max)
        self.open(stream)
        return stream
