"""Reading a stream live without loss or repetition: an ordered consumer, made again after any trouble."""

import asyncio
import contextlib
import datetime
import time
from collections import deque
from collections.abc import Callable
from typing import Any, Self

from contracts.bus.handlers import contained, in_order, is_plain, stop
from contracts.bus.jetstream import JetStream, remake_consumer
from contracts.bus.session import Subscription
from contracts.bus.types import BusError, Handler, Incoming, Unavailable

HEARTBEAT_S = 0.5
"""Of an idle consumer, by which the loss of a server other than ours is noticed: with the library's 5 s a watch resumed
after 19.7 s (measured). The loss of ours shows by the connection."""
HEARTBEAT_ALONE_S = 10.0
"""Of one on a server that is alone: then a consumer ends with the connection, or somebody has deleted it."""
SILENT_S, SILENT_ALONE_S = 1.5, 15.0
"""Without a message or heartbeat for so long the consumer is gone."""
INACTIVE_S = 10.0
"""When the server drops a consumer whose reader vanished without deleting it."""


class OrderedConsumer:
    """Hands each message of ``stream`` to ``handler``, once and in order, until ``close``; over restarts too.

    A plain handler runs as a message is read.

    Starts at ``start_seq`` or at ``start_at_ms`` (Unix ms), else with what is stored from now on. Not for work-queue
    streams. A stream that vanishes is waited for.

    With ``snapshot`` every start, also after trouble, first hands over the last message of each subject
    (``on_start(set_back)`` before, ``on_current()`` once they have all been handed over): the reader compares.
    Without, it goes on after the last message handed over. A stream that was wiped is read from its start.
    """

    def __init__(
        self,
        jetstream: JetStream,
        stream: str,
        subject_filter: str,
        handler: Handler,
        *,
        start_seq: int | None = None,
        start_at_ms: int | None = None,
        snapshot: bool = False,
        on_start: Callable[[bool], None] = lambda set_back: None,
        on_current: Callable[[], None] = lambda: None,
    ) -> None:
        self._jetstream = jetstream
        self._session = jetstream.session
        self._stream = stream
        self._filter = subject_filter
        self._deliver = in_order(handler)
        self._at_once = contained(handler) if is_plain(handler) else None
        self._start_seq = start_seq
        self._start_at_ms = start_at_ms
        self._snapshot = snapshot
        self._on_start = on_start
        self._on_current = on_current
        self._position: int | None = None
        self._created_ns = 0
        self._consumer = ""
        self._consumer_seq = 0
        self._silent_s = SILENT_S
        self._current = False
        self._open_for: object = None
        """The queue of the consumer that is made and not given up."""
        self._heard_at = 0.0
        self._inbox: Subscription | None = None
        self._arrived: deque[Incoming] = deque()
        self._wake = asyncio.Event()
        self._broken = ""
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> Self:
        """Make the first consumer; raises NotFound without the stream, or what else the server says."""
        self._session.readers.add(self)
        try:
            await self._open()
        except BaseException:
            await self.close()
            raise
        self._task = self._session.spawn(self._run(), vital=True)
        return self

    async def close(self) -> None:
        """Hand on no more; a call of the handler that runs is cancelled."""
        self._session.readers.discard(self)
        self._open_for = None
        if self._task is not None:
            await stop(self._task)
        await self._drop()
        if self._consumer and self._session.connected:
            await self._delete(self._consumer)

    def reconnected(self) -> None:
        """After a reconnect the consumer may be gone, or have sent into the void."""
        self._break("reconnected")

    def _break(self, why: str) -> None:
        self._broken = why
        self._open_for = None
        self._wake.set()

    async def _open(self) -> None:
        await self._drop()
        created_ns, last_seq = await self._jetstream.stream_state(self._stream)
        if set_back := self._position is not None and created_ns != self._created_ns:
            self._position = 0  # the stream was wiped
        elif set_back := self._position is not None and last_seq < self._position:
            self._position = last_seq  # the server lost what it had not yet on disk; numbers are given again
        arrived: deque[Incoming] = deque()
        wake = asyncio.Event()

        def receive(message: Incoming) -> None:
            self._heard_at = time.monotonic()
            if self._at_once is not None and self._open_for is arrived and not arrived:
                if self._is_next(message):
                    self._at_once(message)
                    self._handed_over(message)
                return
            arrived.append(message)
            wake.set()

        self._arrived, self._wake, self._broken = arrived, wake, ""
        inbox = self._session.new_inbox()
        self._inbox = await self._session.listen(inbox, receive)
        self._consumer = inbox.rpartition(".")[2]
        alone = self._session.server_alone
        heartbeat_s, self._silent_s = (HEARTBEAT_ALONE_S, SILENT_ALONE_S) if alone else (HEARTBEAT_S, SILENT_S)
        config = {
            "name": self._consumer,
            "deliver_subject": inbox,
            "filter_subject": self._filter,
            "ack_policy": "none",
            "max_deliver": 1,
            "replay_policy": "instant",
            "flow_control": True,
            "idle_heartbeat": int(heartbeat_s * 1e9),
            "inactive_threshold": int(INACTIVE_S * 1e9),
            "num_replicas": 1,
            "mem_storage": True,
            **self._start_at(),
        }
        info = await self._jetstream.create_consumer(self._stream, config)
        self._consumer_seq = 0
        self._created_ns = created_ns
        if self._position is None:
            self._position = int(info["delivered"]["stream_seq"])
        self._current = not self._snapshot
        if self._snapshot:
            self._on_start(set_back)
            if info["num_pending"] == 0:
                self._caught_up()
        self._heard_at = time.monotonic()
        self._open_for = None if self._broken else arrived

    def _start_at(self) -> dict[str, Any]:
        if self._snapshot:
            return {"deliver_policy": "last_per_subject"}
        if self._position is not None:
            return {"deliver_policy": "by_start_sequence", "opt_start_seq": self._position + 1}
        if self._start_seq is not None:
            return {"deliver_policy": "by_start_sequence", "opt_start_seq": max(1, self._start_seq)}
        if self._start_at_ms is not None:
            start = datetime.datetime.fromtimestamp(self._start_at_ms / 1000, datetime.UTC)
            return {"deliver_policy": "by_start_time", "opt_start_time": start.isoformat()}
        return {"deliver_policy": "new"}

    async def _run(self) -> None:
        while True:
            while not self._broken:
                if self._arrived:
                    await self._take(self._arrived.popleft())
                    continue
                self._wake.clear()
                left_s = self._heard_at + self._silent_s - time.monotonic()
                if left_s <= 0:
                    self._break("no heartbeat")
                    break
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(left_s):
                        await self._wake.wait()
            if self._session.connected:  # unsubscribing alone leaves the consumer on the server
                self._session.spawn(self._delete(self._consumer))
            await remake_consumer("ordered", self._stream, self._consumer, self._broken, self._open)

    async def _drop(self) -> None:
        if self._inbox is not None:
            await self._inbox.close()
            self._inbox = None

    async def _delete(self, consumer: str) -> None:
        """A consumer that is gone or does not answer is left to the server's inactivity limit."""
        with contextlib.suppress(BusError):
            await self._jetstream.delete_consumer(self._stream, consumer, timeout_s=1.0)

    async def _take(self, message: Incoming) -> None:
        if self._is_next(message):
            await self._deliver(message)
            self._handed_over(message)

    def _is_next(self, message: Incoming) -> bool:
        """Whether the message is to be handed over: it is no word of the server's, and none before it was missed."""
        if not message.reply.startswith("$JS.ACK."):
            self._control(message.headers.get("Status", ""), message)
            return False
        self._consumer_seq += 1
        if message.consumer_seq != self._consumer_seq:
            self._break(f"message {message.consumer_seq} of the consumer came as number {self._consumer_seq}")
            return False
        self._position = message.stream_seq
        return True

    def _handed_over(self, message: Incoming) -> None:
        if not self._current and message.pending == 0:
            self._caught_up()

    def _control(self, status: str, message: Incoming) -> None:
        if status != "100":
            self._break(f"{status} {message.headers.get('Description', '')}")
        elif message.reply:  # flow control: answered in turn, so a slow handler holds the server back
            self._answer(message.reply)
        elif (stalled := message.headers.get("Nats-Consumer-Stalled")) is not None:
            self._answer(stalled)
        elif int(message.headers.get("Nats-Last-Consumer", "0")) != self._consumer_seq:
            self._break("messages were lost")
        elif not self._current:
            self._caught_up()  # the rest of the snapshot was deleted meanwhile

    def _answer(self, reply: str) -> None:
        try:
            self._session.send(reply, b"")
        except Unavailable:
            pass  # disconnected: the reconnect makes another consumer

    def _caught_up(self) -> None:
        self._current = True
        self._on_current()
