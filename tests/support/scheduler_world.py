"""A small world around the scheduler's core: streams, workers and callers, driven by a seeded random source.

The streams keep what the real ones keep (ATTEMPTS: the first event of an attempt wins); effects are performed in
any order, late, or not at all where the bus may lose them; workers pull, run, freeze, wake and die.
"""

import hashlib
import random
from collections.abc import Callable
from typing import Any, Literal

import msgspec

from contracts.messages.admission import AdmissionAnswer, AdmissionRequest
from contracts.messages.attempts import AttemptEvent
from contracts.messages.base import Epoch, Outcome
from contracts.messages.control import (
    CancelAnswer,
    CancelAttempt,
    CancelRequest,
    ControlAnswer,
    ControlRequest,
    Progress,
    StreamOwnerHeartbeat,
    WorkerHeartbeat,
)
from contracts.messages.frames import Frame
from contracts.messages.records import Manifest, PoolLimits, TenantLimits, TenantRecord
from contracts.messages.request import Reply, RequestEnvelope, WorkItem
from scheduler.core import events, views
from scheduler.core.core import Core
from scheduler.core.fair_queue import SCAN_PER_TENANT
from scheduler.core.settings import Settings
from scheduler.core.transitions import State

EPOCH = Epoch(1, 7)
LIMITS = TenantLimits(rpm=2_000, input_tpm=400_000, output_tpm=100_000, concurrency=20)
"""Wide enough that most requests pass, tight enough that a few do not."""


def manifest(**limits: int) -> Manifest:
    return Manifest(
        name="m",
        version="v1",
        engine="simulated",
        context=8192,
        default_output_tokens=16,
        limits=PoolLimits(**limits),
    )


class FakeWorker:
    """What the core may expect of a worker: it runs what it pulled once, obeys its orders, ends by first-stored."""

    def __init__(self, name: str, slots: int, kv_tokens: int) -> None:
        self.name = name
        self.slots = slots
        self.kv_tokens = kv_tokens
        self.epoch = Epoch()
        self.alive = True
        self.frozen = False
        self.evicted = False
        self.running: dict[tuple[str, int], Progress] = {}
        self.never: set[tuple[str, int]] = set()

    def beat(self) -> WorkerHeartbeat:
        return WorkerHeartbeat(
            worker=self.name,
            model="m",
            version="v1",
            state="ready",
            epoch=self.epoch,
            slots=self.slots,
            kv_tokens=self.kv_tokens,
            context=8192,
            in_flight=list(self.running.values()),
        )


