"""Every message that crosses a process boundary.

JSON by msgspec. Decoders ignore unknown fields; evolve by adding fields with defaults. Instants are UTC Unix
milliseconds (``_at_ms``) of the process that wrote them; spans are milliseconds (``_ms``). OpenAI bodies and
chunks travel as ``msgspec.Raw`` and are not decoded on the way.
"""

from typing import Generic, Literal, TypeVar

import msgspec

M = TypeVar("M")

NOTHING = msgspec.Raw()
"""The absent raw field. Only this object is left out of the JSON; another empty Raw would make it invalid."""

Endpoint = Literal["chat/completions", "completions", "responses", "messages", "embeddings"]
Priority = Literal["interactive", "batch"]
Outcome = Literal["completed", "cancelled", "failed", "lost", "expired"]


class Message(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Base of all messages."""


class Epoch(msgspec.Struct, frozen=True, array_like=True, order=True):
    """Term of a model's owner: (creation of the lease bucket in ns, revision of the acquiring write).

    Constant for a term and greater for every later one; receivers refuse lower epochs (DESIGN.md section 6).
    """

    bucket_created_ns: int = 0
    revision: int = 0


class Reply(Message, frozen=True, kw_only=True):
    """Where frames go: a subject under ``reply.v1.`` and the caller's own name for the stream."""

    subject: str
    stream: str


# Admission -------------------------------------------------------------------------------------------------


class AdmissionRequest(Message, frozen=True, kw_only=True):
    """Gateway -> scheduler, ``admit.v1.<model>``. Idempotent by ``request_id``."""

    request_id: str
    tenant: str
    key_id: str
    model: str
    endpoint: Endpoint
    prompt_tokens: int
    """Exact; over all prompts of the request."""
    max_output_tokens: int
    """Per choice."""
    choices: int = 1
    """Answers generated in all: prompts times ``n``."""
    stream: bool = False
    priority: Priority = "interactive"
    deadline_ms: int | None = None
    """Time to the first token that the caller accepts; without it the tenant's default holds."""
    holder: str = ""
    """Incarnation of who holds the stream (gateway or client service); empty when nobody sends heartbeats."""
    version: str = ""
    """Pinned version; empty for the scheduler's choice."""


class RateLimits(Message, frozen=True, kw_only=True):
    """State of the tenant's buckets after a decision, for OpenAI's ``x-ratelimit-*`` headers. None: no limit."""

    limit_requests: int | None = None
    remaining_requests: int | None = None
    reset_requests_ms: int = 0
    limit_tokens: int | None = None
    remaining_tokens: int | None = None
    reset_tokens_ms: int = 0


class AdmissionAnswer(Message, frozen=True, kw_only=True):
    """Scheduler -> gateway. Refused: ``code`` (of errors.TABLE) and ``message`` say why; nothing was charged."""

    admitted: bool
    epoch: Epoch = Epoch()
    publish_by_ms: int = 0
    """Unix ms until which REQUESTS must have stored the request; later it is dropped as expired."""
    deadline_at_ms: int = 0
    """Unix ms until which the first token must come."""
    code: str = ""
    message: str = ""
    param: str | None = None
    retry_after_s: int | None = None
    limits: RateLimits | None = None


# The request on its way ------------------------------------------------------------------------------------


class RequestEnvelope(Message, frozen=True, kw_only=True):
    """Gateway -> REQUESTS: an admitted request. ``body`` or, over the claim-check size, ``body_object``."""

    request_id: str
    tenant: str
    key_id: str
    model: str
    endpoint: Endpoint
    stream: bool
    prompt_tokens: int
    max_output_tokens: int
    choices: int
    priority: Priority
    admitted_at_ms: int
    publish_by_ms: int
    deadline_at_ms: int
    reply: Reply
    holder: str = ""
    version: str = ""
    tokenizer_fingerprint: str = ""
    client_request_id: str = ""
    body: msgspec.Raw = NOTHING
    body_object: str = ""
    prefix_caching: bool = True
    """Whether the engine may reuse this tenant's earlier prompts; never another tenant's."""


class WorkItem(Message, frozen=True, kw_only=True):
    """Scheduler -> WORK: one attempt for one worker incarnation."""

    epoch: Epoch
    attempt: int
    version: str
    worker: str
    dispatched_at_ms: int
    request: RequestEnvelope


# Frames ----------------------------------------------------------------------------------------------------

FrameKind = Literal["accepted", "chunk", "part", "end", "error", "lost"]


class Frame(Message, frozen=True, kw_only=True):
    """One step of a stream. ``seq`` counts from 0 per generation; -1 in frames that the scheduler sends.

    ``chunk``: data is one OpenAI chunk (an object), or the whole answer when the request does not stream. A chunk
    too big for one bus message comes as ``part`` frames (data: a JSON string, a slice of the chunk's text) closed
    by a ``chunk`` frame whose data is the last slice, again a string. ``end``: EndData. ``error``: ErrorData.
    ``lost``: LostData. ``accepted``: no data.
    """

    stream: str
    attempt: int
    seq: int
    kind: FrameKind
    data: msgspec.Raw = NOTHING


class ReplyMessage(Message, frozen=True, kw_only=True):
    """What is published on a reply subject: the frames of one step. ``worker`` is empty for the scheduler's."""

    worker: str = ""
    epoch: Epoch = Epoch()
    frames: list[Frame] = []


class EndData(Message, frozen=True, kw_only=True):
    """Data of an ``end`` frame: what the terminal event says. ``outcome`` is completed or cancelled."""

    outcome: Outcome
    finish_reason: str = ""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    reasoning_tokens: int = 0


class ErrorData(Message, frozen=True, kw_only=True):
    """Data of an ``error`` frame: the request's final failure. ``code`` is a code of errors.TABLE."""

    code: str
    message: str
    param: str | None = None
    status: int = 0
    """HTTP status when it is not the table's."""
    retry_after_s: int | None = None


class LostData(Message, frozen=True, kw_only=True):
    """Data of a ``lost`` frame: the attempt is void; ``retry`` says whether another one follows."""

    retry: bool


class FramesRequest(Message, frozen=True, kw_only=True):
    """Holder of a stream -> worker, ``frames.v1.<worker>.<tenant>``: frames of an attempt from ``from_seq`` on."""

    request_id: str
    attempt: int
    from_seq: int


class FramesAnswer(Message, frozen=True, kw_only=True):
    """At most one page. ``known`` false: the worker no longer keeps that attempt. ``more``: ask again."""

    known: bool
    frames: list[Frame] = []
    more: bool = False


# Cancel and status -----------------------------------------------------------------------------------------


class CancelRequest(Message, frozen=True, kw_only=True):
    """Anyone who may publish to ``cancel.v1.<model>.<tenant>`` -> scheduler. Idempotent."""

    request_id: str
    reason: Literal["client_disconnected", "client_cancelled", "publish_unconfirmed", "slow_reader", "shutdown"] = (
        "client_cancelled"
    )


class CancelAnswer(Message, frozen=True, kw_only=True):
    """``durable``: the end is stored, or the id is unknown and remembered; without it, ask again."""

    durable: bool
    outcome: Outcome | None = None


class StatusRequest(Message, frozen=True, kw_only=True):
    request_id: str


RequestState = Literal["unknown", "admitted", "queued", "dispatched", "running", "ended"]


class StatusAnswer(Message, frozen=True, kw_only=True):
    """What the scheduler knows of a request; ``last_seq`` is the number of the ended attempt's last frame."""

    state: RequestState
    attempt: int = 0
    worker: str = ""
    outcome: Outcome | None = None
    last_seq: int = -1
    error: ErrorData | None = None
    end: EndData | None = None
    """What the frame ``last_seq`` says where that is the worker's ``end``."""


# Workers ---------------------------------------------------------------------------------------------------

WorkerState = Literal["starting", "ready", "draining", "engine_down"]


class Progress(Message, frozen=True, kw_only=True):
    """One attempt that a worker holds."""

    request_id: str
    attempt: int
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    """Over all choices; above 0 once the first token exists."""


class WorkerHeartbeat(Message, frozen=True, kw_only=True):
    """Worker -> schedulers every 500 ms, ``hb.v1.worker.<model>.<worker>``."""

    worker: str
    model: str
    version: str
    state: WorkerState
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
    held: list[Progress] = []


class HolderHeartbeat(Message, frozen=True, kw_only=True):
    """Gateway or client service -> schedulers every 500 ms, ``hb.v1.holder.<holder>``; the subject's name counts."""

    holder: str
    leaving: bool = False
    """A goodbye: its open requests are cancelled at once."""


class Tick(Message, frozen=True, kw_only=True):
    """An observer's tick to itself; ``number`` counts from 0."""

    observer: str
    number: int


class Announce(Message, frozen=True, kw_only=True, tag="announce"):
    """Owner -> worker: this epoch holds now."""

    epoch: Epoch


class CancelAttempt(Message, frozen=True, kw_only=True, tag="cancel_attempt"):
    """Owner -> worker: stop this attempt, store its terminal event, answer then."""

    epoch: Epoch
    request_id: str
    attempt: int
    reason: str = ""


class Evict(Message, frozen=True, kw_only=True, tag="evict"):
    """Owner -> worker: you were declared lost; abort everything and rejoin under a new name."""

    epoch: Epoch


ControlRequest = Announce | CancelAttempt | Evict


class ControlAnswer(Message, frozen=True, kw_only=True):
    """``stale``: the epoch was lower than one already acknowledged, nothing was done.

    ``ended``: the attempt has a stored terminal event. ``unknown``: the worker never held the attempt (and will
    not start it after this answer) or no longer does.
    """

    status: Literal["ok", "stale", "ended", "unknown"]
    epoch: Epoch = Epoch()


# Terminal events -------------------------------------------------------------------------------------------


class AttemptEvent(Message, frozen=True, kw_only=True):
    """The one terminal event of an attempt, in ATTEMPTS; also the ledger's row. Attempt 0: never dispatched.

    Ledger key: (request_id, attempt). Times are Unix ms, 0 when the thing never happened.
    """

    request_id: str
    attempt: int
    tenant: str
    key_id: str
    model: str
    version: str
    endpoint: Endpoint
    priority: Priority
    outcome: Outcome
    reporter: Literal["worker", "scheduler"]
    worker: str = ""
    stream: bool = False
    finish_reason: str = ""
    error_code: str = ""
    error_message: str = ""
    """Names no prompt and no output."""
    retryable: bool = False
    """A failed attempt that another worker may repeat."""
    engine_death: bool = False
    """The attempt ended because its engine or worker died: the request is a suspect (DESIGN.md section 7)."""
    billable: bool = False
    choices: int = 1
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    reasoning_tokens: int = 0
    reserved_tokens: int = 0
    """What admission had reserved: (prompt + maximum output) times choices."""
    last_seq: int = -1
    """Number of the attempt's last frame, the closing one included."""
    admitted_at_ms: int = 0
    dispatched_at_ms: int = 0
    first_token_at_ms: int = 0
    ended_at_ms: int = 0
    client_request_id: str = ""


# Internal services -----------------------------------------------------------------------------------------


class SubmitRequest(Message, frozen=True, kw_only=True):
    """Service -> any gateway, ``submit.v1.<tenant>.<model>``; the tenant is the subject's, never the body's."""

    endpoint: Endpoint
    reply: Reply
    body: msgspec.Raw = NOTHING
    """OpenAI body; its ``model`` may be left out."""
    deadline_ms: int | None = None
    holder: str = ""
    """Incarnation under which the service sends heartbeats, if it does."""


class SubmitAnswer(Message, frozen=True, kw_only=True):
    """Admitted, with the request's id, or refused with an error of errors.TABLE."""

    admitted: bool
    request_id: str
    model: str = ""
    """Whose scheduler owns the request, for cancel and status; empty when it is the model asked for."""
    status: int = 200
    error: ErrorData | None = None
    limits: RateLimits | None = None


# Records in KV buckets -------------------------------------------------------------------------------------


class PoolLimits(Message, frozen=True, kw_only=True):
    """Bounds of one model's queue, and of one tenant's share of it."""

    queued_requests: int = 2000
    queued_tokens: int = 50_000_000
    tenant_queued_requests: int = 1000
    tenant_queued_tokens: int = 25_000_000
    kv_overbooking: float = 1.0
    """Reserved tokens on a worker may reach its KV capacity times this."""


class Manifest(Message, frozen=True, kw_only=True):
    """A model's entry in the MODELS bucket, keyed by the encoded name."""

    name: str
    version: str
    engine: Literal["vllm", "simulated"]
    context: int
    """Longest sequence in tokens, prompt and output."""
    default_output_tokens: int
    """Output limit of a request that states none."""
    artifacts: dict[str, str] = {}
    """File -> sha256."""
    path: str = ""
    """Directory of the artifacts on hosts that share it; empty for the simulated engine."""
    tokenizer_fingerprint: str = ""
    endpoints: tuple[Endpoint, ...] = ("chat/completions", "completions")
    limits: PoolLimits = PoolLimits()
    fallbacks: list[str] = []
    created_at_ms: int = 0


class TenantLimits(Message, frozen=True, kw_only=True):
    """Limits of a tenant for each model; None is unlimited. Buckets hold one minute's worth."""

    rpm: int | None = None
    input_tpm: int | None = None
    output_tpm: int | None = None
    concurrency: int | None = None
    queued_requests: int | None = None
    queued_tokens: int | None = None


class TenantRecord(Message, frozen=True, kw_only=True):
    """A tenant's entry in the TENANTS bucket, keyed by the encoded name."""

    name: str
    limits: TenantLimits = TenantLimits()
    model_limits: dict[str, TenantLimits] = {}
    """Limits that replace ``limits`` for one model."""
    weight: float = 1.0
    models: list[str] | None = None
    """Models that the tenant may see; None is all."""
    priorities: tuple[Priority, ...] = ("interactive", "batch")
    deadline_ms: int = 60_000
    """Default time to the first token."""
    monthly_budget_tokens: int | None = None
    fallback: bool = False
    """Whether an overloaded model's request may go to a fallback."""
    prefix_caching: bool = True
    disabled: bool = False
    created_at_ms: int = 0


class KeyRecord(Message, frozen=True, kw_only=True):
    """An API key's entry in the KEYS bucket, keyed by the HMAC-SHA256 of the secret (hex). No secret here."""

    id: str
    tenant: str
    admin: bool = False
    created_at_ms: int = 0
    revoked_at_ms: int = 0


# Usage -----------------------------------------------------------------------------------------------------

UsageDimension = Literal["tenant", "key", "model", "version", "day", "hour", "endpoint", "priority", "outcome"]

AskCode = Literal["", "invalid_request", "not_found", "unavailable"]
"""With an error: ask differently, there is no such thing, or ask again."""


class UsageQuery(Message, frozen=True, kw_only=True):
    """Anyone -> ledger, ``usage.v1.query``. Half-open UTC range [from, to) over the request's admission time."""

    from_at_ms: int
    to_at_ms: int
    by: list[UsageDimension]
    tenant: str | None = None
    """None: all tenants (operators only). A subject that names a tenant stands above this."""
    limit: int = 10_000
    offset: int = 0


class UsageRow(Message, frozen=True, kw_only=True, omit_defaults=False):
    """Dimensions that were not asked for are None."""

    tenant: str | None = None
    key: str | None = None
    model: str | None = None
    version: str | None = None
    day: str | None = None
    hour: str | None = None
    endpoint: str | None = None
    priority: str | None = None
    outcome: str | None = None
    requests: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    reasoning_tokens: int = 0
    attempts: int = 0
    unbilled_tokens: int = 0
    """Prompt and completion tokens of attempts that are not billed; in none of the other counts."""
    amount: str = "0"
    """In the currency's unit: an exact decimal number, at most 12 digits after the point."""
    unpriced_tokens: int = 0
    """Billed tokens for which no price holds; they add nothing to the amount."""


class UsageAnswer(Message, frozen=True, kw_only=True):
    rows: list[UsageRow] = []
    has_more: bool = False
    currency: str = ""
    """Empty while there are no prices."""
    error: str = ""
    code: AskCode = ""


LatencyDimension = Literal["tenant", "model", "version", "priority", "day", "hour"]


class LatencyQuery(Message, frozen=True, kw_only=True):
    """Anyone -> ledger. Range and tenant as in UsageQuery."""

    from_at_ms: int
    to_at_ms: int
    by: list[LatencyDimension]
    tenant: str | None = None
    limit: int = 10_000
    offset: int = 0


class Quantiles(Message, frozen=True, kw_only=True, omit_defaults=False):
    """Milliseconds, within 2 %; all 0 when there is no sample."""

    count: int = 0
    p50: float = 0.0
    p90: float = 0.0
    p95: float = 0.0
    p99: float = 0.0


class LatencyRow(Message, frozen=True, kw_only=True, omit_defaults=False):
    """Spans of attempts. Dimensions that were not asked for are None."""

    tenant: str | None = None
    model: str | None = None
    version: str | None = None
    priority: str | None = None
    day: str | None = None
    hour: str | None = None
    queue_wait_ms: Quantiles = Quantiles()
    """Admission to dispatch."""
    first_token_ms: Quantiles = Quantiles()
    """Admission to first token."""
    inter_token_ms: Quantiles = Quantiles()
    """Mean pause between the tokens of one choice, one sample an attempt."""
    end_to_end_ms: Quantiles = Quantiles()
    """Admission to end, completed attempts only."""


class LatencyAnswer(Message, frozen=True, kw_only=True):
    rows: list[LatencyRow] = []
    has_more: bool = False
    error: str = ""
    code: AskCode = ""


class InvoiceQuery(Message, frozen=True, kw_only=True):
    tenant: str = ""
    """A subject that names a tenant stands above this."""
    month: str
    """UTC, ``2026-11``."""


class InvoiceLine(Message, frozen=True, kw_only=True, omit_defaults=False):
    """Tokens of one kind at one price; or ``rounding``, which brings the sum to whole cents."""

    kind: Literal["input", "cached_input", "output", "reasoning", "rounding"]
    model: str = ""
    tier: str = ""
    valid_from: str = ""
    """Day from which the price holds; empty when none does."""
    tokens: int = 0
    price: str = "0"
    """For a million tokens."""
    amount: str = "0"


class Invoice(Message, frozen=True, kw_only=True, omit_defaults=False):
    """The amounts of all lines add up to ``total`` exactly, all but the rounding to ``usage_amount``."""

    tenant: str
    month: str
    currency: str
    closed: bool
    """The month is over, and so is the time in which a late event may still come."""
    requests: int
    lines: list[InvoiceLine]
    usage_amount: str
    total: str
    """Whole cents, half of one rounded up."""
    unpriced_tokens: int


class InvoiceAnswer(Message, frozen=True, kw_only=True):
    invoice: Invoice | None = None
    error: str = ""
    code: AskCode = ""


class ExplainQuery(Message, frozen=True, kw_only=True):
    request_id: str


class ExplainAnswer(Message, frozen=True, kw_only=True):
    """What became of a request: its attempts in order, and the same in plain words, a line each."""

    attempts: list["AttemptEvent"] = []
    text: list[str] = []
    amount: str = "0"
    currency: str = ""
    error: str = ""
    code: AskCode = ""


class Price(Message, frozen=True, kw_only=True):
    """An entry in the PRICES bucket, keyed ``<model>.<tier>.<valid_from>``: holds until a later one begins.

    Prices are whole millionths of the currency's unit for a million tokens.
    """

    model: str
    tier: Priority
    valid_from: str
    """UTC day, ``2026-11-29``."""
    currency: str
    """``USD``; one currency for all prices."""
    input: int
    cached_input: int
    output: int
    reasoning: int
    created_at_ms: int = 0


class Budget(Message, frozen=True, kw_only=True):
    """A tenant's entry in the BUDGETS bucket, keyed by the encoded name: what was billed in a UTC month."""

    month: str
    """``2026-11``; entries of earlier months are not cleared."""
    tokens: int
    """Prompt and completion tokens."""


class DeadLetter(Message, frozen=True, kw_only=True):
    """A message that could not be used, in DEAD_LETTERS: why, where it was, and what it was."""

    reason: str
    subject: str
    stream_seq: int
    stored_at_ms: int
    original: str | None = None
    """The message as text; None when it is not UTF-8."""
    original_base64: str | None = None
    truncated: bool = False


class Quarantined(Message, frozen=True, kw_only=True):
    """A request that ended too many engines or workers, in QUARANTINE: why, when, itself, and its last end.

    A body that travelled by reference is kept only as long as the object store keeps it.
    """

    reason: str
    quarantined_at_ms: int
    request: RequestEnvelope
    last: AttemptEvent


# Live queues -----------------------------------------------------------------------------------------------


class TenantQueue(Message, frozen=True, kw_only=True, omit_defaults=False):
    """One tenant's line of a model's live queue."""

    tenant: str
    waiting: int
    waiting_tokens: int
    running: int
    reserved_tokens: int
    served_counter: float
    """Virtual token counter: weighted tokens served (DESIGN.md section 6)."""
    oldest_wait_ms: int


class QueueAnswer(Message, frozen=True, kw_only=True, omit_defaults=False):
    """A model's live queues, as its owner sees them."""

    model: str
    owner: str
    epoch: Epoch
    waiting: int
    running: int
    reserved_tokens: int
    workers: list[WorkerHeartbeat]
    tenants: list[TenantQueue]


class Codec(Generic[M]):
    """Encoder and decoder of one message type, built once."""

    def __init__(self, kind: type[M]) -> None:
        self._encoder = msgspec.json.Encoder()
        self._decoder = msgspec.json.Decoder(kind)
        self.encode = self._encoder.encode

    def decode(self, data: bytes | memoryview | msgspec.Raw) -> M:
        """Raises msgspec.MsgspecError when ``data`` is not such a message."""
        return self._decoder.decode(data)
