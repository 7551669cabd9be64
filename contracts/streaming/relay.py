"""One stream's frames, put in order and fenced: what of them reaches the caller, and how the stream ends.

Pure: no clock, no I/O. contracts.streaming.subscriber passes in frames, answers and the time, and performs the
effects in order. The rules (ARCHITECTURE.md, Streams):

- A relay is locked to the first generation (attempt, worker) that sends content. Attempt N, or ``lost`` for
  N-1, voids lower attempts: when the caller has seen some of one, the stream fails; what was only gathered is
  thrown away and awaited once more. Two generations are never concatenated.
- Chunks are forwarded in ``seq`` order, each once. A gap is asked for at the worker; silence is asked about
  at the scheduler, whose answer tells of a lost tail, and what the closing frame says: that one alone may be
  missing. What cannot be had ends the stream with an error.
- Exactly one ``Finish`` or ``Fail``, the last effect of all. How long a request may wait is decided by the
  scheduler alone.

Memory per stream: generation.Bounds for each of at most ``generations_max`` generations, and only one of them
assembles. At most 2 * 8 MiB held behind gaps and 2 * 64 MiB while one answer is joined; 8 MiB for a stream of
ordinary chunks from one worker; next to nothing while frames come in order.
"""

from collections.abc import Sequence

import msgspec

from contracts.errors import TABLE
from contracts.messages.base import Epoch, Outcome
from contracts.messages.control import StatusAnswer
from contracts.messages.frames import AcceptedData, EndData, ErrorData, Frame, FramesAnswer, LostData
from contracts.streaming.generation import Bounds, Generation, TooLarge
from contracts.streaming.pattern import Pattern


class RelaySettings(msgspec.Struct, frozen=True, kw_only=True):
    """Times and bounds. Workers keep an attempt's frames longer than ``silence_ms_max + repair_ms_max``."""

    silence_ms: int = 4_000
    """Above the 3 s after which a worker counts as lost: its ``lost`` frame usually comes first."""
    silence_ms_max: int = 8_000
    """The limit doubles up to this while the scheduler says that all is well; 2,000 queued streams then ask
    250 times a second."""
    repair_again_ms: int = 500
    repair_ms_max: int = 10_000
    """Longest repair without progress, of a worker that is heard."""
    status_again_ms: int = 2_000
    """Pause after an answer that settled nothing (unknown, unreachable)."""
    unknown_max: int = 3
    """Answers in a row that nobody knows the request; the first may come from an owner that just began."""
    unreachable_ms_max: int = 60_000
    answer_ms_max: int = 5_000
    """A question without an answer for so long is put again; the subscriber's time limit is shorter."""
    joined_status_ms: int = 1_000
    """Who joined a request asks after it this often: so a new owner learns in time that it is still read."""
    generations_max: int = 2
    """Workers listened to for one attempt before content; the scheduler gives it to one."""
    bounds: Bounds = Bounds()


class Forward(msgspec.Struct, frozen=True, gc=False):
    """One OpenAI chunk for the caller, or the whole answer when the request does not stream."""

    data: msgspec.Raw | bytes


class Finish(msgspec.Struct, frozen=True):
    """The stream is complete, or was cancelled as ``end.outcome`` says."""

    end: EndData


class Fail(msgspec.Struct, frozen=True):
    """The stream ends with this error, of a code in errors.TABLE. The request may still run: cancel it."""

    error: ErrorData


class AskFrames(msgspec.Struct, frozen=True):
    """Send a FramesRequest to the worker and give its answer (None: unreachable) to ``on_frames_answer``."""

    worker: str
    attempt: int
    from_seq: int


class AskStatus(msgspec.Struct, frozen=True):
    """Send a StatusRequest to the scheduler and give its answer (None: unreachable) to ``on_status``."""


Effect = Forward | Finish | Fail | AskFrames | AskStatus
Effects = Sequence[Effect]

NOTHING: tuple[Effect, ...] = ()
DEFAULT = RelaySettings()
NO_EPOCH = Epoch()

_accepted_of = msgspec.json.Decoder(AcceptedData).decode
_end_of = msgspec.json.Decoder(EndData).decode
_error_of = msgspec.json.Decoder(ErrorData).decode
_lost_of = msgspec.json.Decoder(LostData).decode

