"""Taking work from a durable consumer, never more than there is room for.

Pulls by raw requests, because the library's fetch hides errors, hangs over a restart and leaves stale pulls behind.
What to do with a message, and its acknowledgement, is the handler's part.
"""

import asyncio
import hashlib
import time
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Any, Self

import msgspec
import structlog

from contracts.bus.handlers import contain, contained, in_order, is_plain, stop
from contracts.bus.jetstream import CONSUMER_RETRY_S, JetStream, remake_consumer
from contracts.bus.session import Subscription
from contracts.bus.types import BusError, Handler, Incoming

log = structlog.get_logger(__name__)

PULL_EXPIRES_S = 2.0
"""Life of one pull request: what a lost one costs (a server that is restarted, or leads no more, forgets them)."""
PULL_EXPIRES_ALONE_S = 10.0
"""The same at a server that is alone: it forgets them only when the connection ends, too, which is noticed."""
LOOK_S = 2.0
"""How often the credit is looked at when nobody notifies."""
EXPIRY_GRACE_S = 1.0
"""How long after its expiry the server's word about a pull request is awaited before it counts as gone."""
PULL_BATCH_MAX = 1024
PULLS_WAITING_MAX = 4096
"""Pull requests the server keeps for one consumer (its default, 512, is less than the slots of a big pool)."""
HANDLER_CLOSE_S = 5.0
CONSUMER_NAME_BYTES_MAX = 200
"""The server takes 255; longer names are cut and completed by a hash."""
_CONSUMER_GONE = ("Consumer Deleted", "Consumer is push based", "Leadership Change", "Server Shutdown")


