"""The fleet: production cores of the scheduler, machines with a timing, callers, failures, and one clock for all.

A discrete-event simulation. Nothing sleeps; the next thing that happens is the head of a heap. The cores are those that
run in production (scheduler.core), one for each model, and decide all that they decide there: admission, quotas, fair
queue, placement, losses, retries, how many workers there should be. The bus's streams are there and lose nothing.
"""

import gc
import heapq
import random
from array import array
from bisect import bisect
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from contracts.messages.admission import AdmissionRequest
from contracts.messages.attempts import AttemptEvent
from contracts.messages.base import Epoch, Outcome
from contracts.messages.control import CancelAttempt, ControlAnswer, Evict, Progress, WorkerHeartbeat, WorkerState
from contracts.messages.frames import Frame, LostData
from contracts.messages.records import ModelRecord, TenantRecord
from contracts.messages.request import Reply, RequestEnvelope
from contracts.prefix import COVERED
from scheduler.core import events
from scheduler.core.core import Core
from scheduler.core.settings import Settings
from simulator.autoscale import RequestCount
from simulator.demand import Conversation, conversations
from simulator.machine import BLOCK, Job, Key, Machine
from simulator.scenario import Failure, Model, Scenario
from simulator.traces import seeded

BEGIN_MS = 1_800_000_000_000
"""Of the simulated clock: Unix ms of some day."""
EPOCH = Epoch(1, 1)
VERSION = "v1"
_KEYED = [tokens // BLOCK - 1 for tokens in COVERED[1:]]
"""Which blocks of a prompt have a key that travels."""
AUTOSCALE_MS = 2_000


class Caller:
    """One request as who makes it sees it."""

    __slots__ = (
        "asked",
        "blocks",
        "conversation",
        "due_ms",
        "ended",
        "first_ms",
        "job",
        "outcome",
        "output",
        "prompt",
        "tries",
        "worker_given",
    )

    def __init__(
        self, conversation: Conversation, due_ms: float, prompt: int, output: int, blocks: Sequence[int]
    ) -> None:
        self.conversation = conversation
        self.due_ms = due_ms
        self.prompt = prompt
        self.output = output
        self.blocks = blocks
        self.tries = 0
        self.asked: AdmissionRequest | None = None
        self.first_ms = 0.0
        self.outcome: str = ""
        """How it ended: an Outcome, or a code of a refusal that it did not ask again after."""
        self.ended = 0
        """How often it did: once, or there is a bug."""
        self.job: Job | None = None
        self.worker_given = 0

    @property
    def keys(self) -> bytes:
        """Those of the prompt's blocks that travel, as a gateway makes them."""
        blocks = self.blocks
        return array("Q", [blocks[each] for each in _KEYED[: bisect(_KEYED, len(blocks) - 1)]]).tobytes()


Observe = Callable[["Pool", Caller, float], None]


class Fleet:
    """Call ``run`` once. ``observe`` is told of each caller's end, when it ends."""

    def __init__(self, scenario: Scenario, folder: Path, observe: Observe) -> None:
        self.scenario = scenario
        self.now_ms = float(BEGIN_MS)
        self.observe = observe
        self.asked = 0
        """Requests that callers have made; what they ask again is one."""
        self.open = 0
        self.checked: dict[str, int] = dict.fromkeys(("admissions", "tenants", "workers"), 0)
        """How often rules were looked at: limits at admissions; tenants and workers with nothing left at the end."""
        self._events: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._number = 0
        self.source = seeded(f"fleet {scenario.seed}")
        self.pools = [Pool(self, model, folder) for model in scenario.models]

    def at(self, when_ms: float, call: Callable[..., None], *arguments: Any) -> None:
        """Have something happen then; at one instant in the order of these calls."""
        self._number += 1
        heapq.heappush(self._events, (when_ms, self._number, call, arguments))

    def may_ask(self) -> bool:
        """Whether callers may make one more request."""
        return self.asked < self.scenario.requests

    @property
    def span_s(self) -> float:
        """Since the beginning."""
        return (self.now_ms - BEGIN_MS) / 1000

    def run(self, progress: Callable[[int], None] = lambda _: None) -> None:
        """Until everybody has been served, or told otherwise. Raises AssertionError when a rule is broken."""
        was_on = gc.isenabled()
        gc.disable()  # Nothing here is in a cycle, and looking for them takes a tenth of the time.
        try:
            self._run(progress)
        finally:
            if was_on:
                gc.enable()

    def _run(self, progress: Callable[[int], None]) -> None:
        for pool in self.pools:
            pool.begin()
        for failure in self.scenario.failures:
            self.at(BEGIN_MS + failure.at_s * 1000, self._fail, failure)
        quiet_ms, told = 0.0, 0
        heap = self._events
        while heap:
            when_ms, _, call, arguments = heapq.heappop(heap)
            self.now_ms = when_ms
            call(*arguments)
            if self.asked - told >= 1_000:
                told = self.asked
                progress(told)
            if self.open or any(pool.coming for pool in self.pools):
                quiet_ms = when_ms
            elif when_ms - quiet_ms > 30_000:  # Tombstones and reservations have had their time.
                break
        progress(self.asked)
        for pool in self.pools:
            pool.check_empty()

    def _fail(self, failure: Failure) -> None:
        for pool in self.pools:
            if not failure.model or pool.model.name == failure.model:
                pool.fail(failure)


class Pool:
    """A model: its core, its workers, its callers."""

    def __init__(self, fleet: Fleet, model: Model, folder: Path) -> None:
        self.fleet = fleet
        self.model = model
        self.coming = True
        """Whether more conversations begin."""
        self.machines: dict[str, Machine] = {}
        self.gone: list[Machine] = []
        """Those that are no more, for the account."""
        self.refusals: dict[str, int] = {}
        self.replicas: list[tuple[float, int, int]] = []
        """Second, workers that there were, and that there should be: at each change."""
        self._callers: dict[str, Caller] = {}
        self._ended: set[Key] = set()
        """Attempts whose end is stored, of requests that are open."""
        self._envelopes: dict[str, RequestEnvelope] = {}
        self._unsettled: dict[str, AttemptEvent] = {}
        """The last stored end of requests that the core has not ended for good: it may try again."""
        self._todo: deque[events.Effect] = deque()
        self._performers = self._table()
        self._seq = 0
        self._names = 0
        self._stepping = False
        limits = model.limits
        if model.autoscale is not None:
            low, high = model.autoscale
            limits = msgspec.structs.replace(limits, replicas_min=low, replicas_max=high)
        self.core = Core(
            model=model.name,
            owner="owner",
            epoch=EPOCH,
            record=ModelRecord(name=model.name, stable=VERSION, limits=limits),
            settings=Settings(),
            now_ms=BEGIN_MS,
        )
        self._conversations: Iterator[tuple[float, Conversation]] = conversations(model, fleet.scenario.seed, folder)
        self._context = 2 * max(demand.longest for demand in model.demands)
        self._count: RequestCount | None = None
        if model.autoscale is not None and model.scale_by != "tokens":
            self._count = RequestCount(model.requests_per_worker, *model.autoscale)
        self._source: random.Random = seeded(f"pool {fleet.scenario.seed} {model.name}")

    def begin(self) -> None:
        """Workers that are ready, an owner that has recovered, and the first caller."""
        limits = self.fleet.scenario.tenant_limits
        for number in range(max(demand.tenants for demand in self.model.demands)):
            name = f"t{number}"
            self._feed(events.TenantChanged(name, TenantRecord(name=name, limits=limits)))
        for number in range(self.model.workers):
            self._start(number, self.fleet.now_ms)
        self._feed(events.Recovered())
        self.fleet.at(self.fleet.now_ms, self._beat)
        if self.model.autoscale is not None:
            self.fleet.at(self.fleet.now_ms + AUTOSCALE_MS, self._scale)
        self._next_conversation()

    # Callers ------------------------------------------------------------------------------------------------

    def _next_conversation(self) -> None:
        found = next(self._conversations, None) if self.fleet.may_ask() else None
        if found is None:
            self.coming = False
            return
        at_s, conversation = found
        self.fleet.at(BEGIN_MS + at_s * 1000, self._arrive, conversation)

    def _arrive(self, conversation: Conversation) -> None:
        self._turn(conversation)
        self._next_conversation()

    def _turn(self, conversation: Conversation) -> None:
        if not self.fleet.may_ask():
            return
        self.fleet.asked += 1
        self.fleet.open += 1
        prompt, output, blocks = conversation.ask()
        caller = Caller(conversation, self.fleet.now_ms, prompt, output, blocks)
        self.fleet.at(self.fleet.now_ms + self.fleet.scenario.delays.gateway_ms, self._ask, caller)

    def _ask(self, caller: Caller) -> None:
        self._seq += 1
        conversation = caller.conversation
        caller.asked = AdmissionRequest(
            request_id=f"{self.model.name}-{self._seq}",
            tenant=f"t{conversation.tenant}",
            key_id="k",
            model=self.model.name,
            endpoint="chat/completions",
            prompt_tokens=caller.prompt,
            max_output_tokens=caller.output,
            priority="batch" if conversation.batch else "interactive",
            deadline_ms=conversation.demand.deadline_ms,
            stream=True,
            body_hash=f"{conversation.number}.{conversation.turn}",
        )
        caller.tries += 1
        self._feed(events.AdmissionAsked(caller.asked, caller))

    def _answered(self, effect: events.AnswerAdmission) -> None:
        caller, answer = effect.handle, effect.answer
        asked = caller.asked
        if not answer.admitted:
            self.refusals[answer.code] = self.refusals.get(answer.code, 0) + 1
            if caller.tries > caller.conversation.demand.patience or not answer.retry_after_s:
                self._end(caller, answer.code)
            else:
                self.fleet.at(self.fleet.now_ms + answer.retry_after_s * 1000, self._ask, caller)
            return
        self._check_limits(asked.tenant)
        self._callers[asked.request_id] = caller
        envelope = RequestEnvelope(
            request_id=asked.request_id,
            tenant=asked.tenant,
            key_id=asked.key_id,
            model=asked.model,
            endpoint=asked.endpoint,
            priority=asked.priority,
            stream=asked.stream,
            choices=asked.choices,
            stream_owner=asked.stream_owner,
            prompt_tokens=asked.prompt_tokens,
            max_output_tokens=asked.max_output_tokens,
            body_hash=asked.body_hash,
            version=answer.version,
            admitted_at_ms=answer.admitted_at_ms,
            publish_within_ms=answer.publish_within_ms,
            deadline_ms=answer.deadline_ms,
            reply=_REPLY,
            prefix_keys=caller.keys,
        )
        self.fleet.at(self.fleet.now_ms + self.fleet.scenario.delays.bus_ms, self._stored, envelope)

    def _stored(self, envelope: RequestEnvelope) -> None:
        self._seq += 1
        self._envelopes[envelope.request_id] = envelope
        self._feed(events.RequestStored(envelope, self._seq, int(self.fleet.now_ms)))

    def _end(self, caller: Caller, outcome: str) -> None:
        caller.outcome = outcome
        caller.ended += 1
        assert caller.ended == 1, f"{caller.asked} ended twice"
        self.fleet.open -= 1
        self.fleet.observe(self, caller, self.fleet.now_ms)
        conversation = caller.conversation
        if outcome == "completed" and conversation.answered():
            mean_s = conversation.demand.think_s
            think_s = self._source.expovariate(1 / mean_s) if mean_s else 0.0
            self.fleet.at(self.fleet.now_ms + think_s * 1000, self._turn, conversation)

    # The core -----------------------------------------------------------------------------------------------

    def _feed(self, event: events.Event) -> None:
        """A step of the core; what follows at once is done after it, in order."""
        now_ms = int(self.fleet.now_ms)
        self._todo.extend(self.core.step(event, now_ms))
        if self._stepping:
            return
        self._stepping = True
        while self._todo:
            self._perform(self._todo.popleft())
        self._stepping = False

    def _perform(self, effect: events.Effect) -> None:
        perform = self._performers.get(type(effect))
        if perform is not None:
            perform(effect)  # Else of streams that are not kept here, or of what people see.

    def _table(self) -> dict[type[events.Effect], Callable[[Any], None]]:
        return {
            events.AnswerAdmission: self._answered,
            events.StoreWork: self._store_work,
            events.StoreTerminal: lambda effect: self._store_end(self._as_pulled(effect.event)),
            events.SendFrame: lambda effect: self._frame(effect.frame),
            events.SendControl: lambda effect: self._control(effect.worker, effect.order),
            events.ReadEnd: self._read_end,
        }

    def _read_end(self, effect: events.ReadEnd) -> None:
        if (effect.request_id, effect.attempt) not in self._ended:
            self._feed(events.EndMissing(effect.request_id, effect.attempt))

    def _store_work(self, effect: events.StoreWork) -> None:
        request = self.core.awaits_work(effect)
        if request is None:
            return
        self._seq += 1
        when_ms = self.fleet.now_ms + self.fleet.scenario.delays.bus_ms
        self.fleet.at(when_ms, self._pull, effect.worker, (effect.request_id, effect.attempt))
        self._feed(events.WorkStored(effect.request_id, effect.attempt, self._seq))

    def _store_end(self, event: AttemptEvent) -> None:
        """ATTEMPTS keeps the first."""
        key = (event.request_id, event.attempt)
        if key in self._ended or event.request_id not in self._envelopes:
            return
        self._ended.add(key)
        self._seq += 1
        self._feed(events.TerminalStored(event, self._seq, in_order=True))
        if event.request_id in self.core.requests:
            self._unsettled[event.request_id] = event
        elif event.request_id in self._envelopes:
            self._settled(event)

    def _look_for_settled(self) -> None:
        """What the core ended for good some time after the end was stored."""
        for event in list(self._unsettled.values()):
            if event.request_id not in self.core.requests:
                self._settled(event)

    def _settled(self, event: AttemptEvent) -> None:
        self._unsettled.pop(event.request_id, None)
        del self._envelopes[event.request_id]
        self._ended.difference_update([(event.request_id, number) for number in range(event.attempt + 1)])
        caller = self._callers.pop(event.request_id)
        self._end(caller, event.outcome)

    def _as_pulled(self, event: AttemptEvent) -> AttemptEvent:
        """As the scheduler's shell does: it says whether a worker that died had begun the attempt."""
        died = event.outcome == "lost" and bool(self.core.may_have_been_pulled(event))
        return msgspec.structs.replace(event, engine_death=True) if died else event

    def _frame(self, frame: Frame) -> None:
        """What the scheduler tells a stream's owner: of a lost attempt, whether its caller has seen anything."""
        caller = self._callers.get(frame.stream)
        if frame.kind != "lost" or caller is None or caller.worker_given:
            return
        if msgspec.json.decode(frame.data, type=LostData).tell:
            tenant = f"t{caller.conversation.tenant}"
            self._feed(events.StatusAsked(tenant, frame.stream, None, void_below=frame.attempt + 1))

    def _check_limits(self, tenant: str) -> None:
        self.fleet.checked["admissions"] += 1
        quota = self.core.admission.quotas[tenant]
        concurrency = quota.limits.concurrency
        assert concurrency is None or quota.open <= concurrency, f"{tenant} has {quota.open} open requests"
        assert self.core.admission.waiting <= self.core.admission.record.limits.queued_requests

    # Workers ------------------------------------------------------------------------------------------------

    def _start(self, number: int, ready_ms: float) -> None:
        self._names += 1
        name = f"{self.model.name}-w{number}-{self._names}"
        self.machines[name] = Machine(name, number, self.model.worker, ready_ms)
        self._note_replicas()

    def _note_replicas(self) -> None:
        count = sum(not machine.leaving for machine in self.machines.values())
        self.replicas.append((self.fleet.span_s, count, self.core.replicas.plan.desired))

    def _pull(self, name: str, key: Key) -> None:
        machine = self.machines.get(name)
        caller = self._callers.get(key[0])
        if machine is None or not machine.alive or caller is None or key in self._ended:
            return
        caller.job = Job(key, caller.prompt, caller.output, caller.blocks)
        machine.add(caller.job, self.fleet.now_ms)
        self._plan_ends(machine)

    def _plan_ends(self, machine: Machine) -> None:
        for job in machine.begun:
            self.fleet.at(max(job.end_ms, self.fleet.now_ms), self._finish, machine, job, job.stamp)
        machine.begun.clear()

    def _finish(self, machine: Machine, job: Job, stamp: int) -> None:
        if not machine.alive or job.stamp != stamp:
            return
        machine.remove(job.key, self.fleet.now_ms)
        self._plan_ends(machine)
        caller = self._callers.get(job.key[0])
        if caller is not None and job.key not in self._ended:
            caller.first_ms = job.began_ms
            self._ended_at(machine, job, "completed")
        if machine.leaving and not machine.running and not machine.waiting:
            self._leave(machine)

    def _ended_at(self, machine: Machine, job: Job, outcome: Outcome, message: str = "") -> None:
        request_id, attempt = job.key
        envelope = self._envelopes.get(request_id)
        if envelope is None:
            return
        given = job.output if outcome == "completed" else job.tokens_at(self.fleet.now_ms, machine.timing.itl_ms)
        self._store_end(
            AttemptEvent(
                request_id=request_id,
                attempt=attempt,
                tenant=envelope.tenant,
                key_id="k",
                model=self.model.name,
                version=VERSION,
                endpoint="chat/completions",
                priority=envelope.priority,
                outcome=outcome,
                reporter="worker",
                worker=machine.name,
                error_message=message,
                billable=True,
                admitted_at_ms=envelope.admitted_at_ms,
                prompt_tokens=envelope.prompt_tokens,
                cached_tokens=max(0, job.cached),
                completion_tokens=given,
                spent_input_tokens=envelope.prompt_tokens,
                first_token_at_ms=int(job.began_ms) if given else 0,
                ended_at_ms=int(self.fleet.now_ms),
            )
        )

    def _control(self, name: str, order: object) -> None:
        machine = self.machines.get(name)
        alive = machine is not None and machine.alive
        if isinstance(order, Evict) and machine is not None and alive:
            self._lose(machine)
            self._start(machine.number, self.fleet.now_ms)
        elif isinstance(order, CancelAttempt):
            answer = None
            if machine is not None and alive:
                job = machine.remove((order.request_id, order.attempt), self.fleet.now_ms)
                self._plan_ends(machine)
                answer = ControlAnswer(status="ended" if job else "unknown")
                if job is not None:
                    self._ended_at(machine, job, "cancelled", order.reason)
            self._feed(events.ControlAnswered(order.request_id, order.attempt, answer))

    def _beat(self) -> None:
        """All heartbeats of the model, and the owner's own."""
        now_ms = self.fleet.now_ms
        for machine in list(self.machines.values()):
            if machine.alive:
                self._end_late(machine)
                self._feed(events.WorkerSeen(self._heartbeat(machine, now_ms)))
        self._feed(events.LoopbackSeen(int(now_ms)))
        self._feed(events.TimePassed())
        self._look_for_settled()
        self.fleet.at(now_ms + self.fleet.scenario.heartbeat_ms, self._beat)

    def _end_late(self, machine: Machine) -> None:
        """Those whose deadline has passed without a token, as a worker does."""
        now_ms, itl_ms = self.fleet.now_ms, machine.timing.itl_ms
        for job in [*machine.running.values(), *machine.waiting]:
            envelope = self._envelopes.get(job.key[0])
            if envelope is not None and envelope.deadline_at_ms <= now_ms and not job.tokens_at(now_ms, itl_ms):
                machine.remove(job.key, now_ms)
                self._plan_ends(machine)
                self._ended_at(machine, job, "expired")

    def _heartbeat(self, machine: Machine, now_ms: float) -> WorkerHeartbeat:
        timing = machine.timing
        itl_ms, given = timing.itl_ms, 0
        in_flight = []
        for (request_id, attempt), job in machine.running.items():
            tokens = job.tokens_at(now_ms, itl_ms)
            given += tokens
            in_flight.append(
                Progress(request_id=request_id, attempt=attempt, prompt_tokens=job.prompt, completion_tokens=tokens)
            )
        in_flight += [Progress(request_id=job.key[0], attempt=job.key[1]) for job in machine.waiting]
        state: WorkerState = "starting" if now_ms < machine.ready_ms else "draining" if machine.leaving else "ready"
        return WorkerHeartbeat(
            worker=machine.name,
            model=self.model.name,
            version=VERSION,
            state=state,
            epoch=EPOCH,
            slots=timing.slots,
            kv_tokens=timing.kv_tokens,
            kv_tokens_used=machine.held(given),
            context=self._context,
            running=len(machine.running),
            waiting=len(machine.waiting),
            prefill_tokens_total=machine.computed(now_ms),
            decode_tokens_total=machine.output_tokens + given,
            in_flight=in_flight,
            sent_at_ms=int(now_ms),
        )

    def fail(self, failure: Failure) -> None:
        """Kill what the failure names; it is started again later."""
        scenario = self.fleet.scenario
        for machine in list(self.machines.values()):
            host = machine.number // scenario.workers_per_host
            place = {"worker": machine.number, "host": host, "cell": machine.number % scenario.cells}[failure.what]
            if place == failure.number and machine.alive:
                self._lose(machine)
                again_ms = self.fleet.now_ms + (failure.for_s + machine.timing.start_s) * 1000
                self.fleet.at(self.fleet.now_ms + failure.for_s * 1000, self._start, machine.number, again_ms)

    def _lose(self, machine: Machine) -> None:
        """It dies with all that it has: nobody hears of it any more."""
        now_ms = self.fleet.now_ms
        for job in machine.running.values():
            caller = self._callers.get(job.key[0])
            if caller is not None and caller.job is job:
                caller.worker_given = job.tokens_at(now_ms, machine.timing.itl_ms)
        machine.alive = False
        self._forget(machine)

    def _forget(self, machine: Machine) -> None:
        del self.machines[machine.name]
        self.gone.append(machine)
        self._note_replicas()

    def _leave(self, machine: Machine) -> None:
        if machine.name in self.machines:
            self._forget(machine)

    def _scale(self) -> None:
        """As ``headrace up --autoscale`` does; or by counts of requests."""
        there = [machine for machine in self.machines.values() if not machine.leaving]
        desired = self._desired(len(there))
        if desired > len(there):
            for _ in range(desired - len(there)):
                taken = {machine.number for machine in self.machines.values()}
                number = next(number for number in range(len(taken) + 1) if number not in taken)
                self._start(number, self.fleet.now_ms + self.model.worker.start_s * 1000)
        elif desired < len(there):
            idlest = sorted(there, key=lambda machine: len(machine.running) + len(machine.waiting))
            for machine in idlest[: len(there) - desired]:
                machine.leaving = True
                if not machine.running and not machine.waiting:
                    self._leave(machine)
            self._note_replicas()
        if self.fleet.open or self.coming:
            self.fleet.at(self.fleet.now_ms + AUTOSCALE_MS, self._scale)

    def _desired(self, there: int) -> int:
        if self._count is not None:
            requests = self.core.admission.waiting if self.model.scale_by == "queued" else len(self.core.requests)
            return self._count.desired(int(self.fleet.now_ms), requests, there)
        plan = self.core.replicas.plan
        return plan.desired if plan.known else there

    # The account --------------------------------------------------------------------------------------------

    def check_empty(self) -> None:
        """After the last end nothing is left: no request, no slot, no reservation."""
        core = self.core
        assert not core.requests, f"{len(core.requests)} requests are left in {self.model.name}"
        assert not self._callers
        assert not self._envelopes
        assert core.admission.waiting == core.admission.reserved_tokens == 0
        for name, quota in core.admission.quotas.items():
            assert quota.open == quota.waiting == quota.reserved_tokens == 0, name
        for worker in core.pool.workers.values():
            assert not worker.work, f"{worker.beat.worker} still has work"
            assert worker.slots_reserved == worker.kv_reserved == 0
        for machine in self.machines.values():
            assert not machine.running
            assert not machine.waiting
        self.fleet.checked["tenants"] += len(core.admission.quotas)
        self.fleet.checked["workers"] += len(core.pool.workers)


_REPLY = Reply(subject="reply.v1.simulated", stream="s")
