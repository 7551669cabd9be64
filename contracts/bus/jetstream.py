"""JetStream by its wire API: store, read back, delete, and the calls that manage streams and consumers.

The library's own JetStream layer is not used: it hides errors, has no retries and leaves consumers behind.
"""

import asyncio
import calendar
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Any, TypeVar

import msgspec
import structlog
from prometheus_client import Counter

from contracts.bus import types
from contracts.bus.session import Session
from contracts.bus.types import (
    BusError,
    Incoming,
    NoResponder,
    NotFound,
    Stored,
    StreamFull,
    TooLarge,
    Unavailable,
    Unconfirmed,
    WrongSequence,
)

API_TIMEOUT_S = 5.0
"""Longest wait for any answer of JetStream, tries included; a restarted server is back in well under a second."""
TRY_TIMEOUT_S = 1.0
RETRY_WAIT_S = 0.1
CONSUMER_RETRY_S = 0.25
"""Between tries to make a consumer again."""
READ_BATCH = 500
"""Messages per batched direct get: 500 take 7.7 ms (measured)."""
READ_BATCH_BYTES = 4 * 1024 * 1024

MSG_ID = "Nats-Msg-Id"
EXPECT_LAST = "Nats-Expected-Last-Subject-Sequence"

# Error codes of the server (server/errors.json).
NO_STREAM, NO_CONSUMER, NO_MESSAGE = 10059, 10014, 10037
_KINDS: dict[int, type[BusError]] = {
    **dict.fromkeys((10071, 10164), WrongSequence),
    **dict.fromkeys((10077, 10047, 10028, 10023), StreamFull),
    **dict.fromkeys((10054, 10097), TooLarge),
    **dict.fromkeys((NO_STREAM, NO_CONSUMER, NO_MESSAGE), NotFound),
    **dict.fromkeys((10008, 10009, 10039, 10074, 10076, 10118), NoResponder),  # not ready yet
}

log = structlog.get_logger(__name__)
T = TypeVar("T")


class ApiError(msgspec.Struct):
    """What the server says went wrong: HTTP-like ``code``, and ``err_code`` by its own list."""

    code: int = 0
    err_code: int = 0
    description: str = ""


class _PubAck(msgspec.Struct):
    error: ApiError | None = None
    stream: str = ""
    seq: int = 0
    duplicate: bool = False


class _Failure(msgspec.Struct):
    error: ApiError | None = None


_decode_ack = msgspec.json.Decoder(_PubAck).decode
_decode_failure = msgspec.json.Decoder(_Failure).decode


def failure(error: ApiError, about: str) -> BusError:
    """The exception for an error of the server."""
    problem = _KINDS.get(error.err_code, BusError)(f"{about}: {error.description} ({error.err_code})")
    problem.err_code = error.err_code
    return problem


