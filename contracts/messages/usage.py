"""The ledger's query API: usage, latency, invoices, one request's story."""

from typing import Annotated, ClassVar, Literal, get_args

from contracts.messages.attempts import AttemptEvent
from contracts.messages.base import FEW, MANY, SMALL, Line, Message, Name, RequestId, Text

UsageDimension = Literal["tenant", "key", "model", "version", "day", "hour", "endpoint", "priority", "outcome"]

LatencyDimension = Literal["tenant", "model", "version", "priority", "day", "hour"]


class RangeQuery(Message, frozen=True, kw_only=True):
    """What is asked about a half-open range [from, to) of admission times, in pages of ``limit`` rows."""

    BYTES_MAX: ClassVar[int | None] = SMALL

    from_at_ms: int
    to_at_ms: int
    tenant: Name | None = None
    """None: all tenants (operators only). A subject that names a tenant overrides this."""
    limit: int = 10_000
    offset: int = 0


class LedgerAnswer(Message, frozen=True, kw_only=True):
    """What every answer of the ledger says: all is well, or why there is none."""

    error: Text = ""
    code: Literal["", "invalid_request", "not_found", "unavailable"] = ""
    """With an error: ask differently, there is no such thing, or ask again."""


class UsageQuery(RangeQuery, frozen=True, kw_only=True):
    """Anyone -> ledger, ``usage.v1.of.<tenant>.usage``: requests, tokens and amounts, summed by dimensions."""

    by: Annotated[list[UsageDimension], FEW]


class UsageRow(Message, frozen=True, kw_only=True, omit_defaults=False):
    """Dimensions that were not asked for are None."""

    tenant: Name | None = None
    key: Line | None = None
    model: Name | None = None
    version: Name | None = None
    day: Name | None = None
    hour: Name | None = None
    endpoint: Name | None = None
    priority: Name | None = None
    outcome: Name | None = None
    requests: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    reasoning_tokens: int = 0
    attempts: int = 0
    unbilled_tokens: int = 0
    """Prompt and completion tokens of attempts that are not billed; in none of the other counts."""
    amount: Name = "0"
    """In the currency's unit: an exact decimal number, at most 12 digits after the point."""
    unpriced_tokens: int = 0
    """Billed tokens for which no price is valid; they add nothing to the amount."""


USAGE_FIGURES = tuple(name for name in UsageRow.__struct_fields__ if name not in get_args(UsageDimension))
"""Fields of a UsageRow that are no dimension, in their order."""


class UsageAnswer(LedgerAnswer, frozen=True, kw_only=True):
    """One page of usage, sorted by its dimensions."""

    rows: Annotated[list[UsageRow], MANY] = []
    has_more: bool = False
    currency: Name = ""
    """Empty while there are no prices."""


class LatencyQuery(RangeQuery, frozen=True, kw_only=True):
    """Anyone -> ledger, ``usage.v1.of.<tenant>.latency``: spans of attempts, by dimensions."""

    by: Annotated[list[LatencyDimension], FEW]


class Quantiles(Message, frozen=True, kw_only=True, omit_defaults=False):
    """Milliseconds, within 2 %; all 0 when there is no sample."""

    count: int = 0
    p50: float = 0.0
    p90: float = 0.0
    p95: float = 0.0
    p99: float = 0.0


class LatencyRow(Message, frozen=True, kw_only=True, omit_defaults=False):
    """Spans of attempts. Dimensions that were not asked for are None."""

    tenant: Name | None = None
    model: Name | None = None
    version: Name | None = None
    priority: Name | None = None
    day: Name | None = None
    hour: Name | None = None
    queue_wait_ms: Quantiles = Quantiles()
    """Admission to dispatch."""
    first_token_ms: Quantiles = Quantiles()
    """Admission to first token."""
    inter_token_ms: Quantiles = Quantiles()
    """Mean pause between the tokens of one choice, one sample an attempt."""
    end_to_end_ms: Quantiles = Quantiles()
    """Admission to end, completed attempts only."""


LATENCY_SPANS = tuple(name for name in LatencyRow.__struct_fields__ if name not in get_args(LatencyDimension))
"""Fields of a LatencyRow that are no dimension, in their order."""


class LatencyAnswer(LedgerAnswer, frozen=True, kw_only=True):
    """One page of latencies, sorted by its dimensions."""

    rows: Annotated[list[LatencyRow], MANY] = []
    has_more: bool = False


