"""Object stores, kept as the ``nats`` command keeps them (ADR-20)."""

import asyncio
import base64
import hashlib
import uuid
from typing import Any

import msgspec

from contracts.bus.jetstream import JetStream
from contracts.bus.types import BusError, StreamFull

CHUNK_BYTES = 128 * 1024
"""The usual size of other clients; also far under any server's limit."""
HASHED_INLINE_BYTES = 256 * 1024


class Objects:
    """Objects by bucket and name, read and written whole."""

    def __init__(self, jetstream: JetStream) -> None:
        self._jetstream = jetstream

    async def put(self, bucket: str, name: str, data: bytes) -> None:
        """Store ``data`` under ``name``; readers see the old or the new object whole. Raises StreamFull."""
        identity = uuid.uuid4().hex
        chunks = [data[at : at + CHUNK_BYTES] for at in range(0, len(data), CHUNK_BYTES)]
        try:
            for number, chunk in enumerate(chunks):  # one by one: their order in the stream is the object's
                await self._jetstream.store(f"$O.{bucket}.C.{identity}", chunk, msg_id=f"{identity}.{number}")
        except StreamFull:
            await self._jetstream.purge(f"OBJ_{bucket}", f"$O.{bucket}.C.{identity}")
            raise
        meta: dict[str, Any] = {
            "name": name,
            "bucket": bucket,
            "nuid": identity,
            "size": len(data),
            "chunks": len(chunks),
            "digest": await _digest(data),
            "options": {"max_chunk_size": CHUNK_BYTES},
        }
        subject, rollup = _meta_subject(bucket, name), {"Nats-Rollup": "sub"}
        await self._jetstream.store(subject, msgspec.json.encode(meta), msg_id=identity, headers=rollup)

    async def get(self, bucket: str, name: str) -> bytes | None:
        """The whole object; None when it is not there. Raises BusError when it is damaged."""
        meta = await self._meta(bucket, name)
        if meta is None or meta.get("deleted"):
            return None
        data = b"".join([m.data async for m in self._jetstream.read(f"OBJ_{bucket}", f"$O.{bucket}.C.{meta['nuid']}")])
        if len(data) != meta["size"] or await _digest(data) != meta["digest"]:
            raise BusError(f"object {name} of {bucket} is damaged: {len(data)} of {meta['size']} bytes")
        return data

    async def delete(self, bucket: str, name: str) -> None:
        """Delete an object; no error when it is not there."""
        meta = await self._meta(bucket, name)
        if meta is None:
            return
        await self._jetstream.purge(f"OBJ_{bucket}", _meta_subject(bucket, name))
        await self._jetstream.purge(f"OBJ_{bucket}", f"$O.{bucket}.C.{meta['nuid']}")

    async def _meta(self, bucket: str, name: str) -> dict[str, Any] | None:
        message = await self._jetstream.last(f"OBJ_{bucket}", _meta_subject(bucket, name))
        return None if message is None else msgspec.json.decode(message.data)


def _meta_subject(bucket: str, name: str) -> str:
    return f"$O.{bucket}.M.{base64.urlsafe_b64encode(name.encode()).decode()}"


async def _digest(data: bytes) -> str:
    """On a thread where it takes more than a millisecond: a body of 16 MiB takes 30."""
    if len(data) > HASHED_INLINE_BYTES:
        return await asyncio.to_thread(_hash, data)
    return _hash(data)


def _hash(data: bytes) -> str:
    return "SHA-256=" + base64.urlsafe_b64encode(hashlib.sha256(data).digest()).decode()
