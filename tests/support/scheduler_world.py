"""A small world around the scheduler's core: streams, workers and callers, moved by the test that made it.

The streams keep what the real ones keep (ATTEMPTS: the first event of an attempt wins). Effects wait until the test
has them performed; ``pass_time`` performs them as the fates say: in another order, late, or not at all where the bus
may lose them. Workers pull, run, freeze, wake and die. After every step the core's invariants are checked, and its
token buckets against an account of their own.
"""

import hashlib
from collections import Counter, deque
from collections.abc import Callable, Sequence
from typing import Any, Literal

import msgspec

from contracts.accusations import Exposed, put_down_to
from contracts.messages.admission import AdmissionAnswer, AdmissionRequest
from contracts.messages.attempts import AttemptEvent
from contracts.messages.base import Epoch, Outcome
from contracts.messages.control import (
    SERVICE_FAULTS,
    WITHDRAWN,
    CancelAnswer,
    CancelAttempt,
    ControlAnswer,
    ControlRequest,
    Progress,
    StreamOwnerHeartbeat,
    WorkerHeartbeat,
)
from contracts.messages.frames import Frame
from contracts.messages.records import ModelRecord, PoolLimits, Spending, TenantLimits, TenantRecord
from contracts.messages.request import Reply, RequestEnvelope, WorkItem
from scheduler.core import events, views
from scheduler.core.accused import body_key
from scheduler.core.core import Core
from scheduler.core.fair_queue import SCAN_PER_TENANT
from scheduler.core.settings import Settings
from scheduler.core.transitions import State
from scheduler.core.worker_pool import TooLate
from tests.support.token_ledger import TokenLedger

EPOCH = Epoch(1, 7)
LIMITS = {
    "t0": TenantLimits(rpm=2_000, input_tpm=400_000, output_tpm=100_000, concurrency=20),
    "t1": TenantLimits(rpm=60, input_tpm=20_000, output_tpm=5_000),
    "t2": TenantLimits(),
}
"""Wide, narrow, and none."""
WELL = 99
"""The fate of all that is not drawn: nothing goes wrong."""
TOKENS = 3
"""After so many a generation ends well."""