class World:
    """Random histories: call ``step`` any number of times, then ``settle`` and look at what is left."""

    def __init__(self, seed: int, *, limits: dict[str, int] | None = None, tenants: int = 3) -> None:
        self.random = random.Random(seed)
        self.now = 1_000_000
        self.limits = limits or {}
        self.core = self.new_core(EPOCH)
        self.requests: dict[int, RequestEnvelope] = {}
        self.work: dict[int, WorkItem] = {}
        self.attempts: dict[tuple[str, int], AttemptEvent] = {}
        self.tail: list[AttemptEvent] = []
        self.pending: list[Callable[[], object]] = []
        self.workers: list[FakeWorker] = []
        self.answers: dict[str, AdmissionAnswer] = {}
        self.frames: dict[str, list[Frame]] = {}
        self.quarantined: dict[str, events.Quarantine] = {}
        self.cancel_answers: list[CancelAnswer] = []
        self.asked: dict[str, AdmissionRequest] = {}
        self.unpublished: list[str] = []
        self.seq = 0
        self.number = 0
        """Of effects so far; ``digest`` is theirs, in order."""
        self.digest = hashlib.sha256()
        self.names = [f"t{number}" for number in range(tenants)]
        self.tell_tenants()
        self.feed(events.Recovered())

    def new_core(self, epoch: Epoch) -> Core:
        return Core(
            model="m",
            owner="s",
            epoch=epoch,
            manifest=manifest(**self.limits),
            settings=Settings(publish_within_ms=1_000, expiry_margin_ms=200),
            now_ms=self.now,
        )

    def tell_tenants(self) -> None:
        for name in self.names:
            self.feed(events.TenantChanged(name, TenantRecord(name=name, limits=LIMITS)))

    def takeover(self) -> None:
        """The owner dies with half of its last effects done; another one rebuilds itself from the streams.

        What the dead one still had in flight may be stored between the first and the second look at WORK.
        """
        in_flight, self.pending = self.pending, []
        old = self.core
        self.core = self.new_core(Epoch(1, old.epoch.revision + 1))
        self.tell_tenants()
        self.tail.clear()
        for event in list(self.attempts.values()):
            self.feed(events.TerminalStored(event))
        for seq, item in list(self.work.items()):
            self.feed(events.WorkFound(item, seq))
        for seq, envelope in list(self.requests.items()):
            self.feed(events.RequestStored(envelope, seq, self.now))
        for effect in in_flight:
            if self.random.random() < 0.5:
                effect()
        for _ in range(12):
            self.pass_time(500)
            if not self.core.pool.unacknowledged():
                break
        for seq, item in list(self.work.items()):
            self.feed(events.WorkFound(item, seq))
        self.read_tail()
        self.feed(events.Recovered())

    def read_tail(self) -> None:
        while self.tail:
            self.feed(events.TerminalStored(self.tail.pop(0)))

    # -- the core ----------------------------------------------------------------------------------------

    def feed(self, event: events.Event) -> None:
        for effect in self.core.step(event, self.now):
            self.number += 1
            self.digest.update(type(effect).__name__.encode() + msgspec.json.encode(effect))
            self.perform(effect)
        views.check_invariants(self.core)
        self.check_work_conserving()

    def perform(self, effect: events.Effect) -> None:
        match effect:
            case events.AnswerAdmission(handle, answer):
                self.answers[handle] = answer
                if answer.admitted and handle in self.asked:
                    self.check_limits(self.asked[handle].tenant)
                if answer.admitted and handle not in self.unpublished:
                    self.unpublished.append(handle)
            case events.AnswerCancel(_, answer):
                self.cancel_answers.append(answer)
            case events.SendFrame(_, frame):
                self.frames.setdefault(frame.stream, []).append(frame)
            case events.AckRequest(seq):
                self.pending.append(lambda: self.requests.pop(seq, None))
            case events.DeleteWork(seq):
                self.pending.append(lambda: self.work.pop(seq, None))
            case events.Quarantine():
                self.quarantined[effect.envelope.request_id] = effect
                self.pending.append(lambda: self.requests.pop(effect.request_seq, None))
                self.pending.append(lambda: self.work.pop(effect.work_seq, None))
            case events.StoreTerminal(event):
                self.pending.append(lambda: self.store_attempt(event))
            case events.StoreWork():
                core = self.core
                self.pending.append(lambda: self.store_work(core, effect))
            case events.SendControl(worker, order):
                self.pending.append(lambda: self.control(worker, order))

    def check_limits(self, tenant: str) -> None:
        """Right after an admission no limit is exceeded."""
        quota = self.core.admission.quotas[tenant]
        limits = self.core.admission.manifest.limits
        concurrency = quota.limits.concurrency
        assert concurrency is None or quota.open <= concurrency
        for bucket in (quota.request_bucket, quota.input_bucket, quota.output_bucket):
            assert bucket.level(self.now) >= 0
        assert self.core.admission.waiting <= limits.queued_requests
        assert quota.waiting <= limits.tenant_queued_requests

    def check_work_conserving(self) -> None:
        """What could run now does, unless a worker is kept for a large request or the scan's bounds end it."""
        core = self.core
        if core.recovering or core.pool._reserved_for or len(core.queue) > SCAN_PER_TENANT:
            return
        for request in core.requests.values():
            if request.state is State.QUEUED:
                placed = core.pool.place(
                    request.id,
                    choices=request.envelope.choices,
                    tokens=request.cost.total,
                    version="",
                    poison_candidate=request.deaths > 0,
                )
                assert placed is None, f"{request.id} waits although it fits {placed.beat.worker}"

    def store_attempt(self, event: AttemptEvent) -> bool:
        key = (event.request_id, event.attempt)
        if key in self.attempts:
            return False
        self.attempts[key] = event
        self.tail.append(event)
        return True

    def store_work(self, core: Core, effect: events.StoreWork) -> None:
        request = core.awaits_work(effect)
        if request is None:
            return
        if core is not self.core:
            self.add_work(core, effect, request.envelope)
            return
        held = effect.request_seq in self.requests or effect.work_seq in self.work
        assert held, f"the body of {effect.request_id} is gone: {request.history}"
        if self.random.random() < 0.05:
            self.feed(events.WorkRefused(effect.request_id, effect.attempt))
            if self.random.random() < 0.5:
                return  # Else: stored after all.
        seq = self.add_work(core, effect, request.envelope)
        self.feed(events.WorkStored(effect.request_id, effect.attempt, seq))

    def add_work(self, core: Core, effect: events.StoreWork, envelope: RequestEnvelope) -> int:
        self.seq += 1
        self.work[self.seq] = WorkItem(
            epoch=core.epoch,
            attempt=effect.attempt,
            version="v1",
            worker=effect.worker,
            dispatched_at_ms=self.now,
            request=envelope,
        )
        return self.seq

    def control(self, name: str, order: ControlRequest) -> None:
        worker = next((w for w in self.workers if w.name == name), None)
        answer: ControlAnswer | None = None
        if worker is not None and worker.alive and not worker.frozen:
            if order.epoch < worker.epoch:
                return
            worker.epoch = order.epoch
            if isinstance(order, CancelAttempt):
                answer = ControlAnswer(status=self.cancel_on(worker, (order.request_id, order.attempt)))
            elif type(order).__name__ == "Evict":
                worker.evicted = True
                worker.running.clear()
        if isinstance(order, CancelAttempt):
            self.feed(events.ControlAnswered(order.request_id, order.attempt, answer))

    def cancel_on(self, worker: FakeWorker, key: tuple[str, int]) -> Literal["ok", "ended", "unknown"]:
        worker.never.add(key)
        progress = worker.running.pop(key, None)
        if progress is None:
            return "unknown"
        self.end(worker, progress, "cancelled")
        return "ended"

    # -- workers -----------------------------------------------------------------------------------------

    def end(self, worker: FakeWorker, progress: Progress, outcome: Outcome, **more: Any) -> None:
        item = next(
            (
                w
                for w in self.work.values()
                if (w.request.request_id, w.attempt) == (progress.request_id, progress.attempt)
            ),
            None,
        )
        envelope = item.request if item is not None else None
        if envelope is None:
            return
        won = self.store_attempt(
            AttemptEvent(
                request_id=progress.request_id,
                attempt=progress.attempt,
                tenant=envelope.tenant,
                key_id="k",
                model="m",
                version="v1",
                endpoint="chat/completions",
                priority=envelope.priority,
                outcome=outcome,
                reporter="worker",
                worker=worker.name,
                stream=envelope.stream,
                billable=outcome in ("completed", "cancelled"),
                prompt_tokens=progress.prompt_tokens,
                completion_tokens=progress.completion_tokens,
                **more,
            )
        )
        retryable = more.get("retryable", False)
        if won and not retryable:  # Else the scheduler may need the body for the next attempt.
            for seq, found in list(self.work.items()):
                if found is item:
                    del self.work[seq]

    def run_worker(self, worker: FakeWorker) -> None:
        if not worker.alive or worker.frozen or worker.evicted:
            return
        for item in list(self.work.values()):
            key = (item.request.request_id, item.attempt)
            if item.worker != worker.name or item.epoch < worker.epoch or key in worker.never:
                continue
            if len(worker.running) < worker.slots:
                worker.epoch = item.epoch
                worker.never.add(key)
                worker.running[key] = Progress(
                    request_id=key[0], attempt=key[1], prompt_tokens=item.request.prompt_tokens
                )
        for key, progress in list(worker.running.items()):
            draw = self.random.random()
            if draw < 0.5:
                worker.running[key] = msgspec.structs.replace(
                    progress, completion_tokens=progress.completion_tokens + 1
                )
            elif draw < 0.7:
                del worker.running[key]
                self.end(worker, progress, "completed")
            elif draw < 0.75:
                del worker.running[key]
                retryable = self.random.random() < 0.7
                self.end(worker, progress, "failed", retryable=retryable, engine_death=retryable)

    # -- callers -----------------------------------------------------------------------------------------

    def ask(self, **fields: object) -> str:
        number = len(self.asked)
        asked = AdmissionRequest(
            request_id=f"r{number}",
            tenant=self.random.choice(self.names),
            key_id="k",
            model="m",
            endpoint="chat/completions",
            prompt_tokens=self.random.randint(1, 3000),
            max_output_tokens=self.random.randint(1, 500),
            choices=self.random.choice([1, 1, 1, 2]),
            stream=self.random.random() < 0.7,
            priority=self.random.choice(["interactive", "interactive", "batch"]),
            deadline_ms=self.random.choice([None, 500, 20_000]),
            stream_owner=self.random.choice(["", "g1", "g2"]),
        )
        asked = msgspec.structs.replace(asked, **fields)
        self.asked[asked.request_id] = asked
        self.feed(events.AdmissionAsked(asked, asked.request_id))
        return asked.request_id

    def publish(self, request_id: str) -> int:
        asked = self.asked[request_id]
        answer = self.answers[request_id]
        self.seq += 1
        self.requests[self.seq] = RequestEnvelope(
            request_id=request_id,
            tenant=asked.tenant,
            key_id=asked.key_id,
            model="m",
            endpoint=asked.endpoint,
            stream=asked.stream,
            prompt_tokens=asked.prompt_tokens,
            max_output_tokens=asked.max_output_tokens,
            choices=asked.choices,
            priority=asked.priority,
            admitted_at_ms=self.now,
            publish_by_ms=answer.publish_by_ms,
            deadline_at_ms=answer.deadline_at_ms,
            reply=Reply(subject="reply.v1.x", stream=request_id),
            stream_owner=asked.stream_owner,
        )
        self.feed(events.RequestStored(self.requests[self.seq], self.seq, self.now))
        return self.seq

    # -- histories ---------------------------------------------------------------------------------------

    def step(self) -> None:
        draw = self.random.random()
        if draw < 0.25:
            self.ask()
        elif draw < 0.45 and self.unpublished:
            request_id = self.unpublished.pop(self.random.randrange(len(self.unpublished)))
            if self.random.random() < 0.9:
                self.publish(request_id)
        elif draw < 0.52 and self.asked:
            request_id = self.random.choice(list(self.asked))
            tenant = self.asked[request_id].tenant if self.random.random() < 0.9 else "stranger"
            self.feed(events.CancelAsked(tenant, CancelRequest(request_id=request_id), None))
        elif draw < 0.54:
            self.feed(
                events.StreamOwnerSeen(StreamOwnerHeartbeat(stream_owner="g1", leaving=self.random.random() < 0.3))
            )
        elif draw < 0.56 and sum(w.alive for w in self.workers) < 3:
            self.start_worker()
        elif draw < 0.57 and self.workers:
            self.random.choice(self.workers).alive = False
        elif draw < 0.58 and self.workers:
            worker = self.random.choice(self.workers)
            worker.frozen = not worker.frozen
        elif draw < 0.585:
            self.takeover()
        elif draw < 0.60 and self.requests:  # Delivered again.
            seq = self.random.choice(list(self.requests))
            self.feed(events.RequestStored(self.requests[seq], seq, self.now))
        else:
            self.pass_time(self.random.choice([1, 20, 100, 500]))

    def start_worker(self) -> FakeWorker:
        worker = FakeWorker(f"w{len(self.workers)}", self.random.randint(1, 4), self.random.choice([4000, 20_000]))
        self.workers.append(worker)
        return worker

    def pass_time(self, span_ms: int) -> None:
        self.now += span_ms
        self.random.shuffle(self.pending)
        for _ in range(len(self.pending)):
            if self.random.random() < 0.8:
                self.pending.pop()()
        self.read_tail()
        for worker in self.workers:
            self.run_worker(worker)
            if worker.alive and not worker.frozen and not worker.evicted:
                self.feed(events.WorkerSeen(worker.beat()))
        if span_ms >= 100:
            self.feed(events.LoopbackSeen())
        self.feed(events.TimePassed())

    def settle(self) -> None:
        """Let everything come to its end: a healthy worker, no new requests, no faults."""
        for worker in self.workers:
            worker.frozen = False
        healthy = self.start_worker()
        healthy.slots, healthy.kv_tokens = 8, 50_000
        for _ in range(400):
            self.feed(events.StreamOwnerSeen(StreamOwnerHeartbeat(stream_owner="g1")))
            self.feed(events.StreamOwnerSeen(StreamOwnerHeartbeat(stream_owner="g2")))
            self.pass_time(500)
            for seq, item in list(self.work.items()):  # The sweep.
                self.feed(events.WorkFound(item, seq))
            if not self.core.requests and not self.pending and not self.tail:
                return
        raise AssertionError(f"never quiet: {[(r.id, r.state, r.history) for r in self.core.requests.values()]}")
