"""The simulated engine's core: which sequences run, when each gives its next token, and what they hold.

Pure: time comes in, events come out. Like a real engine it has batch slots with a queue before them, one
prefill at a time, a KV cache that preempts the youngest when it is full, and a prefix cache.
"""

import heapq
import math
from collections import OrderedDict, deque
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field
from itertools import islice
from typing import Literal

from worker.engines.base import EngineStats

BLOCK = 16
"""Tokens of a prefix-cache block, vLLM's default on GPUs."""
STEP_S = 0.02
"""Longest step of the engine. Sequences of one inter-token latency decode in the same steps, as in a real engine:
their tokens come together, and the gap after a first token is shorter than the others."""

Action = Literal["fail", "crash", "exit", "hang"]
EventKind = Literal["token", "last", "empty", "fail", "crash", "exit"]
"""``last`` is a token too, ``empty`` the end of a sequence of no tokens."""


@dataclass(slots=True, eq=False)
class Trigger:
    """What happens in place of the token after ``after`` tokens of all sequences that share the trigger."""

    action: Action
    after: int
    given: int = 0

    @property
    def due(self) -> bool:
        """Whether the next token is the one that does not come."""
        return self.given >= self.after


@dataclass(slots=True, eq=False)
class Sequence:
    """One answer to be generated. The batch owns the fields after ``trigger``."""

    owner: object
    index: int
    prompt_tokens: int
    blocks: list[int]
    """Chained hashes of the prompt's whole blocks (prefix_blocks)."""
    length: int
    """Tokens to generate."""
    itl_s: float
    ttft_s: float | None = None
    """Time from its start in a slot to the first token; None: what the prefill takes."""
    trigger: Trigger | None = None

    order: int = 0
    given: int = 0
    cached_tokens: int = -1
    """Prompt tokens found in the prefix cache when it first started; -1 before."""
    due: float = 0.0
    stamp: int = field(default=0, repr=False)
    """Heap entries with an older stamp are void."""

    @property
    def tokens(self) -> int:
        """KV tokens that it holds while it runs."""
        return self.prompt_tokens + self.given


Event = tuple[Sequence, EventKind]


def prefix_blocks(salt: str, prompt: Iterable[Hashable]) -> list[int]:
    """Hash of each whole block of the prompt with all before it; the last token is always computed."""
    tokens = iter(prompt)
    blocks, value = [], hash(salt)
    block = tuple(islice(tokens, BLOCK))
    while following := tuple(islice(tokens, BLOCK)):
        value = hash((value, *block))
        blocks.append(value)
        block = following
    return blocks


