"""The frames of one generation, (attempt, worker), in order; what is missing, and when it may be asked for.

Used by contracts.streaming.relay alone, which decides what to do with them.
"""

import msgspec

from contracts.messages.frames import EndData, ErrorData, Frame
from contracts.streaming.pattern import Pattern

_text_of = msgspec.json.Decoder(str).decode


class TooLarge(Exception):
    """Parts add up to more than may be assembled."""


class Bounds(msgspec.Struct, frozen=True, kw_only=True):
    """Memory of one generation. What does not fit behind a gap is dropped, to be asked for in its turn."""

    held_frames_max: int = 4_096
    held_bytes_max: int = 8 << 20
    """Seconds of any stream; far below the 64 MiB that a slow stream may cost a gateway."""
    assembled_bytes_max: int = 64 << 20
    """A whole answer of a million tokens has about 5 MB; with log-probabilities ten times that."""


class Generation:
    """Counts ``seq`` from 0. ``behind``: frames are missing that are known to exist."""

    __slots__ = (
        "_asked_at_ms",
        "_bounds",
        "_held",
        "_held_bytes",
        "_parts_bytes",
        "answer",
        "asking",
        "attempt",
        "behind_since_ms",
        "end",
        "failure",
        "next_seq",
        "parts",
        "pattern",
        "seen_seq",
        "version",
        "worker",
    )

    def __init__(self, attempt: int, worker: str, bounds: Bounds) -> None:
        self.attempt = attempt
        self.worker = worker
        self.version = ""
        """As its first frame says."""
        self.next_seq = 0
        self.seen_seq = -1
        """Highest number known to exist."""
        self.behind_since_ms = 0
        """While behind: when that began, or the last progress since."""
        self.asking = False
        """A question to the worker is open."""
        self.parts: list[bytes] = []
        """Slices of a chunk whose last one has not come."""
        self.pattern: Pattern | None = None
        """Of the last chunk, whose text alone differs in what ``text`` frames bring."""
        self.answer: msgspec.Raw | bytes | None = None
        """The gathered answer of a request that does not stream."""
        self.failure: ErrorData | None = None
        """Set once the attempt is known to have ended: what to say when not all of its frames can be had."""
        self.end: EndData | None = None
        """What its closing frame says, where the scheduler has said it; the frame itself may yet come."""
        self._bounds = bounds
        self._held: dict[int, Frame] = {}
        self._held_bytes = 0
        self._parts_bytes = 0
        self._asked_at_ms: int | None = None

    @property
    def behind(self) -> bool:
        return self.next_seq <= self.seen_seq

    @property
    def missing_end(self) -> EndData | None:
        """What the closing frame says, when that is known and the frame alone is missing."""
        return self.end if self.next_seq == self.seen_seq else None

    def lacks(self, seq: int) -> bool:
        return seq >= self.next_seq and seq not in self._held

    def note_exists(self, seq: int, now_ms: int) -> None:
        """Frame ``seq`` exists, wherever it is."""
        if not self.behind and seq >= self.next_seq:
            self.behind_since_ms = now_ms
        self.seen_seq = max(self.seen_seq, seq)

    def place(self, frame: Frame, now_ms: int) -> list[Frame]:
        """The frames that are now next in order, ``frame`` first; none while it waits behind a gap."""
        self.note_exists(frame.seq, now_ms)
        if frame.seq > self.next_seq:
            self._hold(frame)
            return []
        ready = [frame]
        self.next_seq += 1
        while self.next_seq in self._held:
            held = self._held.pop(self.next_seq)
            self._held_bytes -= len(memoryview(held.data))
            ready.append(held)
            self.next_seq += 1
        self.behind_since_ms = now_ms
        return ready

    def _hold(self, frame: Frame) -> None:
        size = len(memoryview(frame.data))
        if len(self._held) >= self._bounds.held_frames_max:
            return
        if self._held_bytes + size > self._bounds.held_bytes_max:
            return
        # A copy: the frame's own data keeps the whole bus message alive, with other streams' frames.
        self._held[frame.seq] = msgspec.structs.replace(frame, data=frame.data.copy())
        self._held_bytes += size

    def assemble(self, frame: Frame) -> msgspec.Raw | bytes | None:
        """The chunk that this ``chunk``, ``text`` or ``part`` frame makes whole; None while parts are to come.

        Raises TooLarge, and msgspec.MsgspecError for a part that is not a JSON string, or a text without its chunk.
        """
        if frame.kind == "text":
            if self.pattern is None:
                raise msgspec.ValidationError("there is no chunk for the text")
            return self.pattern.filled(bytes(frame.data))
        self.pattern = None
        if frame.kind == "chunk" and not self.parts:
            if frame.text_at is not None:
                self.pattern = Pattern.of(bytes(frame.data), frame.text_at)
            return frame.data
        part = _text_of(frame.data).encode()
        self._parts_bytes += len(part)
        if self._parts_bytes > self._bounds.assembled_bytes_max:
            raise TooLarge
        self.parts.append(part)
        if frame.kind == "part":
            return None
        whole = b"".join(self.parts)
        self.parts = []
        self._parts_bytes = 0
        return whole

    def may_ask(self, now_ms: int, again_ms: int, answer_ms_max: int) -> bool:
        """Not within ``again_ms`` of the last time, nor within ``answer_ms_max`` while that is unanswered."""
        if self._asked_at_ms is None:
            return True
        return now_ms - self._asked_at_ms >= (answer_ms_max if self.asking else again_ms)

    def note_asked(self, now_ms: int) -> None:
        self.asking = True
        self._asked_at_ms = now_ms
