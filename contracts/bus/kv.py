"""Key-value buckets and object stores, kept as the ``nats`` command keeps them (ADR-8, ADR-20)."""

import asyncio
import base64
import hashlib
import re
import uuid
from collections.abc import Callable
from typing import Any

import msgspec

from contracts.bus.jetstream import API_TIMEOUT_S, MSG_ID, Streams
from contracts.bus.ordered import Tail
from contracts.bus.types import BusError, Incoming, KvEntry, StreamFull, WrongSequence

OPERATION = "KV-Operation"
MARKER = "Nats-Marker-Reason"
"""Header of the marker that the server leaves when a key's time to live is over."""
DELETED_TTL_S = 3600
"""How long the marker of a deleted key stays; a watch needs none, since it compares after every trouble."""
WATCH_START_TIMEOUT_S = 30.0
"""100,000 keys take 3.4 s (measured)."""
OBJECT_CHUNK_BYTES = 128 * 1024
"""The usual size of other clients; also far under any server's limit."""

HASHED_INLINE_BYTES = 256 * 1024

_KEY = re.compile(r"[-/_=A-Za-z0-9]+(\.[-/_=A-Za-z0-9]+)*\Z")


class Watch:
    """A live view of a bucket; ``close`` ends it."""

    def __init__(
        self, bus: Streams, bucket: str, handler: Callable[[str, KvEntry | None], None], key_filter: str
    ) -> None:
        self._bus = bus
        self._prefix = f"$KV.{bucket}."
        self._handler = handler
        self._revisions: dict[str, int] = {}
        self._seen: set[str] | None = None
        self._current = asyncio.Event()
        self._tail = Tail(
            bus,
            f"KV_{bucket}",
            self._prefix + key_filter,
            self._take,
            snapshot=True,
            on_start=self._start,
            on_current=self._compare,
        )

    async def start(self) -> None:
        try:
            async with asyncio.timeout(WATCH_START_TIMEOUT_S):
                await self._tail.start()
                await self._current.wait()
        except BaseException:
            await self._tail.close()
            raise

    async def close(self) -> None:
        await self._tail.close()

    def _start(self, set_back: bool) -> None:
        """A snapshot begins; in a bucket made anew or set back revisions say nothing."""
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
            self._bus._contain(self._prefix + key, error)