class Batch:
    """``add``, ``remove`` and ``step`` take the present time in seconds; ``next_wake`` says when to step."""

    def __init__(self, *, slots: int, kv_tokens: int, prefill_tps: float) -> None:
        self._slots = slots
        self._kv_tokens = kv_tokens
        self._prefill_tps = prefill_tps
        self._waiting: deque[Sequence] = deque()
        self._running: set[Sequence] = set()
        self._prefills: deque[Sequence] = deque()
        """Running sequences whose prompt is not computed; the first one is being computed."""
        self._heap: list[tuple[float, int, int, Sequence]] = []
        self._cache: OrderedDict[int, None] = OrderedDict()
        self._orders = 0
        self._kv_used = 0
        self._prefilled = 0
        self._decoded = 0
        self._preemptions = 0

    def add(self, sequence: Sequence, now: float) -> None:
        """Queue a sequence; it starts at once when there is room."""
        self._orders += 1
        sequence.order = self._orders
        self._waiting.append(sequence)
        self._fill_slots(now)

    def remove(self, sequence: Sequence, now: float) -> None:
        """Drop a sequence and free what it holds; nothing happens when it is gone already."""
        if sequence in self._running:
            self._leave_slot(sequence, now)
            self._fill_slots(now)
        elif sequence in self._waiting:
            self._waiting.remove(sequence)
            self._fill_slots(now)

    def step(self, now: float) -> list[Event]:
        """What is due, at most one event for each sequence. After ``fail`` or ``exit`` a sequence stalls."""
        events: list[Event] = []
        given: list[Sequence] = []
        while self._heap and self._heap[0][0] <= now:
            _, _, stamp, sequence = heapq.heappop(self._heap)
            if stamp != sequence.stamp:
                continue
            if self._prefills and self._prefills[0] is sequence:
                self._prefills.popleft()
                self._remember(sequence)
                self._begin_prefill(sequence.due)
            if (kind := self._give(sequence, now)) is None:
                continue
            events.append((sequence, kind))
            if kind == "token":
                given.append(sequence)
            elif kind in ("last", "empty"):
                self._leave_slot(sequence, now)
        for sequence in given:
            if sequence in self._running:
                self._schedule_next(sequence, now)
        self._fill_slots(now)
        return events

    @property
    def hangs(self) -> bool:
        """Whether everything that runs stalls for ever."""
        return bool(self._running) and all(
            it.trigger is not None and it.trigger.action == "hang" and it.trigger.due for it in self._running
        )

    @property
    def next_wake(self) -> float | None:
        """When ``step`` has something to do, in seconds; None: not before the next ``add``."""
        while self._heap and self._heap[0][2] != self._heap[0][3].stamp:
            heapq.heappop(self._heap)
        return self._heap[0][0] if self._heap else None

    def stats(self) -> EngineStats:
        """How it stands, and tokens since the start."""
        return EngineStats(
            running=len(self._running),
            waiting=len(self._waiting),
            kv_tokens_used=self._kv_used,
            prefill_tokens_total=self._prefilled,
            decode_tokens_total=self._decoded,
            preemptions_total=self._preemptions,
        )

    def _fill_slots(self, now: float) -> None:
        """In order of arrival, while a slot and KV are free. What exceeds the whole cache runs alone."""
        while self._waiting and len(self._running) < self._slots:
            head = self._waiting[0]
            if self._running and self._kv_used + head.tokens + 1 > self._kv_tokens:
                return
            self._waiting.popleft()
            self._running.add(head)
            self._kv_used += head.tokens
            if head.ttft_s is not None and head.given == 0:
                self._prefilled += head.prompt_tokens - self._look_up(head)
                self._remember(head)
                self._schedule(head, due=now + head.ttft_s)
            else:
                self._prefills.append(head)
                if len(self._prefills) == 1:
                    self._begin_prefill(now)

    def _leave_slot(self, sequence: Sequence, now: float) -> None:
        self._running.remove(sequence)
        self._kv_used -= sequence.tokens
        sequence.stamp += 1
        if sequence in self._prefills:
            was_first = self._prefills[0] is sequence
            self._prefills.remove(sequence)
            if was_first:
                self._begin_prefill(now)

    def _make_room(self, sequence: Sequence, now: float) -> bool:
        """Room for one more token, by preemption of the youngest; False when that is the sequence itself."""
        while self._kv_used + 1 > self._kv_tokens and len(self._running) > 1:
            youngest = max(self._running, key=lambda running: running.order)
            self._leave_slot(youngest, now)
            self._waiting.appendleft(youngest)
            self._preemptions += 1
            if youngest is sequence:
                return False
        return True

    def _begin_prefill(self, now: float) -> None:
        if self._prefills:
            sequence = self._prefills[0]
            computed = sequence.tokens - self._look_up(sequence)
            self._prefilled += computed
            self._schedule(sequence, due=now + computed / self._prefill_tps)

    def _look_up(self, sequence: Sequence) -> int:
        """Prompt tokens that the cache holds; the first look is what the sequence reports."""
        hits = 0
        for block in sequence.blocks:
            if block not in self._cache:
                break
            self._cache.move_to_end(block)
            hits += 1
        if sequence.cached_tokens < 0:
            sequence.cached_tokens = hits * BLOCK
        return hits * BLOCK

    def _remember(self, sequence: Sequence) -> None:
        for block in sequence.blocks:
            self._cache[block] = None
        while len(self._cache) > self._kv_tokens // BLOCK:
            self._cache.popitem(last=False)

    def _give(self, sequence: Sequence, now: float) -> EventKind | None:
        """The sequence's next event; None when it stalls or is preempted."""
        trigger = sequence.trigger
        if trigger is not None and trigger.due:
            return None if trigger.action == "hang" else trigger.action
        if sequence.length == 0:
            return "empty"
        if not self._make_room(sequence, now):
            return None
        sequence.given += 1
        self._kv_used += 1
        self._decoded += 1
        if trigger is not None:
            trigger.given += 1
            if trigger.due:
                return "token"
        return "last" if sequence.given == sequence.length else "token"

    def _schedule_next(self, sequence: Sequence, now: float) -> None:
        """In the last step within one interval of the last token; when that is past, a busy engine has slipped."""
        due = max(sequence.due + sequence.itl_s, now)
        if sequence.itl_s:
            step = sequence.itl_s / math.ceil(sequence.itl_s / STEP_S)
            steps = max(math.floor(due / step + 1e-6), math.floor(now / step + 1e-6) + 1)
            due = steps * step
        self._schedule(sequence, due)

    def _schedule(self, sequence: Sequence, due: float) -> None:
        sequence.due = due
        sequence.stamp += 1
        heapq.heappush(self._heap, (due, sequence.order, sequence.stamp, sequence))
