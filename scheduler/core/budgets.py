"""What a tenant has used of its month: the ledger's total, and every billed end after it, as owners have seen them.

The ledger says a total, and up to which sequence number of ATTEMPTS it is complete (it may hold some later ends, too).
What ends later is added here by that number, once however often it is told. Owners tell each other and those after them
what they have seen of their own models, and what is reserved there (SPENDING). So the sum is known without gaps while
the ledger is away, for however long, and after a takeover.

The sum lies between the ledger's total and that total with all that was seen after its number. Within these bounds it
only grows, so an end that the ledger counts early is not counted twice for longer than until the ledger's next word.
"""

from contracts import instants
from contracts.messages.attempts import AttemptEvent
from contracts.messages.records import Seen, Spending

ENTRIES_MAX = 256
"""Ends of one tenant that are kept apart; beyond it the older half is one entry."""
TOLD_ENTRIES_MAX = 16
TELL_EVERY_MS = 500
"""How old what others know of an owner may be: as long as nothing is known of one that just died."""


class Later:
    """Billed ends of one model after the ledger's number: tokens by sequence number."""

    def __init__(self) -> None:
        self.tokens = 0
        self._entries: dict[int, int] = {}
        self._known_to = 0
        """What has a number up to here was counted, here or by the ledger."""

    def add(self, seq: int, tokens: int) -> bool:
        """Count an end; whether it is new."""
        if seq <= self._known_to or seq in self._entries:
            return False
        self._entries[seq] = tokens
        self.tokens += tokens
        if len(self._entries) > ENTRIES_MAX:
            self._merge(ENTRIES_MAX // 2)
        return True

    def cover(self, seq: int) -> None:
        """The ledger has counted what has a number up to ``seq``."""
        self._known_to = max(self._known_to, seq)
        for number in [number for number in self._entries if number <= seq]:
            self.tokens -= self._entries.pop(number)

    def told(self, up_to: int) -> list[Seen]:
        """What has a number up to ``up_to``, of which nothing is missing."""
        found = sorted(item for item in self._entries.items() if item[0] <= up_to)
        first = found[: 1 - TOLD_ENTRIES_MAX]
        rest = found[len(first) :]
        merged = [(first[-1][0], sum(tokens for _, tokens in first))] if first else []
        return [Seen(seq=seq, tokens=tokens) for seq, tokens in (*merged, *rest)]

    def take(self, spending: Spending) -> None:
        """Start from what an owner has told."""
        for seen in spending.later:
            self.add(seen.seq, seen.tokens)
        self._known_to = max(self._known_to, spending.seq)

    def _merge(self, count: int) -> None:
        """The first ``count`` entries become one, which the ledger must have counted whole before it goes."""
        first = sorted(self._entries)[:count]
        tokens = sum(self._entries.pop(seq) for seq in first)
        self._entries[first[-1]] = tokens
        self._known_to = max(self._known_to, first[-1])


class Account:
    """One tenant's month."""

    def __init__(self, month: str) -> None:
        self.month = month
        self.covers_seq = 0
        self.own = Later()
        self.others: dict[str, tuple[Later, Spending]] = {}
        """Model -> what its owner has told, and the ends of it that the ledger has not counted."""
        self._ledgers = 0
        self._twice = 0
        """What the upper bound counts twice."""

    @property
    def spent(self) -> int:
        """Tokens billed in the month, as far as is known."""
        return self._upper - self._twice

    @property
    def reserved_elsewhere(self) -> int:
        """Tokens that open requests on other models reserve."""
        return sum(said.reserved_tokens for _, said in self.others.values())

    @property
    def _upper(self) -> int:
        return self._ledgers + self.own.tokens + sum(later.tokens for later, _ in self.others.values())

    def cover(self, tokens: int, seq: int) -> None:
        """The ledger's word."""
        before = self.spent
        self._ledgers, self.covers_seq = tokens, seq
        for later in (self.own, *(later for later, _ in self.others.values())):
            later.cover(seq)
        self._bound(before)

    def take_other(self, model: str, spending: Spending | None) -> None:
        """What another model's owner has told; None: there is no such model any more."""
        before, known_to = self.spent, self.covers_seq
        if (known := self.others.pop(model, None)) is not None:
            known_to = max(known_to, known[1].seq)
        if spending is not None:
            later = Later()
            later.cover(self.covers_seq)
            for seen in spending.later:
                later.add(seen.seq, seen.tokens)
            self.others[model] = (later, spending)
            before += sum(seen.tokens for seen in spending.later if seen.seq > known_to)
        self._bound(before)

    def _bound(self, spent: int) -> None:
        """The sum is ``spent``, unless that is beyond a bound."""
        self._twice = max(0, self._upper - max(spent, self._ledgers))


class Budgets:
    """The accounts of all tenants, kept by the owner of ``model``."""

    def __init__(self, model: str) -> None:
        self._model = model
        self._accounts: dict[str, Account] = {}
        self._read_to = 0
        """All ends of the model up to this sequence number have been counted."""
        self._untold: dict[str, None] = {}
        self._told_at_ms = 0

    def counted(self, tenant: str, month: str) -> tuple[int, int]:
        """Tokens that the tenant was billed in ``month``, and those that other models' open requests reserve."""
        account = self._accounts.get(tenant)
        if account is None or account.month < month:
            return 0, 0
        return account.spent, account.reserved_elsewhere

    def ended(self, event: AttemptEvent, seq: int, *, in_order: bool) -> None:
        """An end that ATTEMPTS holds under ``seq``. ``in_order``: all before it have been told."""
        tokens = event.prompt_tokens + event.completion_tokens
        if event.billable and tokens and seq:
            account = self._account(event.tenant, instants.month_of(event.admitted_at_ms))
            if account is not None and account.own.add(seq, tokens):
                self._untold[event.tenant] = None
        if in_order:
            self._read_to = max(self._read_to, seq)

    def ledger_said(self, tenant: str, month: str, tokens: int, covers_seq: int) -> None:
        """The ledger's total; one of an earlier month than is known says nothing about this one."""
        if (account := self._account(tenant, month)) is not None:
            account.cover(tokens, covers_seq)

    def owner_said(self, model: str, tenant: str, spending: Spending | None) -> None:
        """What the owner of ``model`` tells; of our own: what the owner before us has seen."""
        if spending is None:
            if (known := self._accounts.get(tenant)) is not None:
                known.take_other(model, None)
        elif (account := self._account(tenant, spending.month)) is not None:
            if model == self._model:
                account.own.take(spending)
                self._read_to = max(self._read_to, spending.seq)
                self._untold[tenant] = None  # What it had reserved may have ended since.
            else:
                account.take_other(model, spending)

    def touch(self, tenant: str) -> None:
        """What the tenant's requests reserve has changed."""
        self._untold[tenant] = None

    def due(self, now_ms: int) -> list[str]:
        """Tenants of which others are to be told now."""
        if not self._untold or now_ms - self._told_at_ms < TELL_EVERY_MS:
            return []
        tenants, self._untold, self._told_at_ms = list(self._untold), {}, now_ms
        return tenants

    def telling(self, tenant: str, month: str, reserved_tokens: int) -> Spending:
        """What there is to tell of a tenant."""
        account = self._accounts.get(tenant)
        later = account.own.told(self._read_to) if account is not None and account.month == month else []
        return Spending(month=month, later=later, seq=self._read_to, reserved_tokens=reserved_tokens)

    def _account(self, tenant: str, month: str) -> Account | None:
        """The tenant's account when it is of ``month``, which begins it anew when it is later; None for an earlier."""
        account = self._accounts.get(tenant)
        if account is None or account.month < month:
            account = self._accounts[tenant] = Account(month)
        return account if account.month == month else None
