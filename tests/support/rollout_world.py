"""A roll-out in virtual time: the scheduler's core, the simulated engine's batches, and callers that come by chance.

No process and no clock: a roll-out of an hour takes seconds. What a version does is drawn for each request, so that one
may fail, be late, never stop or say nothing.
"""

import heapq
import math
import random
import uuid
from collections.abc import Iterator
from typing import Any, NamedTuple

import msgspec

from contracts.messages.admission import AdmissionAnswer, AdmissionRequest
from contracts.messages.attempts import AttemptEvent
from contracts.messages.base import Epoch, RequestDemand, RequestFacts, fields_of
from contracts.messages.control import Progress, SwitchVersion, WorkerHeartbeat, WorkerState
from contracts.messages.records import ModelRecord, TenantRecord
from contracts.messages.request import Reply, RequestEnvelope
from contracts.messages.rollouts import RolloutEvent, RolloutPlan, RolloutProgress
from scheduler.core import events, views
from scheduler.core.core import Core
from scheduler.core.settings import Settings
from worker.engines.simulated.batch import Batch, Sequence

BEGIN_MS = 1_700_000_000_000
SLOTS = 32
TOKENS_MAX = 400
TICK_MS, BEAT_MS = 100, 500


class Kind(NamedTuple):
    """How a version behaves; times are medians of lognormal draws."""

    name: str = "good"
    fails: float = 0.005
    ttft_ms: float = 200.0
    itl_ms: float = 30.0
    tokens: float = 40.0
    endless: bool = False
    empty: bool = False


GOOD = Kind()
KINDS = (
    Kind("fails 20 %", fails=0.20),
    Kind("fails 5 %", fails=0.05),
    Kind("first token 3 x", ttft_ms=600.0),
    Kind("30 % slower", ttft_ms=260.0, itl_ms=39.0),
    Kind("never stops", endless=True),
    Kind("answers nothing", empty=True),
    GOOD,
)


class Running:
    """One attempt at a worker."""

    __slots__ = ("attempt", "began_ms", "dispatched_ms", "envelope", "first_ms", "last_ms", "pause_ms", "tokens")

    def __init__(self, envelope: RequestEnvelope, attempt: int, now_ms: int) -> None:
        self.envelope = envelope
        self.attempt = attempt
        self.dispatched_ms = now_ms
        self.first_ms = self.last_ms = self.pause_ms = self.tokens = 0


class SimWorker:
    """A worker with the simulated engine's batch, of one version."""

    def __init__(self, name: str, version: str, kind: Kind, *, pinned: bool = False) -> None:
        self.name = name
        self.version = version
        self.pinned = pinned
        self.state: WorkerState = "ready"
        self.reason = ""
        self.wanted = version
        self.kind = kind
        self.batch = Batch(slots=SLOTS, kv_tokens=1_000_000, prefill_tps=1e6)
        self.running: dict[Sequence, Running] = {}
        self.epoch = Epoch()
        self.alive = True

    def beat(self) -> WorkerHeartbeat:
        return WorkerHeartbeat(
            worker=self.name,
            model="m",
            version=self.version,
            state=self.state,
            pinned=self.pinned,
            reason=self.reason,
            epoch=self.epoch,
            slots=SLOTS,
            kv_tokens=1_000_000,
            context=100_000,
            in_flight=[
                Progress(
                    request_id=each.envelope.request_id,
                    attempt=each.attempt,
                    prompt_tokens=each.envelope.prompt_tokens,
                    completion_tokens=each.tokens,
                )
                for each in self.running.values()
            ],
        )