class PullConsumer:
    """Takes messages as ``credit()`` allows and hands each to ``handler``, which sees to its ``ack``. A plain function
    is called as they are read, without a turn of the event loop; a coroutine is awaited before the next message.

    What is asked for and what the handler works on counts against ``credit()``, so a handler that takes a message
    must lower it before it returns. More is asked for while that is less than half of ``credit()``. With
    ``recreate`` the consumer is made again at the start and after every reconnect: all unacknowledged messages come
    again, and the handler ignores what it knows. ``inactive_s``: the server forgets a consumer that nobody used for
    so long. A stream that vanishes is waited for. Without credit a lost consumer is left alone: it may be another's.
    """

    def __init__(
        self,
        jetstream: JetStream,
        stream: str,
        durable: str,
        subject_filter: str,
        handler: Handler,
        *,
        ack_wait_s: float,
        credit: Callable[[], int],
        max_ack_pending: int = -1,
        inactive_s: float | None = None,
        recreate: bool = False,
    ) -> None:
        self._jetstream = jetstream
        self._session = jetstream.session
        self._stream = stream
        self._name = consumer_name(durable)
        self._handle = in_order(handler)
        self._take = contained(handler) if is_plain(handler) else self._queue
        self._credit = credit
        self._recreate = recreate
        self._config: dict[str, Any] = {
            "name": self._name,
            "durable_name": self._name,
            "filter_subject": subject_filter,
            "ack_policy": "explicit",
            "deliver_policy": "all",
            "replay_policy": "instant",
            "ack_wait": int(ack_wait_s * 1e9),
            "max_deliver": -1,
            "max_ack_pending": max_ack_pending,
            "max_waiting": PULLS_WAITING_MAX,
        }
        if inactive_s is not None:
            self._config["inactive_threshold"] = int(inactive_s * 1e9)
        self._inbox = self._session.new_inbox() + "."
        """One for all pulls, so a message that the server has sent is never dropped here."""
        self._subscription: Subscription | None = None
        self._asked: dict[str, tuple[int, float]] = {}
        """Pull requests of which some may wait at the server, oldest first: token -> (messages asked for, when to
        give up).
        """
        self._asked_total = 0
        """Messages that they still lack, all together: which of them a message served cannot be told."""
        self._count = 0
        self._broken = ""
        self._pause_until = 0.0
        self._wake = asyncio.Event()
        self._received: deque[Incoming] = deque()
        """What was received and has not come back from the handler, what it works on first."""
        self._arrived = asyncio.Event()
        self._closed = False
        self._pulling: asyncio.Task[None] | None = None
        self._handling: asyncio.Task[None] | None = None

    async def start(self) -> Self:
        """Make the consumer; raises NotFound without the stream, or what else the server says."""
        await self._make()
        self._subscription = await self._session.listen(self._inbox + "*", self._receive)
        self._session.readers.add(self)
        self._pulling = self._session.spawn(self._pull(), vital=True)
        self._handling = self._session.spawn(self._hand_over(), vital=True)
        return self

    def notify(self) -> None:
        """Look at ``credit()`` again now; otherwise it is looked at after each message, when a pull request ends,
        and every 2 s while none waits."""
        if self._broken or self._lacking():
            self._wake.set()

    async def close(self) -> None:
        """Ask for no more and let the handler's call end, within a time limit.

        What was received and not acknowledged comes again as the consumer is configured.
        """
        self._closed = True
        self._session.readers.discard(self)
        if self._subscription is not None:
            await self._subscription.close()
        if self._pulling is not None and self._handling is not None:
            await stop(self._pulling)
            self._arrived.set()
            await asyncio.wait([self._handling], timeout=HANDLER_CLOSE_S)
            await stop(self._handling)

    def reconnected(self) -> None:
        """After a reconnect waiting pulls are gone, and what was sent into the cut is lost."""
        self._break("reconnected")

    def _break(self, why: str) -> None:
        self._broken = self._broken or why
        self._wake.set()

    async def _make(self) -> None:
        self._broken = ""
        self._asked.clear()
        self._asked_total = 0
        if self._recreate:
            while len(self._received) > 1:  # what is not worked on yet comes again
                self._received.pop()
            await self._jetstream.delete_consumer(self._stream, self._name)
        await self._jetstream.create_consumer(self._stream, self._config)

    async def _pull(self) -> None:
        while True:
            self._wake.clear()
            if self._broken and self._room() > 0:  # Without credit it may be somebody else's by now.
                await remake_consumer("pull", self._stream, self._name, self._broken, self._make)
            now = time.monotonic()
            self._expire(now)
            await self._ask(now)
            _, give_up = next(iter(self._asked.values()), (0, now + LOOK_S))
            try:
                async with asyncio.timeout(max(0.01, give_up - now)):
                    await self._wake.wait()
            except TimeoutError:
                pass

    def _expire(self, now: float) -> None:
        """Forget pull requests about which the server's word did not come: they were served, or were lost."""
        while self._asked and next(iter(self._asked.values()))[1] <= now:
            self._forget(next(iter(self._asked)), 0)

    def _forget(self, token: str, lacking: int) -> None:
        if self._asked.pop(token, None) is not None:
            self._asked_total = max(0, self._asked_total - lacking) if self._asked else 0

    def _room(self) -> int:
        """The credit; none when it cannot be told."""
        try:
            return self._credit()
        except Exception as error:
            contain(f"credit of {self._name}", error)
            return 0

    def _lacking(self) -> int:
        """How many messages are to be asked for: topped up by halves, so that few big requests wait at the server, not
        one for each message."""
        room = self._room() - len(self._received)
        missing = room - self._asked_total
        return 0 if missing <= 0 or 2 * missing < room else missing

    async def _ask(self, now: float) -> None:
        if not self._session.connected or now < self._pause_until:
            return
        if not (missing := self._lacking()):
            return
        batch = min(missing, PULL_BATCH_MAX)
        self._count += 1
        token = str(self._count)
        expires_s = PULL_EXPIRES_ALONE_S if self._session.server_alone else PULL_EXPIRES_S
        self._asked[token] = batch, now + expires_s + EXPIRY_GRACE_S
        self._asked_total += batch
        question = msgspec.json.encode({"batch": batch, "expires": int(expires_s * 1e9)})
        try:
            await self._session.publish(
                f"$JS.API.CONSUMER.MSG.NEXT.{self._stream}.{self._name}", question, reply=self._inbox + token
            )
        except BusError:
            self._forget(token, batch)

    def _receive(self, message: Incoming) -> None:
        if not message.reply.startswith("$JS.ACK."):
            self._status(message.headers.get("Status", ""), message)
            return
        self._asked_total = max(0, self._asked_total - 1)
        if not self._closed:
            self._take(message)
        if not self._asked_total or self._lacking():
            self._wake.set()

    def _queue(self, message: Incoming) -> None:
        """For a handler that is awaited."""
        self._received.append(message)
        self._arrived.set()

    def _status(self, status: str, message: Incoming) -> None:
        """The server's word on a pull request: it expired, or something is wrong."""
        token = message.subject.rpartition(".")[2]
        asked = self._asked.get(token)
        if status == "100" or asked is None:
            return
        description = message.headers.get("Description", "")
        pending = message.headers.get("Nats-Pending-Messages")
        self._forget(token, asked[0] if pending is None else int(pending))
        if status == "503" or description.startswith(_CONSUMER_GONE):
            self._break(f"{status} {description}".strip())
        elif status not in ("404", "408"):
            log.warning("bus_pull_refused", stream=self._stream, consumer=self._name, reason=description)
            self._pause_until = time.monotonic() + CONSUMER_RETRY_S
        self._wake.set()

    async def _hand_over(self) -> None:
        while not self._closed:
            if not self._received:
                self._arrived.clear()
                await self._arrived.wait()
                continue
            for _ in range(await self._handle_some()):
                self._received.popleft()
            self._wake.set()

    async def _handle_some(self) -> int:
        """Hand over what was received first; how many messages that were."""
        await self._handle(self._received[0])
        return 1