_FAILURES: dict[Outcome, tuple[str, str]] = {
    "completed": ("stream_interrupted", "Part of the answer was lost on the way and could not be recovered."),
    "cancelled": ("cancelled", "The request was cancelled."),
    "failed": ("engine_error", "The engine failed while it ran this request."),
    "lost": ("worker_lost", "The worker that ran this request was lost."),
    "expired": ("deadline_exceeded", "The request's deadline passed before its first token."),
}
"""By outcome: how the stream of an ended request fails when some of its frames cannot be had."""


_GONE = ErrorData(
    code="conflict",
    message="The request of this idempotency key has ended, and its answer is not kept any more; it is not run again.",
)


class Relay:
    """One stream. ``now_ms`` is of a clock that never goes back. After the end every call returns nothing.

    ``joined``: its request was begun by another, whom the frames are sent to; this one asks the worker for all of them.
    """

    __slots__ = (
        "_calm",
        "_epoch",
        "_floor",
        "_generations",
        "_locked",
        "_quiet_since_ms",
        "_settings",
        "_silence_ms",
        "_status_asked_at_ms",
        "_status_told_at_ms",
        "_stream",
        "_told_void_below",
        "_unknown_count",
        "_unreachable_since_ms",
        "finished",
        "joined",
        "started",
        "version",
    )

    def __init__(self, *, stream: bool, now_ms: int, settings: RelaySettings = DEFAULT, joined: bool = False) -> None:
        self.finished = False
        """A ``Finish`` or ``Fail`` has been returned."""
        self.started = False
        """A ``Forward`` has been returned."""
        self.version = ""
        """That of the generation whose content was first; empty before, and where its worker did not say."""
        self.joined = joined
        self._stream = stream
        self._settings = settings
        self._epoch = NO_EPOCH
        self._floor = 1
        """Lowest attempt that is not void. Only generations of this attempt are kept."""
        self._generations: dict[str, Generation] = {}
        self._locked: Generation | None = None
        self._quiet_since_ms = now_ms
        self._silence_ms = settings.silence_ms
        self._calm = True
        """No answer of the scheduler since the last frame."""
        self._status_asked_at_ms: int | None = None
        self._status_told_at_ms: int | None = None
        self._told_void_below = 0
        self._unreachable_since_ms: int | None = None
        self._unknown_count = 0

    def next_text(self, worker: str, frame: Frame, now_ms: int) -> Pattern | None:
        """What a ``text`` frame fills, where it is next in a stream that misses nothing: the common case, in a fraction
        of a microsecond. None: nothing has happened yet, and ``on_frame`` decides.
        """
        locked = self._locked
        if (
            locked is None
            or frame.seq != locked.next_seq
            or frame.attempt != locked.attempt
            or worker != locked.worker
            or locked.seen_seq >= frame.seq
            or not self._stream
            or not self._calm
        ):
            return None
        if (pattern := locked.pattern) is not None:
            locked.seen_seq = frame.seq
            locked.next_seq += 1
            self._quiet_since_ms = now_ms
        return pattern

    def on_frame(self, worker: str, frame: Frame, now_ms: int, epoch: Epoch = NO_EPOCH) -> Effects:
        """A frame of this stream arrived in a ReplyMessage with these ``worker`` and ``epoch``."""
        locked = self._locked
        if (  # The common case, in a microsecond: the next chunk of a stream that misses nothing.
            locked is not None
            and frame.seq == locked.next_seq
            and frame.kind == "chunk"
            and frame.text_at is None
            and frame.attempt == locked.attempt
            and worker == locked.worker
            and locked.seen_seq < frame.seq
            and not locked.parts
            and self._stream
            and self._calm
        ):
            locked.seen_seq = frame.seq
            locked.next_seq += 1
            self._quiet_since_ms = now_ms
            locked.pattern = None
            return (Forward(frame.data),)
        if self.finished:
            return NOTHING
        if not worker:
            return self._on_scheduler_frame(frame, epoch, now_ms)
        return self._on_worker_frames(worker, frame.attempt, [frame], now_ms)

    @property
    def void_below(self) -> int:
        """Of attempts below this one the caller has seen nothing, and will see nothing."""
        return self._floor

    def on_frames_answer(self, worker: str, attempt: int, answer: FramesAnswer | None, now_ms: int) -> Effects:
        """Answer to ``AskFrames``; None: the worker was not reached."""
        generation = self._generations.get(worker)
        if self.finished or generation is None or generation.attempt != attempt:
            return NOTHING
        generation.asking = False
        if answer is None:
            self._note_unheard(generation, now_ms)
            return NOTHING  # Asked again by the tick.
        if not answer.known:
            return self._give_up(generation) if generation.behind else NOTHING
        if answer.more:
            last = answer.frames[-1].seq if answer.frames else generation.next_seq - 1
            generation.note_exists(last + 1, now_ms)
        before = generation.next_seq
        effects = list(self._on_worker_frames(worker, attempt, answer.frames, now_ms))
        if not self.finished and generation.behind and generation.next_seq > before and not generation.asking:
            effects.append(self._ask_frames(generation, now_ms))
        return effects

    def on_status(self, answer: StatusAnswer | None, now_ms: int) -> Effects:
        """Answer to ``AskStatus``; None: the scheduler was not reached."""
        if self.finished:
            return NOTHING
        self._status_asked_at_ms = None
        self._status_told_at_ms = self._quiet_since_ms = now_ms
        self._calm = False
        if answer is None:
            return self._on_unreachable(now_ms)
        self._unreachable_since_ms = None
        if answer.state == "unknown":
            return self._on_unknown(now_ms)
        self._unknown_count = 0
        if answer.state == "ended":
            return self._on_ended(answer, now_ms)
        self._silence_ms = min(max(self._silence_ms, self._settings.silence_ms) * 2, self._settings.silence_ms_max)
        if answer.state in ("dispatched", "running") and answer.worker:
            return self._look_at(answer.attempt, answer.worker, now_ms)
        return self._void_below(answer.attempt, _error("lost")) or self._tell_void(now_ms)

    def on_tick(self, now_ms: int) -> Effects:
        """Time has passed; call it every 250 ms to 1 s."""
        if self.finished:
            return NOTHING
        effects: list[Effect] = []
        for generation in self._generations.values():
            if not generation.behind:
                if self.joined and self._may_ask(generation, now_ms):
                    effects.append(self._ask_frames(generation, now_ms))
                continue
            may_ask = self._may_ask(generation, now_ms)
            if may_ask and generation.asking:
                self._note_unheard(generation, now_ms)
            if now_ms - generation.behind_since_ms >= self._settings.repair_ms_max:
                return self._give_up(generation)
            if may_ask:
                effects.append(self._ask_frames(generation, now_ms))
        if self._status_due(now_ms):
            effects.append(self._ask_status(now_ms))
        return effects

    def _on_scheduler_frame(self, frame: Frame, epoch: Epoch, now_ms: int) -> Effects:
        if epoch < self._epoch:
            return NOTHING
        self._epoch = epoch
        try:
            if frame.kind == "error":
                return self._fail(_known_code(_error_of(frame.data)))
            if frame.kind == "end":
                end = _end_of(frame.data)
                # What was completed ends by the worker's own frame, after all its chunks.
                return self._finish(end) if end.outcome == "cancelled" else NOTHING
            if frame.kind == "lost":
                lost = _error("lost")
                data = _lost_of(frame.data)
                if not data.retry:
                    return self._fail(lost) if frame.attempt >= self._floor else NOTHING
                failed = self._void_below(frame.attempt + 1, lost)
                return self._tell_void(now_ms, again=True) if data.tell and not failed else failed
        except msgspec.MsgspecError:
            return self._fail(_broken("The scheduler sent a malformed frame."))
        return NOTHING

    def _on_worker_frames(self, worker: str, attempt: int, frames: Sequence[Frame], now_ms: int) -> Effects:
        """Frames of one generation, live or repaired."""
        if attempt < self._floor or not frames:
            return NOTHING
        if failed := self._void_below(attempt, _error("lost")):
            return failed
        generation = self._generation(worker)
        if generation is None:
            return NOTHING
        effects: list[Effect] = []
        for frame in frames:
            if frame.attempt != attempt or not generation.lacks(frame.seq):
                continue
            self._heard(now_ms)
            for placed in generation.place(frame, now_ms):
                self._in_order(generation, placed, effects)
                if self.finished:
                    return effects
        if (end := generation.missing_end) is not None:
            self._on_end(generation, end, effects)
        elif generation.behind:
            if self._may_ask(generation, now_ms):
                effects.append(self._ask_frames(generation, now_ms))
        elif generation.failure is not None:
            # It ended, and no closing frame was among its frames.
            effects.extend(self._fail(generation.failure))
        return effects

    def _generation(self, worker: str) -> Generation | None:
        """The worker's generation at the floor; None when it is not to be listened to."""
        if self._locked is not None:
            return self._locked if self._locked.worker == worker else None
        generation = self._generations.get(worker)
        if generation is None and len(self._generations) < self._settings.generations_max:
            generation = self._generations[worker] = Generation(self._floor, worker, self._settings.bounds)
        return generation

    def _heard(self, now_ms: int) -> None:
        self._quiet_since_ms = now_ms
        self._silence_ms = self._settings.silence_ms
        self._calm = True
        self._unreachable_since_ms = None
        self._unknown_count = 0

    def _note_unheard(self, generation: Generation, now_ms: int) -> None:
        """The worker did not answer. While the scheduler says that it runs the attempt it is late, not gone: how long
        it may be so is the scheduler's to say. Who sends frames and answers nothing is not late.
        """
        if generation.failure is None and not self._calm:
            generation.behind_since_ms = now_ms

    def _in_order(self, generation: Generation, frame: Frame, effects: list[Effect]) -> None:
        try:
            if frame.kind in ("chunk", "text", "part"):
                self._on_content(generation, frame, effects)
            elif frame.kind == "accepted":
                generation.version = _accepted_of(frame.data).version if frame.data else ""
            elif frame.kind == "end":
                self._on_end(generation, _end_of(frame.data), effects)
            elif frame.kind == "error":
                effects.extend(self._fail(_known_code(_error_of(frame.data))))
        except msgspec.MsgspecError:
            effects.extend(self._fail(_broken("The worker sent a malformed frame.")))
        except TooLarge:
            effects.extend(self._fail(_broken("The answer is larger than can be relayed.")))

    def _on_content(self, generation: Generation, frame: Frame, effects: list[Effect]) -> None:
        self._lock(generation)
        whole = generation.assemble(frame)
        if whole is None:
            return
        if self._stream:
            self.started = True
            effects.append(Forward(whole))
        elif generation.answer is None:
            generation.answer = whole if isinstance(whole, bytes) else whole.copy()
        else:
            effects.extend(self._fail(_broken("The worker sent more than one answer.")))

    def _lock(self, generation: Generation) -> None:
        if self._locked is None:
            self._locked = generation
            self.version = generation.version
            self._generations = {generation.worker: generation}

    def _on_end(self, generation: Generation, end: EndData, effects: list[Effect]) -> None:
        if end.outcome not in ("completed", "cancelled") or generation.parts:
            effects.extend(self._fail(_error(end.outcome)))
            return
        if not self._stream and end.outcome == "completed":
            if generation.answer is None:
                effects.extend(self._fail(_broken("The worker ended without an answer.")))
                return
            self.started = True
            effects.append(Forward(generation.answer))
        effects.extend(self._finish(end))

    def _on_unreachable(self, now_ms: int) -> Effects:
        self._silence_ms = self._settings.status_again_ms
        if self._unreachable_since_ms is None:
            self._unreachable_since_ms = now_ms
        elif now_ms - self._unreachable_since_ms >= self._settings.unreachable_ms_max:
            return self._fail(self._nobody("The service that schedules this model cannot be reached."))
        return self._ask_workers(now_ms)

    def _on_unknown(self, now_ms: int) -> Effects:
        self._silence_ms = self._settings.status_again_ms
        self._unknown_count += 1
        if self._unknown_count >= self._settings.unknown_max:
            return self._fail(self._nobody("Nobody knows this request any more."))
        return self._ask_workers(now_ms)

    def _ask_workers(self, now_ms: int) -> Effects:
        """The scheduler was of no help; the worker may well live, and have ended the attempt meanwhile."""
        return [
            self._ask_frames(generation, now_ms)
            for generation in self._generations.values()
            if self._may_ask(generation, now_ms)
        ]

    def _nobody(self, message: str) -> ErrorData:
        return ErrorData(code="stream_interrupted" if self.started else "unavailable", message=message)

    def _on_ended(self, answer: StatusAnswer, now_ms: int) -> Effects:
        outcome = answer.outcome or "failed"
        failure = _known_code(answer.error) if answer.error is not None else _error(outcome)
        if self.joined and outcome == "completed" and not self.started:
            failure = _GONE
        if outcome in ("lost", "expired") or not answer.worker or answer.attempt < self._floor:
            return self._fail(failure)
        if failed := self._void_below(answer.attempt, failure):
            return failed
        generation = self._generation(answer.worker)
        if generation is None:
            return self._fail(failure)
        generation.failure = failure
        generation.end = answer.end
        generation.note_exists(answer.last_seq, now_ms)
        if (end := generation.missing_end) is not None:
            effects: list[Effect] = []
            self._on_end(generation, end, effects)
            return effects
        if not generation.behind:
            return self._fail(failure)
        return [self._ask_frames(generation, now_ms)] if self._may_ask(generation, now_ms) else NOTHING

    def _look_at(self, attempt: int, worker: str, now_ms: int) -> Effects:
        """The attempt runs there: ask for what it has sent beyond what is known here."""
        if attempt < self._floor:
            return NOTHING
        if failed := self._void_below(attempt, _error("lost")):
            return failed
        generation = self._generation(worker)
        if generation is None or not self._may_ask(generation, now_ms):
            return NOTHING
        return [self._ask_frames(generation, now_ms)]

    def _may_ask(self, generation: Generation, now_ms: int) -> bool:
        return generation.may_ask(now_ms, self._settings.repair_again_ms, self._settings.answer_ms_max)

    def _ask_frames(self, generation: Generation, now_ms: int) -> AskFrames:
        generation.note_asked(now_ms)
        return AskFrames(generation.worker, generation.attempt, generation.next_seq)

    def _status_due(self, now_ms: int) -> bool:
        if self._status_asked_at_ms is not None:
            return now_ms - self._status_asked_at_ms >= self._settings.answer_ms_max
        if self.joined:
            told_at_ms = self._status_told_at_ms
            return told_at_ms is None or now_ms - told_at_ms >= self._settings.joined_status_ms
        return now_ms - self._quiet_since_ms >= self._silence_ms

    def _ask_status(self, now_ms: int) -> AskStatus:
        self._status_asked_at_ms = now_ms
        self._told_void_below = self._floor
        return AskStatus()

    def _tell_void(self, now_ms: int, *, again: bool = False) -> Effects:
        """The scheduler waits for word that a stream has shown nothing of the attempts below; a question carries it.

        ``again``: it may not have had what was told.
        """
        told = self._told_void_below == self._floor and not (again and self._status_asked_at_ms is None)
        if told or not self._stream or self._floor == 1:
            return NOTHING
        return (self._ask_status(now_ms),)

    def _void_below(self, attempt: int, error: ErrorData) -> Effects:
        """Attempts below ``attempt`` are void; fails with ``error`` when the caller has seen some of one."""
        if attempt <= self._floor:
            return NOTHING
        self._floor = attempt
        self._locked = None
        self._generations.clear()
        return self._fail(error) if self.started else NOTHING

    def _give_up(self, generation: Generation) -> Effects:
        return self._fail(generation.failure or _error("completed"))

    def _fail(self, error: ErrorData) -> Effects:
        self._close()
        return (Fail(error),)

    def _finish(self, end: EndData) -> Effects:
        self._close()
        return (Finish(end),)

    def _close(self) -> None:
        self.finished = True
        self._locked = None
        self._generations.clear()


def _error(outcome: Outcome) -> ErrorData:
    code, message = _FAILURES[outcome]
    return ErrorData(code=code, message=message)


def _broken(message: str) -> ErrorData:
    return ErrorData(code="internal_error", message=message)


def _known_code(error: ErrorData) -> ErrorData:
    """``error`` with a code that has a row in errors.TABLE: a newer sender may know more codes."""
    if error.code in TABLE:
        return error
    return msgspec.structs.replace(error, code="internal_error")
