"""Frames on their way out, and kept for those who missed some.

Frames of one turn of the event loop for one reply subject go out as one message, bounded in size. What went
out, or could not because the bus was away, is kept for repair until KEEP_S after the attempt's end. The bytes
kept over all attempts are bounded: ended ones go first, then the oldest frames of whichever keeps the most.
"""

import asyncio
from collections import OrderedDict, deque
from collections.abc import Awaitable, Callable
from itertools import islice

import msgspec

from contracts import subjects
from contracts.messages.base import NOTHING, Codec
from contracts.messages.frames import Frame, FrameKind, FramesAnswer, FramesRequest, ReplyMessage
from contracts.messages.request import RequestEnvelope
from contracts.streaming.pattern import Pattern, text_at

KEEP_S = 60.0
"""Above the silence limit plus the repair bound of contracts.streaming.relay (8 s, 10 s), with room for an outage."""
KEPT_BYTES_MAX = 64 << 20
PAGE_BYTES_MAX = 256 << 10
MARGIN_BYTES = 64 << 10
"""Left under the bus's limit for envelopes and headers."""
FRAME_BYTES = 256
"""What a frame weighs beside its data, in memory and (less) on the wire."""

_message: Codec[ReplyMessage] = Codec(ReplyMessage)
_text = msgspec.json.Encoder()


class AttemptFrames(msgspec.Struct, kw_only=True):
    """One attempt's frames."""

    tenant: str
    subject: str
    """Empty when the request names none that frames may go to: they are only kept."""
    name: str
    attempt: int
    kept: deque[Frame]
    """The last ones, without a gap."""
    pattern: Pattern | None = None
    """Of the last frame that has a whole chunk; others have what their text puts in its place."""
    kept_bytes: int = 0
    next_seq: int = 0
    chunks: int = 0
    ended_at: float | None = None


