"""Workers, callers and a scheduler under a clock of their own: the production core, and the simulated engine's batch.

What lies between them is a span: a request takes HOP_S to its worker, a heartbeat as long to the owner. Nothing is lost
unless the one who drives it says so, and the same seed gives the same run.
"""

import heapq
import random
from collections.abc import Callable, Sequence
from functools import partial
from itertools import count, islice
from typing import Any

from contracts.messages.admission import AdmissionAnswer, AdmissionRequest
from contracts.messages.attempts import AttemptEvent
from contracts.messages.base import Epoch, RequestDemand, fields_of
from contracts.messages.control import Announce, CacheChange, Progress, WorkerHeartbeat
from contracts.messages.records import ModelRecord, PoolLimits
from contracts.messages.request import Reply, RequestEnvelope
from contracts.prefix import cache_salt, keys_of
from scheduler.core import events
from scheduler.core.core import Core
from scheduler.core.settings import Settings
from worker.engines.cached_blocks import CachedBlocks
from worker.engines.simulated.batch import BLOCK, Batch, EventKind, prefix_blocks
from worker.engines.simulated.batch import Sequence as Generation

EPOCH = Epoch(1, 1)
HOP_S = 0.002
BEAT_S = 0.5
ITL_S = 0.02
WIDE = PoolLimits(
    queued_requests=10**9, queued_tokens=10**15, tenant_queued_requests=10**9, tenant_queued_tokens=10**15
)


class Asked:
    """One request, and what became of it; seconds of the fleet's clock."""

    __slots__ = ("asked_at", "cached", "ended_at", "expected", "first_at", "output", "then", "tokens", "worker")

    def __init__(self, tokens: Sequence[int], output: int, at: float, then: "Callable[[Asked], object] | None") -> None:
        self.tokens, self.output, self.asked_at, self.then = tokens, output, at, then
        self.first_at = self.ended_at = 0.0
        self.cached = self.expected = 0
        self.worker = ""

    @property
    def ttft(self) -> float:
        return self.first_at - self.asked_at


class TellingBatch(Batch):
    """One that tells which of its blocks it keeps, and which no more."""

    def __init__(self, tell: Callable[[list[int], list[int]], object], **sizes: Any) -> None:
        super().__init__(**sizes)
        self._tell = tell

    def _remember(self, sequence: Generation) -> None:
        before = len(self._cache)
        stored = [block for block in sequence.blocks if block not in self._cache]
        first = list(islice(self._cache, len(stored)))
        super()._remember(sequence)
        removed = first[: before + len(stored) - len(self._cache)]
        if stored or removed:
            self._tell(stored, removed)