class InvoiceQuery(Message, frozen=True, kw_only=True):
    """Anyone -> ledger, ``usage.v1.of.<tenant>.invoice``: what a tenant owes for a month."""

    BYTES_MAX: ClassVar[int | None] = SMALL

    tenant: Name = ""
    """A subject that names a tenant overrides this."""
    month: Name
    """UTC, ``2026-11``."""


class InvoiceLine(Message, frozen=True, kw_only=True, omit_defaults=False):
    """Tokens of one kind at one price; ``correction``, which brings what an issued invoice charged to what its month
    costs now, and may be negative; or ``rounding``, which brings the sum to whole coins of the currency.
    """

    kind: Literal["input", "cached_input", "output", "reasoning", "correction", "rounding"]
    corrects: Line = ""
    """Of a correction: the month that it corrects."""
    model: Name = ""
    """Or an adapter."""
    version: Name = ""
    tier: Name = ""
    valid_from: Name = ""
    """Day from which the price is valid; empty when there is no price."""
    tokens: int = 0
    price: Name = "0"
    """For a million tokens."""
    amount: Name = "0"


class Invoice(Message, frozen=True, kw_only=True, omit_defaults=False):
    """The amounts of all lines add up to ``total`` exactly; all but corrections and rounding to ``usage_amount``.

    An entry in the INVOICES bucket, keyed ``<tenant>.<month>``, once it is issued.
    """

    tenant: Name
    month: Name
    currency: Name
    closed: bool
    """The month is over, and so is the time in which a late event may still come: this document never changes."""
    issued_at_ms: int = 0
    """Unix ms; 0 while the month is open."""
    requests: int
    lines: Annotated[list[InvoiceLine], MANY]
    usage_amount: Name
    total: Name
    """With the currency's digits (ISO 4217): whole cents of USD, whole yen; half of one rounded up."""
    unpriced_tokens: int


class InvoiceAnswer(LedgerAnswer, frozen=True, kw_only=True):
    """The invoice, or an error."""

    invoice: Invoice | None = None


class ExplainQuery(Message, frozen=True, kw_only=True):
    """Anyone -> ledger, ``usage.v1.of.<tenant>.explain``: what became of a request."""

    BYTES_MAX: ClassVar[int | None] = SMALL

    request_id: Line
    """Any id of it: the ``x-request-id`` of its answer, the id in its body, or the one that its caller gave. At most
    256 characters. Of several requests that a caller gave one id the newest is told.
    """


PhaseName = Literal["edge", "admission", "queue", "dispatch", "prefill", "decode", "retry", "relay", "caller"]
"""Where a request's time goes, in the order in which it does: the gateway's checks, the scheduler's leave, waiting for
a worker, the way to its engine, reading the prompt, generating, attempts that were in vain, frames on their way, and
what its caller took to send the body and to read the answer."""


class Phase(Message, frozen=True, kw_only=True, omit_defaults=False):
    """``ms``: None when nobody knows."""

    name: PhaseName
    ms: float | None


class RequestTimes(Message, frozen=True, kw_only=True, omit_defaults=False):
    """Where the time of one request went. Its phases add up to ``total_ms`` where all are known."""

    request_id: RequestId
    tenant: Name
    model: Name
    version: Name = ""
    outcome: Name
    code: Name = ""
    attempts: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    total_ms: float = 0.0
    """From its first byte to its last, or from admission to end where no gateway tells of it."""
    first_token_ms: float | None = None
    phases: Annotated[list[Phase], FEW] = []
    why: Line = ""
    """One sentence."""


SLOWEST_MAX = 100


class SlowestQuery(Message, frozen=True, kw_only=True):
    """Anyone -> ledger, ``usage.v1.of.<tenant>.slowest``: the slowest requests of [from, to), the slowest first.

    ``limit``: of each tenant and model; SLOWEST_MAX in all.
    """

    BYTES_MAX: ClassVar[int | None] = SMALL

    from_at_ms: int
    to_at_ms: int
    tenant: Name | None = None
    """None: all tenants (operators only). A subject that names a tenant overrides this."""
    model: Name | None = None
    order: Literal["total", "first_token", "failed"] = "total"
    """By what they are slow; ``failed``: those that failed instead, the newest first."""
    limit: int = 5


class SlowestAnswer(LedgerAnswer, frozen=True, kw_only=True):
    """The slowest first."""

    rows: Annotated[list[RequestTimes], MANY] = []


class ExplainAnswer(LedgerAnswer, frozen=True, kw_only=True):
    """What became of a request: its attempts in order, and the same in plain words, a line each."""

    attempts: Annotated[list[AttemptEvent], MANY] = []
    text: Annotated[list[Line], MANY] = []
    times: RequestTimes | None = None
    amount: Name = "0"
    currency: Name = ""