class FrameBuffer:
    """Frames of one worker instance.

    ``publish`` sends one message or drops it, and does not raise. ``now`` is a monotonic clock in seconds.
    ``run`` must be running; nothing is sent after ``close``.
    """

    def __init__(
        self,
        worker: str,
        publish: Callable[[str, bytes], Awaitable[None]],
        *,
        max_payload: int,
        now: Callable[[], float],
        kept_bytes_max: int = KEPT_BYTES_MAX,
    ) -> None:
        self._worker = worker
        self._publish = publish
        self._message_bytes_max = max_payload - min(MARGIN_BYTES, max_payload // 4)
        self._now = now
        self._kept_bytes_max = kept_bytes_max
        self._kept_bytes = 0
        self._open: OrderedDict[tuple[str, int], AttemptFrames] = OrderedDict()
        self._ended: OrderedDict[tuple[str, int], AttemptFrames] = OrderedDict()
        self._pending: dict[str, list[Frame]] = {}
        self._wake = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()
        self._closed = False

    def open(self, request: RequestEnvelope, attempt: int) -> AttemptFrames:
        """The attempt's frames; the same object until its end."""
        key = (request.request_id, attempt)
        if (frames := self._open.get(key)) is None:
            frames = self._open[key] = AttemptFrames(
                tenant=request.tenant,
                subject=request.reply.subject if subjects.is_reply(request.reply.subject) else "",
                name=request.reply.stream,
                attempt=attempt,
                kept=deque(),
            )
        return frames

    def send(self, frames: AttemptFrames, kind: FrameKind, data: bytes = b"") -> None:
        """Queue a frame for this turn's message; a chunk too big for one message goes as parts.

        What comes after ``end``, from a generation that did not stop in time, is dropped.
        """
        if self._closed or frames.ended_at is not None:
            return
        if kind == "chunk":
            frames.chunks += 1
            self._send_chunk(frames, data)
        else:
            self._add(frames, kind, data)

    def end(self, request: RequestEnvelope, attempt: int) -> None:
        """No frames follow; what was sent is kept a while."""
        key = (request.request_id, attempt)
        if frames := self._open.pop(key, None):
            frames.ended_at = self._now()
            self._ended[key] = frames
        self.expire()

    def _send_chunk(self, frames: AttemptFrames, data: bytes) -> None:
        pattern = frames.pattern
        if len(data) + FRAME_BYTES > self._message_bytes_max:
            frames.pattern = None
            self._send_parts(frames, data)
        elif pattern is not None and (text := pattern.text_of(data)) is not None:
            self._add(frames, "text", text)
        else:
            at = text_at(data)
            frames.pattern = None if at is None else Pattern.of(data, at)
            self._add(frames, "chunk", data, at)

    def _send_parts(self, frames: AttemptFrames, data: bytes) -> None:
        # Quoting may double a byte (quotes, backslashes); a slice never splits a character.
        size = (self._message_bytes_max - FRAME_BYTES) // 2
        start = 0
        while start < len(data):
            stop = min(start + size, len(data))
            while stop < len(data) and data[stop] & 0xC0 == 0x80:
                stop -= 1
            part = _text.encode(data[start:stop].decode())
            self._add(frames, "part" if stop < len(data) else "chunk", part)
            start = stop

    def _add(self, frames: AttemptFrames, kind: FrameKind, data: bytes, text_at: tuple[int, int] | None = None) -> None:
        frame = Frame(
            stream=frames.name,
            attempt=frames.attempt,
            seq=frames.next_seq,
            kind=kind,
            data=msgspec.Raw(data) if data else NOTHING,
            text_at=text_at,
        )
        frames.next_seq += 1
        frames.kept.append(frame)
        weight = len(data) + FRAME_BYTES
        frames.kept_bytes += weight
        self._kept_bytes += weight
        if self._kept_bytes > self._kept_bytes_max:
            self._shrink()
        if pending := self._pending.get(frames.subject):
            pending.append(frame)
        elif frames.subject:
            self._pending[frames.subject] = [frame]
            self._idle.clear()
            self._wake.set()

    async def run(self) -> None:
        """Send what each turn has gathered, until cancelled."""
        while True:
            await self._wake.wait()
            await asyncio.sleep(0)  # A quick engine's first chunk goes with the word that it was accepted.
            self._wake.clear()
            pending, self._pending = self._pending, {}
            for subject, frames in pending.items():
                for batch in self._batches(frames):
                    if not self._closed:
                        await self._publish(subject, _message.encode(ReplyMessage(worker=self._worker, frames=batch)))
            if not self._pending:
                self._idle.set()

    def _batches(self, frames: list[Frame]) -> list[list[Frame]]:
        batches: list[list[Frame]] = [[]]
        size = 0
        for frame in frames:
            weight = _weight(frame)
            if batches[-1] and size + weight > self._message_bytes_max:
                batches.append([])
                size = 0
            batches[-1].append(frame)
            size += weight
        return batches

    async def flushed(self) -> None:
        """Until everything queued has been handed to the bus."""
        await self._idle.wait()

    def close(self) -> None:
        """Send nothing more and keep nothing."""
        self._closed = True
        self._pending.clear()
        self._open.clear()
        self._ended.clear()
        self._kept_bytes = 0
        self._idle.set()

    def read(self, tenant: str, request: FramesRequest) -> FramesAnswer:
        """A page of an attempt's frames from ``from_seq`` on; unknown when another tenant's or gone."""
        key = (request.request_id, request.attempt)
        frames = self._open.get(key) or self._ended.get(key)
        if frames is None or frames.tenant != tenant:
            return FramesAnswer(known=False)
        first = frames.next_seq - len(frames.kept)
        if request.from_seq < first:
            return FramesAnswer(known=False)
        page: list[Frame] = []
        size = 0
        for frame in islice(frames.kept, request.from_seq - first, None):
            size += _weight(frame)
            if page and size > PAGE_BYTES_MAX:
                return FramesAnswer(known=True, frames=page, more=True)
            page.append(frame)
        return FramesAnswer(known=True, frames=page)

    def expire(self) -> None:
        """Forget what ended more than KEEP_S ago."""
        before = self._now() - KEEP_S
        while self._ended and (next(iter(self._ended.values())).ended_at or 0.0) < before:
            self._forget_oldest()

    @property
    def kept_bytes(self) -> int:
        """Over all attempts, as FRAME_BYTES weighs frames."""
        return self._kept_bytes

    def _forget_oldest(self) -> None:
        _, frames = self._ended.popitem(last=False)
        self._kept_bytes -= frames.kept_bytes

    def _shrink(self) -> None:
        while self._kept_bytes > self._kept_bytes_max and self._ended:
            self._forget_oldest()
        while self._kept_bytes > self._kept_bytes_max:
            largest = max(self._open.values(), key=lambda frames: frames.kept_bytes)
            weight = _weight(largest.kept.popleft())
            largest.kept_bytes -= weight
            self._kept_bytes -= weight


def _weight(frame: Frame) -> int:
    return len(frame.data) + FRAME_BYTES
