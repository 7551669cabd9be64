"""Cancel and status, signs of life, and the orders of a model's owner to its workers."""

from typing import Annotated, ClassVar, Literal, get_args

import msgspec

from contracts.messages.base import (
    MANY,
    SMALL,
    Epoch,
    Line,
    Message,
    Name,
    Outcome,
    PrefixKeys,
    RequestId,
    Subject,
    Text,
    TokenCounts,
    Whole,
)
from contracts.messages.frames import EndData, ErrorData

ServiceFault = Literal[
    "publish_unconfirmed", "relay_failed", "worker_lost", "shutdown", "gateway_lost", "operator_cancelled"
]
CancelReason = Literal["client_disconnected", "client_cancelled", "slow_reader"] | ServiceFault
"""Why a request is cancelled: by its caller, or because the service failed it."""

SERVICE_FAULTS: frozenset[str] = frozenset(get_args(ServiceFault))
"""Nobody is billed for these. A gateway or the admin service may name them, by the gateways' subject
(subjects.gateway_cancel), and a scheduler; from a tenant's service they count as ``client_cancelled``.
"""


WITHDRAWN: ServiceFault = "publish_unconfirmed"
"""Reason of a cancel whose caller was told that nothing had begun, and to ask again."""


class CancelRequest(Message, frozen=True, kw_only=True):
    """A tenant's service (``subjects.cancel``) or a gateway (``subjects.gateway_cancel``) -> scheduler. Idempotent."""

    BYTES_MAX: ClassVar[int | None] = SMALL

    request_id: RequestId = ""
    """Empty where only the ``idempotency_key`` is known: who got no answer cancels what was or will be admitted."""
    reason: CancelReason = "client_cancelled"
    idempotency_key: Line = ""
    reader: Subject = ""
    """The stream that is not read any more: the request goes on while others read it. Empty: it ends for all."""


class CancelAnswer(Message, frozen=True, kw_only=True):
    """``durable``: the end is stored, or the id is unknown and remembered; without it, ask again.

    While others read the request, ``durable`` is not given.
    """

    durable: bool
    outcome: Outcome | None = None


class StatusRequest(Message, frozen=True, kw_only=True):
    """Stream owner -> scheduler, ``status.v1.<model>.<tenant>``: what became of a request that says nothing.

    Who joined a request says so by each of these: for ``reader`` it goes on while ``stream_owner`` is heard.
    """

    BYTES_MAX: ClassVar[int | None] = SMALL

    request_id: RequestId
    void_below: int = 0
    """The caller has seen nothing of the attempts below this one, and will not: after a loss the next may run."""
    reader: Subject = ""
    stream_owner: Subject = ""


RequestState = Literal["unknown", "admitted", "queued", "dispatched", "running", "ended"]


class StatusAnswer(Message, frozen=True, kw_only=True):
    """What the scheduler knows of a request; ``last_seq`` is the number of the ended attempt's last frame."""

    state: RequestState
    attempt: int = 0
    worker: Name = ""
    outcome: Outcome | None = None
    last_seq: int = -1
    error: ErrorData | None = None
    end: EndData | None = None
    """What the frame ``last_seq`` says where that is the worker's ``end``."""


WorkerState = Literal["starting", "ready", "held", "draining", "engine_down", "failed"]
"""``held``: ready, but for an operator, who lets it take nothing. ``failed``: its version cannot be loaded, or is not
what was published; it tries again."""


class Progress(TokenCounts, frozen=True, kw_only=True):
    """One attempt in flight at a worker."""

    request_id: RequestId
    attempt: int


class Loading(Message, frozen=True, kw_only=True):
    """Files of a version on their way to a worker, which may serve another one meanwhile."""

    version: Name
    done_bytes: Whole
    total_bytes: Whole


class WorkerHeartbeat(Message, frozen=True, kw_only=True):
    """Worker -> schedulers every 500 ms, ``hb.v1.worker.<model>.<worker>``."""

    worker: Name
    model: Name
    version: Name
    state: WorkerState
    pinned: bool = False
    """It serves the version that it was started for by name, whatever becomes of that: it has had no order to serve
    one. An adapter's worker goes with its base's, and is never ordered."""
    reason: Text = ""
    """What it waits for or what failed, for people; of a worker that is ready: why it did not switch its version."""
    loading: Loading | None = None
    """None while no files are fetched."""
    epoch: Epoch = Epoch()
    """Highest epoch that the worker has acknowledged."""
    slots: int = 0
    """Sequences that the engine runs at once."""
    kv_tokens: int = 0
    """Capacity of the KV cache in tokens."""
    kv_tokens_used: int = 0
    context: int = 0
    """Longest sequence in tokens, prompt and output."""
    running: int = 0
    waiting: int = 0
    prefill_tokens_total: int = 0
    """Prompt tokens computed since start, cached ones left out."""
    decode_tokens_total: int = 0
    in_flight: Annotated[list[Progress], MANY] = []
    cache_number: Whole = 0
    """Of its last CacheChange; 0: it tells of none."""
    sent_at_ms: int = 0
    """By the sender's wall clock: how it differs is measured, nothing is decided by it."""