class Engine:
    """A worker: its batch, and what it tells."""

    def __init__(self, fleet: "Fleet", name: str) -> None:
        self.fleet, self.name, self.alive = fleet, name, True
        self.running: dict[str, Generation] = {}
        self.wake = 0.0
        self.told = 0
        self.number = 0
        """Of its last CacheChange."""
        self.text: dict[int, tuple[int | None, Sequence[int], int, str]] = {}
        """What each block stands for, as CachedBlocks takes it."""
        self.restart()
        self.done = 0
        """Tokens computed: of prompts and of answers."""

    def restart(self) -> None:
        """The engine begins again with an empty cache, and with what ran; nobody is told."""
        fleet = self.fleet
        sizes: dict[str, Any] = {"slots": fleet.slots, "kv_tokens": fleet.kv_tokens, "prefill_tps": fleet.prefill_tps}
        self.kept = CachedBlocks()
        self.batch = Batch(**sizes) if fleet.tell_s is None else TellingBatch(self.changed, **sizes)
        self.wake = 0.0
        running, self.running = self.running, {}
        for request_id in running:
            self.start(request_id, fleet.asked[request_id], cache_salt(fleet.core.requests[request_id].tenant))

    def changed(self, stored: list[int], removed: list[int]) -> None:
        """Tell of it after the fleet's ``tell_s``; what is lost on the way is asked for again."""
        for block in stored:
            self.kept.stored([block], *self.text[block])
        self.kept.removed(removed)
        for change in self.changes(anew=False):
            if self.fleet.loses.random() >= self.fleet.lost_share:
                self.fleet.at(self.fleet.now + (self.fleet.tell_s or 0), partial(self.fleet.told, change))

    def changes(self, *, anew: bool) -> list[CacheChange]:
        anew, tellings = self.kept.take(anew=anew)
        parts: list[dict[str, Any]] = [{"anew": True}] if anew else []
        parts += [{"stored": each.stored, "removed": each.removed} for each in tellings]
        self.number += len(parts)
        first = self.number - len(parts) + 1
        return [CacheChange(worker=self.name, number=first + n, **part) for n, part in enumerate(parts)]

    def tell_anew(self) -> None:
        for change in self.changes(anew=True):
            self.fleet.at(self.fleet.now + (self.fleet.tell_s or 0), partial(self.fleet.told, change))

    def start(self, request_id: str, asked: Asked, salt: str) -> None:
        if not self.alive:
            return
        generation = Generation(
            owner=request_id,
            index=0,
            prompt_tokens=len(asked.tokens),
            blocks=(blocks := prefix_blocks(salt, asked.tokens)),
            length=asked.output,
            itl_s=ITL_S,
        )
        if self.fleet.tell_s is not None:
            for number, block in enumerate(blocks):
                if block not in self.text:
                    parent = blocks[number - 1] if number else None
                    tokens = asked.tokens[number * BLOCK : (number + 1) * BLOCK]
                    self.text[block] = (parent, tokens, BLOCK, salt)
        self.running[request_id] = generation
        self.batch.add(generation, self.fleet.now)
        self.look()

    def look(self) -> None:
        """Be here again when the batch has something to do."""
        due = self.batch.next_wake
        if due is not None and (not self.wake or due < self.wake):
            self.wake = due
            self.fleet.at(due, self.step)

    def step(self) -> None:
        if self.wake > self.fleet.now or not self.alive:
            return
        self.wake = 0.0
        ended: list[str] = []
        for generation, kind in self.batch.step(self.fleet.now):
            request_id = str(generation.owner)
            self.gave(request_id, generation, kind)
            if kind == "last":
                ended.append(request_id)
        for request_id in ended:
            self.end(request_id)
        if ended:
            self.beat()
        self.look()

    def gave(self, request_id: str, generation: Generation, kind: EventKind) -> None:
        asked = self.fleet.asked[request_id]
        self.done += 1
        if generation.given == 1:
            asked.first_at, asked.cached = self.fleet.now, generation.cached_tokens
            self.done += generation.prompt_tokens - generation.cached_tokens

    def end(self, request_id: str) -> None:
        asked = self.fleet.asked[request_id]
        del self.running[request_id]
        asked.ended_at = self.fleet.now
        event = self.fleet.end_of(request_id, self.name, len(asked.tokens), asked.cached, asked.output)
        self.fleet.at(self.fleet.now + HOP_S, partial(self.fleet.ended, event))

    def beat(self) -> None:
        if not self.alive:
            return
        in_flight = [
            Progress(
                request_id=request_id,
                attempt=self.fleet.core.requests[request_id].attempt,
                prompt_tokens=generation.prompt_tokens,
                cached_tokens=max(0, generation.cached_tokens),
                completion_tokens=generation.given,
            )
            for request_id, generation in self.running.items()
        ]
        beat = WorkerHeartbeat(
            worker=self.name,
            model="m",
            version="v",
            state="ready",
            epoch=EPOCH,
            slots=self.fleet.slots,
            kv_tokens=self.fleet.kv_tokens,
            in_flight=in_flight,
            cache_number=self.told,
        )
        self.fleet.at(self.fleet.now + HOP_S, lambda: self.fleet.feed(events.WorkerSeen(beat)))

    def keep_beating(self) -> None:
        self.beat()
        self.fleet.at(self.fleet.now + BEAT_S, self.keep_beating)