class BatchConsumer(PullConsumer):
    """Hands over up to ``batch`` messages, gathered for at most ``max_wait_s`` from the first one on.

    One batch at a time, and no more is asked for meanwhile; the handler acknowledges. ``ack_wait_s`` must exceed two
    calls of the handler, else messages come again while they wait. One that is not full follows the one before after
    ``every_s`` at the earliest.
    """

    def __init__(
        self,
        jetstream: JetStream,
        stream: str,
        durable: str,
        subject_filter: str,
        handler: Callable[[list[Incoming]], Awaitable[None]],
        *,
        batch: int,
        max_wait_s: float,
        ack_wait_s: float,
        every_s: float = 0.0,
    ) -> None:
        super().__init__(
            jetstream,
            stream,
            durable,
            subject_filter,
            _in_batches,
            ack_wait_s=ack_wait_s,
            credit=lambda: 0 if self._busy else batch,
            max_ack_pending=max(1000, 4 * batch),
        )
        self._handle_batch = handler
        self._batch = batch
        self._max_wait_s = max_wait_s
        self._every_s = every_s
        self._handed_over_at = 0.0
        self._busy = False

    async def _handle_some(self) -> int:
        await self._gather()
        self._busy = True
        self._handed_over_at = time.monotonic()
        batch = list(self._received)
        try:
            await self._handle_batch(batch)
        except Exception as error:
            contain(f"batch of {len(batch)}", error)
            await asyncio.sleep(CONSUMER_RETRY_S)
        finally:
            self._busy = False
        return len(batch)

    async def _gather(self) -> None:
        rest_s = self._handed_over_at + self._every_s - time.monotonic()
        try:
            async with asyncio.timeout(max(self._max_wait_s, rest_s)):
                while len(self._received) < self._batch and not self._closed:
                    self._arrived.clear()
                    await self._arrived.wait()
        except TimeoutError:
            pass


async def _in_batches(message: Incoming) -> None:
    """No message is handed over by itself."""


def consumer_name(durable: str) -> str:
    """``durable``, cut and completed by its hash when the server would not take it."""
    if len(durable) <= CONSUMER_NAME_BYTES_MAX:
        return durable
    digest = hashlib.sha256(durable.encode()).hexdigest()[:32]
    return f"{durable[: CONSUMER_NAME_BYTES_MAX - 33]}-{digest}"