class WorkerPulse(Message, frozen=True, kw_only=True):
    """Worker -> schedulers every 500 ms, ``hb.v1.pulse.<model>.<worker>``: it lives, also while its event loop is late.

    Sent by a thread of its own; what the worker is doing stands in its heartbeat, which a late loop sends late.
    """

    BYTES_MAX: ClassVar[int | None] = SMALL

    worker: Name
    lag_ms: int = 0
    """How late its event loop is."""
    engine_idle_ms: int = 0
    """For how long its engine has made no step, though it has work."""


class CacheRun(Message, frozen=True, kw_only=True):
    """Keys of following blocks of one prompt (contracts.prefix); ``first``: how many keys come before them."""

    first: Whole
    keys: PrefixKeys


class CacheChange(Message, frozen=True, kw_only=True):
    """Worker -> schedulers, ``hb.v1.cache.<model>.<worker>``: what its engine keeps of prompts, and what no more.

    A gap in the numbers means that something was missed: the owner announces itself again, and the worker begins anew.
    """

    worker: Name
    number: Whole
    """From 1, each one more than the last."""
    anew: bool = False
    """Nothing of what was told before holds."""
    stored: Annotated[list[CacheRun], MANY] = []
    removed: Annotated[bytes, msgspec.Meta(max_length=1 << 16)] = b""
    """Keys, one after the other."""


class StreamOwnerHeartbeat(Message, frozen=True, kw_only=True):
    """Gateway or client service -> schedulers every 500 ms, ``hb.v1.stream-owner.<owner>``.

    Only the owner's name in the subject counts: the bus checks who may publish there.
    """

    BYTES_MAX: ClassVar[int | None] = SMALL

    stream_owner: Subject
    leaving: bool = False
    """A goodbye: its open requests are cancelled at once."""
    lag_ms: int = 0
    """How late its event loop is, where this is not sent by that loop."""
    sent_at_ms: int = 0
    """By the sender's wall clock, as a worker's."""


class LoopbackHeartbeat(Message, frozen=True, kw_only=True):
    """A scheduler's heartbeat to itself, by which it counts everybody's silence; ``number`` counts from 0."""

    observer: Name
    number: int
    sent_at_ms: int = 0
    """By the sender's wall clock, as a worker's."""


class Announce(Message, frozen=True, kw_only=True, tag="announce"):
    """Owner -> worker: this is the epoch from now on. A worker that tells of its engine's cache does so anew."""

    epoch: Epoch


class CancelAttempt(Message, frozen=True, kw_only=True, tag="cancel_attempt"):
    """Owner -> worker: stop this attempt, store its terminal event, answer then."""

    epoch: Epoch
    request_id: RequestId
    attempt: int
    reason: Text = ""


class Evict(Message, frozen=True, kw_only=True, tag="evict"):
    """Owner -> worker: you were declared lost; abort everything and rejoin under a new name."""

    epoch: Epoch
    reason: Text = ""
    """Why, when it is declared; empty when it is only said again."""


class SwitchVersion(Message, frozen=True, kw_only=True, tag="switch_version"):
    """Owner -> worker: serve this version of the model, and those that later orders name. Answered at once; the
    heartbeat says what came of it.

    The worker fetches and verifies it while it serves on, lets what runs end, loads it and joins under a new name. One
    that cannot be had, or fails when it starts, is not served: the worker serves the version before, and says why.
    """

    epoch: Epoch
    version: Name


class Hold(Message, frozen=True, kw_only=True, tag="hold"):
    """An operator's order to a worker: take nothing more, and let what runs end (``held``), or take work again.

    It holds for the life of the process, whatever name that has.
    """

    epoch: Epoch
    held: bool


ControlRequest = Announce | CancelAttempt | Evict | SwitchVersion | Hold


class ControlAnswer(Message, frozen=True, kw_only=True):
    """``stale``: the epoch was lower than one already acknowledged, nothing was done.

    ``ended``: the attempt has a stored terminal event. ``unknown``: the worker never had the attempt (and will
    not start it after this answer) or no longer has it in flight.
    """

    status: Literal["ok", "stale", "ended", "unknown"]
    epoch: Epoch = Epoch()