def record(**limits: int) -> ModelRecord:
    return ModelRecord(name="m", stable="v1", limits=PoolLimits(**limits))


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
    """Move it by its methods, then ``settle`` and look at what is left."""

    def __init__(self, *, limits: dict[str, int] | None = None) -> None:
        """``limits``: of the model's queue."""
        self.now = 1_000_000
        self.limits = limits or {}
        self.requests: dict[int, RequestEnvelope] = {}
        self.bodies: set[str] = set()
        """Requests whose body BODIES holds."""
        self.stored_at: dict[int, int] = {}
        """When REQUESTS stored what, by sequence."""
        self.work: dict[int, WorkItem] = {}
        self.attempts: dict[tuple[str, int], AttemptEvent] = {}
        self.attempt_seqs: dict[tuple[str, int], int] = {}
        """Sequence numbers in ATTEMPTS."""
        self.untold: list[AttemptEvent] = []
        """Stored events that the core has not read yet."""
        self.tenants: dict[str, TenantRecord] = {}
        """Those that differ from LIMITS."""
        self.budgets: dict[str, events.BudgetSeen] = {}
        """The ledger's last word about each tenant."""
        self.spending: dict[str, Spending] = {}
        """What owners have told of each tenant."""
        self.pending: list[Callable[[], object]] = []
        """Effects that are not performed yet."""
        self.fates: deque[int] = deque()
        """What becomes of the next things that may go wrong: 0 to 99."""
        self.workers: list[FakeWorker] = []
        self.answers: dict[str, AdmissionAnswer] = {}
        self.frames: dict[str, list[Frame]] = {}
        self.quarantined: dict[str, events.Quarantine] = {}
        self.seen: set[str] = set()
        """Streams whose callers have seen text that no heartbeat told of."""
        self.cancel_answers: list[CancelAnswer] = []
        self.asked: dict[str, AdmissionRequest] = {}
        self.unpublished: list[str] = []
        self.sound = True
        """Whether every check of the core has held."""
        self.seq = 0
        self.number = 0
        """Of effects so far; ``digest`` is theirs, in order."""
        self.digest = hashlib.sha256()
        self.core: Core
        self.begin_term(EPOCH)
        self.feed(events.Recovered())

    def begin_term(self, epoch: Epoch | None = None) -> None:
        """There is a new owner, which knows nothing but the tenants."""
        self.core = Core(
            model="m",
            owner="s",
            epoch=epoch or Epoch(1, self.core.epoch.revision + 1),
            record=record(**self.limits),
            settings=Settings(publish_within_ms=1_000, expiry_margin_ms=200),
            now_ms=self.now,
        )
        self.ledger = TokenLedger()
        self.untold.clear()
        for name, limits in LIMITS.items():
            self.feed(events.TenantChanged(name, self.tenants.get(name, TenantRecord(name=name, limits=limits))))
        for seen in self.budgets.values():
            self.feed(seen)
        for name, spending in self.spending.items():
            self.feed(events.SpendingSeen("m", name, spending))

    def read_streams(self) -> None:
        """What a new owner does first."""
        for event in list(self.attempts.values()):
            self.tell_end(event)
        self.read_work()
        for seq, envelope in list(self.requests.items()):
            self.feed(events.RequestStored(envelope, seq, self.stored_at.get(seq, self.now)))

    def read_work(self) -> None:
        for seq, item in list(self.work.items()):
            self.feed(events.WorkFound(item, seq))

    def takeover(self) -> None:
        """The owner dies with some of its last effects done; another one rebuilds itself from the streams.

        What the dead one still had in flight may be stored between the first and the second look at WORK.
        """
        in_flight, self.pending = self.pending, []
        self.begin_term()
        self.read_streams()
        for effect in in_flight:
            if self.fate() < 50:
                effect()
        for _ in range(12):
            self.pass_time(500)
            if not self.core.pool.unacknowledged():
                break
        self.read_work()
        self.read_ends()
        self.feed(events.Recovered())

    def fate(self) -> int:
        return self.fates.popleft() if self.fates else WELL

    def read_ends(self) -> None:
        while self.untold:
            self.tell_end(self.untold.pop(0))

    def tell_end(self, event: AttemptEvent) -> None:
        """As the follower of ATTEMPTS does."""
        seq = self.attempt_seqs[event.request_id, event.attempt]
        self.feed(events.TerminalStored(event, seq, in_order=True))

    def run_pending(self) -> None:
        """All effects are performed, and what follows from them."""
        while self.pending or self.untold:
            while self.pending:
                self.pending.pop(0)()
            self.read_ends()

    # -- the core ----------------------------------------------------------------------------------------

    def feed(self, event: events.Event) -> None:
        """One step of the core, and every check of it."""
        self.sound = False
        effects = self.core.step(event, self.now)
        self.ledger.observe(event, effects, self.core, self.now)
        for effect in effects:
            self.number += 1
            self.digest.update(type(effect).__name__.encode() + msgspec.json.encode(effect))
            self.perform(effect)
        views.check_invariants(self.core)
        self.check_work_conserving()
        self.sound = True

    def perform(self, effect: events.Effect) -> None:
        match effect:
            case events.AnswerAdmission(handle, answer):
                self.answers[handle] = answer
                if answer.admitted and handle in self.asked:
                    self.check_limits(self.asked[handle].tenant)
                if answer.admitted and not answer.joined and handle not in self.unpublished:
                    self.unpublished.append(handle)
            case events.AnswerCancel(_, answer):
                self.cancel_answers.append(answer)
            case events.SendFrame(_, frame):
                self.frames.setdefault(frame.stream, []).append(frame)
                if frame.kind == "lost" and frame.stream not in self.seen:
                    self.pending.append(lambda: self.clear(frame))
            case events.AckRequest(seq):
                self.pending.append(lambda: self.requests.pop(seq, None))
            case events.DeleteWork(seq):
                self.pending.append(lambda: self.work.pop(seq, None))
            case events.Quarantine():
                self.quarantined[effect.envelope.request_id] = effect
                self.pending.append(lambda: self.requests.pop(effect.request_seq, None))
                self.pending.append(lambda: self.work.pop(effect.work_seq, None))
                self.pending.append(lambda: self.bodies.discard(effect.envelope.request_id))
            case events.DeleteBody(request_id, _):
                self.pending.append(lambda: self.bodies.discard(request_id))
            case events.StoreTerminal(event):
                core = self.core
                self.pending.append(lambda: self.store_attempt(self.as_pulled(core, event)))
            case events.StoreWork():
                core = self.core
                self.pending.append(lambda: self.store_work(core, effect))
            case events.ReadEnd(request_id, attempt):
                self.pending.append(lambda: self.read_end(request_id, attempt))
            case events.TellSpending(tenant, spending):
                self.spending[tenant] = spending
            case events.SendControl(worker, order):
                self.pending.append(lambda: self.control(worker, order))

    def clear(self, lost: Frame) -> None:
        """The stream owner says that its caller has seen nothing of the lost attempt."""
        tenant = self.asked[lost.stream].tenant
        self.feed(events.StatusAsked(tenant, lost.stream, None, void_below=lost.attempt + 1))

    def check_limits(self, tenant: str) -> None:
        """Right after an admission no limit is exceeded."""
        quota = self.core.admission.quotas[tenant]
        limits = self.core.admission.record.limits
        concurrency = quota.limits.concurrency
        assert concurrency is None or quota.open <= concurrency
        for bucket in (quota.request_bucket, quota.input_bucket, quota.output_bucket):
            assert bucket.level(self.now) >= 0
        assert self.core.admission.waiting <= limits.queued_requests
        assert quota.waiting <= limits.tenant_queued_requests

    def check_work_conserving(self) -> None:
        """What could run now does, unless a worker is kept for a large request or the scan's bounds end it."""
        core = self.core
        if core.recovering or core.pool._reserved_for:
            return
        queued = [request for request in core.requests.values() if request.state is State.QUEUED]
        lanes = Counter(core.lane(request) for request in queued)
        for request in queued:
            if lanes[core.lane(request)] <= SCAN_PER_TENANT:
                try:
                    placed = core.place(request)
                except TooLate:
                    continue
                assert placed is None, f"{request.id} waits although it fits {placed.beat.worker}"

    def as_pulled(self, core: Core, event: AttemptEvent) -> AttemptEvent:
        """What the bus says of an attempt whose worker died before its next heartbeat."""
        key = (event.request_id, event.attempt)
        pulled = any(worker.name == event.worker and key in worker.never for worker in self.workers)
        died = pulled and core.may_have_been_pulled(event)
        return msgspec.structs.replace(event, engine_death=True) if died else event

    def store_attempt(self, event: AttemptEvent) -> bool:
        key = (event.request_id, event.attempt)
        if key in self.attempts:
            return False
        self.attempts[key] = event
        self.attempt_seqs[key] = len(self.attempt_seqs) + 1
        self.untold.append(event)
        return True

    def read_end(self, request_id: str, attempt: int) -> None:
        event = self.attempts.get((request_id, attempt))
        seq = self.attempt_seqs.get((request_id, attempt), 0)
        self.feed(events.TerminalStored(event, seq) if event else events.EndMissing(request_id, attempt))

    def store_work(self, core: Core, effect: events.StoreWork) -> None:
        request = core.awaits_work(effect)
        if request is None:
            return
        if core is not self.core:
            self.add_work(core, effect, request.envelope, request.suspect_tokens)
            return
        held = effect.request_seq in self.requests or effect.work_seq in self.work
        assert held, f"the body of {effect.request_id} is gone: {request.history}"
        fate = self.fate()
        if fate < 10:
            self.feed(events.WorkRefused(effect.request_id, effect.attempt))
            if fate < 5:
                return  # Else: stored after all.
        seq = self.add_work(core, effect, request.envelope, request.suspect_tokens)
        self.feed(events.WorkStored(effect.request_id, effect.attempt, seq))

    def add_work(self, core: Core, effect: events.StoreWork, envelope: RequestEnvelope, suspect_tokens: int) -> int:
        self.seq += 1
        self.work[self.seq] = WorkItem(
            epoch=core.epoch,
            attempt=effect.attempt,
            version="v1",
            worker=effect.worker,
            dispatched_at_ms=self.now,
            suspect_tokens=suspect_tokens,
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
                answer = ControlAnswer(status=self.cancel_on(worker, (order.request_id, order.attempt), order.reason))
            elif type(order).__name__ == "Evict":
                worker.evicted = True
                worker.running.clear()
        if isinstance(order, CancelAttempt):
            self.feed(events.ControlAnswered(order.request_id, order.attempt, answer))

    def cancel_on(self, worker: FakeWorker, key: tuple[str, int], why: str) -> Literal["ok", "ended", "unknown"]:
        worker.never.add(key)
        progress = worker.running.pop(key, None)
        if progress is None:
            return "unknown"
        self.end(worker, progress, "cancelled", error_message=why, withdrawn=why == WITHDRAWN)
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
        if item is None:
            return
        envelope = item.request
        callers_doing = outcome == "completed" or (
            outcome == "cancelled" and more.get("error_message") not in SERVICE_FAULTS
        )
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
                idempotency=envelope.idempotency,
                outcome=outcome,
                reporter="worker",
                worker=worker.name,
                stream=envelope.stream,
                billable=outcome in ("completed", "cancelled"),
                body_hash=envelope.body_hash if item.suspect_tokens or "accused" in more else "",
                admitted_at_ms=envelope.admitted_at_ms,
                prompt_tokens=progress.prompt_tokens,
                completion_tokens=progress.completion_tokens,
                spent_input_tokens=envelope.prompt_tokens if callers_doing else 0,
                **more,
            )
        )
        retryable = more.get("retryable", False)
        if won and not retryable:  # Else the scheduler may need the body for the next attempt.
            for seq, found in list(self.work.items()):
                if found is item:
                    del self.work[seq]

    def pull(self, worker: FakeWorker) -> None:
        """The worker begins what WORK holds for it, and is heard."""
        self._take_work(worker)
        self.feed(events.WorkerSeen(worker.beat()))

    def _take_work(self, worker: FakeWorker) -> None:
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

    def crash(self, worker: FakeWorker) -> None:
        """Its engine dies with all that it runs; the worker lives."""
        died, worker.running = worker.running, {}
        items = {(item.request.request_id, item.attempt): item for item in self.work.values()}
        exposed = {
            key: Exposed(body_key(items[key].request), suspect=it.completion_tokens < items[key].suspect_tokens)
            for key, it in died.items()
            if key in items
        }
        for key, accused in put_down_to(exposed).items():
            self.end(worker, died[key], "failed", retryable=True, engine_death=True, accused=accused)

    def generate(self, worker: FakeWorker) -> None:
        """One step of its engine: a token of each generation, or an end."""
        if not worker.alive or worker.frozen or worker.evicted:
            return
        for key, progress in list(worker.running.items()):
            fate = self.fate()
            if progress.completion_tokens >= TOKENS or fate < 20:
                del worker.running[key]
                self.end(worker, progress, "completed")
            elif fate < 22:
                self.crash(worker)
                return
            elif fate < 30:
                del worker.running[key]
                self.end(worker, progress, "failed", retryable=fate < 27)
            elif fate >= 50:
                tokens = progress.completion_tokens + 1
                worker.running[key] = msgspec.structs.replace(progress, completion_tokens=tokens)

    # -- callers -----------------------------------------------------------------------------------------

    def ask(self, **fields: object) -> str:
        """Ask for admission; gives the request's id."""
        asked = AdmissionRequest(
            **{  # type: ignore[arg-type]
                "request_id": f"r{len(self.asked)}",
                "tenant": "t0",
                "key_id": "k",
                "model": "m",
                "endpoint": "chat/completions",
                "prompt_tokens": 10,
                "max_output_tokens": 10,
                "stream": True,
            }
            | fields
        )
        self.asked[asked.request_id] = asked
        self.feed(events.AdmissionAsked(asked, asked.request_id))
        return asked.request_id

    def submit(self, **fields: object) -> str:
        """Ask, and publish what is admitted; gives the request's id."""
        request_id = self.ask(**fields)
        if self.answers[request_id].admitted and not self.answers[request_id].joined:
            self.publish(request_id)
        return request_id

    def publish(self, request_id: str) -> int:
        """REQUESTS stores an admitted request; gives the sequence."""
        asked = self.asked[request_id]
        answer = self.answers[request_id]
        if request_id in self.unpublished:
            self.unpublished.remove(request_id)
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
            admitted_at_ms=answer.admitted_at_ms,
            publish_within_ms=answer.publish_within_ms,
            deadline_ms=answer.deadline_ms,
            reply=Reply(subject="reply.v1.x", stream=asked.reader or request_id),
            stream_owner=asked.stream_owner,
            idempotency=asked.idempotency,
            body_bytes=asked.body_bytes,
            body_hash=asked.body_hash,
        )
        self.stored_at[self.seq] = self.now
        if asked.body_bytes:
            self.bodies.add(request_id)
        self.feed(events.RequestStored(self.requests[self.seq], self.seq, self.now))
        return self.seq

    # -- time --------------------------------------------------------------------------------------------

    def start_worker(self, slots: int = 1, kv_tokens: int = 10_000) -> FakeWorker:
        """A worker that is not heard yet."""
        worker = FakeWorker(f"w{len(self.workers)}", slots, kv_tokens)
        self.workers.append(worker)
        return worker

    def ready_worker(self, slots: int = 1, kv_tokens: int = 10_000) -> FakeWorker:
        """A worker that knows the epoch."""
        worker = self.start_worker(slots, kv_tokens)
        worker.epoch = self.core.epoch
        self.feed(events.WorkerSeen(worker.beat()))
        return worker

    def silence(self, beats: int = 8) -> None:
        """Only the loopback heartbeats are heard."""
        for _ in range(beats):
            self.now += 500
            self.feed(events.LoopbackSeen())
        self.run_pending()

    def kill(self, worker: FakeWorker) -> None:
        """The worker pulls what it has, and dies."""
        self.run_pending()
        self.pull(worker)
        worker.alive = False
        self.silence()

    def pass_time(self, span_ms: int, fates: Sequence[int] = ()) -> None:
        """Effects are performed, workers go on, everybody is heard, and clocks tick."""
        self.fates.extend(fates)
        self.now += span_ms
        for _ in range(len(self.pending)):
            fate = self.fate()
            if fate < 20:
                self.pending.append(self.pending.pop(0))  # Later.
            else:
                self.pending.pop(-1 if fate < 40 else 0)()
        self.read_ends()
        for worker in self.workers:
            self._take_work(worker)
            self.generate(worker)
            if worker.alive and not worker.frozen and not worker.evicted:
                self.feed(events.WorkerSeen(worker.beat()))
        if span_ms >= 100:
            self.feed(events.LoopbackSeen())
        self.feed(events.TimePassed())

    def settle(self) -> None:
        """Let everything come to its end: a healthy worker, no new requests, no faults."""
        self.fates.clear()
        for worker in self.workers:
            worker.frozen = False
        self.start_worker(8, 50_000)
        for _ in range(400):
            for owner in ("g1", "g2"):
                self.feed(events.StreamOwnerSeen(StreamOwnerHeartbeat(stream_owner=owner)))
            self.pass_time(500)
            self.read_work()  # The sweep.
            if not self.core.requests and not self.pending and not self.untold:
                return
        raise AssertionError(f"never quiet: {[str(request) for request in self.core.requests.values()]}")