class Fleet:
    """``run`` until so many requests have ended. ``prefill_tps``: prompt tokens that a worker computes in a second."""

    def __init__(
        self,
        *,
        workers: int,
        slots: int,
        kv_tokens: int,
        prefill_tps: float,
        tell_s: float | None = None,
        lost_share: float = 0.0,
    ) -> None:
        """``tell_s``: workers tell of their caches, so late; ``lost_share`` of what they tell is lost."""
        self.slots, self.kv_tokens, self.prefill_tps = slots, kv_tokens, prefill_tps
        self.tell_s, self.lost_share, self.loses = tell_s, lost_share, random.Random(1)
        self.now = 1000.0
        self._due: list[tuple[float, int, Callable[[], object]]] = []
        self._number = count(1)
        self.asked: dict[str, Asked] = {}
        self._work: dict[str, int] = {}
        self.ends = 0
        self.engines: dict[str, Engine] = {}
        record = ModelRecord(name="m", stable="v", limits=WIDE)
        self.core = Core(
            model="m", owner="s", epoch=EPOCH, record=record, settings=Settings(), now_ms=round(self.now * 1000)
        )
        self.feed(events.Recovered())
        for number in range(workers):
            self.add(f"w{number}")

    def add(self, name: str) -> Engine:
        engine = self.engines[name] = Engine(self, name)
        engine.keep_beating()
        return engine

    def at(self, when: float, do: Callable[[], object]) -> None:
        heapq.heappush(self._due, (when, next(self._number), do))

    def ask(
        self,
        tokens: Sequence[int],
        output: int,
        then: Callable[[Asked], object] | None = None,
        *,
        tenant: str = "t",
        conversation: str = "",
    ) -> None:
        """A request comes now; ``then`` is called at its end."""
        request_id = f"r{next(self._number)}"
        self.asked[request_id] = Asked(tokens, output, self.now, then)
        keys = keys_of(cache_salt(tenant), tokens)
        asked = AdmissionRequest(
            request_id=request_id,
            tenant=tenant,
            key_id="k",
            model="m",
            endpoint="chat/completions",
            prompt_tokens=len(tokens),
            max_output_tokens=output,
            conversation=conversation,
            deadline_ms=3_000_000,
        )
        self.feed(events.AdmissionAsked(asked, (asked, keys)))

    def run(self, requests: int) -> list[Asked]:
        """Until so many have ended; gives all, in the order of their asking."""
        ticking = 0.0
        while self.ends < requests:
            when, _, do = heapq.heappop(self._due)
            self.now = max(self.now, when)
            do()
            if self.now - ticking >= BEAT_S:
                ticking = self.now
                self.feed(events.LoopbackSeen())
                self.feed(events.TimePassed())
        return list(self.asked.values())

    def told(self, change: CacheChange) -> None:
        if (engine := self.engines.get(change.worker)) is not None:
            engine.told = change.number  # As a heartbeat sent now would say.
            self.feed(events.CacheChanged(change))

    def lose(self, name: str) -> None:
        """The worker dies; what it ran is tried elsewhere once its silence was noticed."""
        engine = self.engines.pop(name)
        engine.alive = False

    def end_of(self, request_id: str, worker: str, prompt: int, cached: int, output: int) -> AttemptEvent:
        request = self.core.requests[request_id]
        return AttemptEvent(
            request_id=request_id,
            attempt=request.attempt,
            tenant=request.tenant,
            key_id="k",
            model="m",
            version="v",
            endpoint="chat/completions",
            priority="interactive",
            outcome="completed",
            reporter="worker",
            worker=worker,
            prompt_tokens=prompt,
            cached_tokens=cached,
            completion_tokens=output,
            spent_input_tokens=prompt,
            first_token_at_ms=1,
        )

    def ended(self, event: AttemptEvent) -> None:
        self.feed(events.TerminalStored(event, next(self._number), in_order=True))
        if event.outcome == "completed":
            self.ends += 1
            asked = self.asked[event.request_id]
            if asked.then is not None:
                asked.then(asked)

    def feed(self, event: events.Event) -> None:
        for effect in self.core.step(event, round(self.now * 1000)):
            self.perform(effect)

    def perform(self, effect: events.Effect) -> None:
        match effect:
            case events.AnswerAdmission(handle, answer):
                self.stored(handle, answer)
            case events.StoreWork():
                request = self.core.requests[effect.request_id]
                asked = self.asked[effect.request_id]
                asked.worker = effect.worker
                engine = self.engines.get(effect.worker)
                self.at(
                    self.now,
                    partial(self.feed, events.WorkStored(effect.request_id, effect.attempt, next(self._number))),
                )
                if engine is not None:
                    start = partial(engine.start, effect.request_id, asked, cache_salt(request.tenant))
                    self.at(self.now + HOP_S, start)
            case events.SendControl(worker, Announce()) if self.tell_s is not None and worker in self.engines:
                self.at(self.now + HOP_S, self.engines[worker].tell_anew)
            case events.StoreTerminal(event):
                self.at(self.now + HOP_S, partial(self.ended, event))

    def stored(self, handle: tuple[AdmissionRequest, bytes], answer: AdmissionAnswer) -> None:
        asked, keys = handle
        assert answer.admitted, answer
        envelope = RequestEnvelope(
            **fields_of(RequestDemand, asked),
            admitted_at_ms=answer.admitted_at_ms,
            publish_within_ms=answer.publish_within_ms,
            deadline_ms=answer.deadline_ms,
            reply=Reply(subject="", stream=asked.request_id),
            prefix_keys=keys,
        )
        seq = next(self._number)
        self.at(self.now + HOP_S, lambda: self.feed(events.RequestStored(envelope, seq, round(self.now * 1000))))