class JetStream:
    """Streams, upon a session."""

    def __init__(self, session: Session) -> None:
        self.session = session

    async def store(
        self,
        subject: str,
        data: bytes,
        *,
        msg_id: str,
        expect_last: int | None = None,
        headers: Mapping[str, str] | None = None,
        timeout_s: float = 5.0,
    ) -> Stored:
        """Publish to the stream of ``subject`` and wait for its word, repeating with ``msg_id`` within
        ``timeout_s``.

        ``expect_last`` is the sequence that the subject's last message must have, 0 for none: this alone is safe
        over a restart, since ids of deleted messages are then forgotten. When it is refused, the last message is
        read back: the same id and data are this message, stored by an earlier try (``duplicate``). Raises
        WrongSequence, which holds what was found instead, StreamFull, TooLarge; Unconfirmed when no answer came, and
        then the message may be stored, or be stored later.
        """
        all_headers = {MSG_ID: msg_id, **(headers or {})}
        if expect_last is not None:
            all_headers[EXPECT_LAST] = str(expect_last)

        async def publish(try_s: float) -> Stored:
            answer = await self.session.ask(subject, data, try_s, all_headers)
            ack = _decode_ack(answer.data)
            if ack.error is None:
                return Stored(ack.seq, ack.duplicate)
            refusal = failure(ack.error, subject)
            if isinstance(refusal, WrongSequence):
                return await self._own_or_raise(refusal, ack.stream, subject, data, msg_id)
            raise refusal

        try:
            return await self._insist(publish, timeout_s, types.STORE_RETRIES)
        except Unavailable as error:
            types.STORES_UNCONFIRMED.inc()
            raise Unconfirmed(f"{subject}: not confirmed within {timeout_s:g} s: {error}") from error

    async def _own_or_raise(self, error: WrongSequence, stream: str, subject: str, data: bytes, msg_id: str) -> Stored:
        """What is in the way may be an earlier try of the same publish, whose answer got lost."""
        try:
            found = await self.last(stream, subject)
        except Unavailable as unread:
            raise Unconfirmed(f"{subject}: refused, and what is stored cannot be read: {unread}") from error
        if found is not None and found.headers.get(MSG_ID) == msg_id and found.data == data:
            return Stored(found.stream_seq, True)
        error.found = found
        raise error

    async def delete(self, stream: str, seq: int) -> None:
        """Delete one message, which may be gone already."""
        try:
            await self.api(f"STREAM.MSG.DELETE.{stream}", {"seq": seq, "no_erase": True})
        except BusError as error:
            # The server has several words for a message that is gone.
            if error.err_code in (0, NO_STREAM) or await self.get(stream, seq) is not None:
                raise

    async def purge(self, stream: str, subject: str) -> int:
        """Delete every message on ``subject``, which may have wildcards; how many there were."""
        answer = await self.api(f"STREAM.PURGE.{stream}", {"filter": subject})
        return int(answer.get("purged", 0))

    async def last(self, stream: str, subject: str) -> Incoming | None:
        """The last message on ``subject``, by direct get; when that finds none, the leader is asked."""
        found = await self._direct(f"{stream}.{subject}", b"")
        return found if found is not None else await self._from_leader(stream, {"last_by_subj": subject})

    async def get(self, stream: str, seq: int) -> Incoming | None:
        """The message with sequence ``seq``; None when it is gone."""
        found = await self._direct(stream, msgspec.json.encode({"seq": seq}))
        return found if found is not None else await self._from_leader(stream, {"seq": seq})

    async def _direct(self, rest: str, question: bytes) -> Incoming | None:
        subject = f"$JS.API.DIRECT.GET.{rest}"
        answer = await self._insist(lambda try_s: self.session.ask(subject, question, try_s), API_TIMEOUT_S)
        if "Nats-Sequence" in answer.headers:
            return self._stored(answer)
        if answer.headers.get("Status") == "404":
            return None
        raise BusError(f"direct get of {rest}: {answer.headers.get('Status')} {answer.headers.get('Description', '')}")

    def _stored(self, answer: Incoming) -> Incoming:
        """The stored message that a direct get answered with."""
        headers = answer.headers
        place = (int(headers["Nats-Sequence"]), rfc3339_ns(headers["Nats-Time-Stamp"]) // 1_000_000, 0)
        return Incoming(headers["Nats-Subject"], "", answer.data, dict(headers), self.session, place)

    async def _from_leader(self, stream: str, question: dict[str, Any]) -> Incoming | None:
        """A follower that answers a direct get may lag behind; the leader does not."""
        try:
            answer = await self.api(f"STREAM.MSG.GET.{stream}", question)
        except NotFound as error:
            if error.err_code == NO_MESSAGE:
                return None
            raise
        message = answer["message"]
        place = (int(message["seq"]), rfc3339_ns(message["time"]) // 1_000_000, 0)
        data = msgspec.convert(message.get("data", ""), bytes)
        raw = msgspec.convert(message.get("hdrs", ""), bytes)
        return Incoming(message["subject"], "", data, _headers(raw), self.session, place)

    async def read(
        self, stream: str, subject_filter: str, *, start_seq: int = 1, to_the_end: bool = False
    ) -> AsyncIterator[Incoming]:
        """Everything stored now on ``subject_filter`` from ``start_seq`` on, in order, by batched direct get.

        Finite, and leaves no consumer behind. With ``to_the_end`` also what is stored while reading: a key written
        again meanwhile moves to the end. Raises Unavailable when the stream does not answer. On a replicated stream
        a follower that lags may answer without the newest messages.
        """
        left: int | None = None
        position = start_seq
        while left is None or left > 0:
            batch, pending = await self._batch(stream, subject_filter, position)
            for message in batch:
                position = message.stream_seq + 1
                yield message
            if pending == 0:
                return
            if not to_the_end:  # what comes in while we read must not keep us reading for ever
                left = pending if left is None else left - len(batch)

    async def _batch(self, stream: str, subject_filter: str, start_seq: int) -> tuple[list[Incoming], int]:
        """One batch from ``start_seq`` on and how many messages follow it; asked again when something is missing."""
        question = msgspec.json.encode(
            {"seq": start_seq, "next_by_subj": subject_filter, "batch": READ_BATCH, "max_bytes": READ_BATCH_BYTES}
        )

        async def read(try_s: float) -> tuple[list[Incoming], int]:
            arrived: asyncio.Queue[Incoming] = asyncio.Queue()
            inbox = self.session.new_inbox()
            subscription = await self.session.listen(inbox, arrived.put_nowait)
            try:
                await self.session.publish(f"$JS.API.DIRECT.GET.{stream}", question, reply=inbox)
                return await self._gather(arrived, f"direct get of {stream}")
            finally:
                await subscription.close()

        return await self._insist(read, API_TIMEOUT_S)

    async def _gather(self, arrived: asyncio.Queue[Incoming], about: str) -> tuple[list[Incoming], int]:
        batch: list[Incoming] = []
        while True:
            try:
                async with asyncio.timeout(TRY_TIMEOUT_S):
                    message = await arrived.get()
            except TimeoutError as error:
                raise Unavailable(f"{about}: the end of the batch did not come") from error
            status = message.headers.get("Status", "")
            if "Nats-Sequence" in message.headers:
                # Each message names its predecessor in the batch, so a lost one shows.
                previous = int(message.headers.get("Nats-Last-Sequence", "0"))
                if batch and previous != batch[-1].stream_seq:
                    raise Unavailable(f"{about}: a message of the batch is missing")
                batch.append(self._stored(message))
            elif status == "204":
                if batch and int(message.headers.get("Nats-Last-Sequence", "0")) != batch[-1].stream_seq:
                    raise Unavailable(f"{about}: a message of the batch is missing")
                return batch, int(message.headers.get("Nats-Num-Pending", "0"))
            elif status == "404":
                return batch, 0
            elif status == "503":
                raise Unavailable(f"{about}: no such stream, or it is not ready")
            else:
                raise BusError(f"{about}: {status} {message.headers.get('Description', '')}")

    async def api(
        self, call: str, question: Mapping[str, Any] | None = None, *, timeout_s: float = API_TIMEOUT_S
    ) -> dict[str, Any]:
        """One call of the JetStream API (idempotent: it is repeated); raises by the server's error."""
        payload = b"" if question is None else msgspec.json.encode(question)

        async def ask(try_s: float) -> dict[str, Any]:
            answer = await self.session.ask(f"$JS.API.{call}", payload, try_s)
            if (error := _decode_failure(answer.data).error) is not None:
                raise failure(error, call)
            return msgspec.json.decode(answer.data)

        return await self._insist(ask, timeout_s)

    async def create_consumer(self, stream: str, config: dict[str, Any]) -> dict[str, Any]:
        """Create or update the consumer ``config["name"]``; its info."""
        call = f"CONSUMER.CREATE.{stream}.{config['name']}.{config['filter_subject']}"
        return await self.api(call, {"stream_name": stream, "config": config})

    async def delete_consumer(self, stream: str, name: str, *, timeout_s: float = API_TIMEOUT_S) -> None:
        """Delete a consumer, which may be gone already; raises NotFound without the stream."""
        try:
            await self.api(f"CONSUMER.DELETE.{stream}.{name}", timeout_s=timeout_s)
        except NotFound as error:
            if error.err_code == NO_STREAM:
                raise

    async def _insist(
        self, attempt: Callable[[float], Awaitable[T]], timeout_s: float, retries: Counter | None = None
    ) -> T:
        """``attempt``, which gets the seconds that it may take, again while it raises Unavailable and ``timeout_s``
        lasts.

        Nothing is tried while disconnected: of what lies in the buffer we would not learn the fate.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            left = deadline - time.monotonic()
            try:
                if not self.session.connected and not await self.session.wait_connected(left):
                    raise Unavailable("disconnected")
                return await attempt(max(0.01, min(left, TRY_TIMEOUT_S)))
            except Unavailable:
                if deadline - time.monotonic() <= RETRY_WAIT_S:
                    raise
            if retries is not None:
                retries.inc()
            await asyncio.sleep(RETRY_WAIT_S)

    async def stream_state(self, stream: str) -> tuple[int, int]:
        """When ``stream`` was made, in Unix ns, and its last sequence: together they show a stream that was wiped."""
        info = await self.api(f"STREAM.INFO.{stream}")
        return rfc3339_ns(info["created"]), int(info["state"]["last_seq"])


async def remake_consumer(
    kind: str, stream: str, consumer: str, reason: str, make: Callable[[], Awaitable[None]]
) -> None:
    """``make`` a lost consumer again, repeated while the bus refuses: its stream may be away for long."""
    types.RESUMES.labels(kind).inc()
    log.info("bus_consumer_lost", kind=kind, stream=stream, consumer=consumer, reason=reason)
    refused = ""
    while True:
        try:
            return await make()
        except BusError as error:
            if not refused:
                refused = str(error)
                log.warning("bus_consumer_waits", kind=kind, stream=stream, consumer=consumer, error=refused)
        await asyncio.sleep(CONSUMER_RETRY_S)


def _headers(raw: bytes) -> dict[str, str]:
    """Headers as the server keeps them: a line with the version, then ``Name: value`` each."""
    lines = (line.partition(":") for line in raw.decode("utf-8", "replace").split("\r\n")[1:])
    return {name.strip(): value.strip() for name, colon, value in lines if colon}


def rfc3339_ns(text: str) -> int:
    """Unix ns of the server's UTC times such as ``2026-01-02T03:04:05.678901234Z``."""
    seconds = calendar.timegm(time.strptime(text[:19], "%Y-%m-%dT%H:%M:%S"))
    digits = text[20:].rstrip("Z") if text[19:20] == "." else ""
    return seconds * 1_000_000_000 + int(digits.ljust(9, "0")[:9])
