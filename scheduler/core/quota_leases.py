"""A tenant's limits on a model with several shards: one total, of which each shard spends what it has leased.

What is taken of the limits stands in one record of the bus, which owners change by compare-and-set: no shard grants,
and none has to live for the others to go on. In an *exchange* a shard gives back what it has left, and takes what the
request needs that waits for it, and a little more. What it has taken is spent in the record before it is spent here, so
the sum over all shards keeps the limits whatever is lost on the way: a shard that dies, or whose write was not
confirmed, loses what it held, and that refills. Concurrency is leased as permits; those of a shard that says nothing
for LEASE_MS are free again, while its requests may run on until its next owner counts them. A budget is exact over one
model's shards; what other models spend of it is known as late as ever (``budgets``).

Pure: ``exchange`` is the record's step, ``LeasedQuota`` one shard's.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from contracts.errors import HeadraceError
from contracts.limits import NAMES
from contracts.messages.admission import RateLimit, RateLimits
from contracts.messages.records import QuotaLease, SharedQuota, Spendable, TenantLimits
from contracts.tokens import Cost
from scheduler.core.quotas import MINUTE_MS, Quota, seconds

LEASE_SHARE = 1 / 16
"""Of a limit that all shards together lease beyond what is spent at once: four seconds of full use."""
LEASE_MS = 10_000
"""How long a lease holds that nobody renews: longer than a takeover."""
RENEW_MS = 2_000
"""How often one is, and how long what nobody uses stays away from the others."""
EARLY_MS = 1_000
"""So long before its end nothing is spent of it: more than the clocks of two owners differ by."""
CONTESTED_MS = 2_000
"""For so long after a shard asked for what was not there, the others take no more than they spend at once, and leave
it a permit."""
AGAIN_MS = 250
"""After a refusal nothing as large is asked for, for so long at most: a flood of refusals asks the bus four times a
second."""
_FIELDS = Spendable.__struct_fields__
_LIMITS = ("rpm", "input_tpm", "output_tpm", "")
_ROUNDING = 1e-6
"""Of sums of what was given and given back."""

Amounts = tuple[float, ...]
"""Of each field of Spendable, in order."""
NOTHING: Amounts = (0.0,) * len(_FIELDS)


class Ask(msgspec.Struct, frozen=True):
    """What a shard gives back, and what it wants."""

    sizes: tuple[int | None, ...]
    """Of the tenant's limits by field of Spendable: a minute's worth, the month's budget; None: no limit."""
    concurrency: int | None
    shards: int
    month: str
    """The present one, and what is known to be spent of its budget, on all models."""
    month_spent: int
    returned: Amounts
    """Leased and not spent."""
    replayed: Amounts
    """Spent in the last minute as far as is known here: where no record tells."""
    open: int
    """Requests that are open here, and keep their permits."""
    need: Amounts = NOTHING
    """Of the request that waits: all of it, or nothing."""
    more: Amounts = NOTHING
    """Of those behind it, and how many they are."""
    waiting: int = 0
    active: bool = True
    """Whether anything was admitted here since the last time; who admits nothing keeps nothing."""


class Grant(msgspec.Struct, frozen=True):
    """What a shard may spend until ``until_ms``."""

    left: Amounts
    permits: int
    until_ms: int
    room: Amounts
    """What nobody has taken; infinite where there is no limit."""
    contested: bool = False
    short: str = ""
    """The limit that did not have what was needed, a field of TenantLimits or ``budget``; and after how long it may,
    0 when that is for others to say."""
    wait_ms: int = 0


def exchange(shared: SharedQuota | None, shard: str, ask: Ask, now_ms: int) -> tuple[SharedQuota, Grant]:
    """The record after the exchange, and what the shard gets if that is stored. ``shared`` None: there is none yet."""
    if shared is None:
        *spent, _ = ask.replayed
        shared = SharedQuota(at_ms=now_ms, month=ask.month, taken=_spendable((*spent, ask.month_spent)))
    alive = {name: lease for name, lease in shared.leases.items() if lease.until_ms > now_ms}
    taken = _given_back(shard, ask, alive, _refilled(shared, ask, alive, now_ms))
    others = {name: _lowered(lease, taken) for name, lease in alive.items() if name != shard}
    short_at_ms = alive[shard].short_at_ms if shard in alive else 0
    grant = _granted(ask, taken, others, short_at_ms or now_ms, now_ms)
    taken = tuple(map(sum, zip(taken, grant.left, strict=True)))
    if any(grant.left) or grant.permits or grant.short:
        others[shard] = QuotaLease(
            until_ms=grant.until_ms,
            left=_spendable(grant.left),
            low=_spendable(taken),
            permits=grant.permits,
            short_at_ms=(short_at_ms or now_ms) if grant.short else 0,
        )
    after = SharedQuota(
        at_ms=max(shared.at_ms, now_ms), month=max(shared.month, ask.month), taken=_spendable(taken), leases=others
    )
    return after, grant


