"""Frames: what a stream owner receives, and how it asks a worker for those it missed."""

from typing import Annotated, ClassVar, Literal

import msgspec

from contracts.messages.base import (
    MANY,
    NOTHING,
    SMALL,
    Epoch,
    Line,
    Message,
    Name,
    Outcome,
    RequestId,
    Text,
    TokenCounts,
    Whole,
)

FrameKind = Literal["accepted", "chunk", "text", "part", "end", "error", "lost"]


class Frame(Message, frozen=True, kw_only=True):
    """One step of a stream. ``seq`` counts from 0 per generation; -1 in frames that the scheduler sends.

    ``chunk``: data is one OpenAI chunk (an object), or the whole answer when the request does not stream. A chunk
    too big for one bus message comes as ``part`` frames (data: a JSON string, a slice of the chunk's text) closed
    by a ``chunk`` frame whose data is the last slice, again a string. ``text``: data is a JSON string, and the chunk is
    that of the generation's last ``chunk`` frame with this for its text. ``end``: EndData. ``error``: ErrorData.
    ``lost``: LostData. ``accepted``, the first of a generation: AcceptedData.
    """

    stream: Name
    attempt: int
    seq: int
    kind: FrameKind
    data: msgspec.Raw = NOTHING
    text_at: tuple[Whole, Whole] | None = None
    """Of a ``chunk``: the bytes of its data between which its text stands, quotes included, for ``text`` frames."""


class ReplyMessage(Message, frozen=True, kw_only=True):
    """What is published on a reply subject: the frames of one step. ``worker`` is empty for the scheduler's."""

    worker: Name = ""
    epoch: Epoch = Epoch()
    frames: Annotated[list[Frame], MANY] = []


class AcceptedData(Message, frozen=True, kw_only=True):
    """Data of an ``accepted`` frame: the version that answers."""

    version: Name


class EndData(TokenCounts, frozen=True, kw_only=True):
    """Data of an ``end`` frame: what the terminal event says. ``outcome`` is completed or cancelled."""

    outcome: Outcome
    finish_reason: Name = ""
    reasoning_tokens: int = 0
    """Those of the completion that were reasoning."""


class ErrorData(Message, frozen=True, kw_only=True):
    """Data of an ``error`` frame: the request's final failure. ``code`` is a code of errors.TABLE."""

    code: Name
    message: Text
    param: Line | None = None
    status: int = 0
    """HTTP status when it is not the table's."""
    retry_after_s: int | None = None


class LostData(Message, frozen=True, kw_only=True):
    """Data of a ``lost`` frame: the attempt is void; ``retry`` says whether another one follows.

    ``tell``: only once it is known that the caller has seen nothing of this one (StatusRequest.void_below).
    """

    retry: bool
    tell: bool = False


class FramesRequest(Message, frozen=True, kw_only=True):
    """Stream owner -> worker, ``frames.v1.<worker>.<tenant>``: frames of an attempt from ``from_seq`` on."""

    BYTES_MAX: ClassVar[int | None] = SMALL

    request_id: RequestId
    attempt: Whole
    from_seq: Whole


class FramesAnswer(Message, frozen=True, kw_only=True):
    """At most one page. ``known`` false: the worker no longer keeps that attempt. ``more``: ask again."""

    known: bool
    frames: Annotated[list[Frame], MANY] = []
    more: bool = False
