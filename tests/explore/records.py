"""What a world consists of: immutable records, so that worlds share what did not change."""

from typing import Any, NamedTuple

BASE_MS = 1_000_000_000_000
"""When every history begins; whatever is a little above it is an instant (see ``canonical``)."""
TICK_MS = 500
LOST_TICKS = 2
"""Silence of more loopback heartbeats than these loses a worker; 6 in production."""
LATE_TICKS = 10
"""An event loop or an engine that stands still goes on within these: some are given up before, some are not."""
STOPPED_TICKS = 5
"""A frozen process wakes, and a delayed message arrives, within these: longer than a loss and a takeover take."""

Key = tuple[str, int]
Op = tuple[Any, ...]
Action = tuple[Any, ...]
Message = tuple[Any, ...]


class Violation(Exception):
    """A rule that does not hold."""

    def __init__(self, rule: str, detail: str) -> None:
        super().__init__(rule, detail)
        self.rule = rule
        self.detail = detail

    def __str__(self) -> str:
        return f"{self.rule}: {self.detail}"


class Sched(NamedTuple):
    """A scheduler process; a term of ownership while ``state`` is not -1.

    ``phase`` is how far the term is: standby, reading (WORK is read), ends (reads ATTEMPTS), requests (reads
    REQUESTS), open (serves, waits for the workers), second (looks at WORK again), owner.
    """

    name: str
    up: str = "up"
    since: int = 0
    phase: str = "standby"
    state: int = -1
    epoch: int = 0
    opened: int = 0
    tail: int = 0
    """Events of ATTEMPTS that were fed."""
    mark: int = 0
    newest: int = 0
    """Sequence of the newest message that REQUESTS held at the start of the term."""
    snapshot: tuple[tuple[int, str, bytes], ...] = ()
    todo: tuple[Op, ...] = ()
    """Effects that its tasks have yet to perform."""
    told: tuple[Op, ...] = ()
    """Confirmations that its tasks have yet to hand to the core."""
    beats: tuple[Op, ...] = ()
    """The last heartbeat of each sender that came while it was frozen."""


class Run(NamedTuple):
    """A generation in a worker's engine."""

    key: Key
    steps: int = 0
    due: bool = False
    stopping: bool = False


class Kept(NamedTuple):
    """An attempt's frames, as the worker's replay buffer keeps them."""

    key: Key
    frames: tuple[bytes, ...] = ()
    chunks: int = 0
    ended: bool = False


class Worker(NamedTuple):
    """A worker process under one name; between an eviction and the next name ``name`` is empty.

    ``up``: up, down, frozen, or late: its event loop stands still, and a thread of its own tells of that.
    """

    slot: int
    number: int
    name: str
    state: int
    up: str = "up"
    since: int = 0
    runs: tuple[Run, ...] = ()
    kept: tuple[Kept, ...] = ()
    delivered: frozenset[int] = frozenset()
    todo: tuple[Op, ...] = ()
    beat: bool = False
    rebuild: bool = False
    draining: int = 0
    """Since when it ends in order."""
    stalled: int = 0
    """Since when its engine makes no step."""
    started: frozenset[Key] = frozenset()
    denied: frozenset[tuple[Key, int]] = frozenset()
    """(attempt, epoch): what it has told the owner of that epoch that it will not start."""


class Asked(NamedTuple):
    """One request as its gateway sees it."""

    rid: str
    stream: bool
    version: str = ""
    """Pinned; nobody serves it."""
    phase: str = "idle"
    """idle, asking (for admission), storing, stored; over when the gateway's task has ended."""
    answer: bytes = b""
    relay: int = -1
    text: tuple[bytes, ...] = ()
    ending: tuple[str, Any] | None = None
    questions: tuple[Op, ...] = ()
    """(question, when it was put); they time out at a tick."""
    cancel: str = ""
    cancels: int = 0
    key: str = ""
    """Idempotency key of a service's request; its second try is an ``Asked`` of its own, with a ``+`` behind its id."""
    reads: str = ""
    """The request that it joined under its key."""

    @property
    def listens(self) -> bool:
        return self.relay >= 0 and self.ending is None


class Gateway(NamedTuple):
    up: str = "up"
    since: int = 0
    asked: tuple[Asked, ...] = ()


class Scenario(NamedTuple):
    """``streams``: for each request whether it streams. ``faults``, ``leaves``: at most so many in a history.

    ``poison``: engines die of the requests, at their first step. ``limited``: the tenant has rate limits.
    ``pinned``: so many of the first requests ask for a version that nobody serves.
    ``concurrency``: how many requests the tenant may have open. ``only``: faults that are tried, by name or by name
    and target; empty: all of them.
    ``keyed``: services ask, under idempotency keys, and again when they are not answered or told to. ``slow``: workers'
    event loops and engines may stand still.
    """

    name: str
    streams: tuple[bool, ...]
    faults: int = 2
    leaves: int = 1
    poison: bool = False
    limited: bool = False
    pinned: int = 0
    concurrency: int | None = None
    only: tuple[str, ...] = ()
    keyed: bool = False
    slow: bool = False
