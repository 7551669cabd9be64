"""One connection to NATS that stays usable: core publish, request and subscribe, hardened.

What is guarded here, because the client library does not: a subscription is live when ``subscribe`` returns (its
flush is no barrier); a message over the limit is refused before the server would cut the connection; handlers and
callbacks never raise into the client; a request ends when the connection does; every wait ends. Streams, buckets and
consumers are built upon this by other modules.
"""

import asyncio
import secrets
import time
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, Protocol, Self

import structlog

from contracts import subjects
from contracts.bus import nats_client, types
from contracts.bus.credentials import ANONYMOUS, Credentials
from contracts.bus.handlers import Deliver, at_once, contained, in_order, is_plain, stop, within
from contracts.bus.nats_client import Client, LibraryError
from contracts.bus.types import BusError, Handler, Incoming, NoResponder, TooLarge, Unavailable

log = structlog.get_logger(__name__)

RECONNECT_WAIT_S = 0.2
"""Pause between tries; a restarted server answers after about .1 s (measured)."""
PING_INTERVAL_S = 1.5
"""A link that is dead is given up after four of them at the latest: one in which something came, and three pings."""
"""With two pings outstanding a half-open link is found in 5.7 s (measured)."""
CLOSE_TIMEOUT_S = 2.0
"""Of each step on the way out: readers, subscriptions, what is buffered."""
SUBSCRIBE_TIMEOUT_S = 10.0
FLUSH_TIMEOUT_S = 2.0
"""Longest a publish waits for the socket when the client's buffer (2 MiB) is full."""
SUBJECT_BYTES_MAX = 2048
"""The server closes the connection when subject, reply and lengths pass 4096 bytes; inboxes stay under 1024."""
ACK_TRIES, ACK_TIMEOUT_S = 3, 1.0
TOKENS_AT_ONCE = 256
CONCURRENT_CALLS = 256


class Reader(Protocol):
    """What reads by a consumer of its own."""

    async def close(self) -> None:
        """Called before the session ends."""

    def reconnected(self) -> None:
        """Called after each reconnect: what was under way is lost. Must not raise."""


class Subscription:
    """Interest in a subject until ``close``. ``dropped`` counts messages lost because the handler was too slow."""

    def __init__(self, inner: Any, live: "dict[Any, Subscription]") -> None:
        self._inner = inner
        self._live = live
        self.dropped = 0
        self._logged_at = 0.0
        live[inner] = self

    async def close(self) -> None:
        """No message is handed on after this; calls that already run as own tasks end by themselves."""
        self._live.pop(self._inner, None)
        try:
            await self._inner.unsubscribe()
        except LibraryError:
            pass  # closed before, or the connection is: nothing arrives any more

    async def drain(self) -> None:
        """Unsubscribe, and hand on what has arrived."""
        await self._inner.drain()

    def count_drop(self) -> None:
        """A message was dropped for this subscription."""
        self.dropped += 1
        types.SLOW_CONSUMER_DROPS.inc()
        now = time.monotonic()
        if now - self._logged_at >= 1.0:  # one line a second: drops come a message at a time
            self._logged_at = now
            log.warning("bus_slow_consumer", subject=self._inner.subject, dropped=self.dropped)


