"""One connection to NATS that stays usable: core publish, request and subscribe, hardened.

What is guarded here, because the client library does not: a subscription is live when ``subscribe`` returns
(its flush is no barrier); a read loop that died is noticed and the connection made anew; a message over the
limit is refused before the server would cut the connection; callbacks never raise into the client; every wait
ends.
"""

import asyncio
import contextlib
import re
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from typing import Any, Protocol, Self

import nats.errors
import structlog
from nats.aio.client import Client
from nats.aio.subscription import Subscription as NatsSubscription

from contracts import subjects
from contracts.bus import types
from contracts.bus.types import BusError, Handler, Incoming, NoResponder, TooLarge, Unavailable

log = structlog.get_logger(__name__)

RECONNECT_WAIT_S = 0.2
"""Pause between tries; a restarted server answers after about .1 s (measured)."""
PING_INTERVAL_S = 2.0
"""With two pings outstanding a half-open link is found in 5.7 s (measured)."""
WATCH_INTERVAL_S = 0.5
"""How often the client's own tasks are looked at."""
TICKS_UNTIL_DEAD = 2
CLOSE_TIMEOUT_S = 2.0
"""Of each step on the way out: readers, subscriptions, what is buffered."""
SUBSCRIBE_TIMEOUT_S = 10.0
FLUSH_TIMEOUT_S = 2.0
"""Longest a publish waits for the socket when the client's buffer (2 MiB) is full."""
SUBJECT_BYTES_MAX = 2048
"""The server closes the connection when subject, reply and lengths pass 4096 bytes; inboxes stay under 1024.
"""
ACK_TRIES, ACK_TIMEOUT_S = 3, 1.0
_DENIED = re.compile(r'permissions violation for subscription to "(?P<subject>[^"]*)"')
CONCURRENT_CALLS = 256


class Reader(Protocol):
    """What reads by a consumer of its own: ends before its connection does."""

    async def close(self) -> None: ...


class _Client(Client):
    """The library's client, told to build our messages, and not to leak the socket of a try that failed."""

    msg_class = Incoming
    owner: "Connection"

    async def _connect_to_server(self, s: Any) -> None:
        self.abort()
        await super()._connect_to_server(s)

    def abort(self) -> None:
        """Drop the socket at once, with what is buffered."""
        writer = getattr(self._transport, "_io_writer", None)
        if writer is not None:
            writer.transport.abort()


class Subscription:
    """Interest in a subject until ``close``. ``dropped`` counts messages lost because the handler was too
    slow.
    """

    def __init__(self, connection: "Connection", inner: NatsSubscription) -> None:
        self._connection = connection
        self._inner = inner
        self.dropped = 0
        self._logged_at = 0.0

    async def close(self) -> None:
        """No message is handed on after this; calls that already run as own tasks end by themselves."""
        self._connection._subscriptions.pop(self._inner._id, None)
        try:
            await self._inner.unsubscribe()
        except nats.errors.Error:
            pass  # closed before, or the connection is: nothing arrives any more

    def _count_drop(self) -> None:
        self.dropped += 1
        types.SLOW_CONSUMER_DROPS.inc()
        now = time.monotonic()
        if now - self._logged_at >= 1.0:  # one line a second: drops come a message at a time
            self._logged_at = now
            log.warning("bus_slow_consumer", subject=self._inner.subject, dropped=self.dropped)