def _granted(ask: Ask, taken: Amounts, others: dict[str, QuotaLease], since_ms: int, now_ms: int) -> Grant:
    """What the shard gets of what is not taken; ``since_ms``: since when it has waited for it."""
    *_, budget = taken
    counted = (*taken[:-1], max(budget, ask.month_spent))  # Other models spend of it, too.
    room = tuple(math.inf if size is None else size - each for size, each in zip(ask.sizes, counted, strict=True))
    wanting = [it for it in others.values() if it.short_at_ms and it.until_ms - LEASE_MS + CONTESTED_MS > now_ms]
    room_permits = _permits(ask, others) - sum(it.short_at_ms < since_ms for it in wanting)
    short, wait_ms = _shortage(ask, room, room_permits)
    needed = NOTHING if short else ask.need
    permits = ask.open + bool(ask.waiting and not short)
    extra = NOTHING
    if ask.active and not wanting:
        extra = tuple(map(_extra, ask.sizes, ask.more, room, needed, (ask.shards,) * len(room)))
        extra = math.floor(extra[0]), *extra[1:]  # Parts of a request would be of no use to anybody.
        permits += max(0, min(ask.waiting, math.floor(min(room_permits - permits, 2**31) / ask.shards)))
    left = tuple(map(sum, zip(needed, extra, strict=True)))
    room = tuple(each - own for each, own in zip(room, left, strict=True))
    return Grant(left, permits, now_ms + LEASE_MS, room, bool(wanting), short, wait_ms)


def _refilled(shared: SharedQuota, ask: Ask, alive: dict[str, QuotaLease], now_ms: int) -> Amounts:
    """What is taken now. What is leased has not been spent yet, and does not refill before it is."""
    elapsed = max(0, now_ms - shared.at_ms) / MINUTE_MS
    *taken, budget = _amounts(shared.taken)
    *floor, least = _leased(alive)
    refilled = [
        0.0 if size is None else max(low, each - size * elapsed)
        for size, each, low in zip(ask.sizes, taken, floor, strict=False)
    ]
    return (*refilled, least if shared.month < ask.month else budget)


def _given_back(shard: str, ask: Ask, alive: dict[str, QuotaLease], taken: Amounts) -> Amounts:
    """What was not spent is not taken, unless it has refilled: no more comes back than was taken all the time since."""
    low = _amounts(alive[shard].low) if shard in alive else NOTHING
    floor = _leased({name: lease for name, lease in alive.items() if name != shard})
    return tuple(
        max(least, each - min(back, lowest, each))
        for least, each, back, lowest in zip(floor, taken, ask.returned, low, strict=True)
    )


def _permits(ask: Ask, others: dict[str, QuotaLease]) -> float:
    """Those that the other shards do not have."""
    return math.inf if ask.concurrency is None else ask.concurrency - sum(each.permits for each in others.values())


def _lowered(lease: QuotaLease, taken: Amounts) -> QuotaLease:
    return msgspec.structs.replace(lease, low=_spendable(tuple(map(min, _amounts(lease.low), taken))))


def _leased(leases: dict[str, QuotaLease]) -> Amounts:
    return tuple(map(sum, zip(NOTHING, *(_amounts(lease.left) for lease in leases.values()), strict=True)))


def _extra(size: int | None, more: float, room: float, needed: float, shards: int) -> float:
    """Beyond what is spent at once: a part of what there is, so that others have theirs."""
    if size is None:
        return 0.0
    return max(0.0, min(max(size * LEASE_SHARE / shards, more), (room - needed) / shards))


