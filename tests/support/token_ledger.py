"""What the tenants' token buckets must hold: an account kept beside the core, from its events and answers alone.

The rules: an admitted request takes one request, its prompt tokens and its maximum output over all choices; at its last
end it gets back, once, what it did not use, and the one request only if it never came to REQUESTS. A bucket refills by
its size a minute and never overflows. A new owner takes what earlier ones took, less what was refilled since.
"""

from collections.abc import Iterable
from typing import NamedTuple

from contracts.messages.attempts import AttemptEvent
from contracts.messages.records import TenantLimits
from contracts.messages.request import RequestEnvelope
from scheduler.core import events
from scheduler.core.core import Core
from scheduler.core.quotas import Quota

MINUTE_MS = 60_000


class Amounts(NamedTuple):
    """Of the buckets of requests, input tokens and output tokens."""

    requests: float
    input: float
    output: float

    def times(self, factor: float) -> "Amounts":
        return Amounts(self.requests * factor, self.input * factor, self.output * factor)


class Level:
    """A bucket, known by when it will be full again."""

    def __init__(self, size: int | None) -> None:
        self.size = size
        self.full_at_ms = 0.0

    def take(self, amount: float, now_ms: int) -> None:
        if self.size:  # One of 0 stays there.
            self.full_at_ms = max(self.full_at_ms, now_ms) + amount * MINUTE_MS / self.size

    def resize(self, size: int | None, now_ms: int) -> None:
        spent = self.size - self.at(now_ms) if self.size is not None else 0.0
        self.size = size
        self.full_at_ms = now_ms
        self.take(spent, now_ms)

    def at(self, now_ms: int) -> float:
        assert self.size is not None
        return self.size - self.size * max(0.0, self.full_at_ms - now_ms) / MINUTE_MS


class TokenLedger:
    """The account of one owner's term."""

    def __init__(self) -> None:
        self._levels: dict[str, tuple[Level, Level, Level]] = {}
        self._open: dict[str, tuple[str, Amounts]] = {}
        """Request -> (tenant, what it reserves)."""
        self._ended: dict[str, AttemptEvent] = {}
        """The last end that was told of each request."""
        self._settled = 0

    def observe(self, event: events.Event, effects: Iterable[events.Effect], core: Core, now_ms: int) -> None:
        """The core took in ``event`` and gave ``effects``; raises AssertionError when its buckets are wrong."""
        match event:
            case events.TenantChanged(name, record) if record is not None:
                self._resize(name, record.limits, now_ms)
            case events.AdmissionAsked(asked):
                answers = [effect.answer for effect in effects if isinstance(effect, events.AnswerAdmission)]
                if answers and answers[0].admitted and not answers[0].joined and asked.request_id not in self._open:
                    cost = Amounts(1, asked.prompt_tokens, asked.max_output_tokens * asked.choices)
                    self._reserve(asked.request_id, asked.tenant, cost, cost, now_ms)
            case events.TerminalStored(end):
                self._end(end, core, now_ms)
            case events.EndUnreadable(request_id) if (known := core.tombstones.ended(request_id)) is not None:
                self._ended[request_id] = known.event  # Failed: all comes back.
            case events.WorkFound() | events.RequestStored():
                self._found(event.item.request if isinstance(event, events.WorkFound) else event.envelope, core, now_ms)
        for request_id in [known for known in self._open if known not in core.requests]:
            self._settle(request_id, now_ms)
        self._settled = sum(core.outcomes.values())
        self._check(core, now_ms)

    def _resize(self, tenant: str, limits: TenantLimits, now_ms: int) -> None:
        sizes = (limits.rpm, limits.input_tpm, limits.output_tpm)
        levels = self._levels.setdefault(tenant, (Level(sizes[0]), Level(sizes[1]), Level(sizes[2])))
        for level, size in zip(levels, sizes, strict=True):
            if level.size != size:
                level.resize(size, now_ms)

    def _take(self, tenant: str, amounts: Amounts, now_ms: int) -> None:
        for level, amount in zip(self._levels.get(tenant, ()), amounts, strict=False):
            level.take(amount, now_ms)

    def _reserve(self, request_id: str, tenant: str, cost: Amounts, taken: Amounts, now_ms: int) -> None:
        self._open[request_id] = (tenant, cost)
        self._take(tenant, taken, now_ms)

    def _found(self, envelope: RequestEnvelope, core: Core, now_ms: int) -> None:
        """A message of a request that an earlier owner may have admitted."""
        if envelope.request_id in self._open:
            return
        over_at_once = sum(core.outcomes.values()) > self._settled
        if over_at_once or envelope.request_id in core.requests:
            cost = Amounts(1, envelope.prompt_tokens, envelope.max_output_tokens * envelope.choices)
            taken = cost.times(_left(envelope.admitted_at_ms, now_ms))
            self._reserve(envelope.request_id, envelope.tenant, cost, taken, now_ms)

    def _end(self, end: AttemptEvent, core: Core, now_ms: int) -> None:
        known = self._ended.get(end.request_id)
        self._ended[end.request_id] = end
        if core.recovering and end != known and end.request_id not in self._open and _has_used(end):
            used = Amounts(1, end.spent_input_tokens, end.completion_tokens)
            self._take(end.tenant, used.times(_left(end.admitted_at_ms, now_ms)), now_ms)

    def _settle(self, request_id: str, now_ms: int) -> None:
        tenant, cost = self._open.pop(request_id)
        end = self._ended.get(request_id)
        back = cost if end is None else cost._replace(requests=0)
        if end is not None and _has_used(end):
            back = Amounts(0, cost.input - end.spent_input_tokens, cost.output - end.completion_tokens)
        self._take(tenant, back.times(-1), now_ms)

    def _check(self, core: Core, now_ms: int) -> None:
        for tenant, levels in self._levels.items():
            quota = core.admission.quotas.get(tenant) or Quota(core.admission.tenant(tenant).limits, now_ms)
            for bucket, level in zip(
                (quota.request_bucket, quota.input_bucket, quota.output_bucket), levels, strict=True
            ):
                assert bucket.size == level.size
                if level.size is not None:
                    held, due = bucket.level(now_ms), level.at(now_ms)
                    assert abs(held - due) <= 1e-6 * level.size, (
                        f"{tenant}: the bucket of {level.size} has {held}, not {due}"
                    )


def _has_used(end: AttemptEvent) -> bool:
    return end.spent_input_tokens > 0


def _left(admitted_at_ms: int, now_ms: int) -> float:
    """Share of what was taken then that is not refilled yet."""
    return max(0.0, 1 - (now_ms - admitted_at_ms) / MINUTE_MS)