class Connection:
    """Core NATS. Made by ``connect``; use ``contracts.bus.Bus``, which adds streams and buckets."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.closed = asyncio.Event()
        """Set when the connection is lost for good: the service must exit non-zero."""
        self.reconnects = 0
        self._client = _Client()
        self._client.owner = self
        self._closing = False
        self._up = asyncio.Event()
        self._subscriptions: dict[int, Subscription] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._readers: set[Reader] = set()
        self._kicks: list[Callable[[], None]] = []
        self._callbacks: list[Callable[[], Awaitable[None]]] = []
        self._echoes: dict[str, asyncio.Future[None]] = {}
        self._echo_prefix = ""
        self._echo_count = 0
        self._denied: set[str] = set()
        """Subscriptions that the server refused, as it names them: in lower case."""
        self._publish = self._client.publish

    @classmethod
    async def connect(cls, url: str, *, name: str, inbox: str = "", timeout_s: float = 10.0) -> Self:
        """Connect to the server or servers (comma-separated) of ``url``; raises Unavailable after
        ``timeout_s``. Answers arrive under ``_INBOX.<inbox>.``, which must be the user's own (default: ``name``).

        From then on the connection is made anew for ever, until the server refuses it for good (``closed``).
        """
        self = cls(name)
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
                    inbox_prefix=types.INBOX + (inbox or subjects.encode(name)),
                )
                self._up.set()
                self._echo_prefix = client.new_inbox() + "."
                echoes = await self._attach(self._echo_prefix + "*", self._on_echo)
                del self._subscriptions[echoes._inner._id]  # stays to the very end
                await self._barrier()
        except (TimeoutError, OSError, nats.errors.Error) as error:
            self._closing = True
            await _bounded(client.close())
            reason = client.last_error or error
            raise Unavailable(f"no connection to NATS within {timeout_s:g} s: {reason!r}") from error
        except BaseException:
            self._closing = True
            await _bounded(client.close())
            raise
        self._spawn(self._watch(), vital=True)
        return self

    @property
    def connected(self) -> bool:
        return self._client.is_connected

    @property
    def max_payload(self) -> int:
        """Largest message with headers that the server takes, in bytes."""
        return self._client.max_payload

    def on_reconnect(self, callback: Callable[[], Awaitable[None]]) -> None:
        """Run ``callback`` after each reconnect, in an own task; its exceptions are logged."""
        self._callbacks.append(callback)

    # Sending -----------------------------------------------------------------------------------------------

    async def publish(self, subject: str, data: bytes, *, headers: Mapping[str, str] | None = None) -> None:
        """Core NATS, at most once; while disconnected up to 2 MiB wait for the reconnect.

        Raises TooLarge, and Unavailable when the buffer is full or the connection closed.
        """
        if headers is not None or len(subject) > SUBJECT_BYTES_MAX:
            self._check_size(subject, data, headers)
        try:
            await self._publish(subject, data, "", headers)
        except nats.errors.Error as error:
            raise self._translate(error, subject, data) from error

    async def request(self, subject: str, data: bytes, *, timeout_s: float = 2.0) -> bytes:
        """The first answer; raises Unavailable when nobody listens or answers in time, and TooLarge."""
        return (await self._ask(subject, data, timeout_s)).data

    async def _ask(
        self, subject: str, data: bytes, timeout_s: float, headers: Mapping[str, str] | None = None
    ) -> Incoming:
        if headers is not None or len(subject) > SUBJECT_BYTES_MAX:
            self._check_size(subject, data, headers)
        try:
            answer = await self._client.request(subject, data, timeout=timeout_s, headers=headers)
        except nats.errors.Error as error:
            raise self._translate(error, subject, data) from error
        return answer

    def _check_size(self, subject: str, data: bytes, headers: Mapping[str, str] | None) -> None:
        """The client checks the payload only; the server counts headers too, and closes for good."""
        if len(subject.encode()) > SUBJECT_BYTES_MAX:
            raise TooLarge(f"the subject has {len(subject.encode())} bytes; at most {SUBJECT_BYTES_MAX} are sent")
        size = len(data)
        if headers:
            size += 12 + sum(len(key.encode()) + len(value.encode()) + 4 for key, value in headers.items())
        if size > self.max_payload:
            raise TooLarge(f"{size} bytes with headers; the server takes {self.max_payload}")

    def _translate(self, error: nats.errors.Error, subject: str, data: bytes) -> BusError:
        match error:
            case nats.errors.MaxPayloadError():
                return TooLarge(f"{len(data)} bytes; the server takes {self.max_payload}")
            case nats.errors.NoRespondersError():
                return NoResponder(f"nobody listens on {subject}")
            case nats.errors.TimeoutError():
                return Unavailable(f"no answer from {subject} in time")
            case nats.errors.OutboundBufferLimitError():
                return Unavailable("disconnected, and the buffer for the reconnect is full")
            case nats.errors.ConnectionClosedError() | nats.errors.ConnectionDrainingError():
                return Unavailable("the connection is closed")
            case _:
                return BusError(f"{error!r} for {subject!r}")

    async def confirm_ack(self, reply: str) -> bool:
        """Send an ack and wait for the server's word, a few times; False when it stays unconfirmed."""
        if not reply.startswith("$JS.ACK."):
            raise BusError("only a message of a consumer can be acknowledged")
        for _ in range(ACK_TRIES):
            try:
                await self._ask(reply, b"", ACK_TIMEOUT_S)
                return True
            except Unavailable:
                if not self.connected:
                    await self._wait_up(ACK_TIMEOUT_S)
        types.ACKS_UNCONFIRMED.inc()
        return False

    # Receiving ---------------------------------------------------------------------------------------------

    async def subscribe(
        self,
        subject: str,
        handler: Handler,
        *,
        queue: str = "",
        concurrent: bool = False,
        limit: int = CONCURRENT_CALLS,
    ) -> Subscription:
        """Hand each message on ``subject`` to ``handler``; live at the server on return, else raises
        Unavailable, or BusError when this user may not read it.

        A plain function is called directly; a coroutine is awaited before the next message, or with
        ``concurrent`` runs as an own task, at most ``limit`` at a time. What a handler raises is logged and
        counted, no more.
        """
        deliver = self._concurrently(handler, limit) if concurrent else self._in_order(handler)
        subscription = await self._attach(subject, deliver, queue)
        try:
            await self._barrier()
            if subject.lower() in self._denied:
                self._denied.discard(subject.lower())
                raise BusError(f"this user may not subscribe to {subject}")
        except BaseException:
            await subscription.close()
            raise
        return subscription

    async def _attach(
        self, subject: str, deliver: Callable[[Incoming], Awaitable[None]], queue: str = ""
    ) -> Subscription:
        self._check_size(subject, b"", None)
        try:
            inner = await self._client.subscribe(subject, queue=queue, cb=deliver)
        except nats.errors.Error as error:
            raise self._translate(error, subject, b"") from error
        subscription = Subscription(self, inner)
        self._subscriptions[inner._id] = subscription
        return subscription

    def _in_order(self, handler: Handler) -> Callable[[Incoming], Awaitable[None]]:
        async def deliver(message: Incoming) -> None:
            try:
                running = handler(message)
                if running is not None:
                    await running
            except asyncio.CancelledError as error:
                # The library would silently end the subscription. Only when its task is really being
                # cancelled is that right.
                if _is_cancelled():
                    raise
                self._contain(message.subject, error)
            except Exception as error:
                self._contain(message.subject, error)

        return deliver

    def _concurrently(self, handler: Handler, limit: int) -> Callable[[Incoming], Awaitable[None]]:
        call = self._in_order(handler)
        free = asyncio.Semaphore(limit)

        async def run(message: Incoming) -> None:
            try:
                await call(message)
            finally:
                free.release()

        async def deliver(message: Incoming) -> None:
            await free.acquire()
            self._spawn(run(message))

        return deliver

    def _contain(self, subject: str, error: BaseException) -> None:
        types.HANDLER_ERRORS.inc()
        log.error("bus_handler_failed", subject=subject, exc_info=error)

    async def _barrier(self) -> None:
        """Wait until the server has acted on everything sent so far, by a message through it to ourselves.

        The library's flush lets its PING overtake what is still buffered, and a PONG after its time-out kills
        the read loop; a message keeps its place in line and may be late.
        """
        self._echo_count += 1
        token = str(self._echo_count)
        echo = self._echoes[token] = asyncio.get_running_loop().create_future()
        try:
            async with asyncio.timeout(SUBSCRIBE_TIMEOUT_S):
                while not echo.done():
                    await self.publish(self._echo_prefix + token, b"")
                    await asyncio.wait([echo], timeout=1.0)  # lost in a reconnect: ask again
                    if self._echo_prefix.lower() + "*" in self._denied:
                        raise Unavailable("this user may not read its inbox")
        except TimeoutError as error:
            raise Unavailable("the server does not answer") from error
        finally:
            del self._echoes[token]

    async def _on_echo(self, message: Incoming) -> None:
        echo = self._echoes.get(message.subject.rpartition(".")[2])
        if echo is not None and not echo.done():
            echo.set_result(None)

    # Staying alive -----------------------------------------------------------------------------------------

    async def _wait_up(self, timeout_s: float) -> bool:
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

    async def _watch(self) -> None:
        """Revive a connection whose tasks died or hang: it would stay "connected" and deaf for minutes, or
        for ever.

        A reconnect may also die of an exception that the library does not catch, or hang: it waits for the
        old socket to take what is buffered, which a broken link never does.
        """
        client = self._client
        dead_ticks = hung_ticks = 0
        while not client.is_closed:
            await asyncio.sleep(WATCH_INTERVAL_S)
            if self._closing:
                continue
            if client.is_connected:
                tasks = (client._reading_task, client._flusher_task, client._ping_interval_task)
                dead_ticks = hung_ticks = 0
                if any(task is None or task.done() for task in tasks):
                    await self._revive("a task of the connection died")
                continue
            task = client._reconnection_task
            dead_ticks = dead_ticks + 1 if task is None or task.done() else 0
            hung_ticks = hung_ticks + 1 if self._up.is_set() else 0
            if dead_ticks == TICKS_UNTIL_DEAD and not client.is_closed:
                dead_ticks = 0
                client._status = Client.CONNECTED  # else nothing is reconnected
                await self._revive("the reconnect died")
            elif hung_ticks == TICKS_UNTIL_DEAD:
                log.warning("bus_socket_aborted", reason="the old socket does not close")
                self._client.abort()
        await self._on_closed()

    async def _revive(self, why: str) -> None:
        types.DEAD_LOOPS.inc()
        log.warning("bus_revived", reason=why)
        await self._client.force_reconnect()

    async def _on_error(self, error: Exception) -> None:
        if isinstance(error, nats.errors.SlowConsumerError):
            if (subscription := self._subscriptions.get(error.sid)) is not None:
                subscription._count_drop()
            return
        if (denied := _DENIED.search(str(error))) is not None:
            self._denied.add(denied["subject"])
        level = log.warning if self._client.is_connected else log.debug
        level("bus_error", error=repr(error))

    async def _on_disconnected(self) -> None:
        self._up.clear()
        for waiting in tuple(self._client._resp_map.values()):
            if not waiting.done():  # its answer cannot come any more
                waiting.set_exception(nats.errors.TimeoutError())
        if not self._closing:
            log.warning("bus_disconnected", error=repr(self._client.last_error))

    async def _on_reconnected(self) -> None:
        self.reconnects += 1
        types.RECONNECTS.inc()
        self._up.set()
        log.info("bus_reconnected", reconnects=self.reconnects)
        for kick in tuple(self._kicks):
            kick()
        for callback in self._callbacks:
            self._spawn(self._call(callback))

    async def _call(self, callback: Callable[[], Awaitable[None]]) -> None:
        try:
            await callback()
        except Exception:
            log.exception("bus_reconnect_callback_failed")

    async def _on_closed(self) -> None:
        self._up.clear()
        if not self._closing and not self.closed.is_set():
            log.error("bus_closed", error=repr(self._client.last_error))
            self.closed.set()

    def _spawn(self, work: Coroutine[Any, Any, None], *, vital: bool = False) -> asyncio.Task[None]:
        """Run ``work`` as a task of this connection. When a vital one dies of an exception, the service must
        exit.
        """
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

    async def close(self) -> None:
        """End what reads, hand on what has arrived, send what is buffered, close; within a time limit."""
        await _bounded(*(reader.close() for reader in tuple(self._readers)))
        self._closing = True
        if self._client.is_connected:
            await _bounded(*(subscription._inner.drain() for subscription in self._subscriptions.values()))
            await _bounded(self._barrier())
        await _bounded(self._client.close(), timeout_s=1.0)
        self._client.abort()
        await stop(*self._tasks)


async def stop(*tasks: asyncio.Task[Any]) -> None:
    """Cancel ``tasks`` and wait for them; again where the library swallowed it, but not for ever."""
    for _ in range(10):
        waiting = [task for task in tasks if not task.done() and task is not asyncio.current_task()]
        if not waiting:
            return
        for task in waiting:
            task.cancel()
        await asyncio.wait(waiting, timeout=0.5)


def _is_cancelled() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


async def _bounded(*works: Awaitable[None], timeout_s: float = CLOSE_TIMEOUT_S) -> None:
    """Await ``works`` at once, for at most ``timeout_s``; what fails on the way out is of no interest."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(timeout_s):
            await asyncio.gather(*works, return_exceptions=True)
