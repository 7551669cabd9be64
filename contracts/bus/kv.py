"""Key-value buckets, kept as the ``nats`` command keeps them (ADR-8)."""

import asyncio
import re
import uuid
from collections.abc import Callable

from contracts.bus.handlers import contain
from contracts.bus.jetstream import JetStream, rfc3339_ns
from contracts.bus.ordered import OrderedConsumer
from contracts.bus.types import BusError, Incoming, KvEntry, WrongSequence

OPERATION = "KV-Operation"
MARKER = "Nats-Marker-Reason"
"""Header of the marker that the server leaves when a key's time to live is over."""
DELETED_TTL_S = 3600
"""How long the marker of a deleted key stays; a watch needs none, since it compares after every trouble."""
WATCH_START_TIMEOUT_S = 30.0
"""100,000 keys take 3.4 s (measured)."""
_KEY = re.compile(r"[-/_=A-Za-z0-9]+(\.[-/_=A-Za-z0-9]+)*\Z")


class Watch:
    """A live view of a bucket, made by ``KeyValue.watch``; ``close`` ends it."""

    def __init__(
        self, jetstream: JetStream, bucket: str, handler: Callable[[str, KvEntry | None], None], key_filter: str
    ) -> None:
        self._prefix = f"$KV.{bucket}."
        self._handler = handler
        self._revisions: dict[str, int] = {}
        self._seen: set[str] | None = None
        self._current = asyncio.Event()
        self._consumer = OrderedConsumer(
            jetstream,
            f"KV_{bucket}",
            self._prefix + key_filter,
            self._take,
            snapshot=True,
            on_start=self._start,
            on_current=self._compare,
        )

    async def start(self) -> None:
        """Return once every key that is there has been told; raises TimeoutError, or what the server says."""
        try:
            async with asyncio.timeout(WATCH_START_TIMEOUT_S):
                await self._consumer.start()
                await self._current.wait()
        except BaseException:
            await self._consumer.close()
            raise

    async def close(self) -> None:
        """Tell no more."""
        await self._consumer.close()

    def _start(self, set_back: bool) -> None:
        """A snapshot begins; in a bucket that was wiped or set back revisions say nothing."""
        self._seen = set()
        if set_back:
            self._revisions = dict.fromkeys(self._revisions, 0)

    def _take(self, message: Incoming) -> None:
        key = message.subject[len(self._prefix) :]
        if self._seen is not None:
            self._seen.add(key)
        known = self._revisions.get(key)
        if known is not None and message.stream_seq <= known:
            return  # told before the trouble
        entry = entry_of(key, message)
        if entry is not None:
            self._revisions[key] = entry.revision
        elif self._revisions.pop(key, None) is None:
            return  # gone before anybody knew it
        self._tell(key, entry)

    def _compare(self) -> None:
        """The snapshot is complete: what was known and is not in it has gone meanwhile."""
        gone = [key for key in self._revisions if key not in (self._seen or ())]
        self._seen = None
        for key in gone:
            del self._revisions[key]
            self._tell(key, None)
        self._current.set()

    def _tell(self, key: str, entry: KvEntry | None) -> None:
        try:
            self._handler(key, entry)
        except Exception as error:
            contain(self._prefix + key, error)


class KeyValue:
    """Keys by bucket, upon streams.

    A bucket B is the stream KV_B, a key's revision its sequence there. Keys have letters, digits and ``-/_=.``;
    others raise BusError. Times to live are in seconds, in steps of 1 ms, at least 1 s.
    """

    def __init__(self, jetstream: JetStream) -> None:
        self._jetstream = jetstream

    async def get(self, bucket: str, key: str) -> KvEntry | None:
        """The key's entry; None when it is not there, was deleted or has expired."""
        message = await self._jetstream.last(f"KV_{bucket}", _key_subject(bucket, key))
        return None if message is None else entry_of(key, message)

    async def put(self, bucket: str, key: str, value: bytes) -> int:
        """Write whatever is there; the new revision."""
        return await self._write(bucket, key, value, expect=None, ttl_s=None)

    async def create(self, bucket: str, key: str, value: bytes, *, ttl_s: float | None = None) -> int:
        """Write a key that is not there, was deleted or has expired; raises WrongSequence when it exists."""
        try:
            return await self._write(bucket, key, value, expect=0, ttl_s=ttl_s)
        except WrongSequence as error:
            if error.found is None:
                revision = 0  # gone meanwhile
            elif entry_of(key, error.found) is None:
                revision = error.found.stream_seq  # a marker is in the way: take over from it
            else:
                raise
        return await self._write(bucket, key, value, expect=revision, ttl_s=ttl_s)

    async def update(self, bucket: str, key: str, value: bytes, *, revision: int, ttl_s: float | None = None) -> int:
        """Write over exactly ``revision``; the time to live starts again, or ends without ``ttl_s``."""
        return await self._write(bucket, key, value, expect=revision, ttl_s=ttl_s)

    async def delete(self, bucket: str, key: str, *, revision: int | None = None) -> None:
        """Delete a key, only at ``revision`` when given (else WrongSequence); it may be gone already."""
        headers = {OPERATION: "PURGE", "Nats-Rollup": "sub"}
        await self._write(bucket, key, b"", expect=revision, ttl_s=DELETED_TTL_S, headers=headers)

    async def _write(
        self,
        bucket: str,
        key: str,
        value: bytes,
        *,
        expect: int | None,
        ttl_s: float | None,
        headers: dict[str, str] | None = None,
    ) -> int:
        headers = dict(headers or {})
        if ttl_s is not None:
            headers["Nats-TTL"] = f"{int(ttl_s * 1000)}ms"
        stored = await self._jetstream.store(
            _key_subject(bucket, key), value, msg_id=uuid.uuid4().hex, expect_last=expect, headers=headers
        )
        return stored.seq

    async def all(self, bucket: str, key_filter: str = ">") -> dict[str, KvEntry]:
        """Every key that is there now and matches the filter."""
        entries: dict[str, KvEntry] = {}
        prefix = f"$KV.{bucket}."
        async for message in self._jetstream.read(f"KV_{bucket}", prefix + key_filter, to_the_end=True):
            key = message.subject[len(prefix) :]
            entry = entry_of(key, message)
            if entry is None:
                entries.pop(key, None)
            else:
                entries[key] = entry
        return entries

    async def watch(self, bucket: str, handler: Callable[[str, KvEntry | None], None], key_filter: str = ">") -> Watch:
        """Tell ``handler`` every key that is there, return, then tell every change; None: deleted or expired.

        After any trouble only what changed meanwhile is told. ``handler`` must not block.
        """
        watch = Watch(self._jetstream, bucket, handler, key_filter)
        await watch.start()
        return watch

    async def times_ns(self, bucket: str) -> tuple[int, int]:
        """When the bucket was made, and what time it is, by the server's clock, in Unix ns."""
        info = await self._jetstream.api(f"STREAM.INFO.KV_{bucket}")
        return rfc3339_ns(info["created"]), rfc3339_ns(info["ts"])


def entry_of(key: str, message: Incoming) -> KvEntry | None:
    """The entry in a bucket's message; None for what marks a deleted or expired key."""
    if OPERATION in message.headers or MARKER in message.headers:
        return None
    return KvEntry(key, message.data, message.stream_seq, message.stored_at_ms)


def _key_subject(bucket: str, key: str) -> str:
    if not _KEY.match(key):
        raise BusError(f"not a key of a bucket: {key!r}")
    return f"$KV.{bucket}.{key}"