class RolloutWorld:
    """``step_to`` lets time pass; callers come ``rate`` a second."""

    def __init__(self, seed: int, kind: Kind, *, rate: float = 40.0, stable: int = 4, new: int = 2) -> None:
        self.rng = random.Random(seed)
        self.now = BEGIN_MS
        self.rate = rate
        self.stable = "v1"
        self.epoch = 1
        self.seq = 0
        self.requests: dict[int, RequestEnvelope] = {}
        """REQUESTS."""
        self.kept: RolloutProgress | None = None
        """What the bucket holds."""
        self.plan: RolloutPlan | None = None
        self.told: list[RolloutEvent] = []
        self.ends: list[AttemptEvent] = []
        self.refused = 0
        self.versions: dict[str, str] = {}
        """Request -> the version that it was first dispatched to."""
        self.dispatches: list[tuple[int, str, str]] = []
        """When, request, version."""
        self.orders: list[tuple[int, str, str]] = []
        """Switches of workers: when, from, to."""
        self.broken: set[str] = set()
        """Versions that no worker can load."""
        self.kinds = {"v2": kind}
        self.joined = 0
        self.workers = [SimWorker(f"s{number}", "v1", GOOD) for number in range(stable)]
        self.workers += [SimWorker(f"c{number}", "v2", kind, pinned=True) for number in range(new)]
        self.timers: list[tuple[int, int, str]] = []
        self.begin_term()
        self.feed(events.Recovered())
        for name, at in (("tick", TICK_MS), ("beat", 0), ("call", 1)):
            self._after(at, name)

    # -- owners ------------------------------------------------------------------------------------------

    def begin_term(self) -> None:
        """A new owner, which knows what the bucket holds."""
        self.core = Core(
            model="m",
            owner="s",
            epoch=Epoch(1, self.epoch),
            record=ModelRecord(name="m", stable=self.stable),
            settings=Settings(),
            now_ms=self.now,
        )
        self.feed(events.TenantChanged("t", TenantRecord(name="t")))
        if self.plan is not None:
            self.feed(events.RolloutChanged(self.plan, self.kept))

    def takeover(self) -> None:
        """The owner dies; the next one reads the streams."""
        self.epoch += 1
        self.begin_term()
        for worker in self.workers:
            if worker.alive:
                worker.epoch = self.core.epoch
                for running in list(worker.running.values()):
                    self.feed(events.WorkFound(self._item(running, worker), self._next_seq()))
        for seq, envelope in list(self.requests.items()):
            self.feed(events.RequestStored(envelope, seq, self.now))
        for worker in self.workers:
            if worker.alive:
                self.feed(events.WorkerSeen(worker.beat()))
        self.feed(events.Recovered())

    def _item(self, running: Running, worker: SimWorker) -> Any:
        from contracts.messages.request import WorkItem

        return WorkItem(
            epoch=Epoch(1, self.epoch - 1),
            attempt=running.attempt,
            version=worker.version,
            worker=worker.name,
            dispatched_at_ms=running.dispatched_ms,
            request=running.envelope,
        )

    def start(self, **plan: Any) -> None:
        """Begin a roll-out to v2."""
        given: dict[str, Any] = {
            "steps": [5.0, 25.0, 50.0, 100.0],
            "hold_ms": 60_000,
            "id": f"r{self.rng.randrange(10**9)}",
        }
        self.plan = RolloutPlan(model="m", to="v2", **(given | plan))
        self.kept = None
        self.feed(events.RolloutChanged(self.plan))

    def want(self, wanted: Any) -> None:
        """The operator asks for it."""
        assert self.plan is not None
        self.plan = msgspec.structs.replace(self.plan, wanted=wanted)
        self.feed(events.RolloutChanged(self.plan))

    @property
    def progress(self) -> RolloutProgress:
        """As the owner has it."""
        rollout = self.core.versions.rollout
        assert rollout is not None
        return rollout.progress()

    def kill(self, version: str) -> None:
        """All workers of that version die."""
        for worker in self.workers:
            if worker.version == version:
                worker.alive = False
                worker.running.clear()

    def add_worker(self, version: str, kind: Kind = GOOD) -> None:
        self.workers.append(SimWorker(f"n{len(self.workers)}", version, kind))

    def _switch(self, name: str, version: str) -> None:
        """It drains, and joins a second after its last request has ended, under another name."""
        worker = next(each for each in self.workers if each.name == name)
        worker.pinned = False
        if version != worker.wanted:
            worker.wanted, worker.state = version, "draining"
            self.orders.append((self.now, worker.version, version))
            self._after(1_000, "left")

    def _left(self) -> None:
        for worker in [each for each in self.workers if each.alive and each.state == "draining"]:
            if worker.running:
                self._after(1_000, "left")
                continue
            worker.alive = False
            self.joined += 1
            refused = worker.wanted in self.broken
            version = worker.version if refused else worker.wanted
            joined = SimWorker(f"j{self.joined}", version, self.kinds.get(version, GOOD))
            joined.reason = f"{worker.wanted} refused: it does not start" if refused else ""
            joined.state = "starting"
            self.workers.append(joined)
            self._after(3_000, "started")

    def _started(self) -> None:
        next(each for each in self.workers if each.state == "starting").state = "ready"

    # -- time --------------------------------------------------------------------------------------------

    def _after(self, span_ms: float, what: str) -> None:
        self.seq += 1
        heapq.heappush(self.timers, (self.now + max(1, round(span_ms)), self.seq, what))

    def run(self, seconds: float) -> None:
        """Let that much time pass."""
        until = self.now + round(seconds * 1000)
        while True:
            wake = min((w.batch.next_wake or 1e18 for w in self.workers if w.alive), default=1e18)
            at = min(self.timers[0][0], BEGIN_MS + math.ceil(min(wake, 1e12) * 1000 + 1e-6))
            if at > until:
                self.now = until
                return
            self.now = max(self.now, at)
            if self.timers[0][0] <= at:
                _, _, what = heapq.heappop(self.timers)
                getattr(self, f"_{what}")()
            else:
                for worker in self.workers:
                    if worker.alive:
                        self._generate(worker)

    def run_until_over(self, seconds: float) -> None:
        """Until the roll-out is over, or so long."""
        end = self.now + seconds * 1000
        while self.now < end and not self.over:
            self.run(1)

    @property
    def engine_s(self) -> float:
        """The engines' time."""
        return (self.now - BEGIN_MS) / 1000

    @property
    def over(self) -> bool:
        rollout = self.core.versions.rollout
        return rollout is not None and rollout.over

    def _tick(self) -> None:
        self.feed(events.TimePassed())
        self._after(TICK_MS, "tick")

    def _beat(self) -> None:
        for worker in self.workers:
            if worker.alive:
                worker.epoch = self.core.epoch
                self.feed(events.WorkerSeen(worker.beat()))
        self.feed(events.LoopbackSeen())
        self._after(BEAT_MS, "beat")

    def _call(self) -> None:
        if self.rate:
            self.call()
            self._after(self.rng.expovariate(self.rate) * 1000, "call")
        else:
            self._after(1000, "call")

    # -- callers -----------------------------------------------------------------------------------------

    def call(self, **fields: Any) -> str:
        """One request; gives its id."""
        request_id = str(uuid.UUID(int=self.rng.getrandbits(128)))
        given: dict[str, Any] = {
            "request_id": request_id,
            "tenant": "t",
            "key_id": "k",
            "model": "m",
            "endpoint": "chat/completions",
            "stream": True,
            "prompt_tokens": self.rng.randrange(20, 400),
            "max_output_tokens": TOKENS_MAX,
        }
        asked = AdmissionRequest(**(given | fields))
        self.feed(events.AdmissionAsked(asked, asked))
        return request_id

    def _answered(self, asked: AdmissionRequest, answer: AdmissionAnswer) -> None:
        if not answer.admitted:
            self.refused += 1
            return
        demand = fields_of(RequestDemand, asked) | {"version": answer.version}
        envelope = RequestEnvelope(
            **demand,
            admitted_at_ms=answer.admitted_at_ms,
            publish_within_ms=answer.publish_within_ms,
            deadline_ms=answer.deadline_ms,
            pinned=bool(asked.version),
            arm=answer.arm,
            reply=Reply(subject="reply.v1.x", stream=asked.request_id),
        )
        self._store(envelope)

    def _store(self, envelope: RequestEnvelope) -> None:
        seq = self._next_seq()
        self.requests[seq] = envelope
        self.feed(events.RequestStored(envelope, seq, self.now))

    def _next_seq(self) -> int:
        self.seq += 1
        return self.seq

    # -- the core ----------------------------------------------------------------------------------------

    def feed(self, event: events.Event) -> None:
        """One step of the core, and what follows from it."""
        todo = list(self.core.step(event, self.now))
        for effect in todo:
            self._perform(effect)

    def _perform(self, effect: events.Effect) -> None:
        match effect:
            case events.AnswerAdmission(handle, answer):
                self._answered(handle, answer)
            case events.StoreWork():
                self._start(effect)
            case events.AckRequest(seq):
                self.requests.pop(seq, None)
            case events.StoreTerminal(event):
                self._ended(event)
            case events.SendControl(worker, SwitchVersion(version=version)):
                self._switch(worker, version)
            case events.KeepRollout(progress):
                self.kept = msgspec.json.decode(msgspec.json.encode(progress), type=RolloutProgress)
            case events.TellRollout(event):
                self.told.append(event)
            case events.SetStable(version):
                self.stable = version
                self.feed(events.ModelChanged(ModelRecord(name="m", stable=version)))
            case events.StoreCopy(envelope, _):
                self._store(envelope)

    def _start(self, effect: events.StoreWork) -> None:
        request = self.core.awaits_work(effect)
        if request is None:
            return
        first = self.versions.setdefault(effect.request_id, effect.version)
        assert first == effect.version == request.envelope.version, "a request keeps its version"
        self.dispatches.append((self.now, effect.request_id, effect.version))
        worker = next(each for each in self.workers if each.name == effect.worker)
        self.feed(events.WorkStored(effect.request_id, effect.attempt, self._next_seq()))
        if not worker.alive:
            return
        kind, rng = worker.kind, self.rng
        length = 0 if kind.empty else TOKENS_MAX if kind.endless else 1 + int(kind.tokens * rng.lognormvariate(0, 0.6))
        running = Running(request.envelope, effect.attempt, self.now)
        sequence = Sequence(
            owner=running,
            index=0,
            prompt_tokens=request.envelope.prompt_tokens,
            blocks=[],
            length=min(TOKENS_MAX, length),
            itl_s=kind.itl_ms / 1000 * rng.lognormvariate(0, 0.3),
            ttft_s=kind.ttft_ms / 1000 * rng.lognormvariate(0, 0.5),
        )
        if rng.random() < kind.fails:
            sequence.length = -1
        worker.running[sequence] = running
        worker.batch.add(sequence, self.engine_s)

    def _generate(self, worker: SimWorker) -> None:
        for sequence, what in worker.batch.step(self.engine_s):
            running = worker.running.get(sequence)
            if running is None:
                continue
            if sequence.length < 0:
                worker.batch.remove(sequence, self.engine_s)
                self._finish(worker, sequence, "failed", error_code="engine_error")
                continue
            if what != "empty":
                running.tokens += 1
                if running.first_ms:
                    running.pause_ms = max(running.pause_ms, self.now - running.last_ms)
                running.first_ms, running.last_ms = running.first_ms or self.now, self.now
            if what in ("last", "empty"):
                reason = "length" if running.tokens >= TOKENS_MAX else "stop"
                self._finish(worker, sequence, "completed", finish_reason=reason)

    def _finish(self, worker: SimWorker, sequence: Sequence, outcome: Any, **fields: Any) -> None:
        running = worker.running.pop(sequence)
        envelope = running.envelope
        self._ended(
            AttemptEvent(
                **fields_of(RequestFacts, envelope),
                attempt=running.attempt,
                version=worker.version,
                outcome=outcome,
                reporter="worker",
                worker=worker.name,
                prompt_tokens=envelope.prompt_tokens,
                completion_tokens=running.tokens,
                admitted_at_ms=envelope.admitted_at_ms,
                dispatched_at_ms=running.dispatched_ms,
                first_token_at_ms=running.first_ms,
                ended_at_ms=self.now,
                pause_ms_max=running.pause_ms,
                arm=envelope.arm,
                **fields,
            )
        )

    def _ended(self, event: AttemptEvent) -> None:
        self.ends.append(event)
        self.feed(events.TerminalStored(event))

    # -- what came of it ---------------------------------------------------------------------------------

    def check(self) -> None:
        """The core's own rules."""
        views.check_invariants(self.core)

    def given_to_canary(self, *, shadow: bool = False) -> Iterator[AttemptEvent]:
        """Ends of requests that the roll-out gave the new version: of callers, or of copies."""
        return (event for event in self.ends if event.arm == ("shadow" if shadow else "canary"))