class Buckets(Streams):
    """Core NATS, streams and buckets."""

    # Keys --------------------------------------------------------------------------------------------------

    async def kv_get(self, bucket: str, key: str) -> KvEntry | None:
        message = await self.last(f"KV_{bucket}", _key_subject(bucket, key))
        return None if message is None else entry_of(key, message)

    async def kv_put(self, bucket: str, key: str, value: bytes) -> int:
        """Write whatever is there; the new revision."""
        return await self._kv_write(bucket, key, value, expect=None, ttl_s=None)

    async def kv_create(self, bucket: str, key: str, value: bytes, *, ttl_s: float | None = None) -> int:
        """Write a key that is not there, was deleted or has expired; raises WrongSequence when it exists."""
        try:
            return await self._kv_write(bucket, key, value, expect=0, ttl_s=ttl_s)
        except WrongSequence as error:
            if error.found is None:
                revision = 0  # gone meanwhile
            elif entry_of(key, error.found) is None:
                revision = error.found.stream_seq  # a marker is in the way: take over from it
            else:
                raise
        return await self._kv_write(bucket, key, value, expect=revision, ttl_s=ttl_s)

    async def kv_update(self, bucket: str, key: str, value: bytes, *, revision: int, ttl_s: float | None = None) -> int:
        """Write over exactly ``revision``; the time to live starts anew, or ends without ``ttl_s``."""
        return await self._kv_write(bucket, key, value, expect=revision, ttl_s=ttl_s)

    async def kv_delete(self, bucket: str, key: str, *, revision: int | None = None) -> None:
        """Delete a key, only at ``revision`` when given (else WrongSequence); it may be gone already."""
        headers = {OPERATION: "PURGE", "Nats-Rollup": "sub"}
        await self._kv_write(bucket, key, b"", expect=revision, ttl_s=DELETED_TTL_S, headers=headers)

    async def _kv_write(
        self,
        bucket: str,
        key: str,
        value: bytes,
        *,
        expect: int | None,
        ttl_s: float | None,
        headers: dict[str, str] | None = None,
    ) -> int:
        subject = _key_subject(bucket, key)
        all_headers = {MSG_ID: uuid.uuid4().hex, **(headers or {})}
        if ttl_s is not None:
            all_headers["Nats-TTL"] = f"{int(ttl_s * 1000)}ms"
        return (await self._store(subject, value, all_headers, expect, API_TIMEOUT_S)).seq

    async def kv_all(self, bucket: str) -> dict[str, KvEntry]:
        """Every key that is there now."""
        entries: dict[str, KvEntry] = {}
        prefix = f"$KV.{bucket}."
        async for message in self.read(f"KV_{bucket}", prefix + ">", to_the_end=True):
            key = message.subject[len(prefix) :]
            entry = entry_of(key, message)
            if entry is None:
                entries.pop(key, None)
            else:
                entries[key] = entry
        return entries

    async def kv_watch(
        self, bucket: str, handler: Callable[[str, KvEntry | None], None], key_filter: str = ">"
    ) -> Watch:
        """Tell ``handler`` every key that is there, return, then tell every change; None: deleted or expired.

        After any trouble only what changed meanwhile is told. ``handler`` must not block.
        """
        watch = Watch(self, bucket, handler, key_filter)
        await watch.start()
        return watch

    async def kv_created_ns(self, bucket: str) -> int:
        """When the bucket was made, in Unix ns: part of an owner's epoch."""
        return (await self.stream_state(f"KV_{bucket}"))[0]

    # Objects -----------------------------------------------------------------------------------------------

    async def object_put(self, bucket: str, name: str, data: bytes) -> None:
        """Store ``data`` under ``name``; readers see the old or the new object whole. Raises StreamFull."""
        identity = uuid.uuid4().hex
        chunks = [data[at : at + OBJECT_CHUNK_BYTES] for at in range(0, len(data), OBJECT_CHUNK_BYTES)]
        try:
            for number, chunk in enumerate(chunks):  # one by one: their order in the stream is the object's
                await self.store(f"$O.{bucket}.C.{identity}", chunk, msg_id=f"{identity}.{number}")
        except StreamFull:
            await self.purge(f"OBJ_{bucket}", f"$O.{bucket}.C.{identity}")
            raise
        meta: dict[str, Any] = {
            "name": name,
            "bucket": bucket,
            "nuid": identity,
            "size": len(data),
            "chunks": len(chunks),
            "digest": await _digest(data),
            "options": {"max_chunk_size": OBJECT_CHUNK_BYTES},
        }
        headers = {MSG_ID: identity, "Nats-Rollup": "sub"}
        await self._store(_meta_subject(bucket, name), msgspec.json.encode(meta), headers, None, API_TIMEOUT_S)

    async def object_get(self, bucket: str, name: str) -> bytes | None:
        """The whole object; None when it is not there. Raises BusError when it is damaged."""
        meta = await self._object_meta(bucket, name)
        if meta is None or meta.get("deleted"):
            return None
        data = b"".join([m.data async for m in self.read(f"OBJ_{bucket}", f"$O.{bucket}.C.{meta['nuid']}")])
        if len(data) != meta["size"] or await _digest(data) != meta["digest"]:
            raise BusError(f"object {name} of {bucket} is damaged: {len(data)} of {meta['size']} bytes")
        return data

    async def object_delete(self, bucket: str, name: str) -> None:
        """Delete an object; no error when it is not there."""
        meta = await self._object_meta(bucket, name)
        if meta is None:
            return
        await self.purge(f"OBJ_{bucket}", _meta_subject(bucket, name))
        await self.purge(f"OBJ_{bucket}", f"$O.{bucket}.C.{meta['nuid']}")

    async def _object_meta(self, bucket: str, name: str) -> dict[str, Any] | None:
        message = await self.last(f"OBJ_{bucket}", _meta_subject(bucket, name))
        return None if message is None else msgspec.json.decode(message.data)


def entry_of(key: str, message: Incoming) -> KvEntry | None:
    """The entry in a bucket's message; None for what marks a deleted or expired key."""
    if OPERATION in message.headers or MARKER in message.headers:
        return None
    return KvEntry(key, message.data, message.stream_seq, message.stored_at_ms)


def _key_subject(bucket: str, key: str) -> str:
    if not _KEY.match(key):
        raise BusError(f"not a key of a bucket: {key!r}")
    return f"$KV.{bucket}.{key}"


def _meta_subject(bucket: str, name: str) -> str:
    return f"$O.{bucket}.M.{base64.urlsafe_b64encode(name.encode()).decode()}"


async def _digest(data: bytes) -> str:
    """On a thread where it takes more than a millisecond: a body of 16 MiB takes 30."""
    if len(data) > HASHED_INLINE_BYTES:
        return await asyncio.to_thread(_hash, data)
    return _hash(data)


def _hash(data: bytes) -> str:
    return "SHA-256=" + base64.urlsafe_b64encode(hashlib.sha256(data).digest()).decode()