def _shortage(ask: Ask, room: Amounts, room_permits: float) -> tuple[str, int]:
    """The first limit that has not what is needed; of a budget the last of it is enough for a whole request."""
    if not ask.waiting:
        return "", 0
    for field, size, each, needed in zip(_LIMITS, ask.sizes, room, ask.need, strict=True):
        if size is None:
            continue
        if not field and each <= 0:
            return "budget", 0
        if field and needed > each + _ROUNDING:
            return field, math.ceil((needed - each) * MINUTE_MS / max(1, size))
    return ("concurrency", 0) if ask.open + 1 > room_permits else ("", 0)


def _amounts(spendable: Spendable) -> Amounts:
    return msgspec.structs.astuple(spendable)


def _spendable(amounts: Amounts) -> Spendable:
    return Spendable(**dict(zip(_FIELDS, amounts, strict=True)))


class LeaseAwaited(Exception):
    """The shard has not leased what the request needs: ask for it, then check again."""


class Refusal(NamedTuple):
    """What was not there, for a request that needs ``of``. It counts until then for whatever needs as much."""

    grant: Grant
    of: Amounts
    until_ms: int


class LeasedQuota(Quota):
    """A tenant's quota on one shard. ``ask`` begins an exchange, ``exchanged`` ends it."""

    def __init__(self, limits: TenantLimits, now_ms: int, *, shards: int, budget: int | None = None) -> None:
        super().__init__(limits, now_ms)
        self.shards = shards
        self.budget = budget
        """The tenant's, for the month."""
        self.permits = 0
        self.exchanging = False
        self._left = self._returned = self._replayed = NOTHING
        self._until_ms = 0
        self._exchanged_at_ms = 0
        self._first = NOTHING
        """Needed by the first of those for whom is asked."""
        self._told = False
        """Whether there may be a lease of this shard."""
        self._active = False
        self._contested = False
        self._refusal: Refusal | None = None
        self._room: Amounts = tuple(map(float, (size or 0 for size in self._sizes)))

    @property
    def _sizes(self) -> tuple[int | None, ...]:
        limits = self.limits
        return limits.rpm, limits.input_tpm, limits.output_tpm, self.budget

    @property
    def is_leased(self) -> bool:
        """Whether there is any limit to share."""
        return self.limits.concurrency is not None or any(size is not None for size in self._sizes)

    def needs(self, cost: Cost) -> Amounts:
        """What a request takes of those limits that there are."""
        return self._limited(1, cost.input_tokens, cost.output_tokens, cost.total)

    def _limited(self, *amounts: float) -> Amounts:
        return tuple(0.0 if size is None else float(it) for size, it in zip(self._sizes, amounts, strict=True))

    def check_levels(self, cost: Cost, now_ms: int, turnover_ms: int) -> None:
        """Raises HeadraceError, or LeaseAwaited."""
        need = self.needs(cost)
        if self._refusal is not None:
            self._refuse_again(self._refusal, need, now_ms, turnover_ms)
        if not self.is_leased:
            return
        self._expire(now_ms)
        lacks = any(each > left + _ROUNDING for each, left in zip(need, self._left, strict=True))
        if lacks or (self.limits.concurrency is not None and self.open >= self.permits):
            raise LeaseAwaited

    def _expire(self, now_ms: int) -> None:
        if now_ms >= self._until_ms - EARLY_MS:
            self._left, self.permits = NOTHING, min(self.permits, self.open)

    def _refuse_again(self, refusal: "Refusal", need: Amounts, now_ms: int, turnover_ms: int) -> None:
        grant = refusal.grant
        if now_ms >= refusal.until_ms:
            self._refusal = None
            return
        if grant.short not in _LIMITS:
            message = f"The limit of {self.limits.concurrency} {NAMES['concurrency']} is reached."
            if grant.short == "budget":
                message = f"Open requests may use what is left of the tenant's monthly budget of {self.budget} tokens."
            raise HeadraceError("rate_limit_exceeded", message, retry_after_s=seconds(turnover_ms))
        place = _LIMITS.index(grant.short)
        if need[place] >= refusal.of[place]:
            name, size = NAMES[grant.short], self._sizes[place]
            raise HeadraceError(
                "rate_limit_exceeded",
                f"The limit of {size} {name} is reached: the request needs {need[place]:.0f}, "
                f"{max(0, math.floor(grant.room[place]))} are left.",
                retry_after_s=seconds(grant.wait_ms),
            )

    def ask(self, waiting: Sequence[Cost], now_ms: int, *, month: str, month_spent: int) -> Ask:
        """Give back what is left, and ask for what those who wait need, in order. Until ``exchanged`` there is none."""
        self._expire(now_ms)
        needs = [self.needs(cost) for cost in waiting]
        returned = tuple(map(sum, zip(self._left, self._returned, strict=True)))
        self._left = self._returned = NOTHING
        self.permits = min(self.permits, self.open)
        self.exchanging = True
        self._first = needs[0] if needs else NOTHING
        active, self._active = self._active or bool(waiting), False
        return Ask(
            sizes=self._sizes,
            concurrency=self.limits.concurrency,
            shards=self.shards,
            month=month,
            month_spent=month_spent,
            returned=returned,
            replayed=self._replayed,
            open=self.open,
            need=self._first,
            more=tuple(map(sum, zip(NOTHING, *needs[1:], strict=True))),
            waiting=len(needs),
            active=active,
        )

    def exchanged(self, grant: Grant | None, now_ms: int) -> None:
        """What came of it; None: nobody knows, so that what was given back is lost."""
        self.exchanging, self._exchanged_at_ms = False, now_ms
        self._told = grant is None or bool(grant.permits or any(grant.left))
        if grant is None:
            return
        self._replayed = NOTHING
        self._left, self.permits, self._until_ms = grant.left, grant.permits, grant.until_ms
        self._contested, self._room = grant.contested, grant.room
        self._refusal = None
        if grant.short:
            wait_ms = min(AGAIN_MS, grant.wait_ms or AGAIN_MS)
            self._refusal = Refusal(grant, self._first, now_ms + wait_ms)

    def is_due(self, now_ms: int) -> bool:
        """Whether there is something to give back or to renew."""
        if self.exchanging or not self.is_held:
            return False
        every_ms = AGAIN_MS if self._contested else RENEW_MS
        return now_ms - self._exchanged_at_ms >= every_ms

    @property
    def is_held(self) -> bool:
        """Whether the record says of this shard what is not so, or will not be for long."""
        if not self.is_leased:
            return False
        return bool(self._told or self.open or any(self._left) or any(self._returned))

    def reserve(self, cost: Cost, now_ms: int) -> None:
        """Charge a request that was checked."""
        self._left = tuple(left - each for left, each in zip(self._left, self.needs(cost), strict=True))
        self._active = True
        self.open += 1
        self.reserved_tokens += cost.total

    def replay(self, cost: Cost, admitted_at_ms: int, now_ms: int) -> None:
        """Only where the model had no other shard when it was admitted, and so no record."""
        left = max(0.0, 1 - max(0, now_ms - admitted_at_ms) / MINUTE_MS)
        spent = self._limited(left, cost.input_tokens * left, cost.output_tokens * left, 0)
        self._replayed = tuple(map(sum, zip(self._replayed, spent, strict=True)))

    def settle(
        self, cost: Cost, used: Cost, now_ms: int, *, refund_request: bool = False, billed_tokens: int = 0
    ) -> None:
        """What was not used is not spent here, but given back."""
        unused = self._limited(
            int(refund_request),
            cost.input_tokens - used.input_tokens,
            cost.output_tokens - used.output_tokens,
            cost.total - billed_tokens,
        )
        self._returned = tuple(map(sum, zip(self._returned, unused, strict=True)))
        self.open -= 1
        self.reserved_tokens -= cost.total
        if self._contested:
            self.permits = min(self.permits, self.open)

    def rate_limits(self, now_ms: int) -> RateLimits:
        """As of the last exchange; what other shards hold is taken."""
        requests, input_tokens, output_tokens, _ = map(self._shown, self._sizes, self._room, self._left)
        return RateLimits(requests=requests, input_tokens=input_tokens, output_tokens=output_tokens)

    def _shown(self, size: int | None, room: float, left: float) -> RateLimit | None:
        if size is None:
            return None
        remaining = min(float(size), max(0.0, room) + left)
        reset_ms = math.ceil((size - remaining) * MINUTE_MS / size) if size else 0
        return RateLimit(limit=size, remaining=math.floor(remaining), reset_ms=reset_ms)
