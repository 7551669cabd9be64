"""Objects larger than a message: in pieces on a subject of their own, written once and read whole.

Who reads needs the size and the digest, which travel with whatever names the object. So there is no record beside the
pieces that could be without them, and one purge of the subject deletes all of it.
"""

import asyncio
import hashlib
import uuid

from contracts.bus.jetstream import JetStream
from contracts.bus.types import BusError, StreamFull

PIECE_BYTES = 128 * 1024
"""The usual size of chunks in NATS' own object stores; also far under any server's limit."""
HASHED_INLINE_BYTES = 256 * 1024


class Objects:
    """Objects by stream and subject."""

    def __init__(self, jetstream: JetStream) -> None:
        self._jetstream = jetstream

    async def put(self, stream: str, subject: str, data: bytes) -> str:
        """Store ``data`` on ``subject``, which must be new; its digest. Raises StreamFull, and leaves nothing."""
        identity = uuid.uuid4().hex
        try:
            for number, at in enumerate(range(0, len(data), PIECE_BYTES)):  # one by one: their order is the object's
                piece = data[at : at + PIECE_BYTES]
                await self._jetstream.store(subject, piece, msg_id=f"{identity}.{number}")
        except StreamFull:
            await self.delete(stream, subject)
            raise
        return await _digest(data)

    async def get(self, stream: str, subject: str, *, size: int, digest: str) -> bytes | None:
        """The whole object; None when it is not there. Raises BusError when it is damaged."""
        data = b"".join([message.data async for message in self._jetstream.read(stream, subject)])
        if not data and size:
            return None
        if len(data) != size or await _digest(data) != digest:
            raise BusError(f"the object on {subject} is damaged: {len(data)} of {size} bytes")
        return data

    async def delete(self, stream: str, subject: str) -> None:
        """Delete an object, or what there is of it; no error when it is not there."""
        await self._jetstream.purge(stream, subject)

    async def subjects(self, stream: str, subject_filter: str) -> dict[str, int]:
        """Subjects of all objects, those still being written too, and how many pieces each has."""
        found: dict[str, int] = {}
        while True:
            question = {"subjects_filter": subject_filter, "offset": len(found)}
            info = await self._jetstream.api(f"STREAM.INFO.{stream}", question)
            page = info["state"].get("subjects") or {}
            found.update(page)
            if not page or len(found) >= int(info.get("total", 0)):
                return found


async def _digest(data: bytes) -> str:
    """On a thread where it takes more than a millisecond: a body of 16 MiB takes 30."""
    if len(data) > HASHED_INLINE_BYTES:
        return await asyncio.to_thread(_hash, data)
    return _hash(data)


def _hash(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