class Session:
    """Core NATS, made by ``connect``; ``name`` is what the server knows it by, ``user`` whose inbox it has."""

    def __init__(self, url: str, name: str, user: str, credentials: Credentials) -> None:
        self.url = url
        self.name = name
        self.user = user
        self.credentials = credentials
        self.closed = asyncio.Event()
        """Set when the connection is lost for good: the service must exit non-zero."""
        self.reconnects = 0
        self.readers: set[Reader] = set()
        """Closed first when the session ends, and told of every reconnect."""
        self._client = Client(self, credentials)
        self._closing = False
        self._up = asyncio.Event()
        self._subscriptions: dict[Any, Subscription] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._inbox = ""
        """Answers arrive on one token after it."""
        self._expected: dict[str, tuple[asyncio.Future[Incoming | None], asyncio.TimerHandle]] = {}
        """By that token."""
        self._tokens: list[str] = []
        """Not used yet, drawn many at a time: the system's random numbers cost a call each."""
        self._acks: dict[str, list[tuple[str, asyncio.Future[bool]]]] = {}
        """To be sent, by consumer."""
        self._acking: set[str] = set()
        """Consumers of which acks wait for the server's word."""
        self._denied: set[str] = set()
        """Subscriptions that the server refused, as it names them: in lower case."""

    @classmethod
    async def connect(
        cls, url: str, *, name: str, user: str = "", credentials: Credentials = ANONYMOUS, timeout_s: float = 10.0
    ) -> Self:
        """Connect to the server or servers (comma-separated) of ``url``; raises Unavailable after ``timeout_s``, and
        BusError at once for what cannot work. Answers arrive under ``_INBOX.<user>.``, which must be the user's own
        (default: that of the credentials, else ``name``).

        From then on a lost connection is made again, without end, until the server refuses it for good (``closed``).
        """
        if "@" in url:
            raise BusError("an address of the bus holds no credentials: name a seed's file (HEADRACE_NATS_SEED_FILE)")
        credentials.check()
        self = cls(url, name, user or credentials.user or subjects.encode(name), credentials)
        client = self._client
        try:
            async with asyncio.timeout(timeout_s):
                await client.connect(
                    [server.strip() for server in url.split(",")],
                    name=name,
                    error_cb=self._on_error,
                    disconnected_cb=self._on_disconnected,
                    reconnected_cb=self._on_reconnected,
                    closed_cb=self._on_closed,
                    reconnect_time_wait=RECONNECT_WAIT_S,
                    max_reconnect_attempts=-1,
                    ping_interval=PING_INTERVAL_S,
                    max_outstanding_pings=2,
                    flush_timeout=FLUSH_TIMEOUT_S,
                    flusher_queue_size=0,  # a full one would hold up the pings too
                    inbox_prefix=types.INBOX + self.user,
                )
                self._up.set()
                self._inbox = client.new_inbox() + "."
                await client.subscribe_direct(self._inbox + "*", "", self._on_answer)
                await self.barrier()
        except (TimeoutError, OSError, LibraryError) as error:
            self._closing = True
            await within(CLOSE_TIMEOUT_S, client.close())
            reason = client.last_error or error
            raise Unavailable(f"no connection to NATS within {timeout_s:g} s: {reason!r}") from error
        except BaseException:
            self._closing = True
            await within(CLOSE_TIMEOUT_S, client.close())
            raise
        self.spawn(self._watch(), vital=True)
        return self

    @property
    def connected(self) -> bool:
        """Whether the server is reached now."""
        return self._client.is_connected

    @property
    def server_alone(self) -> bool:
        """Whether the server belongs to no cluster: all that is kept for us is kept by the one that is connected."""
        return self._client.server_alone

    @property
    def max_payload(self) -> int:
        """Largest message with headers that the server takes, in bytes."""
        return self._client.max_payload

    def new_inbox(self) -> str:
        """A subject under this session's inbox that nobody has used."""
        return self._client.new_inbox()

    async def publish(
        self, subject: str, data: bytes, *, headers: Mapping[str, str] | None = None, reply: str = ""
    ) -> None:
        """Core NATS, at most once. Nothing waits for a reconnect: what was told to have failed must not happen later.

        Raises TooLarge, and NoResponder while disconnected.
        """
        if self._client.full:
            await self._client.make_room()
        self.send(subject, data, headers=headers, reply=reply)

    def send(self, subject: str, data: bytes, *, headers: Mapping[str, str] | None = None, reply: str = "") -> None:
        """``publish`` for what is bounded by what came in, such as answers: it does not wait for room."""
        if not self._client.is_connected:
            raise NoResponder("disconnected from the bus")
        if headers is not None or len(subject) > SUBJECT_BYTES_MAX:
            self._check_size(subject, data, headers)
        try:
            self._client.send(subject, data, reply, headers)
        except LibraryError as error:
            raise nats_client.translated(error, subject, len(data), self.max_payload) from error

    async def request(self, subject: str, data: bytes, *, timeout_s: float = 2.0) -> bytes:
        """The first answer; raises Unavailable when nobody listens or answers in time, and TooLarge."""
        return (await self.ask(subject, data, timeout_s)).data

    async def ask(
        self, subject: str, data: bytes, timeout_s: float, headers: Mapping[str, str] | None = None
    ) -> Incoming:
        """``request`` with headers, and the answer with its own."""
        if not self._client.is_connected:
            raise NoResponder("disconnected from the bus")
        reply, coming = self._expect(timeout_s)
        await self.publish(subject, data, headers=headers, reply=reply)
        answer = await coming
        if answer is None:
            raise Unavailable(f"no answer from {subject} in time")
        if answer.headers.get("Status") == "503":
            raise NoResponder(f"nobody listens on {subject}")
        return answer

    def _expect(self, timeout_s: float) -> tuple[str, "asyncio.Future[Incoming | None]"]:
        """A new reply subject, and the message to come on it: None after ``timeout_s`` or a disconnect.

        Not the library's requests: those would wait for answers that a lost connection cannot bring, and cost more.
        A responder must not be able to guess the next reply subject.
        """
        loop = asyncio.get_running_loop()
        token = self._token()
        coming: asyncio.Future[Incoming | None] = loop.create_future()
        self._expected[token] = coming, loop.call_later(timeout_s, self._settle, token, None)
        return self._inbox + token, coming

    def _token(self) -> str:
        if not self._tokens:
            drawn = secrets.token_hex(8 * TOKENS_AT_ONCE)
            self._tokens = [drawn[start : start + 16] for start in range(0, len(drawn), 16)]
        return self._tokens.pop()

    def _settle(self, token: str, answer: Incoming | None) -> None:
        if (expected := self._expected.pop(token, None)) is None:
            return  # late, or a second answer
        coming, timer = expected
        timer.cancel()
        if not coming.done():
            coming.set_result(answer)

    def _on_answer(self, message: Incoming) -> None:
        self._settle(message.subject[len(self._inbox) :], message)

    def _give_up_answers(self) -> None:
        for token in tuple(self._expected):
            self._settle(token, None)

    def _check_size(self, subject: str, data: bytes, headers: Mapping[str, str] | None) -> None:
        """The client checks the payload only; the server counts headers too, and closes for good."""
        if len(subject.encode()) > SUBJECT_BYTES_MAX:
            raise TooLarge(f"the subject has {len(subject.encode())} bytes; at most {SUBJECT_BYTES_MAX} are sent")
        size = len(data)
        if headers:
            size += 12 + sum(len(key.encode()) + len(value.encode()) + 4 for key, value in headers.items())
        if size > self.max_payload:
            raise TooLarge(f"{size} bytes with headers; the server takes {self.max_payload}")

    def confirm_ack(self, reply: str) -> "asyncio.Future[bool]":
        """Send an ack and have the server's word, after a few tries; False when it stays unconfirmed.

        Acks of one consumer that come while one waits for its word are sent together after it, and share theirs: the
        server takes them in their order.
        """
        if (consumer := types.consumer_of(reply)) is None:
            raise BusError("only a message of a consumer can be acknowledged")
        confirmed: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._acks.setdefault(consumer, []).append((reply, confirmed))
        if consumer not in self._acking:
            self._acking.add(consumer)
            self.spawn(self._send_acks(consumer))
        return confirmed

    async def _send_acks(self, consumer: str) -> None:
        try:
            while group := self._acks.pop(consumer, None):
                if not await self._confirm_together(group):
                    self.spawn(self._confirm_each(group))
        finally:
            self._acking.discard(consumer)
            _tell(self._acks.pop(consumer, []), confirmed=False)

    async def _confirm_together(self, group: "list[tuple[str, asyncio.Future[bool]]]") -> bool:
        *others, (last, _) = group
        try:
            for reply, _ in others:
                self.send(reply, b"")
            await self.ask(last, b"", ACK_TIMEOUT_S)
        except Unavailable:
            return False
        except BaseException:
            _tell(group, confirmed=False)
            raise
        _tell(group, confirmed=True)
        return True

    async def _confirm_each(self, group: "list[tuple[str, asyncio.Future[bool]]]") -> None:
        try:
            words = await asyncio.gather(*(self._confirm_alone(reply) for reply, _ in group))
            for each, word in zip(group, words, strict=True):
                _tell([each], confirmed=word)
        finally:
            _tell(group, confirmed=False)

    async def _confirm_alone(self, reply: str) -> bool:
        for _ in range(ACK_TRIES - 1):
            try:
                await self.ask(reply, b"", ACK_TIMEOUT_S)
                return True
            except Unavailable:
                if not self.connected:
                    await self.wait_connected(ACK_TIMEOUT_S)
        types.ACKS_UNCONFIRMED.inc()
        return False

    async def subscribe(
        self,
        subject: str,
        handler: Handler,
        *,
        queue: str = "",
        concurrent: bool = False,
        limit: int = CONCURRENT_CALLS,
    ) -> Subscription:
        """Hand each message on ``subject`` to ``handler``; live at the server on return, else raises Unavailable, or
        BusError when this user may not read it.

        A plain function is called directly; a coroutine is awaited before the next message, or with ``concurrent``
        runs as an own task, at most ``limit`` at a time. What a handler raises is logged and counted, no more.
        """
        if is_plain(handler) and not concurrent:
            subscription = await self.listen(subject, contained(handler), queue)
        else:
            deliver = at_once(handler, limit, self.spawn) if concurrent else in_order(handler)
            subscription = await self._queued(subject, deliver, queue)
        try:
            await self.barrier()
            if subject.lower() in self._denied:
                self._denied.discard(subject.lower())
                raise BusError(f"this user may not subscribe to {subject}")
        except BaseException:
            await subscription.close()
            raise
        return subscription

    async def listen(self, subject: str, take: Callable[[Incoming], None], queue: str = "") -> Subscription:
        """A subscription without a ``barrier``, enough where the same session then asks for what is to come.
        ``take`` is called as messages are read, and must not raise.
        """
        return await self._subscribed(subject, self._client.subscribe_direct(subject, queue, take))

    async def _queued(self, subject: str, deliver: Deliver, queue: str) -> Subscription:
        """``deliver`` is awaited for each message; meanwhile the next ones wait. It must not raise."""
        return await self._subscribed(subject, self._client.subscribe(subject, queue=queue, cb=deliver))

    async def _subscribed(self, subject: str, subscribing: Coroutine[Any, Any, Any]) -> Subscription:
        try:
            self._check_size(subject, b"", None)
            inner = await subscribing
        except LibraryError as error:
            raise nats_client.translated(error, subject, 0, self.max_payload) from error
        finally:
            subscribing.close()
        return Subscription(inner, self._subscriptions)

    async def barrier(self) -> None:
        """Wait until the server has acted on everything sent so far, by a message through it to ourselves.

        The library's flush lets its PING overtake what is still buffered, and a PONG after its time-out kills the
        read loop; a message keeps its place in line and may be late. Raises Unavailable.
        """
        deadline = time.monotonic() + SUBSCRIBE_TIMEOUT_S
        while (left := deadline - time.monotonic()) > 0 and await self.wait_connected(left):
            if self._inbox.lower() + "*" in self._denied:
                raise Unavailable("this user may not read its inbox")
            reply, coming = self._expect(left)
            try:
                await self.publish(reply, b"")
            except Unavailable:
                self._settle(reply[len(self._inbox) :], None)  # Lost since.
            if await coming is not None:
                return  # else it was lost in a reconnect
        raise Unavailable("the server does not answer")

    async def wait_connected(self, timeout_s: float) -> bool:
        """Wait for a connection; whether there is one."""
        try:
            async with asyncio.timeout(timeout_s):
                while not self.connected:
                    if self._up.is_set():  # lost, and the callback has not yet run
                        await asyncio.sleep(0.01)
                    else:
                        await self._up.wait()
        except TimeoutError:
            return False
        return True

    def spawn(self, work: Coroutine[Any, Any, None], *, vital: bool = False) -> asyncio.Task[None]:
        """Run ``work`` as a task of this session. When a vital one dies of an exception, the service must exit."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)

        def done(task: asyncio.Task[None]) -> None:
            self._tasks.discard(task)
            if not task.cancelled() and (error := task.exception()) is not None:
                log.error("bus_task_failed", exc_info=error)
                if vital:
                    self.closed.set()

        task.add_done_callback(done)
        return task

    async def _watch(self) -> None:
        await self._client.watch(self._up.is_set, lambda: self._closing)
        await self._on_closed()

    def dropped(self, inner: Any) -> None:
        """A message found no room in the queue of a subscription."""
        if (subscription := self._subscriptions.get(inner)) is not None:
            subscription.count_drop()

    async def _on_error(self, error: Exception) -> None:
        if (denied := nats_client.denied_subject(error)) is not None:
            self._denied.add(denied)
            if denied == self._inbox.lower() + "*":
                self._give_up_answers()
        level = log.warning if self._client.is_connected else log.debug
        level("bus_error", error=repr(error))

    async def _on_disconnected(self) -> None:
        self._up.clear()
        self._client.drop_unsent()
        self._give_up_answers()
        if not self._closing:
            log.warning("bus_disconnected", error=repr(self._client.last_error or "the connection ended"))

    async def _on_reconnected(self) -> None:
        self.reconnects += 1
        types.RECONNECTS.inc()
        self._up.set()
        log.info("bus_reconnected", reconnects=self.reconnects)
        for reader in tuple(self.readers):
            reader.reconnected()

    async def _on_closed(self) -> None:
        self._up.clear()
        if not self._closing and not self.closed.is_set():
            log.error("bus_closed", error=repr(self._client.last_error))
            self.closed.set()

    async def close(self) -> None:
        """End what reads, hand on what has arrived, send what is buffered, close; within a time limit."""
        await within(CLOSE_TIMEOUT_S, *(reader.close() for reader in tuple(self.readers)))
        for consumer in tuple(self._acks):
            self.spawn(self._confirm_each(self._acks.pop(consumer)))
        self._closing = True
        if self.connected:
            await within(CLOSE_TIMEOUT_S, *(each.drain() for each in self._subscriptions.values()))
            await within(CLOSE_TIMEOUT_S, self.barrier())
        await within(1.0, self._client.close())
        self._client.abort()
        await stop(*self._tasks)


def _tell(group: "list[tuple[str, asyncio.Future[bool]]]", *, confirmed: bool) -> None:
    """Those who wait for the word on their acks, and have not had it."""
    for _, waiting in group:
        if not waiting.done():
            waiting.set_result(confirmed)
